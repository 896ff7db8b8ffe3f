"""Messages between mailboxes on a sound network: real sockets and threads inside one process."""

import gc
import os
import random
import socket
import sys
import threading
import time

import mailbox_tools
import ml_dtypes
import numpy as np
import pytest
from mailbox_tools import WAIT_S, close_all, later, meet, soon, until

from maxdiloco.errors import LostPeerError
from maxdiloco.processes import sockets
from maxdiloco.processes.lane import Lane
from maxdiloco.processes.mailbox import BULK, WORDS


def test_a_lane_stands_between_those_that_open_it(network):
    """As in a run: bulk between counterparts, words to process 0."""
    before = threading.active_count()
    zero, one, two = network.mailboxes(3, bulk=[{0, 2}])
    meet(zero, one, two)
    assert threading.active_count() - before == 3, "one thread each"
    one.put(0, ("row", 1), [b"loss"], WORDS)
    two.put(0, (0, 1), [b"gradient"])
    assert zero.get(1, ("row", 1), soon()) == b"loss"
    assert zero.get(2, (0, 1), soon()) == b"gradient"
    with pytest.raises(KeyError):
        one.put(0, (0, 1), [b"gradient"])


def test_put_never_waits_and_a_row_overtakes_the_bulk(network):
    """10 MB at 100 KB/s would take 100 s; then the limit is lifted, in mid-message."""
    zero, one, _ = network.pair()
    one.pace(100_000)
    one.put(0, (0, 1), [bytes(10_000_000)])
    one.put(0, ("row", 1), [b"loss"], WORDS)
    assert zero.get(1, ("row", 1), soon()) == b"loss"
    assert not zero.arrived(1, (0, 1))
    one.pace(None)
    assert len(zero.get(1, (0, 1), soon())) == 10_000_000


def paces(side, name=BULK):
    """What the kernel says of the sockets of a lane of a side."""
    sockets = [lane._connection for (_, each), lane in side._lanes.items() if each == name]
    read = [each.getsockopt(socket.SOL_SOCKET, 47, 8) for each in sockets if each.fileno() >= 0]
    return {int.from_bytes(data, sys.byteorder) for data in read}


