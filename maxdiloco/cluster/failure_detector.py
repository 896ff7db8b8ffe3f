"""A thread that ends this process when a peer is lost, and tells the peers when this one ends.

JAX aborts in C++ instead: without an exit code of ours, without a name, and after a killed process
other than 0 only at its heartbeat timeout. The mailbox notices a lost peer, also while JAX compiles
or hangs inside a collective; process 0 tells the others. A message is JSON. No JAX.
"""

import ctypes
import json
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from maxdiloco import json_text, output
from maxdiloco.cluster import signals
from maxdiloco.cluster.messages import REMEDY, RESUME, SEE_OUTPUT, Mailbox
from maxdiloco.errors import SHARED_CODES, LostPeerError, Preempted

# All in seconds.
CLEAN_UP_S = 1.0  # for the main thread, in which a loss may raise an error, to close its files
GRACE_S = 5.0  # for a process to end by itself after a peer has ended with an error
LINGER_S = 60.0  # process 0 stays for peers that still save, twice the grace period of Kubernetes
WHY_CHARS = 4000  # of an error's text that peers receive

WORD = "end"  # the key of its messages
# JAX's stack cannot be kept from the output: see delay_aborts.
STACK = "JAX ends with its process and prints a stack, which says no more; then comes the reason."


class Loss(NamedTuple):
    """Why this process cannot continue.

    Attributes:
      line: for the user.
      exit_code: of this process.
      within_s: time until the failure detector ends the process [s].
    """

    line: str
    exit_code: int
    within_s: float


def end_process(exit_code: int, line: str | None) -> None:
    """End this process at once, without the clean-up that would wait for a lost peer."""
    output.last_words(line and f"{LostPeerError.__name__}: {line}")
    os._exit(exit_code)


