"""A thread that watches the peers of a process and ends the process when one is lost.

JAX alone aborts the others in C++: without our exit code, without a name, and after a killed
process other than 0 only at its heartbeat timeout. Here a closed connection counts as a loss at
once, also while JAX compiles or hangs inside a collective, and a silent one after `silence_s`;
process 0 tells the others. (A stream of links.py is made anew instead, until the timeout.) The
connections are a star: one from every process to process 0. A message is a line of JSON. No JAX.
"""

import contextlib
import ctypes
import json
import math
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from maxdiloco import json_text
from maxdiloco.errors import SHARED_CODES, LostPeerError, Preempted
from maxdiloco.processes import output

# All in seconds, all our choice.
BEAT_S = 0.5  # between two signs of life
PATIENCE_S = 1.0  # for the main thread, in which a loss may raise an error, to clean up
GRACE_S = 5.0  # for a process to end by itself after a peer has ended with an error
LINGER_S = 60.0  # process 0 stays this long for peers that are still saving
LINE_BYTES = 1 << 16  # of a message, at most
WHY_CHARS = 4000  # of an error, for the peers: escaped, the message stays below LINE_BYTES

THREAD = "maxdiloco-watch"
SEE_OUTPUT = "See the end of its own output."
RESUME = "Start the run again with the same run_name: it resumes from the last checkpoint."
# Nothing keeps JAX's stack from the output: see delay_aborts.
STACK = "JAX ends with its process and prints a stack, which says no more; then comes the reason."


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
        """Send a message to a peer that has not ended; one that is gone is noticed by a read."""
        if not self.ended:
            with contextlib.suppress(OSError):
                self.socket.sendall(json.dumps(message).encode() + b"\n")

    def messages(self) -> Iterator[dict]:
        """What arrives next. Raises ConnectionError where the connection is over, TimeoutError."""
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
            try:
                message = json_text.parse(line)
            except ValueError:
                message = None
            if not isinstance(message, dict):  # a sender that gave up half-way wrote it
                raise ConnectionError("a message from it was cut off")
            yield message
        if len(self.buffer) > LINE_BYTES:
            raise ConnectionError(f"a message from it is longer than {LINE_BYTES} bytes")
        if not data:
            raise ConnectionError("its connection closed without a word")


class Loss(NamedTuple):
    """Why this process cannot go on."""

    line: str  # for the user
    exit_code: int
    patience_s: float  # until the watch ends the process


def end_process(exit_code: int, line: str | None) -> None:
    """End this process at once, past every teardown that would wait for a lost peer."""
    if line is not None:
        output.say_error(f"{LostPeerError.__name__}: {line}")
    output.finish()
    os._exit(exit_code)


