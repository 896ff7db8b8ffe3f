"""Messages between links on a network that breaks, damages, stops and loses them."""

import random
import time

import pytest
from link_tools import WAIT_S, assert_all_arrive, contents, later, soon, together, until

from maxdiloco.errors import LostPeerError
from maxdiloco.processes import frames


def keep_arming(proxy, faults, *, times, within, done):
    """Let one fault after the other happen at a random byte; how many did."""
    chance = random.Random(3)
    for count in range(times):
        proxy.arm(chance.choice(faults), chance.randrange(1, within))
        while proxy.armed():
            if done():
                return count
            time.sleep(0.001)
    return times


@pytest.mark.full
def test_connections_that_break_fifty_times_lose_and_repeat_nothing(network):
    zero, one, proxy = network.pair(timeout_s=20)
    sending = later(lambda: assert_all_arrive(zero, one, (1, 2), 16))
    broken = keep_arming(proxy, ["end", "reset"], times=40, within=600_000, done=sending.done)
    there, back = sending.result(WAIT_S)
    while broken < 50:  # between messages, too
        broken += keep_arming(proxy, ["end", "reset"], times=1, within=90, done=lambda: False)
    assert_all_arrive(zero, one, (3, 4), 4)
    ends = zero.traffic()[1], one.traffic()[0]
    assert ends[0].payload_sent == ends[1].payload_received > there
    assert ends[1].payload_sent == ends[0].payload_received > back
    assert ends[0].broken >= 10  # others broke before they were open
    assert not zero._messages
    assert not one._messages


def test_a_byte_that_was_changed_never_arrives(network):
    """In bodies, headers, greetings and proofs."""
    zero, one, proxy = network.pair()
    sending = later(lambda: assert_all_arrive(zero, one, (5, 6), 8))
    count = keep_arming(proxy, ["flip"], times=20, within=400_000, done=sending.done)
    sending.result(WAIT_S)
    assert count >= 5
    assert zero.traffic()[1].broken  # several changes may hit one connection


def test_a_link_that_damages_all_that_is_large_loses_the_peer(network, monkeypatch):
    """It can be reached each time, but nothing gets through."""
    zero, one, proxy = network.pair(timeout_s=1)

    def damaged(header, body):
        if header.size > 1000:
            raise frames.BrokenError("the checksum of a message was wrong")

    monkeypatch.setattr("maxdiloco.processes.connection.check", damaged)
    one.send(0, (0, 1), [bytes(2000)])
    with pytest.raises(LostPeerError, match="process 1 at .*: (the checksum of a message|it clos)"):
        zero.receive(1, (0, 1), soon())


@pytest.mark.parametrize("directions", [("to", "from"), ("to",), ("from",)])
def test_a_link_that_stops_for_less_than_the_timeout_goes_on(network, directions):
    """Long enough for connections to be given up."""
    zero, one, proxy = network.pair(timeout_s=6)
    messages = contents(7, 4, most=1_000_000)
    proxy.stop(*directions)
    for key, data in messages.items():
        zero.send(1, key, [data])
        one.send(0, key, [data])
    until(lambda: max(zero.traffic()[1].silence_s, one.traffic()[0].silence_s) > 1.8)
    proxy.go_on()
    for key, data in messages.items():
        assert zero.receive(1, key, soon()) == data
        assert one.receive(0, key, soon()) == data
    assert zero.traffic()[1].broken
    assert max(zero.traffic()[1].longest_silence_s, one.traffic()[0].longest_silence_s) > 1.8


