"""One value of a key: from the text of a file, the environment or the command line to its type."""

import decimal
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from maxdiloco.errors import ConfigError
from maxdiloco.flags import base_yml
from maxdiloco.flags.base_yml import Key, Table, Value, show

MOST_DIGITS = 20  # of a whole number; more are no limit of any key, and Python refuses 4,301
MOST_SHOWN = 200  # characters of a value in a message

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_NUMBER = r"[+-]?([0-9][0-9_]*\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,9})?"
_NULL = "null"
# Defaults that mean "none" or "choose": null is another word for them.
_UNSET = ("", (), Table(), -1)
_TEXT_OR_TABLE = ("eval_dataset_path",)  # their default is text
_TYPES = {bool: "bool", int: "int", float: "float", str: "text", tuple: "list", Table: "table"}


class Given(NamedTuple):
    """A value as it was written, and where."""

    raw: Any
    where: str


def convert(key: Key, given: Given) -> Value:
    """Text (or nested tuples of text, from a file) as a value of the key's type.

    Raises ConfigError for a value of another type.
    """
    raw = given.raw
    if raw == _NULL and key.default in _UNSET:
        return key.default
    or_text = key.name in _TEXT_OR_TABLE
    if isinstance(key.default, tuple) or or_text:
        value = (
            base_yml.parse_list(raw, f"{key.name}={shown(raw)}") if isinstance(raw, str) else raw
        )
        if type(value) is (Table if or_text else type(key.default)):
            return _entries(key, value, given, convert) if key.entries else value
        if not or_text:
            raise _wrong(key, given, f"is not a {_TYPES[type(key.default)]}")
    if isinstance(raw, Table):
        raise _wrong(key, given, "is a table, but keys are not nested")
    if not isinstance(raw, str):
        raise _wrong(key, given, "is a list")
    if isinstance(key.default, bool):
        if raw.lower() not in _TRUE + _FALSE:
            raise _wrong(key, given, "is neither true nor false")
        return raw.lower() in _TRUE
    return _number(key, given) if isinstance(key.default, int | float) else raw


def _number(key: Key, given: Given) -> int | float:
    """A number; a whole one may be written as 1e3 or 12.0 too."""
    is_whole = isinstance(key.default, int)
    problem = "is not a whole number" if is_whole else "is not a number"
    if not re.fullmatch(_NUMBER, given.raw):
        raise _wrong(key, given, problem)
    number = decimal.Decimal(given.raw.replace("_", ""))
    if (number and number.adjusted() >= MOST_DIGITS) if is_whole else math.isinf(float(number)):
        raise _wrong(key, given, "is too large")
    if is_whole and number and (number.adjusted() < 0 or number != number.to_integral_value()):
        raise _wrong(key, given, problem)
    return int(number) if is_whole else float(number)


def same_type(key: Key, given: Given) -> Value:
    """A value of a stored config, as JSON gives it back, frozen. Raises ConfigError."""
    value = _frozen(given.raw)
    if isinstance(key.default, float) and type(value) is int:
        value = float(value)
    takes_table = key.name in _TEXT_OR_TABLE and isinstance(value, Table)
    if type(value) is not type(key.default) and not takes_table:
        raise _wrong(key, given, f"is not of type {_TYPES[type(key.default)]}")
    if not key.entries and not _is_of_text(value):
        raise _wrong(key, given, "holds what is not text")
    return _entries(key, value, given, same_type) if key.entries else value


def _entries(key: Key, table: Table, given: Given, read: Callable[[Key, Given], Value]) -> Table:
    """The entries of a table in base.yml's order, without those at their default."""
    values = {}
    for name, raw in table:
        if name not in key.entries:
            raise ConfigError(
                f"{key.name}={shown(given.raw)} ({given.where}): {name} is no entry. Use "
                f"{', '.join(key.entries)}."
            )
        values[name] = read(key.entries[name], Given(raw, given.where))
    return Table(
        (name, values[name])
        for name, entry in key.entries.items()
        if name in values and (entry.required or values[name] != entry.default)
    )


def _is_of_text(value: Any) -> bool:
    """Whether all that a list or table holds is text, as in one from the command line."""
    if isinstance(value, Table):
        value = tuple(entry for _, entry in value)
    if not isinstance(value, tuple):
        return True
    return all(_is_of_text(x) if isinstance(x, tuple) else isinstance(x, str) for x in value)


def shown(raw: Any) -> str:
    """A value as it was written, for a message."""
    text = show(_frozen(raw))
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def _wrong(key: Key, given: Given, why: str) -> ConfigError:
    return ConfigError(
        f"{key.name}={shown(given.raw)} ({given.where}) {why}. Write it like "
        f"{'' if key.required else 'the default, '}{key.name}={show(key.default)}."
    )


def _frozen(value: Any) -> Any:
    if isinstance(value, Table | dict):
        pairs = value.items() if isinstance(value, dict) else value
        return Table((name, _frozen(entry)) for name, entry in pairs)
    return tuple(_frozen(entry) for entry in value) if isinstance(value, list | tuple) else value
