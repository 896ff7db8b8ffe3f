"""Who may connect: processes of the run, and nobody else."""

import contextlib
import random
import socket
import threading
import time

import link_tools
import numpy as np
import pytest
from link_tools import SECRET, WAIT_S, soon, together, until

from maxdiloco.errors import LostPeerError
from maxdiloco.processes import handshake, links

HELLO_BYTES = 51
PROOF_BYTES = 32
SOON_S = 5  # a stranger that is let in waits so long for the end that does not come


def test_a_wrong_secret_keeps_a_process_out_on_both_sides(network):
    zero, one = network.links(2, timeout_s=1.5, each={1: dict(secret=b"guessed by someone")})
    with pytest.raises(LostPeerError, match="process 0 at .*: what answers there does not know"):
        one.meet()
    with pytest.raises(LostPeerError, match="process 1 at .* without a proof of the secret"):
        zero.meet()


def test_another_fingerprint_is_an_error_that_shows_both(network):
    zero, one = network.links(2, each={1: dict(fingerprint="H=30")})
    for side, own, other in ((zero, "H=20", "H=30"), (one, "H=30", "H=20")):
        line = f"has other keys than this process: '{other}', here '{own}'. Start all processes"
        with pytest.raises(handshake.MismatchError, match=line) as error:
            side.meet()
        assert error.value.exit_code == 2


@pytest.mark.parametrize("newer", [0, 1])
def test_another_version_is_an_error(network, monkeypatch, newer):
    """Each of the two sides finds it."""
    hello = handshake.hello

    def newer_hello(source, *others):
        return hello(source, *others)._replace(version=2 if source == newer else 1)

    monkeypatch.setattr(handshake, "hello", newer_hello)
    older = network.links(2, timeout_s=20)[1 - newer]
    line = f"process {newer} speaks version 2 .* install the same maxdiloco"
    with pytest.raises(handshake.MismatchError, match=line):
        older.meet()


def test_strangers_disturb_no_one(network):
    """Half open, closed at once, garbage, too much of it, and far more than are listened to."""
    zero, one, two = network.links(3, proxies=(0,))
    address = network.proxies[0].target
    chance = random.Random(1)
    strangers = []
    for kind in range(200):
        stranger = socket.create_connection(address)
        if kind % 4 == 1:
            stranger.close()
            continue
        if kind % 4 > 1:
            stranger.setblocking(False)
            stranger.send(chance.randbytes(chance.choice([3, HELLO_BYTES, 10_000])))
        strangers.append(stranger)
    together(zero.meet, one.meet, two.meet)
    for peer, side in ((1, one), (2, two)):
        side.send(0, (0, 1), [b"gradient"])
        assert zero.receive(peer, (0, 1), soon()) == b"gradient"
    assert len(zero._acceptor._guests) <= 64 + 4  # two streams of two peers
    for stranger in strangers:
        stranger.close()


class Door:
    """An acceptor of process 0, which admits channel 1 of process 1, and who came in."""

    def __init__(self):
        self.admitted, self.complaints, self.failures = [], [], []
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self.acceptor = handshake.Acceptor(
            *(0, SECRET, listener, [(1, 1)]),
            admit=lambda hello, new: self.admitted.append(new),
            complain=lambda hello, problem: self.complaints.append(problem),
            fail=self.failures.append,
        )
        self.acceptor.start()

    def dial(self, source=1, target=0, channel=1, secret=SECRET):
        mine = handshake.hello(source, target, channel)
        return handshake.dial(self.address, secret, mine, connect_s=WAIT_S, answer_s=WAIT_S)

    def answer(self, hello):
        """What it says to a hello, and the open connection."""
        stranger = socket.create_connection(self.address, timeout=SOON_S)
        stranger.sendall(hello)
        return stranger.recv(HELLO_BYTES + PROOF_BYTES, socket.MSG_WAITALL), stranger


@pytest.fixture
def door():
    made = Door()
    yield made
    made.acceptor.stop()
    for connection in made.admitted:
        connection.close()
    assert made.failures == []


@pytest.mark.parametrize("claim", [dict(source=2), dict(target=1), dict(channel=0)])
def test_who_is_not_expected_gets_no_answer(door, claim):
    with pytest.raises((handshake.RefusedError, ConnectionResetError)):
        door.dial(**claim)
    assert not door.admitted


def refused(door, stranger):
    """The acceptor closes the connection, and has let no one in."""
    try:
        return stranger.recv(1) == b"" and not door.admitted
    except ConnectionResetError:
        return not door.admitted


