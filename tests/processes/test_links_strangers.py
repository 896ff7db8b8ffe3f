"""Who may connect: processes of the run, and nobody else; how they connect to process 0."""

import contextlib
import random
import socket
import threading
import time

import pytest
from link_tools import SECRET, WAIT_S, Proxy, later, soon, together, until

from maxdiloco.errors import LostPeerError
from maxdiloco.processes import handshake, links, peers
from maxdiloco.processes.watch import Link

HELLO_BYTES = 51
PROOF_BYTES = 32
SOON_S = 5  # a stranger that is let in waits so long for the end that does not come


def dial(address, hello, answer_s=WAIT_S):
    return handshake.dial(address, SECRET, hello, connect_s=WAIT_S, answer_s=answer_s)


def test_a_wrong_secret_keeps_a_process_out_on_both_sides_and_a_short_one_is_none(network):
    zero, one = network.links(2, timeout_s=1.5, each={1: dict(secret=b"guessed by someone")})
    with pytest.raises(LostPeerError, match="process 0 at .*: what answers there does not know"):
        one.meet()
    with pytest.raises(LostPeerError, match="process 1 at .* without a proof of the secret"):
        zero.meet()
    with links.listen() as listener, pytest.raises(ValueError, match="16 are the least"):
        links.Links(0, {}, listener=listener, secret=b"abc", fingerprint="", timeout_s=1)


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

    def refuses(self, hello, proof_of):
        """Whether it closes the connection of who says hello and then this proof, and lets no one
        in. proof_of: its answer -> a proof, or b"" for none."""
        with socket.create_connection(self.address, timeout=SOON_S) as stranger:
            stranger.sendall(hello)
            answer = stranger.recv(HELLO_BYTES + PROOF_BYTES, socket.MSG_WAITALL)
            assert len(answer) == HELLO_BYTES + PROOF_BYTES
            stranger.sendall(proof_of(answer))
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
        return not self.admitted


@pytest.fixture
def door():
    made = Door()
    yield made
    made.acceptor.stop()
    for connection in made.admitted:
        connection.close()
    assert made.failures == []


@pytest.mark.parametrize("claim", [(2, 0, 1), (1, 1, 1), (1, 0, 0)])
def test_who_is_not_expected_gets_no_answer(door, claim):
    """Another process, another target, another channel."""
    with pytest.raises((handshake.RefusedError, ConnectionResetError)):
        dial(door.address, handshake.hello(*claim))
    assert not door.admitted


@pytest.mark.parametrize(
    ("proof_of", "complaint"),
    [
        (lambda answer: answer[HELLO_BYTES:], "does not know the secret"),  # says of which side
        (lambda answer: b"", "gave no proof of the secret in time"),
    ],
)
def test_the_answer_of_the_acceptor_is_no_proof_for_it_nor_is_none(
    monkeypatch, door, proof_of, complaint
):
    if "in time" in complaint:
        monkeypatch.setattr(handshake, "_GUEST_S", 0.05)
    assert door.refuses(handshake._HELLO.pack(*handshake.hello(1, 0, 1)), proof_of)
    until(lambda: door.complaints)
    assert f"from 127.0.0.1 {complaint}" in door.complaints[0]


def test_what_was_recorded_opens_nothing(network, door):
    """Both proofs hold a number that is new each time; and the secret itself is never sent."""
    proxy = Proxy(door.address)
    network.callback(proxy.close)
    proxy.seen = bytearray()
    with dial(proxy.address, handshake.hello(1, 0, 1)):
        until(lambda: door.admitted)
    door.admitted.pop().close()
    record = bytes(proxy.seen)
    assert len(record) == 2 * (HELLO_BYTES + PROOF_BYTES)
    assert SECRET not in record
    assert door.refuses(record[:HELLO_BYTES], lambda answer: record[-PROOF_BYTES:])


IMPOSTOR = handshake._HELLO.pack(*handshake.hello(0, 1, 1)) + bytes(PROOF_BYTES)


