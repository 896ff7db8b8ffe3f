"""How the processes of a run connect and compare their values, and with which code each ends."""

import contextlib
import json
import pathlib
import socket
import threading
from types import SimpleNamespace
from unittest import mock

import jax
import pytest
from messenger_tools import WAIT_S, together

import maxdiloco
from maxdiloco.cluster import certificates, coordination, peers
from maxdiloco.cluster.coordination import Job
from maxdiloco.errors import CheckpointError, ConfigError, DataError, LostPeerError


def test_exit_codes():
    ends = {2: [ConfigError(), CheckpointError()], 3: [DataError()], 130: [KeyboardInterrupt()]}
    ends |= {0: [SystemExit()], 1: [SystemExit("words"), KeyError()], 7: [SystemExit(7)]}
    for code, errors in ends.items():
        assert [peers.exit_code(error) for error in errors] == [code] * len(errors)


@pytest.fixture
def service_fails(monkeypatch):
    """service_fails(text): all calls of JAX's coordination service raise this."""

    def install(text):
        fail = mock.Mock(side_effect=jax.errors.JaxRuntimeError(text))
        client = SimpleNamespace(wait_at_barrier=fail, blocking_key_value_get=fail)
        state = SimpleNamespace(client=client, coordinator_address="[::1]:1234")
        monkeypatch.setattr(coordination.distributed, "global_state", state)

    return install


def test_only_two_files_import_private_parts_of_jax():
    """JAX may change them in any version: then these files need a change."""
    folder = pathlib.Path(maxdiloco.__file__).parent
    users = {path.name for path in folder.rglob("*.py") if "jax._src" in path.read_text()}
    assert users == {"coordination.py", "private_jax.py"}


# As jaxlib 0.10.2 words it; some lines are left out.
LATE = """DEADLINE_EXCEEDED: Barrier timed out. Id: x::0. Please look at the task logs.
# of tasks that reached the barrier: 2/3.
The first task at the barrier: 0. Some timed out task names:
2


"""


@pytest.mark.parametrize("text, who", [(LATE, "process 2"), ("CANCELLED: gone", "a process")])
def test_a_barrier_that_not_all_reach_names_who_is_late(service_fails, text, who):
    service_fails(text)
    with pytest.raises(LostPeerError, match=f"^{who} .*compiled its programs"):
        coordination.barrier("x", "compiled its programs", timeout_s=2)
    with pytest.raises(LostPeerError, match="^process 7 .*its name .* 2 s "):
        coordination.value_of(7, "x", "its name", timeout_s=2)


def test_a_process_0_lost_while_meeting_is_named(service_fails):
    service_fails("UNAVAILABLE: Socket closed")
    with pytest.raises(LostPeerError, match="process 0 at ::1 .*process 3 "):
        peers._start_of_run(Job(3, 4), "", 1)


def test_a_start_that_process_0_did_not_publish_is_refused(monkeypatch):
    """An unauthenticated client may write to the store first. The last case is the control."""
    good = {"id": "7", "secret": "a" * 64}
    wrong = [good | {"secret": "a" * 15}, good | {"secret": 7}, {"id": "7"}, [1], "[" * 100_000]
    for value in (*wrong, good):
        text = value if isinstance(value, str) else json.dumps(value)
        monkeypatch.setattr(coordination, "get", lambda key, timeout_s, text=text: text)
        if value is not good:
            with pytest.raises(LostPeerError, match="process 0 "):
                peers._start_of_run(Job(3, 4), "", 1)
    assert peers._start_of_run(Job(3, 4), "", 1) == ("7", b"a" * 64)


class Store:
    """The key-value store of JAX's coordination service, for threads. written: all that was put."""

    def __init__(self):
        self.written, self._changed = {}, threading.Condition()
        self._barrier = threading.Barrier(2)

    def key_value_set(self, key, value):
        with self._changed:
            assert key not in self.written and value
            self.written[key] = value
            self._changed.notify_all()

    def blocking_key_value_get(self, key, timeout_in_ms):
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.written, timeout_in_ms / 1000):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: GetKeyValue() timed out")
            return self.written[key]

    def wait_at_barrier(self, name, timeout_in_ms):
        self._barrier.wait(WAIT_S)


