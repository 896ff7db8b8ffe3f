"""Messages between links on a sound network: real sockets and threads inside one process."""

import os
import random
import socket
import subprocess
import sys
import threading
import time

import link_tools
import ml_dtypes
import numpy as np
import pytest
from link_tools import WAIT_S, broken, close_all, later, soon, together, until

from maxdiloco.errors import LostPeerError
from maxdiloco.processes import channel, frames, handshake, links


def test_streams_are_made_where_both_sides_name_them(network):
    """As in a run: bulk between counterparts, rows to process 0. The last one is not dialled."""
    before = threading.active_count()
    each = {0: dict(bulk=[2], rows=[1, 2]), 1: dict(bulk=[], rows=[0]), 2: dict(bulk=[0], rows=[0])}
    zero, one, two = network.links(3, each=each)
    together(zero.meet, one.meet, two.meet)
    assert threading.active_count() - before == 2 * 2 * 3 + 1  # and an acceptor
    one.send_row(0, ("row", 1), [b"loss"])
    two.send(0, (0, 1), [b"gradient"])
    assert zero.receive(1, ("row", 1), soon()) == b"loss"
    assert zero.receive(2, (0, 1), soon()) == b"gradient"


def test_send_never_waits_and_a_row_overtakes_the_bulk(network):
    """10 MB at 100 KB/s would take 100 s; then the limit is lifted, in mid-message."""
    zero, one, _ = network.pair()
    one.pace(100_000)
    one.send(0, (0, 1), [bytes(10_000_000)])
    one.send_row(0, ("row", 1), [b"loss"])
    assert zero.receive(1, ("row", 1), soon()) == b"loss"
    assert not zero.arrived(1, (0, 1))
    one.pace(None)
    assert len(zero.receive(1, (0, 1), soon())) == 10_000_000


def test_the_kernel_paces_bulk_alone_and_new_connections_too(network, monkeypatch):
    """And one that cannot sends at once."""
    off = (1 << 64) - 1

    def paces(side):
        read = {}
        for (_, number), stream in side._channels.items():
            until(lambda stream=stream: stream._writing is not None)
            data = stream._writing.socket.getsockopt(socket.SOL_SOCKET, 47, 8)
            read[number] = int.from_bytes(data, sys.byteorder)
        return read

    zero, _, proxy = network.pair(timeout_s=20)
    assert paces(zero) == {links.BULK: off, links.ROWS: off}
    zero.pace(2e5)
    assert paces(zero) == {links.BULK: 200_000, links.ROWS: off}
    proxy.fault = "end", 1
    until(lambda: broken(zero, 1))
    assert paces(zero) == {links.BULK: 200_000, links.ROWS: off}
    zero.pace(None)
    assert paces(zero) == {links.BULK: off, links.ROWS: off}
    monkeypatch.setattr(frames, "_SO_MAX_PACING_RATE", 9999)
    zero, _, _ = network.pair()
    zero.pace(100_000)
    assert paces(zero)[links.BULK] == off


def test_what_cannot_be_sent_is_refused_where_it_is_sent(network):
    zero, one, _ = network.pair()
    no_key = "the key of a message is a tuple of numbers and words"
    for key, data, named in (
        ((0, 1), [np.zeros(4, ml_dtypes.bfloat16)], None),
        ((0, 1), [np.zeros((4, 4))[:, 1]], "C-contiguous"),
        ((0, 1), [17], "bytes-like"),
        ((0, (1, 2)), [b""], no_key),
        ((0, 1.5), [b""], no_key),
    ):
        with pytest.raises((TypeError, ValueError), match=named):
            zero.send(1, key, data)
    zero.send(1, (0, 1), [np.arange(2, dtype=np.int8), b"", np.zeros((0, 3))])
    assert one.receive(0, (0, 1), soon()) == b"\0\1"


