"""Ctrl-C, SIGTERM and a closed terminal: what acts at once, and what asks to save and leave.

What acts at once does so also while the main thread waits inside native code. Programs use it
before JAX loads, so only what follows JAX's start imports JAX.
"""

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from maxdiloco.errors import INTERRUPTED, Preempted
from maxdiloco.processes.output import last_words

# One press reaches a process twice behind timeout, mpirun or srun: a terminal sends it to a group
# of processes, and a launcher passes it on. A person who wants to quit is slower. Our choice.
SAME_PRESS_S = 1.0
WATCH = "maxdiloco-watch"  # the name of the thread of watch.py
SECOND_SIGTERM = "SIGTERM again: ended at once. Start a named run again to resume it."


@contextlib.contextmanager
def hearing(number: int, heard: Callable[[], None]) -> Iterator[None]:
    """Call `heard` in a thread of its own at every signal of this number inside the `with`.

    Python runs signal handlers in the main thread between two bytecodes: after a compilation or
    a wait for devices is over, and in code that may turn a KeyboardInterrupt into any traceback.
    The C handler itself writes the wakeup file descriptor, which the thread reads. Contexts nest:
    of one signal the innermost one is called. Outside the main thread, and where the signal is
    ignored, as SIGINT in a script's background job, nothing changes.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(number) is signal.SIG_IGN:
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    outer = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    thread = threading.Thread(
        target=_listen, args=(reading, number, heard, outer), name="maxdiloco-signal", daemon=True
    )
    thread.start()
    # None: a handler that Python has not installed and cannot restore.
    handler = signal.signal(number, _heard_elsewhere) or signal.SIG_DFL
    try:
        yield
    finally:
        signal.set_wakeup_fd(outer, warn_on_full_buffer=False)
        os.close(writing)
        thread.join()
        os.close(reading)
        # Last: with the default one, which ends the process, a signal must not meet the join.
        signal.signal(number, handler)


def quit_now(line: str = "Interrupted.", code: int = INTERRUPTED) -> None:
    """End the process at once with one line and a code; a save under way leaves no checkpoint."""
    last_words(line)
    os._exit(code)


def _listen(reading: int, number: int, heard: Callable[[], None], outer: int) -> None:
    while byte := os.read(reading, 1):  # b"": the context has ended
        if byte[0] == number:
            heard()
        elif outer != -1:
            with contextlib.suppress(BlockingIOError):  # it is full of signals already
                os.write(outer, byte)


def _heard_elsewhere(number: int, frame: FrameType | None) -> None:
    """The handler: it keeps KeyboardInterrupt, and the end by SIGTERM, away."""


class _Presses:
    """Counts the presses of a signal, which may each come twice. For one thread."""

    _first_s: float | None = None

    def count(self) -> int:
        """1 for the first press, 0 for what comes within SAME_PRESS_S of it, 2 for any other."""
        now = time.monotonic()
        if self._first_s is None:
            self._first_s = now
            return 1
        return 0 if now - self._first_s < SAME_PRESS_S else 2


@contextlib.contextmanager
def ending_at_second_sigterm() -> Iterator[None]:
    """Leave the first SIGTERM to JAX's preemption service, and end the process at another one.

    Enter it in the main thread after jax.distributed.initialize, whose C handler of SIGTERM takes a
    note for the next step: a process that compiles or waits for a peer would never end. Without
    that handler nothing changes.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal.restype = ctypes.c_void_p
    theirs = libc.signal(signal.SIGTERM, signal.SIG_IGN)
    if theirs in (None, int(signal.SIG_IGN)):  # None: the default
        libc.signal(signal.SIGTERM, theirs)
        yield
        return
    take_note = ctypes.CFUNCTYPE(None, ctypes.c_int)(theirs)  # it sets a flag
    presses = _Presses()

    def heard() -> None:
        match presses.count():
            case 1:
                take_note(signal.SIGTERM)
            case 2:
                quit_now(SECOND_SIGTERM, Preempted.exit_code)

    try:
        with hearing(signal.SIGTERM, heard):
            yield
    finally:
        libc.signal(signal.SIGTERM, theirs)


class Preemption:
    """Whether SIGTERM, SIGHUP or Ctrl-C has asked the run to stop, at a step all processes share.

    A context manager, entered in the main thread after jax.distributed.initialize.
    One process: a signal sets a flag. Several: JAX's preemption service, which has its own
    handler of SIGTERM, names a step that no process has passed; SIGHUP and Ctrl-C are sent on to
    it as SIGTERM. SIGHUP does nothing where it is ignored, as under nohup.
    report: called with one line for the user at the first Ctrl-C. Another one, or another SIGTERM
    (of several processes by ending_at_second_sigterm), ends the process at once.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        import jax

        self._report = report
        self._several = jax.process_count() > 1
        self._asked = False
        self._ctrl_c, self._sigterm = _Presses(), _Presses()
        self.by_ctrl_c = False  # whether Ctrl-C, and no other signal before it, asked this process
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Preemption":
        self._stack.enter_context(hearing(signal.SIGINT, self._on_ctrl_c))
        if not self._several:
            self._stack.enter_context(hearing(signal.SIGTERM, self._on_sigterm))
            self._handle(signal.SIGTERM)  # noted at once, where Python runs
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            self._handle(signal.SIGHUP)
        return self

    def __exit__(self, kind, exception, traceback) -> None:
        self._stack.close()

    def requested(self, step: int) -> bool:
        """Whether to save and leave after this step; all processes ask and get the same."""
        if self._several:
            from jax.experimental import multihost_utils

            return multihost_utils.reached_preemption_sync_point(step)
        return self._asked

    def _handle(self, number: signal.Signals) -> None:
        # None: a handler that Python has not installed and cannot restore.
        before = signal.signal(number, lambda number, frame: self._ask()) or signal.SIG_DFL
        self._stack.callback(signal.signal, number, before)

    # Called in a thread of their own, one call at a time.

    def _on_sigterm(self) -> None:
        if self._sigterm.count() == 2:
            quit_now(SECOND_SIGTERM, Preempted.exit_code)

    def _on_ctrl_c(self) -> None:
        count = self._ctrl_c.count()
        if count == 2:
            quit_now()
        if count != 1:
            return
        self.by_ctrl_c = not self._asked
        self._report("Ctrl-C: stopping after this step; press it again to quit now.")
        self._ask()

    def _ask(self) -> None:
        asked, self._asked = self._asked, True
        if self._several and not asked:  # another SIGTERM would end the process
            os.kill(os.getpid(), signal.SIGTERM)
