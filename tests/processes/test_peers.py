"""How the processes of a run connect, and with which code each of them ends."""

import concurrent.futures
import socket
from types import SimpleNamespace

import jax
import pytest

from maxdiloco.errors import CheckpointError, ConfigError, DataError, LostPeerError
from maxdiloco.processes import coordination, links, peers
from maxdiloco.processes.coordination import Job

WAIT_S = 60  # far above what anything here takes


@pytest.mark.parametrize(
    "error, code",
    [
        (ConfigError(), 2),
        (CheckpointError(), 2),
        (DataError(), 3),
        (KeyboardInterrupt(), 130),
        (SystemExit(7), 7),
        (SystemExit(), 0),
        (SystemExit("words"), 1),
        (KeyError(), 1),
    ],
)
def test_exit_codes(error, code):
    assert peers.exit_code(error) == code


class ServiceGone:
    """A client of JAX's coordination service whose process 0 has been killed."""

    def blocking_key_value_get(self, key, timeout_in_ms):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: Socket closed")


def test_a_process_0_lost_while_meeting_is_named(monkeypatch):
    state = SimpleNamespace(client=ServiceGone(), coordinator_address="[::1]:1234")
    monkeypatch.setattr(coordination.distributed, "global_state", state)
    with pytest.raises(LostPeerError, match="process 0 at ::1 was lost before process 3") as caught:
        peers._connect(Job(3, 4), 0, False, timeout_s=1)
    assert "start the run again" in str(caught.value)


@pytest.mark.parametrize("text", ["?", "[1]", '{"port": 1}', '{"problem": 1}', "[" * 100_000])
def test_a_store_that_a_stranger_wrote_to_is_an_error_in_words(monkeypatch, text):
    """Whoever reaches the coordinator's port may write there; a value is written once."""
    client = SimpleNamespace(blocking_key_value_get=lambda key, timeout_in_ms: text)
    state = SimpleNamespace(client=client, coordinator_address="[::1]:1234")
    monkeypatch.setattr(coordination.distributed, "global_state", state)
    words = "JAX's key-value store holds no {} of process {}.*Keep the coordinator's port"
    with pytest.raises(LostPeerError, match=words.format("place", 0)):
        peers._connect(Job(3, 4), 0, False, timeout_s=1)
    with pytest.raises(LostPeerError, match=words.format("address", 1)):
        links.exchange_addresses(0, [1], ("host", 1), put=lambda *_: None, get=lambda key: text)


@pytest.fixture
def meet(monkeypatch, free_port, store):
    """Two processes meet in two threads: the port they used, or the error of each."""
    state = SimpleNamespace(client=store, coordinator_address=f"127.0.0.1:{free_port}")
    monkeypatch.setattr(coordination.distributed, "global_state", state)

    def meet(peer_port, *, next_port=True):
        store.written.clear()

        def connect(index):
            try:
                return peers._connect(Job(index, 2), peer_port, next_port, timeout_s=WAIT_S)
            except (ConfigError, LostPeerError) as error:
                return error

        with concurrent.futures.ThreadPoolExecutor() as pool:
            ends = list(pool.map(connect, (0, 1)))
        if isinstance(ends[1], Exception):
            return ends
        port = ends[1][0].socket.getpeername()[1]
        for (link,) in ends:
            link.socket.close()
        return port

    return meet


def test_the_processes_meet_at_peer_port(meet, free_port):
    with socket.create_server(("127.0.0.1", 0)) as server:
        wanted = server.getsockname()[1]
    assert meet(wanted) == wanted


def test_the_processes_meet_at_the_port_after_jax_s_if_it_is_free(meet, free_port):
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
