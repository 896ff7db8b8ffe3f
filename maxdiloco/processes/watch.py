"""Who is still there: a star of TCP connections from every process of a run to process 0.

JAX notices a lost process by itself, but ends the others by an abort in C++: no exit code of ours,
no name, and for a process that was killed only after its heartbeat timeout. Here a closed
connection is seen at once and a silent one after `silence_s`; process 0 tells the others whom.
This module knows sockets and one thread, not JAX.
"""

import json
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from maxdiloco.errors import SHARED_CODES, LostPeerError, Preempted
from maxdiloco.processes import output

# All in seconds, all our choice.
BEAT_S = 0.5  # between two signs of life
PATIENCE_S = 1.0  # for the main thread to end by the error that a loss raises in it
GRACE_S = 5.0  # for a process to end by itself after a peer has ended with an error
LINGER_S = 60.0  # process 0 stays this long for peers that are still saving

GONE = "its connection closed without a word"
TORN = "a message from it was cut off"
TELLS_MORE = "The end of its own output tells more."
THREAD = "maxdiloco-watch"
RESUME = (
    f"{TELLS_MORE} Start the run again with the same run_name: it resumes from the last checkpoint."
)


class Loss(NamedTuple):
    """Why this process cannot go on: one line to the user, and the exit code to end with."""

    line: str
    code: int


@dataclass
class Link:
    """The connection to one peer."""

    peer: int  # process id
    host: str
    socket: socket.socket
    buffer: bytes = b""
    heard: float = field(default_factory=time.monotonic)  # when it last said anything
    ended: bool = False  # it said goodbye

    def name(self) -> str:
        """The peer in words, for messages."""
        return f"process {self.peer} on {self.host}"

    def say(self, **message: object) -> None:
        """Send one message. A connection that is gone is noticed where it is read, not here."""
        try:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return

    def messages(self) -> tuple[list[dict], str | None]:
        """What has arrived, and what has become of the connection; None while it is open."""
        try:
            data = self.socket.recv(65536)
        except TimeoutError:
            return [], None
        except OSError:
            return [], GONE
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        self.heard = time.monotonic()
        messages = [_message(line) for line in lines]
        if None in messages:
            return messages[: messages.index(None)], TORN
        return messages, None if data else GONE


def end_process(code: int, line: str | None) -> None:
    """End this process at once, past every teardown that would wait for a lost peer."""
    if line is not None:
        output.say_error(f"{LostPeerError.__name__}: {line}")
    output.finish()
    os._exit(code)


