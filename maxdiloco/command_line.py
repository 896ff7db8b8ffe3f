"""Common parts of all programs: options, and errors as one line with an exit code."""

import contextlib
import functools
import math
import os
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

from maxdiloco import output
from maxdiloco.cluster.signals import DETECTOR, quit_now, signal_handler
from maxdiloco.errors import CRASHED, INTERRUPTED, USER_ERRORS, ConfigError, Preempted
from maxdiloco.version import __version__

HELP = ("-h", "--help", "help")
VERSION = "--version"
LEAVE_S = 5.0  # time after which an ending program abandons its remaining threads [s]
Program = Callable[[Sequence[str]], int]  # arguments -> exit code


class Option(NamedTuple):
    """An option of a program, written name=value.

    Attributes:
      default: the default value.
      meaning: description for --help.
      kind: str, int, float or bool.
      least: the smallest int; a float must be greater.
      most: the largest int.
    """

    default: Any
    meaning: str
    kind: type = str
    least: float | None = None
    most: int = 2**63 - 1


def read_options(
    arguments: Sequence[str],
    options: Mapping[str, Option],
    program: str,
    *,
    names: bool = False,
    keys: bool = False,
) -> tuple[SimpleNamespace, list[str]]:
    """Separate the options of a program from its other arguments.

    Args:
      arguments: the command line without the program.
      options: {name: option}.
      program: name of the program, for messages.
      names: whether other arguments without `=` are accepted.
      keys: whether any other arguments are accepted, such as keys of base.yml.

    Returns:
      The value of every option, as attributes, and the other arguments.

    Raises:
      ConfigError: an argument is not accepted, an option is repeated, or a value is invalid.
    """
    given, others = {}, []
    for argument in arguments:
        name, equals, raw = argument.partition("=")
        name = name.lstrip("-")
        if not equals or name not in options:
            if not keys and (equals or not names):
                known = f"Use key=value with one of {', '.join(options)}."
                use = known if options else "Leave it out: the program has no options."
                raise ConfigError(f"{argument} is not an option of {program}. {use}")
            others.append(argument)
        elif name in given:
            raise ConfigError(f"{argument}: {name} is given twice. Give it once.")
        else:
            given[name] = _value(name, options[name], raw)
    defaults = {name: option.default for name, option in options.items()}
    return SimpleNamespace(**defaults | given), others


def _value(name: str, option: Option, raw: str) -> Any:
    kind, whole = option.kind, option.kind is int
    if kind is str:
        return raw
    try:
        value = {"true": True, "false": False}[raw.lower()] if kind is bool else kind(raw)
    except (KeyError, ValueError):
        value = math.nan
    least = -math.inf if option.least is None else option.least
    if least <= value <= option.most if whole else least < value < math.inf:
        return value
    expected = {bool: "true or false", int: "an integer", float: "a number"}[kind]
    if option.least is not None:
        expected += f" {'>=' if whole else '>'} {least}"
    if whole and value > option.most:
        expected += f" <= {option.most}" if option.least is None else f" and <= {option.most}"
    raise ConfigError(f"{name}={raw}: expected {expected} ({option.meaning}).")


def option_lines(options: Mapping[str, Option]) -> list[str]:
    """Return lines for --help: each option with its default, in at most 100 columns."""
    return [
        textwrap.fill(
            f"{name}={'' if option.default is None else repr(option.default)}  {option.meaning}",
            100,
            initial_indent="  ",
            subsequent_indent=" " * 6,
        )
        for name, option in options.items()
    ]


def guarded(program: Program) -> Callable[..., int]:
    """Decorate a program: USER_ERRORS become one line on stderr and an exit code.

    With --version anywhere on the command line, only the version is printed. If the result is
    called without arguments, it runs as the program of this process; see end_with.
    """

    @functools.wraps(program)
    def main(argv: Sequence[str] | None = None) -> int:
        if argv is None:
            end_with(main)
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

    Ctrl-C ends it at any moment with one line and exit code 130, unless `main` handles Ctrl-C. In
    process 1 of a container, SIGTERM ends it with 143: Linux ignores signals for which process 1
    has no handler.
    """
    output.fill_closed_streams()
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        # Used after the context below, so that Python's clean-up raises no KeyboardInterrupt.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    code = CRASHED
    try:
        with contextlib.ExitStack() as handlers:
            handlers.enter_context(signal_handler(signal.SIGINT, quit_now))
            if os.getpid() == 1:
                handlers.enter_context(signal_handler(signal.SIGTERM, _terminated))
            code = main(sys.argv[1:])
    finally:
        if code == INTERRUPTED:  # another Ctrl-C must not change the exit code
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        output.finish()
        # In a run of several processes the failure detector ends the process, and may wait longer.
        if all(thread.name != DETECTOR for thread in threading.enumerate()):
            # Python joins its threads first. After a save that failed on a disk error, Orbax's
            # threads wait for each other for minutes.
            leave = threading.Timer(LEAVE_S, os._exit, (code,))
            leave.daemon = True
            leave.start()
    sys.exit(code)


def _terminated() -> None:
    quit_now("Terminated.", Preempted.exit_code)
