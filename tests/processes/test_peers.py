"""How the processes of a run connect and compare their values, and with which code each ends."""

import pathlib
import socket
import threading
from types import SimpleNamespace

import jax
import pytest
from link_tools import WAIT_S, together

import maxdiloco
from maxdiloco.errors import CheckpointError, ConfigError, DataError, LostPeerError
from maxdiloco.processes import coordination, distributed, links, peers
from maxdiloco.processes.coordination import Job


def test_exit_codes():
    ends = {2: [ConfigError(), CheckpointError()], 3: [DataError()], 130: [KeyboardInterrupt()]}
    ends |= {0: [SystemExit()], 1: [SystemExit("words"), KeyError()], 7: [SystemExit(7)]}
    for code, errors in ends.items():
        assert [peers.exit_code(error) for error in errors] == [code] * len(errors)


@pytest.fixture
def served(monkeypatch):
    """served(call): JAX's coordination service, all of whose calls are this one."""

    def serve(call):
        client = SimpleNamespace(wait_at_barrier=call, blocking_key_value_get=call)
        state = SimpleNamespace(client=client, coordinator_address="[::1]:1234")
        monkeypatch.setattr(coordination.distributed, "global_state", state)

    return serve


def raising(text):
    def fail(*_):
        raise jax.errors.JaxRuntimeError(text)

    return fail


def test_one_file_alone_imports_what_is_private_to_jax():
    """JAX may change it in any version: then this file is the one to mend."""
    folder = pathlib.Path(maxdiloco.__file__).parent
    users = {path.name for path in folder.rglob("*.py") if "jax._src" in path.read_text()}
    assert users == {"coordination.py"}


# As jaxlib 0.10.2 words it; some lines are left out.
LATE = """DEADLINE_EXCEEDED: Barrier timed out. Id: x::0. Please look at the task logs.
# of tasks that reached the barrier: 2/3.
The first task at the barrier: 0. Some timed out task names:
2


"""


@pytest.mark.parametrize("text, who", [(LATE, "process 2"), ("CANCELLED: gone", "a process")])
def test_a_barrier_that_not_all_reach_says_who_is_late_with_what(served, text, who):
    """JAX's own error is a traceback of six lines."""
    served(raising(text))
    with pytest.raises(LostPeerError, match=rf"^{who} has not compiled its programs since \d\d:"):
        coordination.meet("x", "compiled its programs", timeout_s=2)
    with pytest.raises(LostPeerError, match=r"^process 7 has not sent its name since .*for 2 s at"):
        coordination.value_of(7, "x", "its name", timeout_s=2)


def test_a_process_0_lost_while_meeting_is_named(served):
    served(raising("UNAVAILABLE: Socket closed"))
    line = "process 0 at ::1 was lost before process 3 .* start the run again"
    with pytest.raises(LostPeerError, match=line):
        peers._connect(Job(3, 4), 0, False, timeout_s=1)


@pytest.mark.parametrize("text", ["?", "[1]", '{"port": 1}', '{"problem": 1}', "[" * 100_000])
def test_a_store_that_a_stranger_wrote_to_is_an_error_in_words(served, text):
    """Whoever reaches the coordinator's port may write there; a value is written once."""
    served(lambda *_: text)
    words = "JAX's key-value store holds no {} of process {}.*Keep the coordinator's port"
    with pytest.raises(LostPeerError, match=words.format("place", 0)):
        peers._connect(Job(3, 4), 0, False, timeout_s=1)
    with pytest.raises(LostPeerError, match=words.format("address", 1)):
        links.exchange_addresses(0, [1], ("host", 1), put=lambda *_: None, get=lambda key: text)


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
def meet(store):
    """meet(peer_port): the port that two processes in two threads used, or the error of each."""

    def meet(peer_port, *, next_port=True):
        store.written.clear()

        def connect(index):
            try:
                return peers._connect(Job(index, 2), peer_port, next_port, timeout_s=WAIT_S)
            except (ConfigError, LostPeerError) as error:
                return error

        ends = together(lambda: connect(0), lambda: connect(1))
        if isinstance(ends[1], Exception):
            return ends
        port = ends[1][0].socket.getpeername()[1]
        for (link,) in ends:
            link.socket.close()
        return port

    return meet


def test_the_processes_meet_at_peer_port_or_the_one_after_jax_s_if_it_is_free(meet, free_port):
    with socket.create_server(("127.0.0.1", 0)) as server:
        wanted = server.getsockname()[1]
    assert meet(wanted) == wanted
    assert meet(0) == free_port + 1
    with socket.create_server(("", free_port + 1)):
        assert meet(0) != free_port + 1
    assert meet(0, next_port=False) != free_port + 1


def test_a_peer_port_in_use_ends_every_process_with_2_and_one_line(meet):
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        first, second = meet(port)
    assert (type(first), first.exit_code) == (ConfigError, 2)
    assert (type(second), second.exit_code) == (LostPeerError, 2)
    assert str(first) == (
        f"peer_port={port} cannot be used on {socket.gethostname()}: Address already in use. "
        "Name a free port, or leave peer_port=0 to take one."
    )
    assert str(second) == f"process 0 at 127.0.0.1 has ended: {first}"


@pytest.mark.parametrize("process, why", [(2, "Address already in use.*"), (65535, ".*0-65535.")])
def test_process_i_listens_for_the_exchange_on_the_port_1_plus_i_after_peer_port(
    store, process, why
):
    vars(coordination.distributed.global_state).update(process_id=process, num_processes=3)
    with socket.create_server(("127.0.0.1", 0)) as other:
        first = other.getsockname()[1] - 3
        line = f"peer_port={first}: process {process} cannot listen on 127.0.0.1 port "
        with pytest.raises(ConfigError, match=f"{line}{first + 1 + process}: {why}. Use an"):
            with distributed.linked(
                peer_port=first, interface="127.0.0.1", fingerprint="", timeout_s=1
            ):
                raise AssertionError


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
    assert str(errors[0]).startswith("process 2 has not sent its keys, as the same version of")
    assert ", for 0.05 s at most. See the end of its own output" in str(errors[0])
    assert str(errors[1]).startswith("process 0 has not sent whether the keys are equal since ")
