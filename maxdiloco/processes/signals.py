"""Ctrl-C that acts at once, also while the main thread waits inside native code."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from maxdiloco.errors import INTERRUPTED
from maxdiloco.processes.output import finish, say_error


@contextlib.contextmanager
def hearing_ctrl_c(heard: Callable[[], None]) -> Iterator[None]:
    """Call `heard` in a thread of its own at every SIGINT inside the `with`.

    Python runs signal handlers in the main thread between two bytecodes: after a compilation or
    a wait for devices is over, and in code that may turn a KeyboardInterrupt into any traceback.
    The C handler itself writes the wakeup file descriptor, which the thread reads. Contexts nest:
    the innermost one is called. Outside the main thread, and where SIGINT is ignored as in a
    script's background job, nothing changes.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    thread = threading.Thread(
        target=_listen, args=(reading, heard), name="maxdiloco-ctrl-c", daemon=True
    )
    thread.start()
    outer = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    # None: a handler that Python has not installed and cannot restore.
    handler = signal.signal(signal.SIGINT, _heard_elsewhere) or signal.SIG_DFL
    try:
        yield
    finally:
        signal.set_wakeup_fd(outer, warn_on_full_buffer=False)
        os.close(writing)
        thread.join()
        os.close(reading)
        # Last: with the default one, which ends the process, a signal must not meet the join.
        signal.signal(signal.SIGINT, handler)


def quit_now() -> None:
    """End the process at once, whatever its threads do: one line and exit code 130.

    Checkpoints on disk stay whole; a save under way leaves none, as after any kill.
    """
    say_error("Interrupted.")
    finish()
    os._exit(INTERRUPTED)


def _listen(reading: int, heard: Callable[[], None]) -> None:
    while number := os.read(reading, 1):  # b"": the context has ended
        if number[0] == signal.SIGINT:
            heard()


def _heard_elsewhere(number: int, frame: FrameType | None) -> None:
    """The handler of SIGINT: it keeps KeyboardInterrupt away."""