def test_the_kernel_paces_bulk_alone_and_new_connections_too(network, monkeypatch):
    """And one that cannot sends at once."""
    off = (1 << 64) - 1
    zero, one, proxy = network.pair(timeout_s=20)
    for side in (zero, one):
        assert paces(side) == {off}
        side.pace(2e5)
        until(lambda side=side: paces(side) == {200_000})
        assert paces(side, WORDS) == {off}
    old = len(proxy.pairs)
    for pair in list(proxy.pairs):
        pair.end()
    until(lambda: len(proxy.pairs) == old + 2 and paces(zero) == {200_000} == paces(one))
    zero.pace(1.0)  # four records of TLS come in a quarter of the timeout
    until(lambda: paces(zero) == {4 * 16384 // 5})
    zero.pace(None)
    until(lambda: paces(zero) == {off})
    monkeypatch.setattr(sockets, "_SO_MAX_PACING_RATE", 9999)
    zero, one, _ = network.pair()
    zero.pace(100_000)
    zero.put(1, (0, 1), [b"gradient"])
    assert one.get(0, (0, 1), soon()) == b"gradient" and paces(zero) == {off}


def test_what_cannot_be_sent_is_refused_where_it_is_put(network):
    zero, one, _ = network.pair()
    for key, data in (
        ((0, 1), [np.zeros(4, ml_dtypes.bfloat16)]),
        ((0, 1), [np.zeros((4, 4))[:, 1]]),
        ((0, 1), [17]),
        ((0, (1, 2)), [b""]),
        ((0, 1.5), [b""]),
    ):
        with pytest.raises((TypeError, ValueError)):
            zero.put(1, key, data)
    zero.put(1, (0, 1), [np.arange(2, dtype=np.int8), b"", np.zeros((0, 3))])
    assert one.get(0, (0, 1), soon()) == b"\0\1"


def test_messages_of_one_key_arrive_in_order(network):
    zero, one, _ = network.pair()
    with pytest.raises(TimeoutError, match=r"process 1 at 127.0.0.1 port \d+"):
        zero.get(1, ("row",), time.monotonic() + 0.01)
    for i in range(5):
        one.put(0, ("row",), [bytes([i])], WORDS)
    assert [zero.get(1, ("row",), soon())[0] for _ in range(5)] == [0, 1, 2, 3, 4]
    assert not zero.arrived(1, ("row",))


@pytest.mark.parametrize("leaver", [0, 1])
def test_close_sends_what_is_queued_and_the_end_is_no_error(network, leaver):
    """Of the process that is dialled, and of the one that dials."""
    pair = network.pair()
    side, other, left = pair[leaver], pair[1 - leaver], 1 - leaver
    data = random.randbytes(8_000_000)
    side.put(left, (0, 1), [data])
    side.put(left, ("row", 1), [b"the last"], WORDS)
    assert side.close(WAIT_S)
    assert other.get(leaver, (0, 1), soon()) == data
    assert other.get(leaver, ("row", 1), soon()) == b"the last"
    other.put(leaver, (1, 1), [b"to nobody"])
    with pytest.raises(LostPeerError, match=rf"process {leaver} at .*\(1, 1\)"):
        other.get(leaver, (1, 1), soon())
    other.wait_until_left(WAIT_S)
    assert other.close(WAIT_S)
    for call in (lambda: other.put(leaver, (0, 1), [b""]), lambda: other.meet(WORDS, WAIT_S)):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_close_returns_in_time_and_says_what_it_could_not_send(network):
    _, one, proxy = network.pair()
    proxy.stopped = {"to", "from"}
    one.put(0, (0, 1), [bytes(1000)])
    assert one.close(0.1) is False
    assert one.close(0.1) is False
    proxy.stopped = set()


def test_watched_words_reach_the_watch_even_after_a_failure(network):
    zero, one, _ = network.pair()
    heard = []
    one.watch("watch", heard=lambda *it: heard.append(it), lost=lambda *it: None)
    zero.fail(LostPeerError("process 7 is gone"))
    zero.tell(1, "watch", b"end")
    until(lambda: heard == [(0, b"end")])
    assert not one.arrived(0, ("watch",))


def test_no_thread_and_no_descriptor_is_left():
    def count():
        gc.collect()  # a connection that waits for the last word of TLS when the loop ends
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    threads, descriptors = count()
    for _ in range(2):
        with mailbox_tools.Network() as network:
            zero, one, proxy = network.pair(timeout_s=20)
            stranger = socket.create_connection(proxy.target)
            proxy.fault = "end", 1
            one.put(0, (0, 1), [bytes(100_000)])
            zero.get(1, (0, 1), soon())
            assert threading.active_count() > threads and count()[1] > descriptors
            assert close_all([zero, one]) == [True, True]
            stranger.close()
    now = count()
    assert now[0] <= threads and now[1] <= descriptors


@pytest.mark.parametrize(("name", "sender"), [("fill", 1), ("begin", 0), ("hear", 1)])
def test_any_error_of_the_thread_reaches_the_callers(network, monkeypatch, capfd, name, sender):
    """Of either side, and nothing is printed: the caller raises it."""
    pair = network.pair()

    def fail(*_):
        raise ZeroDivisionError("in the thread")

    waiting = later(lambda: pair[1 - sender].get(sender, (0, 1), soon()))
    monkeypatch.setattr(Lane, name, fail)
    pair[sender].put(1 - sender, (0, 2), [b"x"])
    with pytest.raises(ZeroDivisionError, match="in the thread"):
        waiting.result(WAIT_S)
    with pytest.raises(ZeroDivisionError):
        pair[1 - sender].put(sender, (0, 1), [b""])
    assert capfd.readouterr().err == ""


def test_a_mailbox_needs_no_jax(started):
    code = "import sys; from maxdiloco.processes import mailbox; sys.exit('jax' in sys.modules)"
    assert started(code).wait(WAIT_S) == 0
    assert "jax" in sys.modules, "the positive control: it would be seen"
