"""Only processes of this start of the run may connect."""

import contextlib
import random
import select
import socket
import ssl
import time
import weakref

import pytest
from messenger_tools import AUTHORITY, START_ID, key_files, meet, soon, until

from maxdiloco.cluster import certificates, server
from maxdiloco.cluster.messages import Peer
from maxdiloco.cluster.payloads import MESSAGE_BYTES
from maxdiloco.errors import LostPeerError

OTHER = certificates.authority_key(b"the secret of another run")
SOON_S = 5  # a client that is accepted waits this long for an end that does not come


@contextlib.contextmanager
def shown(address, process, authority=AUTHORITY):
    """A connection by TLS to a messenger, with the certificate of a process; None: without one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if process is not None:
        with key_files(process, authority) as keys:
            context.load_cert_chain(keys.certificate, keys.key)
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


@pytest.mark.parametrize("process", [None, 1])
def test_a_client_without_a_certificate_of_the_run_gets_no_answer(network, process):
    """Without any, and with one of another authority. Control: that of process 1 gets an answer."""
    zero, one, proxy = network.pair()
    with shown(proxy.target, process, OTHER) as connection:
        assert ask(connection, f"GET /{START_ID}/bulk HTTP/1.1") == b""
    with shown(proxy.target, 1) as connection:
        assert ask(connection, f"GET /{START_ID}/bulk HTTP/1.1").startswith(b"HTTP/1.1 405")
    one.put(0, (0, 1), [b"gradient"])
    assert zero.get(1, (0, 1), soon()) == b"gradient"


def test_a_process_of_another_start_or_another_number_is_refused(network):
    """It has the secret: an earlier attempt still runs, or two runs share the secret file."""
    zero, one, proxy = network.pair()
    for process, path in ((1, "earlier/bulk"), (2, f"{START_ID}/bulk"), (0, f"{START_ID}/bulk")):
        with shown(proxy.target, process) as connection:
            assert ask(connection, f"POST /{path} HTTP/1.1").startswith(b"HTTP/1.1 503")
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


def server_context(process, authority=AUTHORITY):
    """A context that accepts any client."""
    with key_files(process, authority) as keys:
        context = keys.context(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_NONE
    return context


@pytest.mark.parametrize("process, authority", [(0, OTHER), (2, AUTHORITY)])
def test_a_server_without_the_certificate_of_the_peer_receives_nothing(network, process, authority):
    """Of another authority, or of another process of the run."""
    _, one = network.messengers(2)
    received = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one.open("other", {0: Peer(*listener.getsockname(), "host")})
        plain, _ = listener.accept()
        with plain, contextlib.suppress(OSError):
            with server_context(process, authority).wrap_socket(plain, True) as connection:
                received.append(connection.recv(1000))
        until(lambda: "certificate" in one._channels[0, "other"].problem.lower())
    assert received in ([], [b""])


def test_a_peer_cannot_redirect_a_request_to_another_host(network):
    """It has the certificate of process 0, and its answer is a redirect."""
    _, one = network.messengers(2)
    local = "127.0.0.1", 0
    with socket.create_server(local) as listener, socket.create_server(local) as other:
        location = f"http://127.0.0.1:{other.getsockname()[1]}/"
        one.open("other", {0: Peer(*listener.getsockname(), "host")})
        plain, _ = listener.accept()
        with plain, server_context(0).wrap_socket(plain, True) as connection:
            assert connection.recv(1000).startswith(f"POST /{START_ID}/other ".encode())
            answer = f"HTTP/1.1 303 See Other\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n"
            connection.sendall(answer.encode())
            channel = one._channels[0, "other"]
            until(lambda: channel.problem == "it is not ready" or connected(other))
        assert not connected(other)


def connected(listener):
    """Whether somebody has connected."""
    return bool(select.select([listener], [], [], 0)[0])


def test_hundreds_of_unauthenticated_clients_disturb_no_one(network):
    """Three hundred, far more than may be in a handshake: half open, closed at once, or after some
    garbage or too much of it."""
    zero, one, two = network.messengers(3, proxies=(0,))
    address, chance, clients = network.proxies[0].target, random.Random(1), []
    for kind in range(300):
        client = socket.create_connection(address)
        if kind % 4 == 1:
            client.close()
            continue
        if kind % 4 > 1:
            client.setblocking(False)
            with contextlib.suppress(OSError):
                client.send(chance.randbytes(chance.choice([3, 51, 10_000])))
        clients.append(client)
    meet(zero, one, two)
    for peer, side in ((1, one), (2, two)):
        side.put(0, (0, 1), [b"gradient"])
        assert zero.get(peer, (0, 1), soon()) == b"gradient"
    until(lambda: len(zero._server._handshakes) <= 64 + 4)  # two channels of two peers
    assert not zero._server.connections or len(zero._server.connections) <= 8
    for client in clients:
        client.close()


def test_clients_of_one_address_crowd_out_none_of_another(network, monkeypatch):
    """The oldest handshake of the address with the most is dropped, even where another is older."""
    monkeypatch.setattr(server, "_HANDSHAKES", 4)
    zero, _, proxy = network.pair()
    with contextlib.ExitStack() as stack:
        for host in ("127.0.0.2", *["127.0.0.1"] * 20):
            made = socket.create_connection(proxy.target, source_address=(host, 0))
            stack.enter_context(made)
            until(lambda host=host: host in zero._server._handshakes.values())
        until(lambda: len(zero._server._handshakes) == 4 + 2)
        assert "127.0.0.2" in zero._server._handshakes.values()


def test_a_burst_of_clients_takes_few_descriptors_at_once(network, monkeypatch):
    """They wait in the kernel until the thread looks, which then accepts them one after the other:
    it closes one that is too many before it accepts the next one."""
    monkeypatch.setattr(server, "_HANDSHAKES", 4)
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
                client = stack.enter_context(socket.create_connection(proxy.target))
                client.send(b"\x16\x03\x01")
        until(lambda: len(counts) >= 199)
        assert max(counts) <= 4 + 2 + 2  # handshakes, channels, the new one and the dropped one
        one.put(0, (0, 1), [b"gradient"])
        assert zero.get(1, (0, 1), soon()) == b"gradient"


def test_a_handshake_that_does_not_finish_is_dropped_in_time(network, monkeypatch):
    monkeypatch.setattr(server, "_HANDSHAKE_S", 0.2)
    _, _, proxy = network.pair()
    with socket.create_connection(proxy.target, timeout=SOON_S) as client:
        begun = time.monotonic()
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""
        assert time.monotonic() - begun < SOON_S


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (f"GET /{START_ID}/bulk HTTP/1.1", b"HTTP/1.1 405"),
        (f"POST /{START_ID}/bulk/1 HTTP/1.1", b"HTTP/1.1 503"),
        (f"POST /{START_ID}/other HTTP/1.1", b"HTTP/1.1 503"),
        (f"POST /{START_ID}/bulk HTTP/1.1\r\nRange: {'9' * 20_000}", b"HTTP/1.0 400"),
    ],
)
def test_an_unknown_request_is_refused_and_changes_nothing(network, request_, answer):
    """Even by one that has the certificate of a process: it is replayed, or forged."""
    zero, one, proxy = network.pair()
    with shown(proxy.target, 1) as connection:
        assert ask(connection, request_).startswith(answer)
    one.put(0, (0, 1), [b"gradient"])
    assert zero.get(1, (0, 1), soon()) == b"gradient"


@pytest.mark.parametrize(
    "said",
    [
        b"?\n",
        b"[" * 60_000 + b"\n",
        b"9" * 3_000_000,
        b'["received", 99]\n',
        b'["received", -1]\n',
        b'["message", 7, 4, [1]]\n1234',
        b'["message", 1, -1, [1]]\n',
        b'["message", 1, 4, 7]\n1234',
        b'["message", 1, 4, [1.5]]\n1234',
        b'["message", 1, %d, [1]]\n' % (MESSAGE_BYTES + 1),
    ],
)
def test_a_malformed_request_of_a_peer_ends_the_run_and_names_it(network, said):
    """Only a client with the key of a process gets so far; nothing of the request is kept."""
    zero, _, proxy = network.pair()
    with shown(proxy.target, 1) as connection:
        opened = ask(connection, f"POST /{START_ID}/bulk HTTP/1.1\r\nTransfer-Encoding: chunked")
        assert opened.startswith(b"HTTP/1.1 200")
        with contextlib.suppress(OSError):
            connection.sendall(b"%x\r\n%b\r\n" % (len(said), said))
        until(lambda: zero._failure)
    with pytest.raises(LostPeerError, match="process 1 "):
        zero.has_message(1, (1,))
    assert zero.received_bytes == 0


def test_processes_of_a_run_do_not_drop_each_other(network, monkeypatch):
    """Thirty-two connections at once; one handshake in addition."""
    monkeypatch.setattr(server, "_HANDSHAKES", 1)
    ranks = network.messengers(9, bulk=[{0, rank} for rank in range(1, 9)], timeout_s=20)
    meet(*ranks)
    assert len(ranks[0]._server.connections) >= 16
