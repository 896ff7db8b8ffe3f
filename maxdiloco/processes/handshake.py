"""Two processes of a run prove to each other that they know its secret, before anything else.

The side that dials sends a hello, the other one a hello and a proof, the first one its proof. A
proof is the HMAC-SHA256 of both hellos, which hold a random number each, and of the side it is
from: the secret itself never travels, and no proof is good twice. Versions are compared after the
proofs, so that a stranger cannot end a run by claiming another one.

One thread answers all that dial. It waits for no one, reads at most _PROVED bytes from a stranger,
and allocates nothing by a number that it was sent. What follows is neither hidden nor signed:
whoever can change packets on the way can change a run.
"""

import contextlib
import hmac
import ipaddress
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from maxdiloco.errors import ConfigError
from maxdiloco.processes.threads import reporting_thread

VERSION = 1  # of all that the processes of a run say to each other over these connections
_MAGIC = b"mxdiloco"
# magic, version, from which process, to which, which of their connections, nonce. Never changes.
_HELLO = struct.Struct("!8sHIIB32s")
_PROOF_BYTES = 32  # of SHA-256
_PROVED = _HELLO.size + _PROOF_BYTES

# Our choice.
_GUESTS = 64  # without a proof, beside one of each that is expected; then the oldest one goes
_GUEST_S = 10.0  # for one of them to give its proof
_PAUSE_S = 0.1  # from the first try to connect to the second
_MOST_DOUBLINGS = 10  # of the pause between two tries
_TIRED_S = 0.2  # before the next try where the system has no file descriptor left


class MismatchError(ConfigError):
    """The processes of a run are of different versions or configurations: exit code 2."""


class RefusedError(ConnectionError):
    """What answers at the address is not the process that was expected there."""


class Hello(NamedTuple):
    """The first message of either side."""

    magic: bytes
    version: int
    source: int  # process id
    target: int  # process id
    channel: int
    nonce: bytes


def hello(source: int, target: int, channel: int) -> Hello:
    """A hello with a new nonce."""
    return Hello(_MAGIC, VERSION, source, target, channel, secrets.token_bytes(32))


def _proof(secret: bytes, side: bytes, dialled: bytes, answered: bytes) -> bytes:
    """side: b"dials" or b"answers", so that no one's proof can be sent back to it."""
    return hmac.digest(secret, side + dialled + answered, "sha256")


def check_version(other: Hello) -> None:
    """Raise MismatchError for a peer, which has proved that it is one, of another version."""
    if other.version != VERSION:
        raise MismatchError(
            f"process {other.source} speaks version {other.version} of the messages between the "
            f"processes, this one version {VERSION}: install the same maxdiloco on every host."
        )


def pause_s(failures: int, most_s: float) -> float:
    """Time between two tries to connect, after so many failures in a row [seconds].

    It doubles up to most_s. Half of it is random, so that no two come back together.
    """
    pause = min(_PAUSE_S * 2 ** min(failures, _MOST_DOUBLINGS), most_s)
    return secrets.SystemRandom().uniform(0.5, 1) * pause


def receive(connection: socket.socket, count: int, until: float) -> bytes:
    """So many bytes, by `until` [monotonic] however slowly they come. Raises OSError."""
    data = b""
    while len(data) < count:
        if (left := until - time.monotonic()) <= 0:
            raise TimeoutError("it did not answer in time")
        connection.settimeout(left)
        part = connection.recv(count - len(data))
        if not part:
            raise RefusedError("it closed the connection in the middle of a handshake")
        data += part
    return data


def dial(
    address: tuple[str, int], secret: bytes, mine: Hello, *, connect_s: float, answer_s: float
) -> socket.socket:
    """Connect to the process mine.target at `address`. Raises OSError, MismatchError.

    connect_s, answer_s: for the connection to stand, and for the whole answer [seconds].
    """
    connection = socket.create_connection(address, timeout=connect_s)
    with contextlib.ExitStack() as stack:
        stack.callback(connection.close)
        until = time.monotonic() + answer_s
        dialled = _HELLO.pack(*mine)
        connection.sendall(dialled)
        answer = receive(connection, _PROVED, until)
        answered, proof = answer[: _HELLO.size], answer[_HELLO.size :]
        theirs = Hello(*_HELLO.unpack(answered))
        if (theirs.magic, theirs.source, theirs.target) != (_MAGIC, mine.target, mine.source):
            raise RefusedError("something else than this process answers there")
        if not hmac.compare_digest(proof, _proof(secret, b"answers", dialled, answered)):
            raise RefusedError("what answers there does not know the secret of this run")
        connection.sendall(_proof(secret, b"dials", dialled, answered))
        check_version(theirs)
        stack.pop_all()
    return connection


