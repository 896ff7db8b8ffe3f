"""Who may connect: processes of the run, and nobody else."""

import contextlib
import json
import random
import select
import socket
import ssl
import time
import weakref

import pytest
from mailbox_tools import IDENTITIES, meet, soon, until

from maxdiloco.errors import LostPeerError
from maxdiloco.processes import certificates, doorman
from maxdiloco.processes.certificates import Peer
from maxdiloco.processes.mailbox import BULK

SECRET = b"known to all of them"
SOON_S = 5  # a stranger that is let in waits so long for the end that does not come


@contextlib.contextmanager
def shown(address, identity):
    """A connection by TLS to a mailbox, which shows this certificate, or none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if identity is not None:
        context = identity.context(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(address, timeout=SOON_S) as plain:
        with context.wrap_socket(plain) as connection:
            yield connection


def ask(connection, request, body=b""):
    """The first bytes of the answer; b"" where the connection is closed instead."""
    with contextlib.suppress(OSError):
        connection.sendall(request.encode() + b"\r\nHost: x\r\n\r\n" + body)
        return connection.recv(100)
    return b""


@pytest.mark.parametrize("identity", [None, certificates.make_identity()])
def test_who_shows_no_certificate_of_the_run_is_not_heard(network, identity):
    """None, and one that it made itself. Control: that of process 1, which gets an answer."""
    zero, one, proxy = network.pair()
    with shown(proxy.target, identity) as connection:
        assert ask(connection, "GET /bulk HTTP/1.1") == b""
    with shown(proxy.target, IDENTITIES[1]) as connection:
        assert ask(connection, "GET /bulk HTTP/1.1").startswith(b"HTTP/1.1 405")
    one.put(0, (0, 1), [b"gradient"])
    assert zero.get(1, (0, 1), soon()) == b"gradient"


def test_nothing_travels_in_the_open(network):
    """Control: the same words where they are not encrypted, in the memory of the process."""
    zero, one, proxy = network.pair()
    proxy.seen = bytearray()
    words = b"the outer gradient of fragment 7" * 10
    one.put(0, ("a key of words",), [words])
    assert zero.get(1, ("a key of words",), soon()) == words
    assert len(proxy.seen) > len(words)
    for secret in (words[:32], b"a key of words", b"HTTP/1.1"):
        assert secret not in proxy.seen


def test_an_impostor_at_the_address_gets_nothing(network):
    """It shows a certificate of its own: the process does not say a word over the connection."""
    _, one = network.mailboxes(2)
    impostor, heard = certificates.make_identity(), []
    context = impostor.context(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_NONE
    with socket.create_server(("127.0.0.1", 0)) as listener:
        certificate = IDENTITIES[5].certificate.decode()
        peer = Peer(*listener.getsockname(), "host", certificate)
        one.open("other", {0: peer})
        plain, _ = listener.accept()
        with plain, contextlib.suppress(OSError), context.wrap_socket(plain, True) as connection:
            heard.append(connection.recv(1000))
        until(lambda: "certificate" in one._lanes[0, "other"].problem.lower())
    assert heard in ([], [b""])


def test_a_peer_cannot_redirect_a_request_to_another_host(network):
    """It has the certificate of process 0, and its answer is a redirect."""
    _, one = network.mailboxes(2)
    context = IDENTITIES[0].context(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_NONE
    local = "127.0.0.1", 0
    with socket.create_server(local) as listener, socket.create_server(local) as other:
        location = f"http://127.0.0.1:{other.getsockname()[1]}/"
        certificate = IDENTITIES[0].certificate.decode()
        one.open("other", {0: Peer(*listener.getsockname(), "host", certificate)})
        plain, _ = listener.accept()
        with plain, context.wrap_socket(plain, True) as connection:
            assert connection.recv(1000).startswith(b"POST /other ")
            answer = f"HTTP/1.1 303 See Other\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n"
            connection.sendall(answer.encode())
            lane = one._lanes[0, "other"]
            until(lambda: lane.problem == "it is not ready" or dialled(other))
        assert not dialled(other)


def dialled(listener):
    """Whether somebody has connected."""
    return bool(select.select([listener], [], [], 0)[0])


def test_strangers_disturb_no_one(network):
    """A thousand: half open, closed at once, garbage, too much of it, in the middle of a handshake;
    far more than are listened to."""
    zero, one, two = network.mailboxes(3, proxies=(0,))
    address, chance, strangers = network.proxies[0].target, random.Random(1), []
    for kind in range(400):
        stranger = socket.create_connection(address)
        if kind % 4 == 1:
            stranger.close()
            continue
        if kind % 4 > 1:
            stranger.setblocking(False)
            with contextlib.suppress(OSError):
                stranger.send(chance.randbytes(chance.choice([3, 51, 10_000])))
        strangers.append(stranger)
    meet(zero, one, two)
    for peer, side in ((1, one), (2, two)):
        side.put(0, (0, 1), [b"gradient"])
        assert zero.get(peer, (0, 1), soon()) == b"gradient"
    until(lambda: len(zero._doorman._guests) <= 64 + 4)  # two lanes of two peers
    assert not zero._doorman.connections or len(zero._doorman.connections) <= 8
    for stranger in strangers:
        stranger.close()


def test_strangers_of_one_address_crowd_out_none_of_another(network, monkeypatch):
    """Of the address with the most guests the oldest goes, even where another is older."""
    monkeypatch.setattr(doorman, "_GUESTS", 4)
    zero, _, proxy = network.pair()
    with contextlib.ExitStack() as stack:
        for host in ("127.0.0.2", *["127.0.0.1"] * 20):
            made = socket.create_connection(proxy.target, source_address=(host, 0))
            stack.enter_context(made)
            until(lambda host=host: host in zero._doorman._guests.values())
        until(lambda: len(zero._doorman._guests) == 4 + 2)
        assert "127.0.0.2" in zero._doorman._guests.values()


def test_a_burst_of_strangers_takes_few_descriptors_at_once(network, monkeypatch):
    """They wait in the kernel until the thread looks, which then accepts them one after the other:
    it closes one that is too many before it accepts the next one."""
    monkeypatch.setattr(doorman, "_GUESTS", 4)
    zero, one, proxy = network.pair()
    accept, accepted, counts = zero._loop.sock_accept, weakref.WeakSet(), []

    async def counted(listener):
        connection, address = await accept(listener)
        accepted.add(connection)
        counts.append(sum(each.fileno() != -1 for each in accepted))
        return connection, address

    monkeypatch.setattr(zero._loop, "sock_accept", counted)
    with contextlib.ExitStack() as stack:
        for _ in range(2):  # the first one ends the accept under way, which is not counted
            zero._loop.call_soon_threadsafe(time.sleep, 0.5)
            for _ in range(100):
                stranger = stack.enter_context(socket.create_connection(proxy.target))
                stranger.send(b"\x16\x03\x01")
        until(lambda: len(counts) >= 199)
        assert max(counts) <= 4 + 2 + 2  # guests, lanes, the new one and the one that goes
        one.put(0, (0, 1), [b"gradient"])
        assert zero.get(1, (0, 1), soon()) == b"gradient"


def test_a_guest_that_shows_nothing_is_sent_away_in_time(network, monkeypatch):
    monkeypatch.setattr(doorman, "_GUEST_S", 0.2)
    _, _, proxy = network.pair()
    with socket.create_connection(proxy.target, timeout=SOON_S) as stranger:
        begun = time.monotonic()
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
        assert time.monotonic() - begun < SOON_S


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        ("GET /bulk HTTP/1.1", b"HTTP/1.1 405"),
        ("POST /bulk/1 HTTP/1.1", b"HTTP/1.1 503"),
        ("POST /other HTTP/1.1", b"HTTP/1.1 503"),
        (f"POST /bulk HTTP/1.1\r\nRange: {'9' * 20_000}", b"HTTP/1.0 400"),
    ],
)
def test_an_unknown_request_is_refused_and_changes_nothing(network, request_, answer):
    """Even by one that has the certificate of a process: it is replayed, or forged."""
    zero, one, proxy = network.pair()
    with shown(proxy.target, IDENTITIES[1]) as connection:
        assert ask(connection, request_).startswith(answer)
    one.put(0, (0, 1), [b"gradient"])
    assert zero.get(1, (0, 1), soon()) == b"gradient"


@pytest.mark.parametrize(
    "said",
    [
        b"?\n",
        b"[" * 60_000 + b"\n",
        b"9" * 3_000_000,
        b'["have", 99, 0]\n',
        b'["part", 7, 0, 4, [1], 4]\n',
        b'["part", 1, 0, 2000000000, [1], 4]\n',
        b'["part", 1, 0, 4, [1], -1]\n',
        b'["part", 1, 0, 4, [1], 5]\n12345',
    ],
)
def test_a_malformed_request_of_a_peer_ends_the_run_and_names_it(network, said):
    """Only a client with the key of a process gets so far; nothing of the request is kept."""
    zero, _, proxy = network.pair()
    with shown(proxy.target, IDENTITIES[1]) as connection:
        opened = ask(connection, "POST /bulk HTTP/1.1\r\nTransfer-Encoding: chunked")
        assert opened.startswith(b"HTTP/1.1 200")
        with contextlib.suppress(OSError):
            connection.sendall(b"%x\r\n%b\r\n" % (len(said), said))
        until(lambda: zero._failure)
    with pytest.raises(LostPeerError, match="process 1 "):
        zero.arrived(1, (0, 1))
    assert len(zero._lanes[1, BULK]._buffer) <= 4


def test_the_processes_of_a_run_do_not_send_each_other_away(network, monkeypatch):
    """Thirty-two connections at once; one place for strangers."""
    monkeypatch.setattr(doorman, "_GUESTS", 1)
    ranks = network.mailboxes(9, bulk=[{0, rank} for rank in range(1, 9)], timeout_s=20)
    meet(*ranks)
    assert len(ranks[0]._doorman.connections) >= 16


def test_an_identity_counts_only_with_a_proof_of_the_secret():
    """A stranger may write to the store; one that repeats an entry for another process, or changes
    the address in one that it has read, has no proof of it."""
    store = {}
    peer = Peer("10.0.0.2", 8477, "host-b", IDENTITIES[1].certificate.decode())
    certificates.tell(1, peer, SECRET, store.__setitem__)
    (written,) = store.values()
    assert certificates.told(1, SECRET, store.get) == peer
    entry, other = json.loads(written), certificates.make_identity().certificate.decode()
    changes = (0, "10.6.6.6"), (1, 1), (2, "host-c"), (3, other), (4, "0" * 64)
    forged = [json.dumps([*entry[:i], value, *entry[i + 1 :]]) for i, value in changes]
    garbage = ["?", "[1]", "{}", '["a", 1, "b", "c"]', "[" * 100_000, "[]", "[[1]]"]
    for process, text in (*((1, text) for text in forged + garbage), (2, written)):
        with pytest.raises(LostPeerError, match=f"process {process} "):
            certificates.told(process, SECRET, lambda key, text=text: text)
    with pytest.raises(LostPeerError, match="process 1 "):
        certificates.told(1, b"guessed by someone", store.get)
    with pytest.raises(ValueError, match="16"):
        certificates.tell(1, peer, b"short", store.__setitem__)
