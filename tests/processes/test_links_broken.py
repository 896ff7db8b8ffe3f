"""Messages between links on a network that breaks, damages, stops and loses them."""

import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from link_tools import SECRET, WAIT_S, broken, contents, later, silence_s, soon, until
from tiers import full

from maxdiloco.errors import LostPeerError
from maxdiloco.processes import frames, links


@pytest.mark.parametrize(
    ("fault", "times", "within", "least"),
    [(None, 0, 1, 0), ("flip", 20, 400_000, 1), full("end", 40, 600_000, 10)],
)
def test_messages_of_any_size_arrive_once_however_connections_break(
    network, fault, times, within, least
):
    """A byte changes in bodies, headers, greetings and proofs, or the connection ends there.

    least: connections that were seen to break; others broke before they were open.
    """
    zero, one, proxy = network.pair(timeout_s=20)
    proxy.seen = bytearray()
    sides, messages = ((zero, 1), (one, 0)), [contents(seed, 12) for seed in (1, 2)]

    def exchange():
        for (side, peer), sent in zip(sides, messages, strict=True):
            for key, data in sent.items():
                middle = len(data) // 3
                side.send(peer, key, [data[:middle], np.frombuffer(data[middle:], np.uint8)])
        for (side, peer), wanted in zip(sides, reversed(messages), strict=True):
            for key in reversed(wanted):  # in another order than sent
                assert side.receive(peer, key, soon()) == wanted[key], key

    exchanging, chance = later(exchange), random.Random(3)
    for _ in range(times):
        proxy.fault = fault, chance.randrange(1, within)
        while proxy.fault and not exchanging.done():
            time.sleep(0.001)
    exchanging.result(WAIT_S)
    there, back = (sum(map(len, sent.values())) for sent in messages)
    assert (one.received_bytes(0), zero.received_bytes(1)) == (there, back)
    assert broken(zero, 1) >= least and (fault or broken(zero, 1) == 0)
    assert fault or there + back < len(proxy.seen) < 1.001 * (there + back) + 20_000
    assert not (zero._messages or one._messages)


def test_a_link_that_damages_all_that_is_large_loses_the_peer(network, monkeypatch):
    """It can be reached each time, but nothing gets through."""
    zero, one, _ = network.pair(timeout_s=1)

    def damaged(header, body):
        if header.size > 1000:
            raise frames.BrokenError("the checksum of a message was wrong")

    monkeypatch.setattr("maxdiloco.processes.frames.check", damaged)
    one.send(0, (0, 1), [bytes(2000)])
    with pytest.raises(LostPeerError, match="process 1 at .*: (the checksum of a message|it clos)"):
        zero.receive(1, (0, 1), soon())


@pytest.mark.parametrize("directions", [{"to", "from"}, {"to"}, {"from"}])
def test_a_link_that_stops_for_less_than_the_timeout_goes_on(network, directions):
    """Long enough for connections to be given up."""
    zero, one, proxy = network.pair(timeout_s=6)
    messages = contents(7, 4, most=1_000_000)
    proxy.stopped = directions
    for key, data in messages.items():
        zero.send(1, key, [data])
        one.send(0, key, [data])
    until(lambda: max(silence_s(zero), silence_s(one)) > 1.8)
    proxy.stopped = set()
    for key, data in messages.items():
        assert zero.receive(1, key, soon()) == one.receive(0, key, soon()) == data
    assert broken(zero, 1)


@pytest.mark.parametrize("directions", [{"to", "from"}, {"to"}, {"from"}, "killed"])
def test_a_link_that_stops_for_longer_loses_the_peer_on_both_sides(network, directions):
    """Or for good, as when the peer is killed: its connections close and its port refuses."""
    zero, one, proxy = network.pair(timeout_s=1.5)
    waiting = {
        1: later(lambda: zero.receive(1, (0, 1), soon())),
        0: later(lambda: one.receive(0, (0, 1), soon())),
    }
    if directions == "killed":
        proxy.close()
    else:
        proxy.stopped = directions
    for peer, future in waiting.items():
        line = rf"process {peer} at 127.0.0.1 port \d+ has been out of reach for \d s \(peer_time"
        with pytest.raises(LostPeerError, match=line) as error:
            future.result(WAIT_S)
        assert error.value.exit_code == 5
        assert "peer_timeout_seconds=1.5" in str(error.value)
        assert "resumes from the last checkpoint" in str(error.value)
    for call in (lambda: zero.send(1, (0, 1), [b""]), lambda: zero.arrived(1, (0, 1))):
        with pytest.raises(LostPeerError, match="out of reach"):
            call()


