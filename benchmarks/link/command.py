"""A benchmark's command line: errors in one line, and an end that removes the hosts."""

import signal
import sys
from collections.abc import Callable, Sequence

from benchmarks.link.rows import RowError
from maxdiloco.errors import ConfigError


def guarded(
    run: Callable[[Sequence[str]], int], argv: Sequence[str], *, interrupted: str = "Interrupted."
) -> int:
    """The exit code of run(argv). interrupted: what is printed after Ctrl-C."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)  # an exception, so that the hosts are removed
    try:
        return run(argv)
    except ConfigError as error:
        print(f"ConfigError: {error}", file=sys.stderr)
        return error.exit_code
    except RowError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return 128 + signal.SIGINT


def _end(number: int, _) -> None:
    raise SystemExit(128 + number)