def delay_aborts() -> None:
    """Make an abort of this process wait for 6 s, so that the watch ends the process first.

    When process 0 dies, a C++ thread of JAX in every other process logs a stack and calls abort()
    after 0.1 to 0.4 s: exit code 134, and no name. No timeout of JAX postpones it, and nothing
    turns the stack off (benchmarks/log/2026-11-24.md). The handler of SIGABRT is therefore libc's
    `sleep`: called with the signal's number, 6, it takes it for seconds, and needs no GIL.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal.restype = ctypes.c_void_p
    libc.signal(int(signal.SIGABRT), ctypes.cast(libc.sleep, ctypes.c_void_p))


class Watch:
    """The watch of one process over its peers: process 0 has a link to each, the others one to it.

    The first loss ends the process; later ones follow from it. The thread is no daemon: after
    `leave` it ends the process when the main thread has printed its error, before a teardown can
    wait for processes that are gone.
    """

    def __init__(
        self,
        process_id: int,
        links: list[Link],
        *,
        silence_s: float,
        end: Callable[[int, str | None], None] = end_process,
        main: threading.Thread | None = None,
    ) -> None:
        self._process_id, self._links, self._silence_s = process_id, links, silence_s
        self._end, self._main = end, main or threading.main_thread()
        self._loss: Loss | None = None
        self._lost = threading.Event()  # there is a loss
        self._due = math.inf  # when it ends the process
        self._goodbye: tuple[int, str | None] | None = None  # what `leave` was given
        self._closing = False
        self._selector = selectors.DefaultSelector()
        for link in links:
            link.socket.settimeout(BEAT_S)
            self._selector.register(link.socket, selectors.EVENT_READ, link)
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=False)
        self._thread.start()

    def end_if_lost(self, wait_s: float) -> None:
        """End the process now if a peer is lost, or is within wait_s [seconds]; else return."""
        if self._lost.wait(wait_s):
            self._due = -math.inf
            self._thread.join()

    def leave(self, exit_code: int, why: str | None = None) -> None:
        """Tell the peers that this process ends, and why; end it after the main thread."""
        self._goodbye = exit_code, why and why[:WHY_CHARS]

    def close(self) -> None:
        """Stop watching: every process is done."""
        self._closing = True
        self.leave(0)
        self._thread.join()

    def _run(self) -> None:
        beaten = -math.inf
        while self._goodbye is None and time.monotonic() < self._due:
            begun = time.monotonic()
            self._receive()
            if begun - beaten >= BEAT_S:
                for link in self._links:
                    link.send(beat=True)
                beaten = begun
            self._check_silence(begun)
        if self._goodbye is not None:
            self._say_goodbye(*self._goodbye)
        else:
            self._end(self._loss.exit_code, self._loss.line)
        self._selector.close()
        for link in self._links:
            link.socket.close()

    def _receive(self) -> None:
        for key, _ in self._selector.select(BEAT_S / 2):
            link = key.data
            try:
                for message in link.messages():
                    link.ended |= "end" in message
                    link.host = message.get("host", link.host)
                    if message.get("loss"):
                        self._lose(Loss(*message["loss"]))
            except TimeoutError:
                continue
            except ConnectionError as error:
                self._selector.unregister(link.socket)
                self._links.remove(link)
                link.socket.close()
                if not link.ended:
                    if link.peer == 0 and self._loss is None:
                        output.say_error(f"{link.name()} is gone. {STACK}")
                    self._lose_peer(link, f"is gone: {error}.")

    def _check_silence(self, begun: float) -> None:
        """begun: when the loop last came by. Long ago: this process was stopped, not the others."""
        now = time.monotonic()
        for link in self._links:
            if now - begun > self._silence_s / 2:
                link.heard = now
            silent = now - link.heard
            if silent > self._silence_s and not link.ended:
                after = f"for {silent:.0f} s (peer_timeout_seconds={self._silence_s:g})"
                remedy = "Raise peer_timeout_seconds if it was only slow."
                self._lose_peer(link, f"has been silent {after} and is taken for lost. {remedy}")

    def _lose_peer(self, link: Link, what: str) -> None:
        line = f"{link.name()} {what} {SEE_OUTPUT} {RESUME}"
        self._lose(Loss(line, LostPeerError.exit_code, PATIENCE_S), link)

    def _lose(self, loss: Loss, lost: Link | None = None) -> None:
        """Note the first loss; by process 0 all learn of it, the lost peer with who has lost it."""
        if self._loss is not None:
            return
        self._loss, self._due = loss, time.monotonic() + loss.patience_s
        self._lost.set()
        for link in self._links:
            who = f"{self._me()} says: " if link is lost else ""
            link.send(loss=loss._replace(line=who + loss.line))

    def _say_goodbye(self, exit_code: int, why: str | None) -> None:
        """End the process after its main thread, and process 0 after its peers: JAX aborts them."""
        for link in self._links:
            link.send(end=exit_code, loss=self._loss_of_peers(exit_code, why))
        if self._closing:
            return
        begun = time.monotonic()
        limit = LINGER_S if exit_code == Preempted.exit_code else GRACE_S + 2 * PATIENCE_S
        while self._main.is_alive() and time.monotonic() - begun < GRACE_S:
            self._receive()
        while self._process_id == 0 and self._links and time.monotonic() - begun < limit:
            self._receive()
        self._end(exit_code, None)

    def _loss_of_peers(self, exit_code: int, why: str | None) -> Loss | None:
        """What this process's end means to the others; nothing if all end so, each by itself."""
        if exit_code in (0, Preempted.exit_code):
            return None
        line = f"{self._me()} ended with exit code {exit_code}"
        if exit_code in SHARED_CODES:
            line = f"{line}, and so does this process: {why or SEE_OUTPUT}"
            return Loss(line, exit_code, GRACE_S)
        line = f"{line} while this process was still running: {why or SEE_OUTPUT} {RESUME}"
        return Loss(line, LostPeerError.exit_code, GRACE_S)

    def _me(self) -> str:
        return f"process {self._process_id} on {socket.gethostname()}"
