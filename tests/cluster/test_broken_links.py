"""Messages between messengers on a network that breaks, damages and stops connections."""

import asyncio
import random
import signal
import time

import numpy as np
import pytest
from messenger_tools import START_ID, WAIT_S, contents, key_files, later, messenger, soon, until
from tiers import full

from maxdiloco.cluster import client, deadlines, sockets
from maxdiloco.cluster.channel import Channel, Connection
from maxdiloco.cluster.deadlines import Deadlines
from maxdiloco.cluster.messages import Peer
from maxdiloco.cluster.payloads import BULK, CONTROL, MESSAGE_BYTES, message, put_payload
from maxdiloco.errors import LostPeerError


@pytest.mark.parametrize(
    ("fault", "times", "within", "least"),
    [(None, 0, 1, 0), ("flip", 8, 400_000, 1), full("end", 20, 600_000, 5)],
)
def test_messages_arrive_once_however_connections_break(network, fault, times, within, least):
    """A byte changes in bodies, headers and handshakes, or the connection ends there.

    least: connections that were made after the first ones.
    """
    zero, one, proxy = network.pair(timeout_s=20)
    before = len(proxy.pairs)
    proxy.seen = bytearray()
    sides, messages = ((zero, 1), (one, 0)), [contents(seed, 20) for seed in (1, 2)]

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
    assert (one.received_bytes, zero.received_bytes) == (there, back)
    assert len(proxy.pairs) - before >= least and (fault or len(proxy.pairs) <= before + 2)
    assert fault or there + back < len(proxy.seen) < 1.01 * (there + back)
    assert not (zero._messages or one._messages)


@pytest.mark.parametrize("directions", [full({"to", "from"}), full({"to"}), {"from"}])
def test_a_link_that_stops_for_less_than_the_timeout_goes_on(network, directions):
    """Long enough for connections to be given up, and made again. Process 1, which hears nothing,
    closes them, and process 0 hears that: it is no end of process 1."""
    zero, one, proxy = network.pair(timeout_s=6)
    before, messages = len(proxy.pairs), contents(7, 4)
    proxy.stopped = directions
    for key, data in messages.items():
        zero.put(1, key, [data])
        one.put(0, key, [data])
    channels = [*zero._channels.values(), *one._channels.values()]
    until(lambda: max(each.silence_s for each in channels) > (4.5 if directions == {"from"} else 2))
    proxy.stopped = set()
    for key, data in messages.items():
        assert zero.get(1, key, soon()) == one.get(0, key, soon()) == data
    assert len(proxy.pairs) > before


@pytest.mark.parametrize("directions", [{"to", "from"}, full({"to"}), full({"from"}), "killed"])
def test_a_link_that_stops_for_long_loses_the_peer_on_both_sides(network, directions):
    """Or for good, as when the peer is killed: its connections close and its port refuses."""
    zero, one, proxy = network.pair(timeout_s=1.5)
    lost = []
    one.subscribe("end", on_message=lambda *it: None, on_loss=lambda *it: lost.append(it))
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
    for call in (lambda: zero.put(1, (0, 1), [b""]), lambda: zero.has_message(1, (0, 1))):
        with pytest.raises(LostPeerError, match="process 1 at "):
            call()
    assert [peer for peer, _ in lost] == [0]


def test_who_has_not_come_is_named_and_lost_after_the_timeout(network):
    """Process 2 opens no bulk channel to process 0: both are alive and do not reach each other."""
    zero, _, two = network.messengers(3, timeout_s=0.5, bulk=[])
    two.open(BULK, {0: two._peers[0]})
    assert two.wait_until_connected(BULK, 0.1) == [0]
    with pytest.raises(LostPeerError, match="process 0 at "):
        two.wait_until_connected(BULK, WAIT_S)
    assert zero.wait_until_connected(CONTROL, 0.0) in ([], [1], [2], [1, 2])


PEER = """
import sys, time
from maxdiloco.errors import LostPeerError
from maxdiloco.cluster import sockets
from maxdiloco.cluster.certificates import KeyFiles
from maxdiloco.cluster.messages import Messenger, Peer
port, start_id, *keys = sys.argv[1:]
made = Messenger(1, KeyFiles(*keys), listener=sockets.listen("127.0.0.1"), timeout_s=2.5,
               start_id=start_id)
for channel in ("control", "bulk"):
    made.open(channel, {0: Peer("127.0.0.1", int(port), "host-a")})
print("open", flush=True)
try:
    while True:
        for number in range(8):
            made.put(0, (number,), [made.get(0, (number,), time.monotonic() + 60)])
except LostPeerError as error:
    sys.exit(error.exit_code)
"""


