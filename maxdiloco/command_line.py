"""How every program of the package ends: one line and an exit code for what a user can act on."""

import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from maxdiloco import output
from maxdiloco.errors import USER_ERRORS
from maxdiloco.signals import INTERRUPTED, hearing_ctrl_c, quit_now

HELP = ("-h", "--help", "help")


def guarded(program: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """Run a program and turn its user-facing errors into one line on stderr and an exit code."""
    try:
        return program(argv)
    except USER_ERRORS as error:
        output.say_error(output.one_line(f"{type(error).__name__}: {error}"))
        return error.exit_code
    except KeyboardInterrupt:
        output.say_error("Interrupted.")
        return INTERRUPTED


def end_with(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Run `main` as this process's program and exit with its code.

    Ctrl-C ends it at any moment with one line and 130, unless `main` hears it itself.
    """
    output.fill_closed_streams()
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        # While Python ends, after the context below: no KeyboardInterrupt in its own clean-up.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    with hearing_ctrl_c(quit_now):
        code = main(sys.argv[1:])
    output.finish()
    sys.exit(code)
