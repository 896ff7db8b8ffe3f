"""How every program ends: one line and an exit code for an error the user can act on."""

import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn

from maxdiloco.errors import CRASHED, INTERRUPTED, USER_ERRORS
from maxdiloco.processes import output
from maxdiloco.processes.signals import hearing, quit_now
from maxdiloco.version import __version__

HELP = ("-h", "--help", "help")
VERSION = "--version"
LEAVE_S = 5.0  # until threads that are left are abandoned; our choice


Program = Callable[[Sequence[str]], int]  # arguments -> exit code


def guarded(program: Program) -> Program:
    """Decorator: errors the user can act on become one line on stderr and an exit code.

    --version anywhere on the command line prints the version, and the program does not run.
    """

    @functools.wraps(program)
    def main(argv: Sequence[str]) -> int:
        if VERSION in argv:
            output.say(f"maxdiloco {__version__}")
            return 0
        try:
            return program(argv)
        except USER_ERRORS as error:
            output.say_error(output.one_line(f"{type(error).__name__}: {error}"))
            return error.exit_code
        except KeyboardInterrupt:
            output.say_error("Interrupted.")
            return INTERRUPTED

    return main


def end_with(main: Program) -> NoReturn:
    """Run `main` as this process's program and exit with its code.

    Ctrl-C ends it at any moment with one line and 130, unless `main` handles it.
    """
    output.fill_closed_streams()
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        # For the time after the context below: no KeyboardInterrupt in Python's own clean-up.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    code = CRASHED
    try:
        with hearing(signal.SIGINT, quit_now):
            code = main(sys.argv[1:])
    finally:
        if code == INTERRUPTED:  # it is ending already: another Ctrl-C must not change the code
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        output.finish()
        _leave_threads_behind(code)
    sys.exit(code)


def _leave_threads_behind(code: int) -> None:
    """End the process within LEAVE_S, whatever its other threads do.

    Python joins them first, and after a save that a disk has refused those of Orbax wait for each
    other for minutes. One of several processes is ended by its watch, which may wait for peers.
    """
    from maxdiloco.processes import watch

    if any(thread.name == watch.THREAD for thread in threading.enumerate()):
        return
    timer = threading.Timer(LEAVE_S, os._exit, (code,))
    timer.daemon = True
    timer.start()
