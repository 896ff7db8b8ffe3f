"""A peer that is alive and sends nothing is lost after a while; a slow one is not."""

from concurrent.futures import Future

import numpy as np
import pytest

from maxdiloco.cluster.deadlines import SLOWER, Deadlines
from maxdiloco.cluster.payloads import MESSAGE_BYTES
from maxdiloco.engine.host_transfer import HostTransfers, Shard, Transfer, routes
from maxdiloco.errors import LostPeerError
from maxdiloco.metrics.rows import RowCollector
from maxdiloco.parallel import mesh as mesh_lib


class Peer:
    """A messenger with a process that is alive: its message comes at a time, its bytes before it.

    Its own clock. message_s: time between the messages of its payloads.
    """

    timeout_s = 100.0

    def __init__(self, *, comes_at=float("inf"), message_s=0.0):
        self.now, self._comes_at, self._message_s = 0.0, comes_at, message_s

    def clock(self):
        return self.now

    def has_message(self, peer, key):
        return self.now >= self._comes_at

    def get(self, peer, key, deadline):
        if self._comes_at > deadline:
            self.now = max(deadline, self.now)
            raise TimeoutError("not in time")
        self.now = max(self.now, self._comes_at)
        self._comes_at += self._message_s
        size = (4 * MESSAGE_BYTES).to_bytes(8, "big")
        return bytearray(size if key[-1] == "size" else MESSAGE_BYTES)


def wait(peer, *, worked_s=0.0):
    """What comes, or the error, and the lines said."""
    lines = []
    deadlines = Deadlines(say=lines.append, clock=peer.clock)
    peer.now = worked_s
    deadlines.record_work()
    try:
        return deadlines.receive_payload(peer, 1, ("key",), "fragment 0 of step 8"), lines
    except LostPeerError as error:
        return error, lines


def test_a_peer_that_is_alive_and_silent_is_lost():
    """The error names the peer and the message."""
    peer = Peer()
    error, lines = wait(peer, worked_s=2.0)
    assert isinstance(error, LostPeerError) and error.exit_code == 5
    assert peer.now - 2.0 == pytest.approx(100 + SLOWER * 2.0, abs=10)
    (line,) = lines
    for named in ("process 1", "fragment 0 of step 8"):
        assert named in str(error) and named in line
    assert "peer_timeout_seconds=100" in str(error)


@pytest.mark.parametrize(
    "peer, worked_s",
    [
        (Peer(comes_at=99), 0.0),
        (Peer(comes_at=2500), 500.0),  # 500 steps of a second, and a peer of five times that
        (Peer(comes_at=50, message_s=90), 0.0),  # four messages of a fragment on a thin link
    ],
)
def test_a_slow_peer_is_not_lost(peer, worked_s):
    """Control: each message has a deadline."""
    assert len(wait(peer, worked_s=worked_s)[0]) == 4 * MESSAGE_BYTES
    for late in (Peer(comes_at=101), Peer(comes_at=50, message_s=101)):
        assert isinstance(wait(late)[0], LostPeerError)


def test_what_was_waited_for_a_peer_is_no_work_of_this_process():
    """Else each wait would make the next limit several times as long. Control: work counts."""
    for worked_s, limit_s in ((2.0, 100 + SLOWER * 2.0), (50.0, 100 + SLOWER * 50.0)):
        peer = Peer(comes_at=90)
        deadlines = Deadlines(say=lambda line: None, clock=peer.clock)
        deadlines.receive(peer, 1, ("key",), "fragment 0 of step 8")
        peer.now += worked_s
        deadlines.record_work()
        peer._comes_at = float("inf")
        with pytest.raises(LostPeerError):
            deadlines.receive(peer, 1, ("key",), "fragment 0 of step 16")
        assert peer.now - 90 - worked_s == pytest.approx(limit_s, abs=10)


def test_the_host_exchange_and_the_rows_end_the_wait(monkeypatch, devices):
    """As the engine sees it: the error of the thread that collects."""
    peer, make = Peer(), Deadlines.__init__
    monkeypatch.setattr(
        Deadlines, "__init__", lambda self: make(self, say=lambda line: None, clock=peer.clock)
    )
    mesh = mesh_lib.Mesh([[devices[0]], [devices[1]]], ("diloco", "fsdp"))
    carrier = HostTransfers(mesh, messenger=peer)
    carrier._routes = [routes({Shard(0, 0): 0, Shard(1, 0): 1}, 0)]
    fetched = Future()
    fetched.set_result({Shard(0, 0): [np.zeros((1, 8), np.int8)]})
    with pytest.raises(LostPeerError, match="process 1 .*fragment 0 of step 8 "):
        carrier._collect(Transfer(("key",), 8, 1, False, "fragment 0 of step 8"), fetched)
    carrier.close()
    rows = RowCollector(0, {0: [0], 1: [1]}, messenger=peer, write=lambda *row: None)
    rows.add(8, {}, {})
    with pytest.raises(LostPeerError, match="process 1 .*step 8"):
        rows.write_all()
