"""A star of TCP connections, from every process of a run to process 0, and its messages.

A message is one line of JSON. Sockets alone: no threads, no JAX.
"""

import json
import secrets
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from maxdiloco.errors import LostPeerError

HELLO_S = 5.0  # for the first message of a connection; our choice
HELLO_BYTES = 1000  # at most; our choice
REACHABLE = "let the hosts open TCP connections to each other."


@dataclass
class Link:
    """The connection to one peer."""

    socket: socket.socket
    peer: int = 0  # process id
    host: str = ""
    heard: float = field(default_factory=time.monotonic)  # when its last message came
    ended: bool = False  # it has said that it ends
    buffer: bytes = b""

    def name(self) -> str:
        """The peer in words, for messages."""
        return f"process {self.peer} on {self.host}"

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
        if not data:
            raise ConnectionError("its connection closed without a word")

    def hello(self, timeout_s: float) -> dict:
        """The message that a connection begins with; {} for anything else."""
        self.socket.settimeout(timeout_s)
        try:
            while len(self.buffer) < HELLO_BYTES:
                for message in self.messages():
                    return message
        except OSError:
            return {}
        return {}


def listen(port: int = 0) -> tuple[socket.socket, str]:
    """A listening socket on every interface, and the secret that peers must send.

    port: 0 for any free one. Raises OSError when the port cannot be used.
    """
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    listener = socket.create_server(("", port), family=family, dualstack_ipv6=dual)
    return listener, secrets.token_hex(16)


def gather(
    listener: socket.socket, secret: str, num_processes: int, *, timeout_s: float
) -> list[Link]:
    """Process 0: wait for all other processes, then close the listener. Strangers are refused.

    Raises LostPeerError naming the processes that did not come within timeout_s.
    """
    links: dict[int, Link] = {}
    limit = time.monotonic() + timeout_s
    with listener:
        while len(links) < num_processes - 1 and (left := limit - time.monotonic()) > 0:
            listener.settimeout(left)
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                break
            link = Link(connection)
            hello = link.hello(min(left, HELLO_S))
            if hello.get("secret") != secret:
                connection.close()
                continue
            link.peer, link.host = hello["process"], hello["host"]
            links[link.peer] = link
    if missing := sorted(set(range(1, num_processes)) - links.keys()):
        raise LostPeerError(
            f"processes {missing} did not reach process 0 on {socket.gethostname()} within "
            f"{timeout_s:g} s (the lesser of jax_distributed_initialization_timeout and "
            f"peer_timeout_seconds). See the end of their own output, and {REACHABLE}"
        )
    return list(links.values())


def join(
    address: str, port: int, secret: str, host: str, process_id: int, *, timeout_s: float
) -> list[Link]:
    """Every other process: connect to process 0. Raises LostPeerError if it cannot be reached.

    address: of process 0. host: its name for messages.
    """
    try:
        connection = socket.create_connection((address, port), timeout=timeout_s)
    except OSError as error:
        raise LostPeerError(
            f"process {process_id} cannot reach process 0 at {address} port {port}: {error}. See "
            f"the end of the output of process 0, and {REACHABLE}"
        ) from error
    link = Link(connection, 0, host)
    link.send(secret=secret, process=process_id, host=socket.gethostname())
    return [link]


def _message(line: bytes) -> dict:
    """One line as a message. Raises ConnectionError: a sender that gave up half-way wrote it."""
    try:
        message = json.loads(line)
    except ValueError:
        message = None
    if not isinstance(message, dict):
        raise ConnectionError("a message from it was cut off")
    return message