@pytest.mark.parametrize("fault", [signal.SIGSTOP, full(signal.SIGKILL)])
def test_a_stopped_process_loses_nothing_until_it_is_lost(network, started, fault):
    """First for longer than the silence after which connections are replaced, 2.5 / 4 s. One that
    is killed is gone as soon as it could have connected again."""
    listener = sockets.listen("127.0.0.1")
    port = str(listener.getsockname()[1])
    zero = messenger(0, listener, timeout_s=2.5)
    network.callback(zero.close, 0.0)
    keys = network.enter_context(key_files(1))
    process = started(PEER, port, START_ID, *keys)
    process.stdout.readline()  # its imports may take longer than the timeout
    for channel in (CONTROL, BULK):
        zero.open(channel, {1: Peer("host-b", 7, "host-b")})
    for channel in (CONTROL, BULK):
        assert zero.wait_until_connected(channel, WAIT_S) == []
    assert not zero.has_silent_peer
    process.send_signal(signal.SIGSTOP)
    data = random.randbytes(MESSAGE_BYTES)
    for number in range(8):
        zero.put(1, (number,), [data])
    time.sleep(1.2)
    assert zero.has_silent_peer and not zero.has_message(1, (0,))
    process.send_signal(signal.SIGCONT)
    assert all(zero.get(1, (number,), soon()) == data for number in range(8))
    process.send_signal(fault)
    with pytest.raises(LostPeerError, match="process 1 at host-b port 7 "):
        zero.get(1, (0,), soon())
    zero.close(0.0)
    process.send_signal(signal.SIGCONT)
    assert process.wait(WAIT_S) == (5 if fault == signal.SIGSTOP else -signal.SIGKILL)


@pytest.fixture
def channel():
    """To process 1, and the messages that it has delivered."""
    delivered = []
    return Channel("process 1", lambda key, data: delivered.append((key, bytes(data)))), delivered


def test_a_message_out_of_turn_is_refused(channel):
    """Each number once, in order: a repeated message would be delivered twice."""
    channel, delivered = channel
    for number in (0, 2):
        with pytest.raises(LostPeerError, match="process 1 "):
            channel.receive(number, ("a",), bytearray(b"x"))
    channel.receive(1, ("a",), bytearray(b"x"))
    with pytest.raises(LostPeerError, match="process 1 "):
        channel.receive(1, ("a",), bytearray(b"x"))
    assert delivered == [(("a",), b"x")]


def test_a_message_is_kept_until_the_peer_has_it(channel):
    channel, _ = channel
    sent = [message((i,), [bytes(10)]) for i in (1, 2)]
    for each in sent:
        channel.add(each)
    assert asyncio.run(channel.next(1, 0)) == sent[0]
    assert asyncio.run(channel.next(2, 0)) == sent[1]
    channel.acknowledge(1)
    assert asyncio.run(channel.next(2, 0)) == sent[1] and len(channel._outgoing) == 1
    assert asyncio.run(channel.next(3, 0)) is None
    for number in (0, 3):
        with pytest.raises(LostPeerError, match="process 1 "):
            channel.acknowledge(number)


def test_a_connection_that_is_given_up_ends_its_request_at_once(channel):
    """The peer tells it so from a process that was killed. Not only at the next heartbeat."""

    async def give_up():
        connection = Connection(channel[0], heartbeat_s=WAIT_S)
        records = connection.outgoing()
        await anext(records)
        connection._start.set_result(0)
        waiting = asyncio.ensure_future(anext(records))
        await asyncio.sleep(0.1)
        connection.close()
        await asyncio.wait_for(waiting, WAIT_S / 10)
        return [record async for record in records]

    assert len(asyncio.run(give_up())) == 1


@pytest.mark.parametrize("every_bytes", [3_000_000, full(1_300_000)])
def test_a_link_that_is_cut_again_and_again_makes_progress(network, every_bytes):
    """A payload of 12 messages over connections that end after a few of them, or after one."""
    zero, one, proxy = network.pair(timeout_s=20)
    before, data = len(proxy.pairs), random.Random(5).randbytes(12 * MESSAGE_BYTES)
    receive = Deadlines(say=lambda line: None).receive_payload
    receiving = later(lambda: receive(zero, 1, ("fragment",), "a fragment"))
    put_payload(one, 0, ("fragment",), [data])
    while not receiving.done():
        proxy.fault = proxy.fault or ("end", every_bytes)
        time.sleep(0.005)
    assert receiving.result().tobytes() == data
    assert len(proxy.pairs) - before >= len(data) // every_bytes - 2


def test_a_peer_that_was_heard_is_connected_again_at_once(network, monkeypatch):
    """However often connections break: only what fails in a row makes the pause longer."""
    counted, pause_s = [], deadlines.retry_pause_s

    def counting(failures, most_s):
        counted.append(failures)
        return pause_s(failures, most_s) / 10

    monkeypatch.setattr(client, "retry_pause_s", counting)
    _, one, proxy = network.pair(timeout_s=20)
    for _ in range(5):
        before = {name: one._channels[0, name].num_reads for name in (CONTROL, BULK)}
        for pair in list(proxy.pairs):
            pair.end()
        until(lambda old=before: all(one._channels[0, name].num_reads > old[name] for name in old))
    assert len(counted) >= 10 and max(counted) <= 1


def test_the_pause_before_a_retry_grows_to_a_limit_with_jitter():
    """At least half of 0.8 s after three; the rest is random, so that none return together."""
    pauses = {deadlines.retry_pause_s(3, WAIT_S) for _ in range(9)}
    assert len(pauses) == 9 and min(pauses) >= 0.4
    assert 1 <= deadlines.retry_pause_s(10_000, 2) <= 2
