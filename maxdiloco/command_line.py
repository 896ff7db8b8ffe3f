"""How every program of the package ends: one line and an exit code for what a user can act on."""

import sys
from collections.abc import Callable, Sequence

from maxdiloco.errors import USER_ERRORS

INTERRUPTED = 130


def guarded(program: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """Run a program and turn its user-facing errors into one line on stderr and an exit code."""
    try:
        return program(argv)
    except USER_ERRORS as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr, flush=True)
        return INTERRUPTED
