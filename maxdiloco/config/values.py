"""Types of the keys' values: convert text to values, write values, and describe expected values.

Values are validated strictly. Text from a file, the environment or the command line is converted
first, and only in the context TEXT. A value of a stored configuration must already have its type.
"""

import dataclasses
import decimal
import math
import re
import types
import typing
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BeforeValidator, ValidationInfo, WrapValidator

from maxdiloco.config import files

LARGEST = 2**31 - 1  # of int32, the type of sizes and counts in JAX
MAX_SEED = 2**32 - 1
MAX_DIGITS = 20  # most digits of a whole number; no key needs more, and Python refuses 4,301
MAX_SHOWN = 200  # characters of a value in a message
# Contexts of a validation. Cross-key rules run only without a context.
TEXT = "text"  # values are text, or nested tuples and dicts of text
STORED = "stored"  # values have their types

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_NUMBER = re.compile(r"[+-]?([0-9][0-9_]*\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,9})?")


def _parser(parse: Any) -> BeforeValidator:
    """Return a validator that applies `parse` to text in the context TEXT."""

    def validate(value: Any, info: ValidationInfo) -> Any:
        return parse(value) if info.context == TEXT and isinstance(value, str) else value

    return BeforeValidator(validate)


def _boolean(text: str) -> bool | str:
    if text.lower() in _TRUE:
        return True
    return False if text.lower() in _FALSE else text


def _number(text: str) -> float | str:
    if not _NUMBER.fullmatch(text):
        return text
    number = float(text.replace("_", ""))
    return number if math.isfinite(number) else text


def _integer(text: str) -> int | str:
    """Read a whole number, also written as 1e3 or 12.0. Other text is returned as it is."""
    if not _NUMBER.fullmatch(text):
        return text
    number = decimal.Decimal(text.replace("_", ""))
    if number and not 0 <= number.adjusted() < MAX_DIGITS:
        return text
    return int(number) if number == number.to_integral_value() else text


def _nested(text: str) -> Any:
    parsed = files.parse_nested(text)
    return text if parsed is None else parsed


def _text_or_table(text: str) -> Any:
    parsed = files.parse_nested(text)
    return parsed if isinstance(parsed, dict) else text


def _as_table(value: Any, handler: Any, info: ValidationInfo) -> Any:
    """Validate a table as its model, and keep the entries that are not at their default."""
    if info.context == TEXT and isinstance(value, str):
        value = _nested(value)
    return handler(value).model_dump(exclude_defaults=True) if value != {} else {}


NESTED, TEXT_OR_TABLE = _parser(_nested), _parser(_text_or_table)
TABLE = WrapValidator(_as_table)

# pydantic applies metadata from the last to the first before the type itself.
INTEGER, NUMBER = _parser(_integer), _parser(_number)
Bool = Annotated[bool, _parser(_boolean)]
Count = Annotated[int, Ge(1), Le(LARGEST), INTEGER]
Natural = Annotated[int, Ge(0), Le(LARGEST), INTEGER]
AtLeastTwo = Annotated[int, Ge(2), Le(LARGEST), INTEGER]
MinusOne = Annotated[Literal[-1], INTEGER]
Auto = Literal["auto"]
Seed = Annotated[int, Ge(0), Le(MAX_SEED), INTEGER]
Float = Annotated[float, NUMBER]
Positive = Annotated[float, Gt(0), NUMBER]
NonNegative = Annotated[float, Ge(0), NUMBER]
Share = Annotated[float, Ge(0), Le(1), NUMBER]
ShareBelowOne = Annotated[float, Ge(0), Lt(1), NUMBER]
MinusOneFloat = Annotated[float, Ge(-1), Le(-1), NUMBER]


@dataclasses.dataclass(frozen=True)
class Words:
    """Annotates a type with the description of its values in messages."""

    text: str


def frozen(value: Any) -> Any:
    """Return a value with tuples instead of lists, as in a Config."""
    if isinstance(value, dict):
        return {name: frozen(entry) for name, entry in value.items()}
    return tuple(frozen(entry) for entry in value) if isinstance(value, list | tuple) else value


def as_json(value: Any) -> Any:
    """Return a value as it is after a round trip through JSON: with lists instead of tuples."""
    if isinstance(value, dict):
        return {name: as_json(entry) for name, entry in value.items()}
    return [as_json(entry) for entry in value] if isinstance(value, list | tuple) else value


def show(value: Any) -> str:
    """Return a value as it is written on the command line and in a file."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {show(entry)}' for name, entry in value.items())}}}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(show(entry) for entry in value)}]"
    return str(value)


def infer(text: Any) -> Any:
    """Convert text of a stored config to the type that it looks like; other values are unchanged.

    Raises:
      ValueError: a whole number has more digits than Python accepts.
    """
    if not isinstance(text, str):
        return text
    if text in ("true", "false"):
        return text == "true"
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    return float(text) if re.fullmatch(r"-?\d+(\.\d*)?(e-?\d+)?", text) else text


def shorten(value: Any) -> str:
    """Return a value as it is written in a file, cut to a length that fits a message."""
    text = show(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def choices(annotation: Any) -> tuple[str, ...]:
    """Return the words that a type, or a list of it, accepts; empty if it accepts other values."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return tuple(map(str, arguments))
    if origin is Annotated or origin is tuple:
        return choices(arguments[0])
    return ()


def expected(annotation: Any, metadata: Sequence[Any] = (), *, brief: bool = False) -> str:
    """Describe the values of a type, such as `an integer >= 1`.

    Args:
      annotation: the type.
      metadata: limits of the values.
      brief: whether to name only limits and choices, such as `>= 1`, for a line about the key.
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    for words in metadata:
        if isinstance(words, Words):
            return words.text
    if origin is Annotated:
        return expected(arguments[0], (*arguments[1:], *metadata), brief=brief)
    if origin in (typing.Union, types.UnionType):
        parts = [expected(one, brief=brief) for one in reversed(arguments)]
        return " or ".join(part for part in parts if part)
    if origin is Literal:
        names = [str(name) or '""' for name in arguments]
        return f"one of {', '.join(names)}" if len(names) > 1 else names[0]
    if origin is tuple:
        names = choices(annotation)
        if brief:
            return f"of {', '.join(names)}" if names else ""
        return f"a list [...] of {', '.join(names)}" if names else "a list [...]"
    if annotation in (int, float):
        limits = _limits(metadata, brief=brief)
        kind = "an integer" if annotation is int else "a number"
        is_one_value = limits.removeprefix("-").isdigit()  # such as -1
        return limits if brief or is_one_value else f"{kind} {limits}".rstrip()
    if brief:
        return ""
    return {bool: "true or false", str: "text", type(None): "null"}.get(annotation, "a table {...}")


def _limits(metadata: Sequence[Any], *, brief: bool) -> str:
    bounds = {}
    for limit in metadata:
        match limit:
            case Ge(bound) | Gt(bound) | Le(bound) | Lt(bound):
                bounds[type(limit)] = bound
    lower, below = bounds.get(Ge), bounds.get(Lt)
    upper = None if brief and bounds.get(Le) == LARGEST else bounds.get(Le)
    start = "" if brief else "from "
    if Gt in bounds:
        return f"> {bounds[Gt]}"
    if lower is None:
        return ""
    if below is not None:
        return f"{start}{lower} to below {below}"
    if upper is None:
        return f">= {lower}"
    return f"{start}{lower} to {upper}" if lower != upper else f"{lower}"