def test_the_answer_of_the_acceptor_is_no_proof_for_it(door):
    """A proof says of which side it is."""
    hello = bytes(handshake._HELLO.pack(*handshake.hello(1, 0, 1)))
    answer, stranger = door.answer(hello)
    assert len(answer) == HELLO_BYTES + PROOF_BYTES
    with stranger:
        stranger.sendall(answer[HELLO_BYTES:])
        assert refused(door, stranger)
    until(lambda: door.complaints)
    assert "from 127.0.0.1 does not know the secret" in door.complaints[0]


def test_what_was_recorded_opens_nothing(network, door):
    """Both proofs hold a number that is new each time; and the secret itself is never sent."""
    proxy = link_tools.Proxy(door.address)
    network.callback(proxy.close)
    proxy.seen = bytearray()
    mine = handshake.hello(1, 0, 1)
    with handshake.dial(proxy.address, SECRET, mine, connect_s=WAIT_S, answer_s=WAIT_S):
        until(lambda: door.admitted)
    door.admitted.pop().close()
    record = bytes(proxy.seen)
    assert len(record) == 2 * (HELLO_BYTES + PROOF_BYTES)
    assert SECRET not in record
    _, stranger = door.answer(record[:HELLO_BYTES])
    with stranger:
        stranger.sendall(record[-PROOF_BYTES:])
        assert refused(door, stranger)


def test_an_impostor_at_the_address_is_refused():
    """Whoever listens there learns nothing but a hello."""
    hellos = []

    def impostor(listener):
        connection, _ = listener.accept()
        with connection:
            hellos.append(connection.recv(1000))
            answer = handshake._HELLO.pack(*handshake.hello(0, 1, 1))
            connection.sendall(answer + bytes(PROOF_BYTES))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=impostor, args=(listener,))
        thread.start()
        address, mine = listener.getsockname(), handshake.hello(1, 0, 1)
        with pytest.raises(handshake.RefusedError, match="does not know the secret of this run"):
            handshake.dial(address, SECRET, mine, connect_s=WAIT_S, answer_s=WAIT_S)
        thread.join()
    assert len(hellos[0]) == HELLO_BYTES


def test_an_answer_that_drips_ends_with_the_time_for_the_whole_of_it():
    """A byte each 20 ms would take 1.7 s; each one alone comes in time."""

    def drip(listener):
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            for _ in range(HELLO_BYTES + PROOF_BYTES):
                connection.sendall(b"m")
                time.sleep(0.02)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        dripping = link_tools.later(lambda: drip(listener))
        address, mine = listener.getsockname(), handshake.hello(1, 0, 1)
        with pytest.raises(TimeoutError, match="it did not answer in time|timed out"):
            handshake.dial(address, SECRET, mine, connect_s=WAIT_S, answer_s=0.2)
        dripping.result(WAIT_S)


def test_the_processes_of_a_run_do_not_send_each_other_away(network, monkeypatch):
    """Sixteen connections at once, each a while on its way; one place for strangers."""
    dials, connect = [], socket.create_connection

    def far(address, timeout):
        dials.append(address)
        connection = connect(address, timeout)
        time.sleep(0.2)
        return connection

    monkeypatch.setattr(handshake, "_GUESTS", 1)
    monkeypatch.setattr(socket, "create_connection", far)
    star = {rank: dict(bulk=[0], rows=[0]) for rank in range(1, 9)}
    ranks = network.links(9, each=star, timeout_s=5)
    together(*(each.meet for each in ranks))
    assert len(dials) == 16


def test_tries_to_connect_come_ever_more_rarely_and_never_together(network, monkeypatch):
    """Until a connection is open. At least half of 0.2, 0.4 and 0.8 s; the rest is random."""
    tried, dial = [], handshake.dial

    def refuse(*arguments, **options):
        tried.append(time.monotonic())
        if len(tried) < 4:
            raise ConnectionRefusedError("refused")
        return dial(*arguments, **options)

    monkeypatch.setattr(handshake, "dial", refuse)
    zero, one = network.links(2, rows=[])
    together(zero.meet, one.meet)
    pauses = np.diff(tried)
    assert all(pauses >= [0.1, 0.2, 0.4])
    assert one._channels[0, links.BULK]._failures == 0
    assert len({handshake.pause_s(3, WAIT_S) for _ in range(9)}) == 9
    assert 1 <= handshake.pause_s(10_000, 2) <= 2


def test_one_that_gives_no_proof_in_time_is_sent_away(monkeypatch, door):
    monkeypatch.setattr(handshake, "_GUEST_S", 0.05)
    _, stranger = door.answer(handshake._HELLO.pack(*handshake.hello(1, 0, 1)))
    with stranger:
        assert refused(door, stranger)
    until(lambda: door.complaints)
    assert "gave no proof of the secret in time" in door.complaints[0]