@pytest.fixture
def store(monkeypatch, free_port):
    """The store, in the place of JAX's; its process 0 has the address `127.0.0.1`."""
    made = Store()
    state = SimpleNamespace(client=made, coordinator_address=f"127.0.0.1:{free_port}")
    monkeypatch.setattr(coordination.distributed, "global_state", state)
    return made


@pytest.fixture
def connect(store, monkeypatch):
    """connect(*address): the ports that two processes in two threads have, or the error of each.

    secret_files: of each.
    """
    monkeypatch.setattr(peers, "FailureDetector", NoDetector)
    monkeypatch.setattr(jax.distributed, "shutdown", lambda: None)

    def connect(*address, secret_files=("", "")):
        store.written.clear()
        address = peers.Address(*address)

        def enter(index):
            try:
                options = dict(secret_file=secret_files[index], timeout_s=5, silence_s=5)
                with peers.connect_peers(Job(index, 2), address, **options) as cluster:
                    cluster.open_bulk()
                    port = json.loads(store.written[f"maxdiloco/peer/{index}"])["port"]
                    cluster.messenger.close(WAIT_S)
                    return port
            except (ConfigError, LostPeerError) as error:
                return error

        return together(lambda: enter(0), lambda: enter(1))

    return connect


class NoDetector:
    """Instead of a failure detector, which would end this process."""

    def __init__(self, process_id):
        pass

    def begin(self, messenger):
        self.close = lambda: messenger.close(0)

    def end_if_lost(self, wait_s):
        pass

    def leave(self, exit_code, why=None):
        pass


def test_process_i_listens_on_peer_port_plus_i_or_after_jax(connect, free_port):
    with socket.create_server(("127.0.0.1", 0)) as server:
        wanted = server.getsockname()[1]
    assert connect(wanted, True, "") == [wanted, wanted + 1]
    assert connect(0, True, "")[0] == free_port + 1
    with socket.create_server(("", free_port + 1)):
        assert connect(0, True, "127.0.0.1")[0] != free_port + 1
    assert connect(0, False, "")[0] != free_port + 1


def ended_by(process, ends):
    """The line of the process that ends both with 2; the other one repeats it."""
    first, second = ends[process], ends[1 - process]
    assert (type(first), first.exit_code) == (ConfigError, 2)
    assert (type(second), second.exit_code) == (LostPeerError, 2)
    assert str(second) == f"process {process} has ended: {first}"
    return str(first)


@pytest.mark.parametrize("process", [0, 1])
def test_a_peer_port_in_use_ends_every_process_with_2(connect, process):
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        ends = connect(port - process, True, "")
    where = ["any address", "127.0.0.1"][process]
    line = ended_by(process, ends)
    for named in (f"peer_port={port - process}", f"process {process} ", f"{where} port {port} "):
        assert named in line


def test_a_secret_file_is_not_in_the_store_and_must_agree(connect, store, tmp_path):
    path = tmp_path / "secret"
    path.write_text("known to every host of the run\n")
    path.chmod(0o600)
    ports = connect(0, True, "", secret_files=[str(path)] * 2)
    assert all(isinstance(port, int) for port in ports)
    assert json.loads(store.written[peers.START])["secret"] == ""
    connect(0, True, "")
    assert len(json.loads(store.written[peers.START])["secret"]) == 64, "the control"
    path.write_text("short")
    for error in connect(0, True, "", secret_files=[str(path)] * 2):
        assert type(error) is ConfigError and "5 bytes" in str(error)


@pytest.mark.parametrize("process", [0, 1])
def test_a_secret_that_one_process_lacks_ends_both_with_2(connect, tmp_path, process):
    """Its file is not there, or only one process has the key; then process 1 reports it."""
    path, none = tmp_path / "secret", tmp_path / "none"
    path.write_text("known to every host of the run\n")
    path.chmod(0o600)
    one, other = (path, "none") if process == 0 else ("", "one")
    cases = {
        str(none): (process, f"exchange_secret_file={none}: "),
        "": (1, f"exchange_secret_file={one} in process 1, and process 0 has {other}."),
    }
    for file, (by, line) in cases.items():
        files = [str(path), str(path)]
        files[process] = file
        assert ended_by(by, connect(0, True, "", secret_files=files)).startswith(line)


def published(process, secret):
    """Store the address of a process with this secret."""
    authority = certificates.fingerprint(certificates.authority_key(secret))
    address = {"host": "127.0.0.1", "port": process, "machine": "host", "authority": authority}
    coordination.put(f"maxdiloco/peer/{process}", json.dumps(address))
    return authority


