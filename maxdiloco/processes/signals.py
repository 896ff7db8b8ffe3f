"""Ctrl-C and SIGTERM that act at once, also while the main thread waits inside native code."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from maxdiloco.errors import INTERRUPTED
from maxdiloco.processes.output import finish, say_error


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
    """End the process at once, whatever its threads do: one line and an exit code.

    Checkpoints on disk stay whole; a save under way leaves none, as after any kill.
    """
    say_error(line)
    finish()
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