@dataclass
class _Guest:
    """A connection that has not proved yet whose it is."""

    socket: socket.socket
    host: str
    until: float
    said: bytes = b""
    answered: bytes = b""
    hello: Hello | None = None


@dataclass
class Acceptor:
    """Answers all that dial this process, in a thread of its own, until stop().

    listener: is closed at the end. expected: (process id, channel) of those who may come. admit:
    gets the hello and the connection of each that has given its proof, and owns it then. complain:
    gets the hello of one that has not, and in words what it did. fail: gets an error of the thread.
    """

    rank: int
    secret: bytes
    listener: socket.socket
    expected: Collection[tuple[int, int]]
    admit: Callable[[Hello, socket.socket], None]
    complain: Callable[[Hello, str], None]
    fail: Callable[[BaseException], None]
    _guests: dict[int, _Guest] = field(default_factory=dict, init=False)  # oldest first

    def start(self) -> None:
        """Begin to answer."""
        self._stopping, self._stopped = socket.socketpair()
        self._thread = reporting_thread("maxdiloco-accept", self._run, self.fail)

    def stop(self) -> None:
        """Answer no more."""
        self._stopping.close()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.ExitStack() as stack:
            self._selector = stack.enter_context(selectors.DefaultSelector())
            stack.callback(self._stopped.close)
            stack.callback(self.listener.close)
            stack.callback(lambda: [self._dismiss(guest) for guest in [*self._guests.values()]])
            self.listener.setblocking(False)
            self._selector.register(self.listener, selectors.EVENT_READ)
            self._selector.register(self._stopped, selectors.EVENT_READ)
            while True:
                soonest = min((guest.until for guest in self._guests.values()), default=None)
                left = None if soonest is None else max(0.0, soonest - time.monotonic())
                for key, _ in self._selector.select(left):
                    if key.fileobj is self._stopped:
                        return
                    if key.fileobj is self.listener:
                        self._accept()
                    elif self._guests.get(key.fd) is key.data:  # not sent away since
                        self._hear(key.data)
                now = time.monotonic()
                for guest in [one for one in self._guests.values() if one.until < now]:
                    self._dismiss(guest, "gave no proof of the secret in time")

    def _accept(self) -> None:
        try:
            connection, address = self.listener.accept()
        except BlockingIOError:
            return  # it has gone again
        except OSError:
            time.sleep(_TIRED_S)
            return
        connection.setblocking(False)
        guest = _Guest(connection, address[0], time.monotonic() + _GUEST_S)
        if len(self._guests) >= _GUESTS + len(self.expected):
            self._dismiss(next(iter(self._guests.values())))
        self._guests[connection.fileno()] = guest
        self._selector.register(connection, selectors.EVENT_READ, guest)

    def _hear(self, guest: _Guest) -> None:
        try:
            part = guest.socket.recv((_PROVED if guest.hello else _HELLO.size) - len(guest.said))
            guest.said += part
            if guest.hello is None and len(guest.said) == _HELLO.size:
                self._answer(guest)
        except BlockingIOError:
            return
        except OSError as error:
            self._dismiss(guest, f"broke off: {error}")
            return
        if not part:
            self._dismiss(guest, "closed it without a proof of the secret")
        elif len(guest.said) == _PROVED:
            self._judge(guest)

    def _answer(self, guest: _Guest) -> None:
        theirs = Hello(*_HELLO.unpack(guest.said))
        known = (theirs.source, theirs.channel) in self.expected
        if theirs.magic != _MAGIC or theirs.target != self.rank or not known:
            raise RefusedError("no process of this run")
        guest.hello = theirs
        guest.answered = _HELLO.pack(*hello(self.rank, theirs.source, theirs.channel))
        proof = _proof(self.secret, b"answers", guest.said, guest.answered)
        guest.socket.sendall(guest.answered + proof)  # the buffer of a new socket has room for it

    def _judge(self, guest: _Guest) -> None:
        dialled, proof = guest.said[: _HELLO.size], guest.said[_HELLO.size :]
        expected = _proof(self.secret, b"dials", dialled, guest.answered)
        if not hmac.compare_digest(proof, expected):
            self._dismiss(guest, "does not know the secret of this run")
            return
        check_version(guest.hello)
        self._forget(guest)
        self.admit(guest.hello, guest.socket)

    def _dismiss(self, guest: _Guest, problem: str | None = None) -> None:
        self._forget(guest)
        guest.socket.close()
        if problem is not None and guest.hello is not None:
            # An IPv4 address that arrived at an IPv6 socket, as it is usually written.
            host = ipaddress.ip_address(guest.host.partition("%")[0])
            host = host.version == 6 and host.ipv4_mapped or host
            self.complain(guest.hello, f"what dialled from {host} {problem}")

    def _forget(self, guest: _Guest) -> None:
        self._selector.unregister(guest.socket)
        del self._guests[guest.socket.fileno()]