def delay_aborts() -> None:
    """Make an abort of this process wait for 6 s, so that the failure detector ends it first.

    When process 0 dies, a C++ thread of JAX in every other process logs a stack and calls abort()
    after 0.1 to 0.4 s: exit code 134, and no name. No timeout of JAX postpones it, and nothing
    turns the stack off (benchmarks/results/thin_link.md). The handler of SIGABRT is therefore
    libc's `sleep`: it is called with the signal's number, 6, as its seconds, and needs no GIL.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal.restype = ctypes.c_void_p
    libc.signal(int(signal.SIGABRT), ctypes.cast(libc.sleep, ctypes.c_void_p))


class FailureDetector:
    """Detects lost peers. The first loss ends this process; later ones follow from the first.

    The thread is not a daemon: after `leave` it ends the process when the main thread has printed
    its error, before Python's clean-up can wait for processes that are gone.
    """

    def __init__(
        self,
        process: int,
        *,
        end: Callable[[int, str | None], None] = end_process,
        main: threading.Thread | None = None,
    ):
        """Start the thread.

        Args:
          process: number of this process.
          end: ends the process with an exit code and a line.
          main: the thread whose end is waited for; None: the main thread.
        """
        self._process, self._mailbox = process, None
        self._end, self._main = end, main or threading.main_thread()
        self._changed = threading.Condition()
        self._loss: Loss | None = None
        self._due = math.inf  # when it ends the process
        self._left: tuple[int, str | None] | None = None  # the arguments of `leave`
        self._closing = False
        self._wait_until: float | None = None  # for the loss that may have caused an error
        self._before_end: list[Callable[[str], None]] = []
        self._thread = threading.Thread(target=self._run, name=signals.DETECTOR, daemon=False)
        self._thread.start()

    def begin(self, mailbox: Mailbox) -> None:
        """Watch the peers of a mailbox; `close` and `leave` close it."""
        self._mailbox = mailbox
        mailbox.watch(WORD, on_message=self._receive, on_loss=self._lose_peer)

    def before_end(self, note: Callable[[str], None]) -> None:
        """Call `note` with the error's line before a lost peer ends the process.

        In a thread, for CLEAN_UP_S at most. The line is "LostPeerError: ...", as on the terminal.
        """
        self._before_end.append(note)

    def loss_behind(self, wait_s: float) -> LostPeerError | None:
        """Return the loss of a peer that may have caused an error of the main thread, if any.

        Args:
          wait_s: time to wait from the first call on [s]. Later calls do not wait again. The wait
            continues while a peer is silent: a process that was stopped has to find out.
        """
        with self._changed:
            now = time.monotonic()
            if self._wait_until is None:
                self._wait_until = now + wait_s
            left_s = max(0.0, self._wait_until - now)
            while not self._changed.wait_for(lambda: self._loss is not None, left_s):
                if self._mailbox is None or not self._mailbox.misses_a_peer:
                    return None
                left_s = wait_s
            return LostPeerError(self._loss.line, self._loss.exit_code)

    def end_if_lost(self, wait_s: float) -> None:
        """End the process now if a peer is lost, as `loss_behind` decides; else return."""
        if self.loss_behind(wait_s) is None:
            return
        with self._changed:
            self._due = -math.inf
            self._changed.notify_all()
        self._thread.join()

    def leave(self, exit_code: int, why: str | None = None) -> None:
        """Tell the peers that this process ends, and why; end it after the main thread."""
        with self._changed:
            self._left = exit_code, why and why[:WHY_CHARS]
            self._changed.notify_all()

    def close(self) -> None:
        """Stop: every process is done."""
        self._closing = True
        self.leave(0)
        self._thread.join()

    def _run(self) -> None:
        with self._changed:
            while self._left is None and (left_s := self._due - time.monotonic()) > 0:
                self._changed.wait(min(left_s, threading.TIMEOUT_MAX))
        if self._left is not None:
            self._say_goodbye(*self._left)
            return
        self._mailbox.close(CLEAN_UP_S)
        for note in self._before_end:  # in a thread: a file system may hang
            text = f"{LostPeerError.__name__}: {self._loss.line}"
            thread = threading.Thread(target=note, args=(text,), daemon=True)
            thread.start()
            thread.join(CLEAN_UP_S)
        self._end(self._loss.exit_code, self._loss.line)

    def _receive(self, peer: int, data: bytes) -> None:
        """Receive the loss that a peer reports. In the thread of the mailbox, as _lose_peer."""
        try:
            loss = Loss(*json_text.parse(data))
        except (TypeError, ValueError):
            loss = None
        if loss is None or [type(part) for part in loss[:2]] != [str, int]:
            self._lose_peer(peer, "has sent an invalid message.")
        else:
            self._lose(loss)

    def _lose_peer(self, peer: int, what: str) -> None:
        if peer == 0 and self._loss is None:
            output.say_error(f"{self._name(peer)} is gone. {STACK}")
        line = f"{self._name(peer)} {what} {REMEDY}"
        self._lose(Loss(line, LostPeerError.exit_code, CLEAN_UP_S), peer)

    def _lose(self, loss: Loss, lost: int | None = None) -> None:
        """Keep the first loss and tell all peers; the lost one learns who has lost it."""
        with self._changed:
            if self._loss is not None:
                return
            self._loss, self._due = loss, time.monotonic() + loss.within_s
            self._changed.notify_all()
        for peer in self._mailbox.machines:
            who = f"{self._me()} says: " if peer == lost else ""
            self._tell(peer, loss._replace(line=who + loss.line))
        self._mailbox.fail(LostPeerError(loss.line, loss.exit_code))

    def _say_goodbye(self, exit_code: int, why: str | None) -> None:
        """End the process after its main thread, and process 0 after its peers: JAX aborts them."""
        saved = exit_code == Preempted.exit_code
        limit = time.monotonic() + (LINGER_S if saved else GRACE_S + 2 * CLEAN_UP_S)
        if self._mailbox is not None:
            if (loss := self._loss_of_peers(exit_code, why)) is not None:
                for peer in self._mailbox.machines:
                    self._tell(peer, loss)
            if self._closing:
                self._mailbox.close(CLEAN_UP_S)
                return
        self._main.join(GRACE_S)
        if self._mailbox is not None:
            if self._process == 0:
                self._mailbox.wait_until_left(limit - time.monotonic())
            self._mailbox.close(CLEAN_UP_S)
        self._end(exit_code, None)

    def _tell(self, peer: int, loss: Loss) -> None:
        self._mailbox.tell(peer, WORD, json.dumps(loss).encode())

    def _loss_of_peers(self, exit_code: int, why: str | None) -> Loss | None:
        """Return what this process's end means to the others; None if all end in the same way."""
        if exit_code in (0, Preempted.exit_code):
            return None
        line = f"{self._me()} ended with exit code {exit_code}"
        if exit_code in SHARED_CODES:
            line = f"{line}, and so does this process: {why or SEE_OUTPUT}"
            return Loss(line, exit_code, GRACE_S)
        line = f"{line} while this process was still running: {why or SEE_OUTPUT} {RESUME}"
        return Loss(line, LostPeerError.exit_code, GRACE_S)

    def _me(self) -> str:
        return f"process {self._process} on {socket.gethostname()}"

    def _name(self, peer: int) -> str:
        return f"process {peer} on {self._mailbox.machines[peer]}"
