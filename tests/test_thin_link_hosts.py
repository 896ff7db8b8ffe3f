"""Hosts of the benchmark of thin links: what they are on this kernel, and that nothing stays.

They are network namespaces: root, iproute2 and a kernel with tbf, or these tests are skipped.
"""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from tiers import full

from benchmarks.link import counters, faults, hosts
from benchmarks.link.faults import Fault
from benchmarks.link.hosts import DEVICE, ETC, NAMESPACES, PROGRAMS, Link
from maxdiloco.errors import ConfigError

pytestmark = pytest.mark.xdist_group("hosts")  # whoever makes hosts sweeps those of killed ones

ROOT = pathlib.Path(__file__).parent.parent
WAIT_S = 120
QUICK_TO_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
SMALL = (
    "override_model_config=true base_emb_dim=64 base_mlp_dim=256 base_num_decoder_layers=1 "
    "base_num_query_heads=2 base_num_kv_heads=1 head_dim=16 max_target_length=16 opt_type=sgd "
    "diloco_sync_period=4 num_communication_overlapping_steps=1 num_diloco_fragments=2 "
    "log_period=4 periods=1 fast_device_ms=50 congestion=reno"
).split()


@pytest.fixture(scope="module", autouse=True)
def thin_links():
    """Skips where this machine cannot make hosts."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces are made by root")
    try:
        with hosts.hosts(1, Link(mbit=10.0)):
            return
    except ConfigError as error:
        pytest.skip(f"no hosts on this machine: {error}")


def running(words):
    """Processes whose command line has the words."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if words in path.read_text():
                found.append(path)
    return found


def left(pid):
    """Files that the hosts of a process are made of, and processes that carry their frames."""
    prefix = f"{hosts.PREFIX}-{pid}-"
    files = [path for folder in (NAMESPACES, ETC, PROGRAMS) for path in folder.glob(f"{prefix}*")]
    return files + running(prefix)


SERVE = """
import socket
server = socket.create_server(("0.0.0.0", 5000))
print("up", flush=True)
connection, _ = server.accept()
while connection.recv(65536):
    continue
connection.sendall(b"!")
"""
SEND = """
import socket, sys, time
address, size = sys.argv[1], int(sys.argv[2])
connection = socket.create_connection((address, 5000))
start = time.monotonic()
connection.sendall(bytes(size))
connection.shutdown(socket.SHUT_WR)
connection.recv(1)
print(time.monotonic() - start, socket.gethostbyname(socket.gethostname()))
"""


def sent_over(made, size):
    """(seconds, own address) of a host that sends bytes to the first."""
    piped = dict(stdout=subprocess.PIPE, text=True)
    server = made.start(0, [sys.executable, "-c", SERVE], **piped)
    assert server.stdout.readline() == "up\n"
    last = len(made.names) - 1
    command = [sys.executable, "-c", SEND, made.addresses[0], str(size)]
    seconds, address = made.start(last, command, **piped).communicate(timeout=WAIT_S)[0].split()
    return float(seconds), address


def test_a_link_is_as_thin_as_it_says_and_its_bytes_are_counted():
    """1 MB at 10 Mbit/s less the bucket's 32 KB is 0.77 s; with headers it is at most 1.2 MB. A
    busy machine makes it longer, never shorter. An unlimited link is the control. With 60 ms one
    way the data and the answer are 120 ms, and more round trips at a slow start."""
    with hosts.hosts(2, Link(mbit=10.0, congestion="reno")) as made:
        assert made.congestion() == "reno"
        with counters.Sampler(made) as sampler:
            time.sleep(0.1)
            seconds, address = sent_over(made, 1_000_000)
            time.sleep(0.1)
    first, last = sampler.samples[0].at, sampler.samples[-1].at
    sent, received = counters.between(sampler.samples, first + 1e-6, last)
    assert seconds > 0.75 and address == made.addresses[1]
    assert 1_000_000 < sent[1] < 1_200_000 and 1_000_000 < received[0] < 1_200_000
    assert sent[0] < 100_000
    assert counters.peak(sampler.samples, first, last) < 1.5 * 10e6 / 8
    with hosts.hosts(2, Link()) as made:
        assert sent_over(made, 1_000_000)[0] < 0.5
    with hosts.hosts(3, Link(mbit=50.0, delay_ms=60.0)) as made:
        assert sent_over(made, 1000)[0] > 0.12


def test_nothing_is_left_of_hosts_and_what_ran_on_them():
    """Hosts of a living process and files of others are not swept; those of a killed one are."""
    other = PROGRAMS / f"{hosts.PREFIX}-1-notes-of-somebody"
    other.mkdir(exist_ok=True)

    def interfaces():
        return subprocess.run(["ip", "-br", "link"], capture_output=True, text=True).stdout

    before, pid = interfaces(), os.getpid()
    with hosts.hosts(2, Link(mbit=10.0, delay_ms=1.0)) as made:
        there = [path.name for path in left(pid)]
        sleeper = made.start(1, ["sleep", "600"])
        assert sorted(there) == sorted(
            [*made.names, made.switch, *made.names, made.switch, "cmdline", "cmdline"]
        )  # namespaces, /etc/netns of the hosts, the folder of delay.c, a process for each host
        assert made.switch not in hosts.sweep()
        assert (NAMESPACES / made.switch).exists() and other.exists()
        assert sleeper.poll() is None and DEVICE not in interfaces()
    assert left(pid) == [] and sleeper.returncode == -signal.SIGKILL
    assert interfaces() == before
    other.rmdir()


