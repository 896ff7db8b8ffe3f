"""How the processes of a run connect to process 0."""

import socket
import threading

import pytest

from maxdiloco.errors import LostPeerError
from maxdiloco.processes import star

WAIT_S = 60  # far above what anything here takes


def join(port, secret, process_id):
    return star.join(
        "localhost", port=port, secret=secret, host="host-a", process_id=process_id,
        timeout_s=WAIT_S,
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


@pytest.mark.parametrize("greeting", [b"GET / HTTP/1.1\n", b'{"secret": "guess"}\n', b"[1]\n"])
def test_strangers_are_turned_away(greeting):
    listener, secret = star.listen()
    port = listener.getsockname()[1]
    stranger = socket.create_connection(("localhost", port), timeout=WAIT_S)
    stranger.sendall(greeting)
    peer = threading.Thread(target=join, args=(port, secret, 1))
    peer.start()
    gathered = star.gather(listener, secret, 2, timeout_s=WAIT_S)
    peer.join()
    assert [link.peer for link in gathered] == [1]
    assert stranger.recv(1) == b""


def test_messages_come_whole_and_in_order_however_they_are_cut():
    """The first one is read apart from the others; a beat may arrive together with it."""
    ours, theirs = socket.socketpair()
    link = star.Link(ours)
    theirs.sendall(b'{"secr')
    later = threading.Timer(0.2, theirs.sendall, [b'et": "s"}\n{"beat": true}\n{"e'])
    later.start()
    assert link.hello(WAIT_S) == {"secret": "s"}
    theirs.sendall(b'nd": 0}\n')
    assert list(link.messages()) == [{"beat": True}, {"end": 0}]
    theirs.close()
    with pytest.raises(ConnectionError, match="its connection closed without a word"):
        next(link.messages())


def test_a_watch_that_cannot_be_reached_is_an_error_with_the_place():
    listener, _ = star.listen()
    port = listener.getsockname()[1]
    listener.close()
    with pytest.raises(LostPeerError) as caught:
        join(port, "secret", 1)
    assert f"process 1 cannot reach process 0 at localhost port {port}" in str(caught.value)
    assert "let the hosts open TCP connections" in str(caught.value)
