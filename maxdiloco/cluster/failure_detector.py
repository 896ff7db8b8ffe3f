"""A thread that ends this process when a peer is lost, and notifies peers when this process ends.

By itself, JAX would abort in C++, without our exit code and without the peer's name. If a process
other than 0 is killed, JAX notices only at its heartbeat timeout. The messenger detects a lost peer
even while JAX compiles or hangs inside a collective, and process 0 notifies the other processes.
Messages are JSON. This module does not import JAX.
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
from maxdiloco.cluster.messages import REMEDY, RESUME, SEE_OUTPUT, Messenger
from maxdiloco.errors import SHARED_CODES, LostPeerError, Preempted

# All in seconds.
CLEAN_UP_S = 1.0  # time for the main thread, in which a loss may raise, to close its files
GRACE_S = 5.0  # time for a process to exit by itself after a peer has exited with an error
LINGER_S = 60.0  # process 0 waits for peers that save: twice the grace period of Kubernetes
WHY_CHARS = 4000  # characters of an error's text that peers receive

WORD = "end"  # key of the failure detector's messages
# Printed because the stack that JAX logs cannot be suppressed: see delay_aborts.
STACK = "JAX may now print a stack that does not name the reason; the reason follows."


class Loss(NamedTuple):
    """Why this process cannot continue.

    Attributes:
      line: the message for the user.
      exit_code: exit code of this process.
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
    """Delay an abort of this process by 6 s, so that the failure detector ends the process first.

    When process 0 dies, a C++ thread of JAX in every other process logs a stack and calls abort()
    after 0.1 to 0.4 s. The exit code is 134, and process 0 is not named. JAX has no timeout
    that postpones this, and no option that disables the stack (benchmarks/results/thin_link.md).
    The handler of SIGABRT is therefore libc's `sleep`, which needs no GIL. Its argument, the
    seconds, is the number of the signal, 6.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal.restype = ctypes.c_void_p
    libc.signal(int(signal.SIGABRT), ctypes.cast(libc.sleep, ctypes.c_void_p))


class FailureDetector:
    """Detects lost peers. The first loss ends this process; later losses are its consequences.

    The thread is not a daemon. After `leave` it ends the process once the main thread has printed
    its error, before Python's clean-up can wait for lost processes.
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
          end: called with an exit code and a line; ends the process.
          main: the thread to wait for before the process ends; None: the main thread.
        """
        self._process, self._messenger = process, None
        self._end, self._main = end, main or threading.main_thread()
        self._changed = threading.Condition()
        self._loss: Loss | None = None
        self._due = math.inf  # when to end the process [time.monotonic()]
        self._left: tuple[int, str | None] | None = None  # the arguments of `leave`
        self._closing = False
        self._wait_until: float | None = None  # end of the wait in find_loss
        self._before_end: list[Callable[[str], None]] = []
        self._thread = threading.Thread(target=self._run, name=signals.DETECTOR, daemon=False)
        self._thread.start()

    def begin(self, messenger: Messenger) -> None:
        """Watch the peers of a messenger; `close` and `leave` close it."""
        self._messenger = messenger
        messenger.subscribe(WORD, on_message=self._receive, on_loss=self._lose_peer)

    def before_end(self, note: Callable[[str], None]) -> None:
        """Register a function to call with the error's line before a lost peer ends the process.

        It is called in a thread, for CLEAN_UP_S at most. The line is "LostPeerError: ...", as on
        the terminal.
        """
        self._before_end.append(note)

    def find_loss(self, wait_s: float) -> LostPeerError | None:
        """Return the loss of a peer that may have caused an error of the main thread, if any.

        Args:
          wait_s: longest wait for a loss, from the first call on [s]. Later calls do not wait
            again. While a peer is silent the wait continues, since this process may have been
            stopped and must find out.
        """
        with self._changed:
            now = time.monotonic()
            if self._wait_until is None:
                self._wait_until = now + wait_s
            left_s = max(0.0, self._wait_until - now)
            while not self._changed.wait_for(lambda: self._loss is not None, left_s):
                if self._messenger is None or not self._messenger.has_silent_peer:
                    return None
                left_s = wait_s
            return LostPeerError(self._loss.line, self._loss.exit_code)

    def end_if_lost(self, wait_s: float) -> None:
        """End the process now if `find_loss` finds a lost peer; otherwise return."""
        if self.find_loss(wait_s) is None:
            return
        with self._changed:
            self._due = -math.inf
            self._changed.notify_all()
        self._thread.join()

    def leave(self, exit_code: int, why: str | None = None) -> None:
        """Notify the peers that this process ends, and why; end it after the main thread."""
        with self._changed:
            self._left = exit_code, why and why[:WHY_CHARS]
            self._changed.notify_all()

    def close(self) -> None:
        """Stop the thread and close the messenger, once every process is done."""
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
        self._messenger.close(CLEAN_UP_S)
        for note in self._before_end:  # in a thread: a file system may hang
            text = f"{LostPeerError.__name__}: {self._loss.line}"
            thread = threading.Thread(target=note, args=(text,), daemon=True)
            thread.start()
            thread.join(CLEAN_UP_S)
        self._end(self._loss.exit_code, self._loss.line)

    def _receive(self, peer: int, data: bytes) -> None:
        """Receive the loss that a peer reports. Called in the messenger's thread."""
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
        """Keep the first loss and send it to all peers; the lost peer also receives our name."""
        with self._changed:
            if self._loss is not None:
                return
            self._loss, self._due = loss, time.monotonic() + loss.within_s
            self._changed.notify_all()
        for peer in self._messenger.machines:
            who = f"{self._me()} says: " if peer == lost else ""
            self._notify(peer, loss._replace(line=who + loss.line))
        self._messenger.fail(LostPeerError(loss.line, loss.exit_code))

    def _say_goodbye(self, exit_code: int, why: str | None) -> None:
        """End the process after its main thread; process 0 also waits for its peers to end.

        When process 0 ends, JAX aborts the other processes.
        """
        saved = exit_code == Preempted.exit_code
        limit = time.monotonic() + (LINGER_S if saved else GRACE_S + 2 * CLEAN_UP_S)
        if self._messenger is not None:
            if (loss := self._loss_of_peers(exit_code, why)) is not None:
                for peer in self._messenger.machines:
                    self._notify(peer, loss)
            if self._closing:
                self._messenger.close(CLEAN_UP_S)
                return
        self._main.join(GRACE_S)
        if self._messenger is not None:
            if self._process == 0:
                self._messenger.wait_until_left(limit - time.monotonic())
            self._messenger.close(CLEAN_UP_S)
        self._end(exit_code, None)

    def _notify(self, peer: int, loss: Loss) -> None:
        self._messenger.notify(peer, WORD, json.dumps(loss).encode())

    def _loss_of_peers(self, exit_code: int, why: str | None) -> Loss | None:
        """Return the Loss to send to the peers when this process ends; None if all end alike."""
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
        return f"process {peer} on {self._messenger.machines[peer]}"