class Watch:
    """One process's watch over its peers: process 0 holds a link to each, the others one to it.

    The thread keeps the interpreter alive on purpose: after `leave` it ends the process when the
    main thread has printed its error, before a teardown can wait for processes that are gone.
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
        self._process_id = process_id
        self._links = links
        self._silence_s = silence_s
        self._end = end
        self._main = main or threading.main_thread()
        self._selector = selectors.DefaultSelector()
        for link in links:
            link.socket.settimeout(BEAT_S)
            self._selector.register(link.socket, selectors.EVENT_READ, link)
        self._changed = threading.Condition()
        self._lost: Loss | None = None
        self._lost_at = 0.0
        self._claimed = False  # the main thread will print the loss
        self._bad_ends: dict[Loss, float] = {}  # when
        self._leaving: tuple[int, float] | None = None  # exit code, since when
        self._why: str | None = None  # the error behind it
        self._closing = False
        self._beaten = 0.0
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=False)
        self._thread.start()

    def cause(self, wait_s: float) -> Loss | None:
        """The loss of a peer, or None if none is lost within wait_s [seconds].

        The caller who gets one raises it; the watch then prints nothing.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._lost or self._bad_ends, wait_s)
            loss = self._lost or next(iter(self._bad_ends), None)
            self._claimed = loss is not None
            return loss

    def leave(self, code: int, why: str | None = None) -> None:
        """Tell the peers that this process ends with `code`, and end it after the main thread.

        why: the error in one line, for the peers to print.
        """
        with self._changed:
            self._why = why
            self._leaving = (code, time.monotonic())

    def close(self) -> None:
        """Stop watching: every process is done."""
        self._closing = True
        self._thread.join()

    def _run(self) -> None:
        told, now = False, time.monotonic()
        while True:
            for key, _ in self._selector.select(BEAT_S / 2):
                self._receive(key.data)
            now, before = time.monotonic(), now
            if now - before > self._silence_s / 2:  # this process was stopped, not the others
                for link in self._links:
                    link.heard = now
            with self._changed:
                leaving = self._leaving
            if self._closing or leaving:
                if not told:
                    self._say_all(end=leaving[0] if leaving else 0, why=self._why)
                    told = True
                if self._closing:
                    break
                if self._may_end(*leaving, now):
                    self._end(leaving[0], None)
                    break
            elif self._judge(now):
                break
            if now - self._beaten >= BEAT_S:
                self._beaten = now
                self._say_all(beat=True)
        self._selector.close()
        for link in self._links:
            link.socket.close()

    def _may_end(self, code: int, since: float, now: float) -> bool:
        """Whether the main thread has said all, and, in process 0, the peers have left.

        JAX aborts the others as soon as process 0 is gone, so it leaves last.
        """
        if self._main.is_alive() and now - since < GRACE_S:
            return False
        limit = LINGER_S if code == Preempted.exit_code else GRACE_S + 2 * PATIENCE_S
        return self._process_id != 0 or not self._links or now - since > limit

    def _judge(self, now: float) -> bool:
        """Look for losses; end the process when the main thread does not. True when it did."""
        for link in self._links:
            silent = now - link.heard
            if silent > self._silence_s and not link.ended:
                self._lose(
                    f"{link.name()} has been silent for {silent:.0f} s "
                    f"(peer_timeout_seconds={self._silence_s:g}) and is taken for lost. Raise "
                    f"peer_timeout_seconds if it was only slow. {RESUME}"
                )
        with self._changed:
            for loss, when in self._bad_ends.items():
                if now - when > GRACE_S and self._lost is None:
                    self._lost, self._lost_at = loss, now
            if self._lost is None or self._claimed or now - self._lost_at < PATIENCE_S:
                return False
            self._say_all(end=self._lost.code)
            self._end(self._lost.code, self._lost.line)  # inside the lock: one of us prints
            return True

    def _lose(self, line: str) -> None:
        with self._changed:
            if self._lost is not None:
                return
            self._lost = Loss(line, LostPeerError.exit_code)
            self._lost_at = time.monotonic()
            self._changed.notify_all()
        self._say_all(lost=line)

    def _receive(self, link: Link) -> None:
        messages, over = link.messages()
        for message in messages:
            if "lost" in message:
                self._lose(message["lost"])
            elif "end" in message:
                link.ended = True
                self._note_end(link.name(), message["end"], message.get("why"))
            elif "ended" in message:
                self._note_end(message["ended"], message["code"], message.get("why"))
        if over is not None:
            self._selector.unregister(link.socket)
            self._links.remove(link)
            link.socket.close()
            if not link.ended:
                self._lose(f"{link.name()} is gone: {over}. {RESUME}")

    def _note_end(self, name: str, code: int, why: str | None) -> None:
        """A peer has said goodbye. 0 and a saved preemption are ends that all share."""
        if self._process_id == 0:
            self._say_all(ended=name, code=code, why=why)
        if code in (0, Preempted.exit_code):
            return
        if code in SHARED_CODES:
            line = f"{name} ended with exit code {code}, and so does this process"
            loss = Loss(f"{line}: {why}" if why else f"{line}. {TELLS_MORE}", code)
        else:
            line = f"{name} ended with exit code {code} while this process was still running"
            line = f"{line}: {why} {RESUME}" if why else f"{line}. {RESUME}"
            loss = Loss(line, LostPeerError.exit_code)
        with self._changed:
            self._bad_ends.setdefault(loss, time.monotonic())
            self._changed.notify_all()

    def _say_all(self, **message: object) -> None:
        for link in self._links:
            if not link.ended:
                link.say(**message)


def listen(port: int = 0) -> tuple[socket.socket, str]:
    """A listening socket on every interface, and the secret that peers must tell.

    port: 0 for any free one. Raises OSError when the port cannot be used.
    """
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    listener = socket.create_server(("", port), family=family, dualstack_ipv6=dual)
    return listener, secrets.token_hex(16)


def gather(
    listener: socket.socket, secret: str, num_processes: int, *, timeout_s: float
) -> list[Link]:
    """Process 0: wait for every other process and close the listener. Strangers are turned away.

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
            hello = _read_line(connection, min(left, GRACE_S))
            if hello.get("secret") != secret:
                connection.close()
                continue
            link = Link(hello["process"], hello["host"], connection)
            link.say(host=socket.gethostname())
            links[link.peer] = link
    if missing := sorted(set(range(1, num_processes)) - links.keys()):
        raise LostPeerError(
            f"processes {missing} did not reach process 0 on {socket.gethostname()} within "
            f"{timeout_s:g} s (the lesser of jax_distributed_initialization_timeout and "
            f"peer_timeout_seconds). See the end of their own output, and let the hosts open TCP "
            f"connections to each other."
        )
    return list(links.values())


def join(host: str, port: int, secret: str, process_id: int, *, timeout_s: float) -> list[Link]:
    """Every other process: connect to process 0 on `host`. Raises LostPeerError if it cannot."""
    problem = "it closed the connection"
    try:
        connection = socket.create_connection((host, port), timeout=timeout_s)
        Link(0, host, connection).say(secret=secret, process=process_id, host=socket.gethostname())
        hello = _read_line(connection, timeout_s)
    except OSError as error:
        hello, problem = {}, str(error)
    if not hello:
        raise LostPeerError(
            f"process {process_id} cannot reach process 0 at {host} port {port}: {problem}. See "
            f"the end of the output of process 0, and let the hosts open TCP connections to each "
            f"other."
        )
    return [Link(0, hello["host"], connection)]


def _read_line(connection: socket.socket, timeout_s: float) -> dict:
    """One message, byte by byte so that none of the next is taken; {} for anything else."""
    connection.settimeout(timeout_s)
    line = b""
    try:
        while not line.endswith(b"\n"):
            byte = connection.recv(1)
            if not byte or len(line) > 1000:
                return {}
            line += byte
    except OSError:
        return {}
    return _message(line) or {}


def _message(line: bytes) -> dict | None:
    """One line as a message; None for anything else."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None
