"""Messages between mailboxes on a network that breaks, damages, stops and loses them."""

import asyncio
import random
import signal
import time

import numpy as np
import pytest
from mailbox_tools import IDENTITIES, WAIT_S, contents, later, soon, until
from tiers import full

from maxdiloco.errors import LostPeerError
from maxdiloco.processes import dialler, sockets
from maxdiloco.processes.certificates import Peer
from maxdiloco.processes.lane import Lane, message
from maxdiloco.processes.mailbox import BULK, WORDS, Mailbox


@pytest.mark.parametrize(
    ("fault", "times", "within", "least"),
    [(None, 0, 1, 0), ("flip", 20, 400_000, 1), full("end", 20, 600_000, 5)],
)
def test_messages_arrive_once_however_connections_break(network, fault, times, within, least):
    """A byte changes in bodies, headers and handshakes, or the connection ends there.

    least: connections that were made after the first ones.
    """
    zero, one, proxy = network.pair(timeout_s=20)
    before = len(proxy.pairs)
    proxy.seen = bytearray()
    sides, messages = ((zero, 1), (one, 0)), [contents(seed, 12) for seed in (1, 2)]

    def exchange():
        for (side, peer), sent in zip(sides, messages, strict=True):
            for key, data in sent.items():
                middle = len(data) // 3
                side.put(peer, key, [data[:middle], np.frombuffer(data[middle:], np.uint8)])
        for (side, peer), wanted in zip(sides, reversed(messages), strict=True):
            for key in reversed(wanted):  # in another order than sent
                assert side.get(peer, key, soon()) == wanted[key], key

    exchanging, chance = later(exchange), random.Random(3)
    for _ in range(times):
        proxy.fault = fault, chance.randrange(1, within)
        while proxy.fault and not exchanging.done():
            time.sleep(0.001)
    exchanging.result(WAIT_S)
    there, back = (sum(map(len, sent.values())) for sent in messages)
    assert (one.received_bytes(0), zero.received_bytes(1)) == (there, back)
    assert len(proxy.pairs) - before >= least and (fault or len(proxy.pairs) <= before + 2)
    assert fault or there + back < len(proxy.seen) < 1.01 * (there + back)
    assert not (zero._messages or one._messages)


@pytest.mark.parametrize("directions", [full({"to", "from"}), full({"to"}), {"from"}])
def test_a_link_that_stops_for_less_than_the_timeout_goes_on(network, directions):
    """Long enough for connections to be given up, and made anew. Process 1, which hears nothing,
    closes them, and process 0 hears that: it is no end of process 1."""
    zero, one, proxy = network.pair(timeout_s=6)
    before, messages = len(proxy.pairs), contents(7, 4, most=1_000_000)
    proxy.stopped = directions
    for key, data in messages.items():
        zero.put(1, key, [data])
        one.put(0, key, [data])
    lanes = [*zero._lanes.values(), *one._lanes.values()]
    until(lambda: max(lane.silence_s for lane in lanes) > (4.5 if directions == {"from"} else 2))
    proxy.stopped = set()
    for key, data in messages.items():
        assert zero.get(1, key, soon()) == one.get(0, key, soon()) == data
    assert len(proxy.pairs) > before


@pytest.mark.parametrize("directions", [{"to", "from"}, full({"to"}), full({"from"}), "killed"])
def test_a_link_that_stops_for_long_loses_the_peer_on_both_sides(network, directions):
    """Or for good, as when the peer is killed: its connections close and its port refuses."""
    zero, one, proxy = network.pair(timeout_s=1.5)
    lost = []
    one.watch("watch", heard=lambda *it: None, lost=lambda *it: lost.append(it))
    waiting = {
        1: later(lambda: zero.get(1, (0, 1), soon())),
        0: later(lambda: one.get(0, (0, 1), soon())),
    }
    if directions == "killed":
        proxy.close()
    else:
        proxy.stopped = directions
    for peer, future in waiting.items():
        with pytest.raises(LostPeerError, match=rf"process {peer} at 127.0.0.1 port \d+") as error:
            future.result(WAIT_S)
        assert error.value.exit_code == 5
        assert directions == "killed" or "peer_timeout_seconds=1.5" in str(error.value)
    for call in (lambda: zero.put(1, (0, 1), [b""]), lambda: zero.arrived(1, (0, 1))):
        with pytest.raises(LostPeerError, match="process 1 at "):
            call()
    assert [peer for peer, _ in lost] == [0]


def test_who_has_not_come_is_named_and_lost_after_the_timeout(network):
    """Process 2 opens no lane of bulk to process 0: both are there and do not reach each other."""
    zero, _, two = network.mailboxes(3, timeout_s=0.5, bulk=[])
    two.open(BULK, {0: two._peers[0]})
    assert two.meet(BULK, 0.1) == [0]
    with pytest.raises(LostPeerError, match="process 0 at "):
        two.meet(BULK, WAIT_S)
    assert zero.meet(WORDS, 0.0) in ([], [1], [2], [1, 2])


PEER = """
import sys, time
from maxdiloco.errors import LostPeerError
from maxdiloco.processes import sockets
from maxdiloco.processes.certificates import Identity, Peer
from maxdiloco.processes.mailbox import BULK, WORDS, Mailbox
port, key, mine, theirs = sys.argv[1:]
made = Mailbox(1, Identity(key.encode(), mine.encode()), listener=sockets.listen("127.0.0.1"),
               timeout_s=2.5)
for lane in (WORDS, BULK):
    made.open(lane, {0: Peer("127.0.0.1", int(port), "host-a", theirs)}, most_bytes=1 << 30)
try:
    while True:
        made.put(0, (0, 1), [made.get(0, (0, 1), time.monotonic() + 60)])
except LostPeerError as error:
    sys.exit(error.exit_code)
"""