PRINT_WHAT_COMES = """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as place:
    place.bind(("0.0.0.0", 5000))
    print("up", flush=True)
    while True:
        print(place.recv(100).decode(), flush=True)
"""
SEND_WORDS = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as place:
    place.sendto(sys.argv[2].encode(), (sys.argv[1], 5000))
"""


def test_a_cut_drops_only_its_direction_until_it_is_mended():
    """What arrives is what was sent in a direction that was not cut, in this order."""
    fault = Fault("cut", victim=1, receives=False)
    with hosts.hosts(2, Link()) as made:
        printing = [sys.executable, "-c", PRINT_WHAT_COMES]
        there = [made.start(i, printing, stdout=subprocess.PIPE, text=True) for i in range(2)]
        assert [process.stdout.readline() for process in there] == ["up\n"] * 2

        def send(source, words):
            command = [sys.executable, "-c", SEND_WORDS, made.addresses[1 - source], words]
            assert made.start(source, command).wait(60) == 0

        send(1, "before")
        faults._cut(fault, made, mend=False)
        send(1, "lost")
        send(0, "the other way")
        faults._cut(fault, made, mend=True)
        send(1, "after")
        assert [there[0].stdout.readline() for _ in range(2)] == ["before\n", "after\n"]
        assert there[1].stdout.readline() == "the other way\n"


@pytest.fixture
def bench(tmp_path):
    """Starts the benchmark as a program; it is killed in the end."""
    started = []
    flags = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_TO_COMPILE}"
    environ = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": flags}

    def start(*argv):
        command = [sys.executable, str(ROOT / "benchmarks" / "thin_link.py"), *argv]
        log = tmp_path / "log"
        piped = dict(stdout=log.open("w"), stderr=subprocess.STDOUT, start_new_session=True)
        process = subprocess.Popen(command, cwd=tmp_path, env=environ, **piped)
        process.log = log
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
    hosts.sweep()


@pytest.mark.parametrize(
    ("number", "code"), [full(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_nothing_is_left_of_a_benchmark_that_is_ended_in_mid_run(bench, tmp_path, number, code):
    """Both processes of the first row's trainer run on their hosts. A killed one cannot clean up:
    its trainers end with it, and the next one sweeps its hosts."""
    out, limit = tmp_path / "out", time.monotonic() + WAIT_S
    process = bench(f"out={out}", *SMALL)
    logs = [out / "logs" / "plain-unlimited" / f"process_{i}.log" for i in range(2)]
    while not all(log.exists() and log.stat().st_size for log in logs):
        assert process.poll() is None and time.monotonic() < limit, process.log.read_text()
        time.sleep(0.05)
    assert len(left(process.pid)) == 5, "three namespaces and /etc/netns of two hosts"
    assert len(running(str(out))) >= 3, "the benchmark and its trainers"
    process.send_signal(number)
    assert process.wait(timeout=WAIT_S) == code, process.log.read_text()
    limit = time.monotonic() + WAIT_S  # the kernel's SIGKILL of trainers whose parent is gone
    while running(str(out)) and time.monotonic() < limit:
        time.sleep(0.05)
    assert running(str(out)) == []
    if number == signal.SIGKILL:
        names = {path.name for path in left(process.pid) if path.parent == NAMESPACES}
        assert len(names) == 3
        assert hosts.sweep() == sorted(names)
    assert left(process.pid) == []


@pytest.mark.full
def test_a_run_over_two_hosts_measures_what_it_sends(bench, tmp_path):
    """Three runs of a small model: the plain step twice, and one exchange between them."""
    out = tmp_path / "out"
    process = bench(f"out={out}", "modes=overlapped", "wires=float32", "carriers=program",
                    "rates=20", *SMALL)  # fmt: skip
    code = process.wait(timeout=500)
    text = process.log.read_text()
    assert code == 0 or "on the link" in text.splitlines()[-1], text  # TCP, on a busy machine
    plain, exchange, again = json.loads((out / "rows.json").read_text())["rows"]
    assert (plain["mode"], again["mode"], exchange["mode"]) == ("plain", "plain", "overlapped")
    assert plain["step_ms"] > 50 and plain["claimed_per_step"] == 0
    assert exchange["claimed_per_step"] > 50 * plain["sent_per_step"][0]
    for sent in exchange["sent_per_step"]:
        assert 0.9 < sent / exchange["claimed_per_step"] < 1.5  # messages lie across its ends
    assert "streaming, tau=1, float32, program" in (out / "table.md").read_text()
    assert left(process.pid) == []