@pytest.mark.parametrize("directions", [("to", "from"), ("to",), ("from",), "killed"])
def test_a_link_that_stops_for_longer_loses_the_peer_on_both_sides(network, directions):
    """Or for good, as when the peer is killed: its connections close and its port refuses."""
    zero, one, proxy = network.pair(timeout_s=1.5)
    waiting = [
        later(lambda: zero.receive(1, (0, 1), soon())),
        later(lambda: one.receive(0, (0, 1), soon())),
    ]
    if directions == "killed":
        proxy.close()
    else:
        proxy.stop(*directions)
    for peer, future in ((1, waiting[0]), (0, waiting[1])):
        line = rf"process {peer} at 127.0.0.1 port \d+ has been out of reach for \d s \(peer_time"
        with pytest.raises(LostPeerError, match=line) as error:
            future.result(WAIT_S)
        assert error.value.exit_code == 5
        assert "peer_timeout_seconds=1.5" in str(error.value)
        assert "resumes from the last checkpoint" in str(error.value)
    for call in (
        lambda: zero.send(1, (0, 1), [b""]),
        lambda: zero.arrived(1, (0, 1)),
        lambda: one.receive(0, (0, 1), soon()),
    ):
        with pytest.raises(LostPeerError, match="out of reach"):
            call()


def test_the_loss_of_one_peer_wakes_who_waits_for_another(network):
    zero, one, two = network.links(3, proxies=(0,), timeout_s=3)
    together(zero.meet, one.meet, two.meet)
    waiting = later(lambda: one.receive(2, (0, 1), soon()))
    network.proxies[0].stop()
    with pytest.raises(LostPeerError, match="process 0 at"):
        waiting.result(WAIT_S)


def test_a_connection_that_is_dead_is_made_anew(network):
    """As after a firewall has forgotten it: TCP alone would try for minutes."""
    zero, one, proxy = network.pair(timeout_s=4)
    proxy.lose()
    zero.send(1, (0, 1), [b"gradient"])
    one.send(0, (0, 1), [b"gradient"])
    assert one.receive(0, (0, 1), soon()) == zero.receive(1, (0, 1), soon()) == b"gradient"


def test_a_peer_that_never_comes_is_named(network):
    zero, _, _ = network.links(3, timeout_s=0.5, each={1: dict(rows=[], bulk=[0, 2])})
    with pytest.raises(LostPeerError, match="process 1 at .*: it has not connected"):
        zero.meet()


@pytest.mark.parametrize("number", [0, 3])
def test_an_acknowledgement_of_frames_not_sent_or_before_the_last_one_breaks(number):
    """The first would drop frames that the peer may not have. Control: frame 1, then it again."""
    outgoing = frames.Outgoing()
    outgoing.add((0, 1), [b"gradient"])
    assert [frame.number for frame in outgoing.batch()] == [1, 2]
    outgoing.acknowledge(1)
    outgoing.acknowledge(1)
    with pytest.raises(frames.BrokenError, match="it acknowledged what was never sent"):
        outgoing.acknowledge(number)
    outgoing.resume(1)
    assert [frame.number for frame in outgoing.batch()] == [2]


@pytest.mark.parametrize(("number", "in_turn"), [(1, True), (2, False), (0, True)])
def test_a_numbered_frame_comes_in_its_turn(number, in_turn):
    """A frame that was lost on the way would leave a hole. Those without a number have no turn."""
    incoming = frames.Incoming(lambda key, data: None)
    header = frames.Header(frames.MESSAGE, 8, number, 0, 0)
    if in_turn:
        assert len(incoming.space(header)) == 8
    else:
        with pytest.raises(frames.BrokenError, match="a frame came out of turn"):
            incoming.space(header)


@pytest.mark.parametrize(
    "body",
    [b"", bytes(8), bytes(8) + b"{}", bytes(8) + b"[[1]]", bytes(8) + b"[" * 100_000],
)
def test_a_message_that_begins_with_no_key_breaks(body):
    """It is well framed and no sender of ours writes it. Control: a key of a number and a word."""
    came = []
    incoming = frames.Incoming(lambda key, data: came.append(key))

    def take(content):
        header = frames.Header(frames.MESSAGE, len(content), 1, 0, 0)
        return incoming.take(header, memoryview(content))

    with pytest.raises(frames.BrokenError, match="a message began with no key"):
        take(body)
    assert incoming.arrived == 0 and came == []
    assert take(bytes(8) + b'[1, "a"]') and came == [(1, "a")]
