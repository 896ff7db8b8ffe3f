"""Handle Ctrl-C, SIGTERM and SIGHUP: the first requests a save and exit, the second exits at once.

The second also works while the main thread is inside native code. Programs use this module before
JAX loads, so only functions for use after JAX's start import JAX.
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
from maxdiloco.output import last_words

# Under timeout, mpirun or srun, a process receives one press twice: the terminal signals a group of
# processes, and a launcher forwards the signal within milliseconds. A second press by a person
# comes after 1 s or more.
SAME_PRESS_S = 1.0
DETECTOR = "maxdiloco-failure-detector"  # the name of the thread of failure_detector.py
SECOND_SIGTERM = "SIGTERM again: ended at once. Start a named run again to resume it."


@contextlib.contextmanager
def signal_handler(number: int, on_signal: Callable[[], None]) -> Iterator[None]:
    """Call `on_signal` in a separate thread at every signal of this number inside the `with`.

    Python runs signal handlers in the main thread between two bytecodes. A handler would therefore
    wait for a compilation or for devices, and a KeyboardInterrupt could surface as any traceback.
    The C handler writes to the wakeup file descriptor at once, and the thread reads from it.

    Contexts nest: for each signal, the innermost one is called. Nothing changes outside the main
    thread, or if the signal is ignored, as SIGINT is in a script's background job.

    Args:
      number: number of the signal.
      on_signal: called without arguments, one call at a time.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(number) is signal.SIG_IGN:
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    outer = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    thread = threading.Thread(
        target=_listen,
        args=(reading, number, on_signal, outer),
        name="maxdiloco-signal",
        daemon=True,
    )
    thread.start()
    # signal() returns None for a handler that Python has not installed and cannot restore.
    handler = signal.signal(number, _do_nothing) or signal.SIG_DFL
    try:
        yield
    finally:
        signal.set_wakeup_fd(outer, warn_on_full_buffer=False)
        os.close(writing)
        thread.join()
        os.close(reading)
        # Restored last, because with the default handler a signal during the join ends the process.
        signal.signal(number, handler)


def quit_now(line: str = "Interrupted.", code: int = INTERRUPTED) -> None:
    """End the process at once with a line and an exit code; an unfinished save is discarded."""
    last_words(line)
    os._exit(code)


def _listen(reading: int, number: int, on_signal: Callable[[], None], outer: int) -> None:
    while byte := os.read(reading, 1):  # b"" at the end of the context
        if byte[0] == number:
            on_signal()
        elif outer != -1:
            with contextlib.suppress(BlockingIOError):  # the pipe is full of signals
                os.write(outer, byte)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Handle a signal without an effect, to prevent KeyboardInterrupt and the end by SIGTERM."""


class _Presses:
    """Counts the presses of a signal, each of which may arrive twice. For one thread."""

    _first_s: float | None = None

    def count(self) -> int:
        """Return 1 for the first press, 0 within SAME_PRESS_S of it, and 2 for any other."""
        now = time.monotonic()
        if self._first_s is None:
            self._first_s = now
            return 1
        return 0 if now - self._first_s < SAME_PRESS_S else 2


@contextlib.contextmanager
def exit_on_second_sigterm() -> Iterator[None]:
    """Leave the first SIGTERM to JAX's preemption service, and end the process at the second one.

    Enter it in the main thread after jax.distributed.initialize. JAX's C handler of SIGTERM only
    sets a flag for the next step, so a process that compiles or waits would not end. If JAX has
    not installed its handler, nothing changes.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal.restype = ctypes.c_void_p
    theirs = libc.signal(signal.SIGTERM, signal.SIG_IGN)
    if theirs in (None, int(signal.SIG_IGN)):  # None: the default handler
        libc.signal(signal.SIGTERM, theirs)
        yield
        return
    take_note = ctypes.CFUNCTYPE(None, ctypes.c_int)(theirs)  # it sets a flag
    presses = _Presses()

    def on_sigterm() -> None:
        match presses.count():
            case 1:
                take_note(signal.SIGTERM)
            case 2:
                quit_now(SECOND_SIGTERM, Preempted.exit_code)

    try:
        with signal_handler(signal.SIGTERM, on_sigterm):
            yield
    finally:
        libc.signal(signal.SIGTERM, theirs)


class Preemption:
    """Detects a request to stop by SIGTERM, SIGHUP or Ctrl-C, at the same step in all processes.

    A context manager, entered in the main thread after jax.distributed.initialize. In a run of one
    process a signal sets a flag. In a run of several processes, JAX's preemption service handles
    SIGTERM and chooses a step that no process has passed. SIGHUP and Ctrl-C are converted to
    SIGTERM. SIGHUP has no effect if it is ignored, as under nohup. A second Ctrl-C or SIGTERM ends
    the process at once (in a run of several processes, by exit_on_second_sigterm).

    Attributes:
      by_ctrl_c: whether the first signal to this process was Ctrl-C.
    """

    def __init__(self, report: Callable[[str], None]):
        """Create the object; handlers are installed on entry.

        Args:
          report: called with one line for the user at the first Ctrl-C.
        """
        import jax

        self._report = report
        self._several = jax.process_count() > 1
        self._requested = False
        self._ctrl_c, self._sigterm = _Presses(), _Presses()
        self.by_ctrl_c = False
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Preemption":
        """Install the handlers."""
        self._stack.enter_context(signal_handler(signal.SIGINT, self._on_ctrl_c))
        if not self._several:
            self._stack.enter_context(signal_handler(signal.SIGTERM, self._on_sigterm))
            self._handle(signal.SIGTERM)  # sets the flag sooner if Python runs
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            self._handle(signal.SIGHUP)
        return self

    def __exit__(self, kind, exception, traceback) -> None:
        """Restore the earlier handlers."""
        self._stack.close()

    def requested(self, step: int) -> bool:
        """Return whether to save and exit after this step; the result is equal in all processes."""
        if self._several:
            from jax.experimental import multihost_utils

            return multihost_utils.reached_preemption_sync_point(step)
        return self._requested

    def _handle(self, number: signal.Signals) -> None:
        # signal() returns None for a handler that Python has not installed and cannot restore.
        before = signal.signal(number, lambda number, frame: self._request_stop()) or signal.SIG_DFL
        self._stack.callback(signal.signal, number, before)

    # Called in the threads of `signal_handler`, one call at a time.

    def _on_sigterm(self) -> None:
        if self._sigterm.count() == 2:
            quit_now(SECOND_SIGTERM, Preempted.exit_code)

    def _on_ctrl_c(self) -> None:
        count = self._ctrl_c.count()
        if count == 2:
            quit_now()
        if count != 1:
            return
        self.by_ctrl_c = not self._requested
        self._report("Ctrl-C: stopping after this step; press it again to quit now.")
        self._request_stop()

    def _request_stop(self) -> None:
        requested, self._requested = self._requested, True
        if self._several and not requested:  # another SIGTERM would end the process
            os.kill(os.getpid(), signal.SIGTERM)
