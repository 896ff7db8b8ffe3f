"""Processes that join, and clients without a certificate at their ports."""

import inspect
import json
import socket
import ssl
import time

import jax
import pytest
from messenger_tools import WAIT_S
from tiers import full

HAS_TLS = "mtls_cert_file" in inspect.signature(jax.distributed.initialize).parameters
JOIN_S = 300  # far above what a start takes

JOIN = """
import os, sys, time
import jax
from maxdiloco.cluster import coordination, start
from maxdiloco.command_line import guarded

@guarded
def main(argv):
    secret_file, peer_timeout_s = argv
    jax.config.update("jax_platforms", "cpu")
    with start.join_processes(
        os.environ, timeout_s=300, peer_timeout_s=float(peer_timeout_s), secret_file=secret_file
    ) as cluster:
        print("joined", cluster.messenger._server._listener.getsockname()[1], flush=True)
        operations = int(sys.stdin.readline())
        jax.devices()  # waits for those of the other process
        begun = time.monotonic()
        if operations:
            def program(x):
                for i in range(operations):
                    x = jax.numpy.sin(x @ x + i)
                return x
            jax.jit(program).lower(jax.numpy.ones((8, 8))).compile()
        print(time.monotonic() - begun, flush=True)
        coordination.barrier("end", "come to its end", timeout_s=300)
    return 0

main()
"""
# A process that sends 3 MiB to each of the others, and prints what it has received.
EXCHANGE = """
import os, sys, time
import jax
from maxdiloco.cluster import coordination, start
from maxdiloco.cluster.payloads import get_payload, put_payload
from maxdiloco.command_line import guarded

@guarded
def main(argv):
    jax.config.update("jax_platforms", "cpu")
    with start.join_processes(
        os.environ, timeout_s=300, peer_timeout_s=60, secret_file=argv[0]
    ) as cluster:
        me, messenger = cluster.job.process_id, cluster.messenger
        others = [peer for peer in range(cluster.job.num_processes) if peer != me]
        cluster.open_bulk()
        for peer in others:
            put_payload(messenger, peer, ("x",), [bytes([10 * me + peer]) * (3 << 20)])
        for peer in others:
            end = time.monotonic() + 300
            found = get_payload(lambda key: messenger.get(peer, key, end), ("x",))
            print(peer, me, found.size, found.min(), found.max(), flush=True)
        coordination.barrier("end", "come to its end", timeout_s=300)
    return 0

main()
"""
# A client of JAX's coordination service without a certificate. It enters as process 1.
CLIENT = """
import os, sys, threading
from jax._src.lib import _jax

threading.Timer(30, os._exit, (9,)).start()
client = _jax.get_distributed_runtime_client(sys.argv[1], 1, init_timeout=8)
client.connect()
print(client.blocking_key_value_get("maxdiloco/start", 8000), flush=True)
os._exit(0)
"""


@pytest.fixture
def secret_file(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(b"known to every host of the run")
    path.chmod(0o600)
    return path


@pytest.fixture
def join(started, free_port):
    """join(index, ...): start a process of the run, which prints `joined` and waits for a line."""

    def join(index, secret_file, *, peer_timeout_s=60, host="127.0.0.1"):
        where = {"JAX_COORDINATOR_ADDRESS": f"{host}:{free_port}", "JAX_NUM_PROCESSES": "2"}
        where |= {"JAX_PROCESS_ID": str(index)}
        return started(JOIN, str(secret_file), str(peer_timeout_s), **where)

    return join


@pytest.fixture
def intruder(started, free_port):
    """intruder(): start a client of the coordination service."""
    return lambda: started(CLIENT, f"127.0.0.1:{free_port}")


def port(process):
    """Wait until a process has joined; returns the port of its server."""
    return int(process.stdout.readline().split()[1])


def end(processes, operations=(0, 0)):
    """Compile programs of so many operations; returns the exit codes."""
    for process, count in zip(processes, operations, strict=True):
        process.stdin.write(f"{count}\n")
        process.stdin.flush()
    return [process.wait(JOIN_S) for process in processes]


def answer(port):
    """What a server says to a client without a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as plain:
            with context.wrap_socket(plain) as connection:
                connection.sendall(b"POST /start/control HTTP/1.1\r\nHost: x\r\n\r\n")
                return connection.recv(100)
    except OSError:
        return b""


@pytest.mark.parametrize("order, host", [((1, 0), "[::1]"), full((0, 1), "127.0.0.1")])
def test_processes_start_in_any_order(join, secret_file, order, host):
    """Also where the address is one of IPv6."""
    processes = {}
    for index in order:
        processes[index] = join(index, secret_file, host=host)
        time.sleep(3)
    assert end([processes[0], processes[1]]) == [0, 0]


@pytest.mark.full
def test_eight_processes_exchange_with_each_other(started, free_port, secret_file):
    count = 8
    where = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port}", "JAX_NUM_PROCESSES": str(count)}
    processes = [
        started(EXCHANGE, str(secret_file), **where, JAX_PROCESS_ID=str(index))
        for index in range(count)
    ]
    assert [process.wait(JOIN_S) for process in processes] == [0] * count
    found = {line for process in processes for line in process.stdout.read().splitlines()}
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    assert found == {f"{a} {b} {3 << 20} {10 * a + b} {10 * a + b}" for a, b in pairs}


@pytest.mark.full
def test_a_compilation_that_takes_longer_than_the_timeout_ends_nothing(join, secret_file):
    processes = [join(index, secret_file, peer_timeout_s=2) for index in (0, 1)]
    assert end(processes, (0, 300)) == [0, 0]
    compiled_s = float(processes[1].stdout.read().split()[-1])
    assert compiled_s > 2 * 2


@pytest.mark.skipif(not HAS_TLS, reason="JAX's coordination service has TLS from 0.12 on")
def test_a_client_without_a_certificate_cannot_read_or_enter(join, intruder, secret_file):
    """It comes before process 1, whose place it wants."""
    processes = [join(0, secret_file)]
    client = intruder()
    assert client.wait(WAIT_S) != 0
    assert client.stdout.read() == ""
    processes.append(join(1, secret_file))
    assert end(processes) == [0, 0]


@pytest.mark.skipif(not HAS_TLS, reason="with 0.10 the service is open in both cases")
def test_without_a_secret_file_such_a_client_reads_and_enters(join, intruder):
    """The positive control: it reads the secret of the run."""
    join(0, "")
    client = intruder()
    assert client.wait(WAIT_S) == 0
    assert len(json.loads(client.stdout.read())["secret"]) == 64


@pytest.mark.skipif(not HAS_TLS, reason="JAX's coordination service has TLS from 0.12 on")
def test_a_client_without_a_certificate_cannot_end_the_run(join, intruder, secret_file):
    processes = [join(index, secret_file) for index in (0, 1)]
    ports = [port(process) for process in processes]
    assert intruder().wait(WAIT_S) != 0
    assert [answer(each) for each in ports] == [b"", b""]
    assert end(processes) == [0, 0]


@pytest.mark.skipif(not HAS_TLS, reason="with 0.10 the service is open in both cases")
def test_without_a_secret_file_such_a_client_ends_the_run(join, intruder):
    """The positive control: JAX aborts both when another process 1 enters."""
    processes = [join(index, "") for index in (0, 1)]
    for process in processes:
        port(process)
    intruder()
    assert all(process.wait(WAIT_S) != 0 for process in processes)