@pytest.mark.parametrize(
    ("pieces", "error", "words"),
    [
        ([IMPOSTOR], handshake.RefusedError, "does not know the secret of this run"),
        # A byte each 20 ms takes 1.7 s; each one alone comes in time.
        ([b"m"] * len(IMPOSTOR), TimeoutError, "it did not answer in time|timed out"),
    ],
)
def test_an_impostor_at_the_address_learns_a_hello_and_holds_up_nobody(pieces, error, words):
    def impostor(listener):
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            heard = connection.recv(1000)
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(0.02)
        return heard

    with socket.create_server(("127.0.0.1", 0)) as listener:
        heard = later(lambda: impostor(listener))
        with pytest.raises(error, match=words):
            dial(listener.getsockname(), handshake.hello(1, 0, 1), answer_s=1.0)
        assert len(heard.result(WAIT_S)) == HELLO_BYTES


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
    each = {rank: dict(bulk=[0], rows=[0]) for rank in range(1, 9)}
    ranks = network.links(9, each=each, timeout_s=5)
    together(*(each.meet for each in ranks))
    assert len(dials) == 16


def test_the_pause_before_a_try_grows_to_a_limit_and_no_two_are_alike():
    """At least half of 0.8 s after three; the rest is random, so that none come back together."""
    pauses = {handshake.pause_s(3, WAIT_S) for _ in range(9)}
    assert len(pauses) == 9 and min(pauses) >= 0.4
    assert 1 <= handshake.pause_s(10_000, 2) <= 2


class Star:
    """A listener of process 0 on a host."""

    def __init__(self):
        self.listener, self.secret = links.listen(), "a secret of this run"
        self.port = self.listener.getsockname()[1]

    def join(self, process_id, secret=None, timeout_s=WAIT_S):
        return peers.join(
            "localhost", port=self.port, secret=secret or self.secret, host="host-a",
            process_id=process_id, timeout_s=timeout_s,
        )  # fmt: skip

    def gathering(self, count, timeout_s=WAIT_S):
        """A future of the links of process 0."""
        arguments = self.listener, self.secret, count
        return later(lambda: peers.gather(*arguments, timeout_s=timeout_s))


@pytest.fixture
def zero():
    return Star()


def test_gather_names_the_processes_that_did_not_come(zero):
    gathered = zero.gathering(4, timeout_s=1.0)
    (came,) = zero.join(2)
    with pytest.raises(LostPeerError) as caught:
        gathered.result(WAIT_S)
    assert "processes [1, 3] did not reach process 0" in str(caught.value)
    assert "within 1 s (the lesser of jax_distributed_initialization_timeout" in str(caught.value)
    assert "let the hosts open TCP connections" in str(caught.value)
    assert came.name() == "process 0 on host-a"


@pytest.mark.parametrize(("process", "secret"), [(1, "guessed"), (7, None), (0, None)])
def test_who_does_not_know_the_secret_or_is_no_process_of_the_run_stays_out(zero, process, secret):
    gathered = zero.gathering(2, timeout_s=1.0)
    line = f"{process} cannot reach process 0 at localhost port .* let the hosts open TCP connec"
    with pytest.raises(LostPeerError, match=line):
        zero.join(process, secret, timeout_s=0.3)
    with pytest.raises(LostPeerError, match=r"processes \[1\] did not reach process 0"):
        gathered.result(WAIT_S)


def test_a_second_connection_of_a_process_replaces_only_one_that_has_closed(zero):
    """Who has come says the name of its host, and never sends the secret, only proves it."""
    gathered = zero.gathering(3)
    peers._dial(("localhost", zero.port), zero.secret, 1, time.monotonic() + WAIT_S).close()
    (first,) = zero.join(1)
    with pytest.raises(LostPeerError, match="it closed the connection"):
        zero.join(1, timeout_s=0.3)
    with contextlib.closing(Proxy(("localhost", zero.port))) as proxy:
        proxy.seen = bytearray()
        zero.port = proxy.address[1]
        (_kept,) = zero.join(2)
        taken = {link.peer: link for link in gathered.result(WAIT_S)}
        for link in taken.values():
            link.socket.settimeout(WAIT_S)
            assert next(link.messages()) == {"host": socket.gethostname()}
    assert taken.keys() == {1, 2}
    assert taken[1].socket.getpeername()[1] == first.socket.getsockname()[1]
    assert zero.secret.encode() not in proxy.seen
    assert socket.gethostname().encode() in proxy.seen, "the control: it would be seen"


def test_messages_to_process_0_come_whole_and_in_order_however_they_are_cut():
    ours, theirs = socket.socketpair()
    link = Link(ours)
    theirs.sendall(b'{"be')
    threading.Timer(0.2, theirs.sendall, [b'at": true}\n{"e']).start()
    assert [message for _ in range(2) for message in link.messages()] == [{"beat": True}]
    theirs.sendall(b'nd": 0}\n')
    assert list(link.messages()) == [{"end": 0}]
    theirs.close()
    with pytest.raises(ConnectionError, match="its connection closed without a word"):
        next(link.messages())
