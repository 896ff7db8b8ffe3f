"""Messages between links on a sound network: real sockets and threads inside one process."""

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
from link_tools import (
    WAIT_S,
    assert_all_arrive,
    close_all,
    descriptors,
    later,
    soon,
    together,
    until,
)

from maxdiloco.errors import LostPeerError
from maxdiloco.processes import channel, connection, frames, handshake, links


def test_messages_of_any_size_arrive_in_any_order_of_keys(network):
    zero, one, _ = network.pair()
    there, back = assert_all_arrive(zero, one, (1, 2), 12)
    traffic = zero.traffic()[1]
    assert (traffic.payload_sent, traffic.payload_received) == (there, back)
    assert there < traffic.wire_sent < 1.001 * there + 10_000
    assert traffic.broken == 0


def test_messages_of_one_key_come_in_their_order(network):
    zero, one, _ = network.pair()
    for i in range(5):
        one.send_row(0, ("row",), [bytes([i])])
    assert [zero.receive(1, ("row",), soon())[0] for _ in range(5)] == [0, 1, 2, 3, 4]
    assert not zero.arrived(1, ("row",))


@pytest.mark.parametrize("count", [3, 4])
def test_every_process_reaches_every_other(network, count):
    ranks = network.links(count)
    together(*(each.meet for each in ranks))
    for rank, each in enumerate(ranks):
        for peer in set(range(count)) - {rank}:
            each.send(peer, ("fragment", 7), [bytes([rank, peer])])
    for rank, each in enumerate(ranks):
        for peer in set(range(count)) - {rank}:
            assert each.receive(peer, ("fragment", 7), soon()) == bytes([peer, rank])


def test_streams_are_made_where_both_sides_name_them(network):
    """As in a run: bulk between counterparts, rows to process 0. The last one is not dialled."""
    streams = {
        0: dict(bulk=[2], rows=[1, 2]),
        1: dict(bulk=[], rows=[0]),
        2: dict(bulk=[0], rows=[0]),
    }
    before = threading.active_count()
    zero, one, two = network.links(3, each=streams)
    together(zero.meet, one.meet, two.meet)
    assert threading.active_count() - before == 2 * 2 * 3 + 1  # and an acceptor
    one.send_row(0, ("row", 1), [b"loss"])
    two.send(0, (0, 1), [b"gradient"])
    assert zero.receive(1, ("row", 1), soon()) == b"loss"
    assert zero.receive(2, (0, 1), soon()) == b"gradient"


def test_send_never_waits_and_a_row_overtakes_the_bulk(network):
    """10 MB at 100 KB/s would take 100 s; then the limit is lifted, in mid-message."""
    zero, one, _ = network.pair()
    assert one.pace(100_000)
    one.send(0, (0, 1), [bytes(10_000_000)])
    one.send_row(0, ("row", 1), [b"loss"])
    assert zero.receive(1, ("row", 1), soon()) == b"loss"
    assert not zero.arrived(1, (0, 1))
    one.pace(None)
    assert len(zero.receive(1, (0, 1), soon())) == 10_000_000


def paces(side):
    """What the kernel says of the connection of each stream."""
    read = {}
    for key, stream in side._channels.items():
        until(lambda stream=stream: stream._writing is not None)
        data = stream._writing._socket.getsockopt(socket.SOL_SOCKET, 47, 8)
        read[key] = int.from_bytes(data, sys.byteorder)
    return read


def test_the_kernel_paces_bulk_alone_and_new_connections_too(network):
    zero, one, proxy = network.pair(timeout_s=20)
    off = (1 << 64) - 1
    assert paces(zero) == {(1, links.BULK): off, (1, links.ROWS): off}
    assert zero.pace(2e5)
    assert paces(zero) == {(1, links.BULK): 200_000, (1, links.ROWS): off}
    proxy.arm("end", 1)
    until(lambda: zero.traffic()[1].broken)
    assert paces(zero) == {(1, links.BULK): 200_000, (1, links.ROWS): off}
    assert zero.pace(None)
    assert paces(zero) == {(1, links.BULK): off, (1, links.ROWS): off}


def test_a_kernel_that_cannot_pace_says_so(network, monkeypatch):
    monkeypatch.setattr(connection, "_SO_MAX_PACING_RATE", 9999)
    zero, _, _ = network.pair()
    assert zero.pace(100_000) is False
    assert paces(zero)[1, links.BULK] == (1 << 64) - 1


