"""A benchmark's command line: its help, errors in one line, and an end that removes the hosts."""

import signal
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import yaml

from benchmarks.link.rows import ROOT, RowError
from maxdiloco.errors import ConfigError


def help_text(doc: str | None, names: Mapping[str, Any], *more: str) -> str:
    """Text of --help: the module's docstring, its arguments with their defaults, more lines."""
    return "\n".join([doc or "", *(f"  {name}={value}" for name, value in names.items()), *more])


def split_arguments(
    argv: Sequence[str], options: Mapping[str, str], chosen: Collection[str] = ()
) -> tuple[dict[str, str], dict[str, str]]:
    """A benchmark's own arguments, with their defaults, and the trainer's keys among name=value.

    chosen: keys that the benchmark sets for every row. Raises ConfigError.
    """
    given = dict(argument.partition("=")[::2] for argument in argv)
    known = yaml.safe_load((ROOT / "configs" / "base.yml").read_text(encoding="utf-8"))
    for name in given:
        if name in chosen or name not in {*options, *known}:
            why = "chosen for every row" if name in chosen else "no key"
            raise ConfigError(
                f"{name}={given[name]}: {name} is {why}. Use {', '.join(options)}, or another key "
                f"of configs/base.yml."
            )
    mine = dict(options) | {name: value for name, value in given.items() if name in options}
    return mine, {name: value for name, value in given.items() if name not in options}


def without_keys(argv: Sequence[str], options: Mapping[str, str]) -> dict[str, str]:
    """The arguments of a benchmark that trains nothing, with their defaults. Raises ConfigError."""
    mine, keys = split_arguments(argv, options)
    if keys:
        raise ConfigError(f"{', '.join(keys)}: nothing is trained. Use {', '.join(options)}.")
    return mine


def number(name: str, options: Mapping[str, str], kind: type = int, *, least: float = 1) -> Any:
    """A number among a benchmark's own arguments. Raises ConfigError."""
    try:
        value = kind(options[name])
    except ValueError:
        value = None
    if value is None or not least <= value < float("inf"):
        words = "an integer" if kind is int else "a number"
        raise ConfigError(f"{name}={options[name]}: expected {words} >= {least:g}.")
    return value


def numbers(name: str, options: Mapping[str, str]) -> list[float]:
    """The numbers of a list, 0 or more, among a benchmark's own arguments. Raises ConfigError."""
    return [number(name, {name: each}, float, least=0) for each in options[name].split(",")]


def choices(
    name: str, options: Mapping[str, str], offered: Sequence[str], *, separator: str = ","
) -> list[str]:
    """The values of a list among a benchmark's own arguments; all that are offered for `all`.

    Raises ConfigError.
    """
    chosen = list(offered) if options[name] == "all" else options[name].split(separator)
    chosen = [value.strip() for value in chosen]
    for value in chosen:
        if value not in offered:
            raise ConfigError(
                f"{name}={options[name]}: {value!r} is unknown. Use all, or some of "
                f"{separator.join(offered)}."
            )
    return list(dict.fromkeys(chosen))


def guarded(
    run: Callable[[Sequence[str]], int],
    argv: Sequence[str],
    *,
    usage: str,
    interrupted: str = "Interrupted.",
) -> int:
    """Return the exit code of run(argv). usage: text of --help. interrupted: text after Ctrl-C."""
    if any(argument in ("-h", "--help") for argument in argv):
        print(usage)
        return 0
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