def test_a_peer_that_never_comes_is_named(network):
    zero, _, _ = network.links(3, timeout_s=0.5, each={1: dict(rows=[], bulk=[0, 2])})
    with pytest.raises(LostPeerError, match="process 1 at .*: it has not connected"):
        zero.meet()


PEER = """
import sys, time
from maxdiloco.errors import LostPeerError
from maxdiloco.processes import links
address, options = ("127.0.0.1", int(sys.argv[1])), dict(fingerprint="", timeout_s=2.5)
listener, secret = links.listen("127.0.0.1"), sys.argv[2].encode()
made = links.Links(1, {0: address}, listener=listener, secret=secret, **options)
try:
    while True:
        made.send(0, (0, 1), [made.receive(0, (0, 1), time.monotonic() + 60)])
except LostPeerError as error:
    sys.exit(error.exit_code)
"""


@pytest.mark.parametrize("fault", [signal.SIGSTOP, signal.SIGKILL])
def test_a_real_process_that_stands_still_loses_nothing_and_for_long_is_lost(fault):
    """First for longer than the silence after which connections are made anew, 2.5 / 4 s."""
    listener = links.listen("127.0.0.1")
    port = str(listener.getsockname()[1])
    options = dict(secret=SECRET, fingerprint="", timeout_s=2.5)
    zero = links.Links(0, {1: ("host-b", 7)}, listener=listener, **options)
    process = subprocess.Popen([sys.executable, "-c", PEER, port, SECRET.decode()])
    try:
        zero.meet()
        process.send_signal(signal.SIGSTOP)
        data = random.randbytes(8_000_000)
        zero.send(1, (0, 1), [data])
        time.sleep(1.2)
        assert not zero.arrived(1, (0, 1))
        process.send_signal(signal.SIGCONT)
        assert zero.receive(1, (0, 1), soon()) == data
        process.send_signal(fault)
        line = r"process 1 at host-b port 7 has been out of reach for 3 s \(peer_timeout_seconds=2"
        with pytest.raises(LostPeerError, match=line):
            zero.receive(1, (0, 1), soon())
        zero.close(0.0, why="it is lost")
        process.send_signal(signal.SIGCONT)
        assert process.wait(WAIT_S) == (5 if fault == signal.SIGSTOP else -signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
        zero.close(0.0)


def test_what_no_sender_of_ours_writes_breaks():
    """An acknowledgement of what was not sent, which would drop it; a message without a key; a
    frame out of turn, since one that was lost would leave a hole. Those numbered 0 have no turn.

    Controls: frame 1 is acknowledged, then again; a key of a number and a word; frame 1.
    """
    outgoing = frames.Outgoing()
    outgoing.add((0, 1), [b"gradient"])
    assert [frame.number for frame in outgoing.batch()] == [1, 2]
    outgoing.acknowledge(1)
    outgoing.acknowledge(1)
    for number in (0, 3):
        with pytest.raises(frames.BrokenError, match="it acknowledged what was never sent"):
            outgoing.acknowledge(number)
    outgoing.resume(1)
    assert [frame.number for frame in outgoing.batch()] == [2]
    came = []
    incoming = frames.Incoming(lambda key, data: came.append(key))

    def header(body, number=1):
        return frames.Header(frames.MESSAGE, len(body), number, 0, 0)

    with pytest.raises(frames.BrokenError, match="a frame came out of turn"):
        incoming.space(header(bytes(8), 2))
    assert len(incoming.space(header(bytes(8), 1))) == len(incoming.space(header(bytes(8), 0))) == 8
    for body in (b"", *(bytes(8) + key for key in (b"", b"{}", b"[[1]]", b"[" * 100_000))):
        with pytest.raises(frames.BrokenError, match="a message began with no key"):
            incoming.take(header(body), memoryview(body))
    assert incoming.arrived == 0 and came == []
    body = bytes(8) + b'[1, "a"]'
    assert incoming.take(header(body), memoryview(body)) and came == [(1, "a")]
