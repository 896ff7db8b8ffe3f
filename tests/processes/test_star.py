"""How the processes of a run connect to process 0."""

import contextlib
import socket
import threading
import time

import link_tools
import pytest

from maxdiloco.errors import LostPeerError
from maxdiloco.processes import star

WAIT_S = 20  # far above what anything here takes


def join(port, secret, process_id, timeout_s=WAIT_S):
    return star.join(
        "localhost", port=port, secret=secret, host="host-a", process_id=process_id,
        timeout_s=timeout_s,
    )  # fmt: skip


def test_gather_names_the_processes_that_did_not_come():
    listener, secret = star.listen()
    port = listener.getsockname()[1]
    came = []
    peer = threading.Thread(target=lambda: came.extend(join(port, secret, 2)))
    peer.start()
    with pytest.raises(LostPeerError) as caught:
        star.gather(listener, secret, 4, timeout_s=1.0)
    peer.join()
    assert "processes [1, 3] did not reach process 0" in str(caught.value)
    assert "within 1 s (the lesser of jax_distributed_initialization_timeout" in str(caught.value)
    assert "let the hosts open TCP connections" in str(caught.value)
    assert came[0].name() == "process 0 on host-a"


def gathering(listener, secret, count, timeout_s=WAIT_S):
    """A future of the links of process 0."""
    return link_tools.later(lambda: star.gather(listener, secret, count, timeout_s=timeout_s))


@pytest.fixture
def door():
    """A listener, its secret, its port."""
    listener, secret = star.listen()
    return listener, secret, listener.getsockname()[1]


@pytest.mark.parametrize(
    "greeting",
    [b"GET / HTTP/1.1\n", b'{"secret": "guess"}\n', b"[1]\n", b"[" * 60_000 + b"\n"],
)
def test_strangers_are_turned_away(door, greeting):
    listener, secret, port = door
    stranger = socket.create_connection(("localhost", port), timeout=WAIT_S)
    stranger.sendall(greeting)
    gathered = gathering(listener, secret, 2)
    join(port, secret, 1)
    assert [link.peer for link in gathered.result(WAIT_S)] == [1]
    with contextlib.suppress(ConnectionResetError):  # where it has sent more than was read
        assert stranger.recv(1) == b""


def test_a_stranger_that_drips_bytes_holds_up_nobody(door):
    """A hello has one time for the whole of it, and the others are answered beside it."""
    listener, secret, port = door
    over = threading.Event()

    def drip():
        with (
            socket.create_connection(("localhost", port)) as stranger,
            contextlib.suppress(OSError),
        ):
            for _ in range(100):
                if over.wait(0.05):
                    return
                stranger.sendall(b"m")

    dripping = link_tools.later(drip)
    time.sleep(0.2)
    begun = time.monotonic()
    gathered = gathering(listener, secret, 2)
    join(port, secret, 1)
    assert [link.peer for link in gathered.result(WAIT_S)] == [1]
    assert time.monotonic() - begun < 2
    over.set()
    dripping.result(WAIT_S)


def test_the_secret_is_proved_and_never_sent(door):
    """The positive control is the name of the host, which is sent as it is."""
    listener, secret, port = door
    proxy = link_tools.Proxy(("localhost", port))
    proxy.seen = bytearray()
    gathered = gathering(listener, secret, 2)
    (link,) = join(proxy.address[1], secret, 1)
    (taken,) = gathered.result(WAIT_S)
    taken.socket.settimeout(WAIT_S)
    assert next(taken.messages()) == {"host": socket.gethostname()}
    assert socket.gethostname().encode() in proxy.seen
    assert secret.encode() not in proxy.seen
    link.socket.close()
    proxy.close()


@pytest.mark.parametrize(("process", "secret"), [(1, "guessed"), (7, None), (0, None)])
def test_who_does_not_know_the_secret_or_is_no_process_of_the_run_stays_out(door, process, secret):
    listener, known, port = door
    gathered = gathering(listener, known, 2, timeout_s=1.0)
    with pytest.raises(
        LostPeerError, match=f"{process} cannot reach process 0 at localhost port"
    ) as e:
        join(port, secret or known, process, timeout_s=0.3)
    assert "let the hosts open TCP connections" in str(e.value)
    with pytest.raises(LostPeerError, match=r"processes \[1\] did not reach process 0"):
        gathered.result(WAIT_S)


def test_a_second_connection_of_a_process_replaces_only_one_that_has_closed(door):
    listener, secret, port = door
    gathered = gathering(listener, secret, 3)
    star._dial(("localhost", port), secret, 1, time.monotonic() + WAIT_S).close()
    (first,) = join(port, secret, 1)
    with pytest.raises(LostPeerError, match="it closed the connection"):
        join(port, secret, 1, timeout_s=0.3)
    (other,) = join(port, secret, 2)
    taken = {link.peer: link.socket.getpeername()[1] for link in gathered.result(WAIT_S)}
    assert taken == {1: first.socket.getsockname()[1], 2: other.socket.getsockname()[1]}


def test_messages_come_whole_and_in_order_however_they_are_cut():
    ours, theirs = socket.socketpair()
    link = star.Link(ours)
    theirs.sendall(b'{"be')
    later = threading.Timer(0.2, theirs.sendall, [b'at": true}\n{"e'])
    later.start()
    assert [message for _ in range(2) for message in link.messages()] == [{"beat": True}]
    theirs.sendall(b'nd": 0}\n')
    assert list(link.messages()) == [{"end": 0}]
    theirs.close()
    with pytest.raises(ConnectionError, match="its connection closed without a word"):
        next(link.messages())
