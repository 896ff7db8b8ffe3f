"""A thread that watches the peers of a process and ends the process when one is lost.

JAX alone aborts the others in C++: without our exit code, without a name, and after a killed
process other than 0 only at its heartbeat timeout. Here a closed connection counts as a loss at
once and a silent one after `silence_s`; process 0 tells the others. No JAX here.

It is not one mechanism with links.py, which would not be simpler. A link makes a closed connection
anew until the timeout and raises in the main thread; the watch has to take it for a killed process
at once, also while JAX compiles, ends a process that hangs inside a collective, and says who ended
with which code and why. The watch runs before the processes have compared their keys, which a link
does first.
"""

import math
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from maxdiloco.errors import SHARED_CODES, LostPeerError, Preempted
from maxdiloco.processes import output
from maxdiloco.processes.star import Link

# All in seconds, all our choice.
BEAT_S = 0.5  # between two signs of life
PATIENCE_S = 1.0  # for the main thread, in which a loss may raise an error, to clean up
GRACE_S = 5.0  # for a process to end by itself after a peer has ended with an error
LINGER_S = 60.0  # process 0 stays this long for peers that are still saving
WHY_CHARS = 4000  # of an error, for the peers: escaped, the message stays below star.LINE_BYTES

THREAD = "maxdiloco-watch"
SEE_OUTPUT = "See the end of its own output."
RESUME = "Start the run again with the same run_name: it resumes from the last checkpoint."
# Nothing keeps JAX's stack from the output: see aborts.py.
STACK = "JAX ends with its process and prints a stack, which says no more; then comes the reason."


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
        self._process_id = process_id
        self._links = links
        self._silence_s = silence_s
        self._end = end
        self._main = main or threading.main_thread()
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
        """Tell the peers that this process ends, and end it after the main thread.

        why: the error in one line, for the peers to print.
        """
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
                self._send_all(beat=True)
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
        """Note the first loss, and send it to the peers: through process 0 all learn of it.

        lost: the link of the lost peer. If that one is there, it learns who has lost it.
        """
        if self._loss is not None:
            return
        self._loss, self._due = loss, time.monotonic() + loss.patience_s
        self._lost.set()
        for link in self._links:
            who = f"{self._me()} says: " if link is lost else ""
            if not link.ended:
                link.send(loss=loss._replace(line=who + loss.line))

    def _say_goodbye(self, exit_code: int, why: str | None) -> None:
        """End the process after its main thread, and process 0 after its peers.

        JAX aborts them as soon as process 0 is gone.
        """
        self._send_all(end=exit_code, loss=self._loss_of_peers(exit_code, why))
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
        """This process in words, for messages of the peers."""
        return f"process {self._process_id} on {socket.gethostname()}"

    def _send_all(self, **message: object) -> None:
        for link in self._links:
            if not link.ended:
                link.send(**message)