@pytest.mark.parametrize(
    ("key", "data", "named"),
    [
        ((0, 1), [np.zeros(4, ml_dtypes.bfloat16)], None),
        ((0, 1), [np.zeros((4, 4))[:, 1]], "C-contiguous"),
        ((0, 1), [17], "bytes-like"),
        ((0, (1, 2)), [b""], "the key of a message is a tuple of numbers and words"),
        ((0, 1.5), [b""], "the key of a message is a tuple of numbers and words"),
    ],
)
def test_what_cannot_be_sent_is_refused_where_it_is_sent(network, key, data, named):
    zero, one, _ = network.pair()
    with pytest.raises((TypeError, ValueError), match=named):
        zero.send(1, key, data)
    zero.send(1, (0, 1), [np.arange(2, dtype=np.int8), b"", np.zeros((0, 3))])
    assert one.receive(0, (0, 1), soon()) == b"\0\1"


def test_a_message_that_does_not_come_in_time_leaves_the_links_as_they_are(network):
    zero, one, _ = network.pair()
    with pytest.raises(TimeoutError, match=r"process 1 at 127.0.0.1 port \d+ is there, but has no"):
        zero.receive(1, (0, 1), time.monotonic() + 0.01)
    one.send(0, (0, 1), [b"late"])
    assert zero.receive(1, (0, 1), soon()) == b"late"


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


def test_close_returns_in_time_and_says_what_it_could_not_send(network):
    zero, one, proxy = network.pair()
    proxy.stop()
    one.send(0, (0, 1), [bytes(1000)])
    assert one.close(0.1) is False
    assert one.close(0.1) is False
    proxy.go_on()


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


def test_closed_links_refuse_every_call(network):
    zero, one, _ = network.pair()
    together(lambda: zero.close(WAIT_S), lambda: one.close(WAIT_S))
    for call in (
        lambda: zero.send(1, (0, 1), [b""]),
        lambda: zero.receive(1, (0, 1), soon()),
        zero.meet,
    ):
        with pytest.raises(RuntimeError, match="these links are closed"):
            call()


def assert_breaks(zero, proxy, fault):
    before = zero.traffic()[1].broken
    proxy.arm(fault, 1)
    zero.send(1, (0, 1), [b"to break it"])
    until(lambda: zero.traffic()[1].broken > before)
    assert zero.traffic()[1].broken == before + 1


def test_no_thread_and_no_descriptor_is_left():
    threads, before = threading.active_count(), descriptors()
    for _ in range(3):
        with link_tools.Network() as network:
            zero, one, proxy = network.pair(timeout_s=20)
            stranger = socket.create_connection(proxy.target)
            for fault in ("end", "reset"):
                assert_breaks(zero, proxy, fault)
            one.send(0, (0, 1), [bytes(100_000)])
            zero.receive(1, (0, 1), soon())
            assert threading.active_count() > threads
            assert descriptors() > before
            assert close_all([zero, one]) == [True, True]
            stranger.close()
    assert (threading.active_count(), descriptors()) == (threads, before)


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


def test_addresses_are_exchanged_by_a_store_of_texts():
    store, filled = {}, threading.Barrier(3)

    def run(rank):
        peers = {0, 1, 2} - {rank}

        def get(key):
            return store[key]

        def put(key, text):
            store[key] = text
            filled.wait(WAIT_S)

        return links.exchange_addresses(rank, peers, ("10.0.0.1", rank), put=put, get=get)

    ranks = together(*(lambda rank=rank: run(rank) for rank in range(3)))
    assert ranks[0] == {1: ("10.0.0.1", 1), 2: ("10.0.0.1", 2)}
    assert ranks[2] == {0: ("10.0.0.1", 0), 1: ("10.0.0.1", 1)}


def test_the_interface_and_the_port_can_be_named():
    with links.listen() as everywhere, links.listen("127.0.0.1") as here:
        assert here.getsockname()[0] == "127.0.0.1"
        port = everywhere.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            links.listen("127.0.0.1", port)
        socket.create_connection(("127.0.0.1", port)).close()
        assert links.interface_towards(("127.0.0.1", port)) == "127.0.0.1"


def test_a_short_secret_is_refused():
    with links.listen() as listener, pytest.raises(ValueError, match="16 are the least"):
        links.Links(0, {}, listener=listener, secret=b"abc", fingerprint="", timeout_s=1)


def test_links_need_no_jax():
    code = "import sys; from maxdiloco.processes import links; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert "jax" in sys.modules, "the positive control: it would be seen"