def test_messages_of_one_key_come_in_their_order_and_late_ones_too(network):
    zero, one, _ = network.pair()
    with pytest.raises(TimeoutError, match=r"process 1 at 127.0.0.1 port \d+ is there, but has no"):
        zero.receive(1, ("row",), time.monotonic() + 0.01)
    for i in range(5):
        one.send_row(0, ("row",), [bytes([i])])
    assert [zero.receive(1, ("row",), soon())[0] for _ in range(5)] == [0, 1, 2, 3, 4]
    assert not zero.arrived(1, ("row",))


def test_close_sends_what_is_queued_and_the_end_is_no_error(network):
    zero, one, _ = network.pair()
    data = random.randbytes(8_000_000)
    one.send(0, (0, 1), [data])
    one.send_row(0, ("row", 1), [b"the last"])
    assert one.close(WAIT_S)
    assert zero.receive(1, (0, 1), soon()) == data
    assert zero.receive(1, ("row", 1), soon()) == b"the last"
    zero.send(1, (1, 1), [b"to nobody"])
    with pytest.raises(LostPeerError, match=r"process 1 at .* has ended and never sent \(1, 1\)"):
        zero.receive(1, (1, 1), soon())
    assert zero.close(WAIT_S)
    for call in (lambda: zero.send(1, (0, 1), [b""]), zero.meet):
        with pytest.raises(RuntimeError, match="these links are closed"):
            call()


def test_close_returns_in_time_and_says_what_it_could_not_send(network):
    _, one, proxy = network.pair()
    proxy.stopped = {"to", "from"}
    one.send(0, (0, 1), [bytes(1000)])
    assert one.close(0.1) is False
    assert one.close(0.1) is False
    proxy.stopped = set()


def test_a_goodbye_with_a_reason_ends_what_waits_elsewhere(network):
    """Bulk that is queued would keep the goodbye back, so it is dropped."""
    zero, one, two = network.links(3)
    together(zero.meet, one.meet, two.meet)
    waiting = [later(lambda side=side: side.receive(2, (0, 1), soon())) for side in (zero, one)]
    two.pace(100_000)
    two.send(0, (9, 9), [bytes(10_000_000)])
    two.close(0.5, why="NumericsError: the loss is not finite.")
    for future in waiting:
        with pytest.raises(LostPeerError, match="process 2 at .* has ended: NumericsError: the lo"):
            future.result(WAIT_S)
    with pytest.raises(LostPeerError, match="process 2"):
        zero.send(1, (0, 1), [b""])


def test_no_thread_and_no_descriptor_is_left():
    def count():
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    threads, descriptors = count()
    for _ in range(3):
        with link_tools.Network() as network:
            zero, one, proxy = network.pair(timeout_s=20)
            stranger = socket.create_connection(proxy.target)
            proxy.fault = "end", 1
            zero.send(1, (0, 1), [b"to break it"])
            until(lambda zero=zero: broken(zero, 1))
            one.send(0, (0, 1), [bytes(100_000)])
            zero.receive(1, (0, 1), soon())
            assert threading.active_count() > threads and count()[1] > descriptors
            assert close_all([zero, one]) == [True, True]
            stranger.close()
    assert count() == (threads, descriptors)


@pytest.mark.parametrize(
    ("module", "name", "error", "sender"),
    [
        (frames.Incoming, "take", MemoryError("no room"), 1),
        (channel.Connection, "write", ZeroDivisionError("in the sender"), 0),
        (handshake.Acceptor, "_hear", KeyError("in the acceptor"), 1),
    ],
)
def test_any_error_of_a_thread_reaches_the_callers(
    network, monkeypatch, module, name, error, sender
):
    zero, one, proxy = network.pair()

    def fail(*_):
        raise error

    waiting = later(lambda: zero.receive(1, (0, 1), soon()))
    monkeypatch.setattr(module, name, fail)
    (zero, one)[sender].send(1 - sender, (0, 2), [b"x"])
    with socket.create_connection(proxy.target) as stranger:
        stranger.sendall(b"x")
        with pytest.raises(type(error), match=error.args[0]):
            waiting.result(WAIT_S)
    with pytest.raises(type(error)):
        zero.send(1, (0, 1), [b""])


def test_links_need_no_jax():
    code = "import sys; from maxdiloco.processes import links; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert "jax" in sys.modules, "the positive control: it would be seen"