@pytest.mark.parametrize("fault", [signal.SIGSTOP, signal.SIGKILL])
def test_a_stopped_process_loses_nothing_until_it_is_lost(network, started, fault):
    """First for longer than the silence after which connections are made anew, 2.5 / 4 s. One that
    is killed is gone as soon as it could have come back."""
    listener = sockets.listen("127.0.0.1")
    port, (one, two) = str(listener.getsockname()[1]), IDENTITIES[:2]
    zero = Mailbox(0, one, listener=listener, timeout_s=2.5)
    network.callback(zero.close, 0.0)
    for lane in (WORDS, BULK):
        peer = Peer("host-b", 7, "host-b", two.certificate.decode())
        zero.open(lane, {1: peer}, most_bytes=1 << 30)
    pem = [each.decode() for each in (*two, one.certificate)]
    process = started(PEER, port, *pem)
    assert zero.meet(BULK, WAIT_S) == [] and not zero.misses_a_peer
    process.send_signal(signal.SIGSTOP)
    data = random.randbytes(8_000_000)
    zero.put(1, (0, 1), [data])
    time.sleep(1.2)
    assert zero.misses_a_peer and not zero.arrived(1, (0, 1))
    process.send_signal(signal.SIGCONT)
    assert zero.get(1, (0, 1), soon()) == data
    process.send_signal(fault)
    with pytest.raises(LostPeerError, match="process 1 at host-b port 7 "):
        zero.get(1, (0, 1), soon())
    zero.close(0.0)
    process.send_signal(signal.SIGCONT)
    assert process.wait(WAIT_S) == (5 if fault == signal.SIGSTOP else -signal.SIGKILL)


@pytest.fixture
def lane():
    """Of process 1, and what it has delivered."""
    came = []
    return Lane("process 1", lambda key, data: came.append((key, bytes(data))), 100), came


def test_a_malformed_message_or_part_out_of_turn_is_refused(lane):
    """A message without a key, of too many bytes or of another size. Each number once, and each
    part after the part before it."""
    lane, came = lane

    def refused(call, *arguments):
        with pytest.raises(LostPeerError, match="process 1 "):
            call(*arguments)

    for key in ({}, [[1]], 7, [1.5]):
        refused(lane.begin, (1, 0), 1, key)
    refused(lane.begin, (1, 0), 101, [1])
    for place, size in (((2, 0), 3), ((0, 0), 3), ((1, 1), 3), ((1, 0), -1)):
        refused(lane.begin, place, size, [1])
    lane.begin((1, 0), 3, [1, "a"])
    lane.fill(b"ab")
    assert lane.place == (1, 2)
    refused(lane.begin, (1, 2), 4, [1, "a"])
    lane.begin((1, 2), 3, [1, "a"])
    refused(lane.fill, b"cd")
    assert not came
    lane.fill(b"c")
    assert came == [((1, "a"), b"abc")] and lane.place == (2, 0)
    refused(lane.begin, (1, 0), 3, [1, "a"])


def test_a_part_that_the_peer_has_is_not_kept(lane):
    lane, _ = lane
    sent = [message((i,), [bytes(10)]) for i in (1, 2)]
    for each in sent:
        lane.add(each)
    lane.drop_before((1, 4))
    assert asyncio.run(lane.next(1, 0)) == sent[0]
    lane.drop_before((2, 0))
    assert asyncio.run(lane.next(2, 0)) == sent[1] and len(lane._outgoing) == 1
    assert asyncio.run(lane.next(3, 0)) is None
    for place in ((1, 0), (2, 11), (2, -1), (4, 0)):
        with pytest.raises(LostPeerError, match="process 1 "):
            lane.drop_before(place)


@pytest.mark.parametrize("start", [0, 1, 3, 4, 5, 8])
def test_a_message_goes_on_after_the_part_that_the_peer_has(start):
    sent = message(("a",), [b"abc", b"", np.arange(5, dtype=np.uint8)])
    assert b"".join(sent.parts(start, 2)) == (b"abc\0\1\2\3\4")[start:] and sent.size == 8
    assert max(map(len, sent.parts(0, 2))) == 2


def test_a_peer_that_was_heard_is_dialled_again_at_once(network, monkeypatch):
    """However often connections break: only what fails in a row makes the pause longer."""
    counted, pause_s = [], dialler.pause_s

    def counting(failures, most_s):
        counted.append(failures)
        return pause_s(failures, most_s) / 10

    monkeypatch.setattr(dialler, "pause_s", counting)
    _, one, proxy = network.pair(timeout_s=20)
    for _ in range(5):
        before = {name: one._lanes[0, name].heard for name in (WORDS, BULK)}
        for pair in list(proxy.pairs):
            pair.end()
        until(lambda old=before: all(one._lanes[0, name].heard > old[name] for name in old))
    assert len(counted) >= 10 and max(counted) <= 1


def test_the_pause_before_a_retry_grows_to_a_limit_with_jitter():
    """At least half of 0.8 s after three; the rest is random, so that none come back together."""
    pauses = {dialler.pause_s(3, WAIT_S) for _ in range(9)}
    assert len(pauses) == 9 and min(pauses) >= 0.4
    assert 1 <= dialler.pause_s(10_000, 2) <= 2
