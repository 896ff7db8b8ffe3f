"""A star of TCP connections, from every process of a run to process 0, and its messages.

A connection begins with the proofs of handshake.py, and process 0 says that it has taken it. After
that a message is one line of JSON. No JAX.
"""

import contextlib
import json
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from maxdiloco import json_text
from maxdiloco.errors import LostPeerError
from maxdiloco.processes import handshake, links
from maxdiloco.processes.handshake import Hello

CHANNEL = 2  # of the hello: beside BULK and ROWS of links.py
TAKEN = b"taken"  # what process 0 says once a link is the one of its process
# Our choice.
TRY_S = 10.0  # for one try to connect
MOST_PAUSE_S = 2.0  # between two of them
LINE_BYTES = 1 << 16  # of a message, at most
REACHABLE = "let the hosts open TCP connections to each other."


@dataclass
class Link:
    """The connection to one peer."""

    socket: socket.socket
    peer: int = 0  # process id
    host: str = ""  # process 0 learns it by the first message
    heard: float = field(default_factory=time.monotonic)  # when its last message came
    ended: bool = False  # it has said that it ends
    buffer: bytes = b""

    def name(self) -> str:
        """The peer in words, for messages."""
        return f"process {self.peer} on {self.host}" if self.host else f"process {self.peer}"

    def send(self, **message: object) -> None:
        """Send one message. A connection that is gone is noticed where it is read, not here."""
        try:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return

    def messages(self) -> Iterator[dict]:
        """What has arrived. Waits until something does.

        Raises ConnectionError with the reason when the connection is over, TimeoutError.
        """
        try:
            data = self.socket.recv(65536)
        except TimeoutError:
            raise
        except OSError:
            data = b""
        self.heard = time.monotonic()
        self.buffer += data
        while b"\n" in self.buffer:
            line, _, self.buffer = self.buffer.partition(b"\n")
            yield _message(line)
        if len(self.buffer) > LINE_BYTES:
            raise ConnectionError(f"a message from it is longer than {LINE_BYTES} bytes")
        if not data:
            raise ConnectionError("its connection closed without a word")

    def closed(self) -> bool:
        """Whether the peer has ended a connection on which it has sent nothing; never waits."""
        self.socket.setblocking(False)
        try:
            return not self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True


def listen(port: int = 0) -> tuple[socket.socket, str]:
    """A listening socket on every interface, and the secret that peers must know.

    port: 0 for any free one. Raises OSError when the port cannot be used.
    """
    return links.listen(port=port), secrets.token_hex(32)


def gather(
    listener: socket.socket, secret: str, num_processes: int, *, timeout_s: float
) -> list[Link]:
    """Process 0: wait for all other processes, then close the listener. Strangers are refused.

    A second connection of a process is refused, too, while its first one stands.
    Raises LostPeerError naming the processes that did not come within timeout_s, MismatchError.
    """
    came: dict[int, Link] = {}
    errors: list[BaseException] = []
    over = threading.Event()

    def admit(hello: Hello, connection: socket.socket) -> None:
        if hello.source in came and not came[hello.source].closed():
            connection.close()
            return
        came[hello.source] = Link(connection, hello.source)
        with contextlib.suppress(OSError):  # gone again: the next one takes its place
            connection.sendall(TAKEN)  # the buffer of a new socket has room for it
        if len(came) == num_processes - 1:
            over.set()

    def fail(error: BaseException) -> None:
        errors.append(error)
        over.set()

    expected = [(process, CHANNEL) for process in range(1, num_processes)]
    acceptor = handshake.Acceptor(
        *(0, secret.encode(), listener, expected, admit),
        complain=lambda hello, problem: None,  # a process of the run tries again
        fail=fail,
    )
    acceptor.start()
    over.wait(timeout_s)
    acceptor.stop()
    if errors:
        raise errors[0]
    if missing := sorted({process for process, _ in expected} - came.keys()):
        raise LostPeerError(
            f"processes {missing} did not reach process 0 on {socket.gethostname()} within "
            f"{timeout_s:g} s (the lesser of jax_distributed_initialization_timeout and "
            f"peer_timeout_seconds). See the end of their own output, and {REACHABLE}"
        )
    return list(came.values())


def join(
    address: str, port: int, secret: str, host: str, process_id: int, *, timeout_s: float
) -> list[Link]:
    """Every other process: connect to process 0. Raises LostPeerError if it cannot be reached.

    address: of process 0. host: its name for messages. Tries again until timeout_s where process 0
    has sent it away among many. Raises MismatchError for another version.
    """
    limit = time.monotonic() + timeout_s
    failures = 0
    while True:
        try:
            connection = _dial((address, port), secret, process_id, limit)
            break
        except OSError as error:
            pause_s = handshake.pause_s(failures, MOST_PAUSE_S)
            again = isinstance(error, handshake.RefusedError | ConnectionResetError | TimeoutError)
            if not again or time.monotonic() + pause_s > limit:
                raise LostPeerError(
                    f"process {process_id} cannot reach process 0 at {address} port {port}: "
                    f"{error}. See the end of the output of process 0, and {REACHABLE}"
                ) from error
        time.sleep(pause_s)
        failures += 1
    link = Link(connection, 0, host)
    link.send(host=socket.gethostname())
    return [link]


def _dial(address: tuple[str, int], secret: str, process_id: int, limit: float) -> socket.socket:
    """A connection that process 0 has taken. Raises OSError, MismatchError."""
    try_s = max(0.0, min(TRY_S, limit - time.monotonic()))
    mine = handshake.hello(process_id, 0, CHANNEL)
    key = secret.encode()
    connection = handshake.dial(address, key, mine, connect_s=try_s, answer_s=try_s)
    with contextlib.ExitStack() as stack:
        stack.callback(connection.close)
        if handshake.receive(connection, len(TAKEN), time.monotonic() + try_s) != TAKEN:
            raise handshake.RefusedError("it has not taken the connection")
        stack.pop_all()
    return connection


def _message(line: bytes) -> dict:
    """One line as a message. Raises ConnectionError: a sender that gave up half-way wrote it."""
    try:
        message = json_text.parse(line)
    except ValueError:
        message = None
    if not isinstance(message, dict):
        raise ConnectionError("a message from it was cut off")
    return message