def test_a_process_with_another_secret_is_named(store):
    """The channels to the others are opened before the error, or JAX would abort them."""
    opened, waited = {}, []
    authority = published(1, b"s" * 16)
    published(2, b"t" * 16)
    messenger = SimpleNamespace(
        open=lambda channel, peers: opened.update(peers),
        wait_until_connected=lambda channel, within_s: waited.append(channel),
    )
    with pytest.raises(LostPeerError, match="process 2 .*exchange_secret_file"):
        peers.Cluster(Job(0, 3), messenger, None, authority, 1).open("control", [2, 1])
    assert ([*opened], waited) == ([1], ["control"])


@pytest.mark.parametrize("text", ["?", "[1]", "{}", "[" * 100_000, '{"host": 1}', '{"port": "1"}'])
def test_an_address_that_a_process_did_not_publish_is_refused(store, text):
    """A client of JAX's store may write there. Control: the address of process 1."""
    authority = published(1, b"s" * 16)
    coordination.put("maxdiloco/peer/2", text)
    messenger = SimpleNamespace(
        open=lambda channel, peers: None, wait_until_connected=lambda channel, within_s: []
    )
    cluster = peers.Cluster(Job(0, 3), messenger, None, authority, 1)
    cluster.open("control", [1])
    with pytest.raises(LostPeerError, match="process 2 "):
        cluster.open("control", [2])


def test_an_error_that_a_lost_peer_caused_becomes_its_loss():
    """An error of this process's own, and one without a loss, stay as they are."""
    loss = LostPeerError("process 1 on host-b is gone", 5)
    for error, behind, raised in (
        (RuntimeError("Gloo AllGather failed"), loss, loss),
        (own := RuntimeError("Gloo AllGather failed"), None, own),
        (data := DataError("no text"), loss, data),
    ):
        detector = SimpleNamespace(find_loss=lambda wait_s, behind=behind: behind)
        cluster = peers.Cluster(Job(0, 2), None, detector, "", 1)
        stack = contextlib.ExitStack()
        stack.push(cluster.raise_cause)
        with pytest.raises(type(raised)) as caught, stack:
            raise error
        assert caught.value is raised


def test_who_does_not_come_is_named(store):
    nobody_reached = SimpleNamespace(open=lambda channel, peers: None)
    with pytest.raises(LostPeerError) as caught:
        peers.Cluster(Job(0, 3), nobody_reached, None, "", 0.2).open("control", [1, 2])
    for named in ("process 0 ", "[1, 2]", "0.2 s", "jax_distributed_initialization_timeout"):
        assert named in str(caught.value)


def compare(of_each, *, count=None, timeout_s=60):
    """What require_equal raises in each process; None for nothing. count: of processes, all."""

    def one(index):
        try:
            return coordination.require_equal(
                Job(index, count or len(of_each)),
                of_each[index],
                difference=lambda groups: f"differ \udcff: {groups}",  # a path that is no text
                timeout_s=timeout_s,
            )
        except (ConfigError, LostPeerError) as error:
            return error

    return together(*(lambda index=index: one(index) for index in range(len(of_each))))


def test_equal_values_pass_and_one_process_sends_none(store):
    assert compare([{"steps": 8}]) == [None] and store.written == {}
    assert compare([{"steps": 8, "seed": 1}] * 3) == [None] * 3


def test_all_processes_raise_the_same_line(store):
    """Those that agree with process 0 end, too: the run cannot begin without the others."""
    errors = compare([{"steps": 8}, {"steps": 8}, {"steps": 9}, {"steps": 9}, {"steps": 8}])
    assert all(type(error) is ConfigError and error.exit_code == 2 for error in errors)
    (line,) = {str(error) for error in errors}
    assert line == "differ \udcff: {(0, 1, 4): {'steps': 8}, (2, 3): {'steps': 9}}"


def test_a_process_that_never_sends_its_values_is_named(store):
    errors = compare([{}, {}], count=3, timeout_s=0.05)
    assert [type(error) for error in errors] == [LostPeerError] * 2
    assert [str(error)[:10] for error in errors] == ["process 2 ", "process 0 "]
    assert " 0.05 s " in str(errors[0])
