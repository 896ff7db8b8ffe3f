"""Types of the keys' values: convert text to values, write values, and describe expected values.

pydantic converts text from a file, the environment or the command line (strict=False). A value of a
stored configuration must already have its type (strict=True). Cross-key checks follow later.
"""

import dataclasses
import decimal
import re
import types
import typing
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen, MultipleOf
from pydantic import AfterValidator, BeforeValidator, Strict, WrapValidator

from maxdiloco.config import files

LARGEST = 2**31 - 1  # of int32, the type of sizes and counts in JAX
MAX_SHOWN = 200  # characters of a value in a message


@dataclasses.dataclass(frozen=True)
class Words:
    """Annotates a type with the description of its values in messages."""

    text: str


def _without_exponent(value: Any) -> Any:
    """Rewrite a number such as 1e3 or 12., which pydantic does not read as an integer."""
    is_number = isinstance(value, str) and re.fullmatch(r"\d+\.?\d*([eE]\+?\d)?", value)
    return f"{decimal.Decimal(value):f}" if is_number else value


def _nested(value: Any) -> Any:
    """Parse a list or a table on the command line, such as [gelu]; keep other values."""
    return files.parse_nested(value) if isinstance(value, str) else value


def _as_table(value: Any, handler: Any) -> Any:
    """Validate a table as its model, and keep the entries that are not at their default."""
    value = _nested(value)
    return handler(value).model_dump(exclude_defaults=True) if value != {} else {}


def matching(pattern: str, words: str) -> AfterValidator:
    """Return a validator of text that matches a regular expression, which `words` describe."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text, re.DOTALL):
            raise ValueError(f"expected {words}")
        return text

    return AfterValidator(check)


LIST = Strict(False)  # a JSON list is accepted as a tuple
NESTED, TABLE = BeforeValidator(_nested), WrapValidator(_as_table)

# Last in a type, since pydantic applies the limits before it to the integer itself.
INTEGER = BeforeValidator(_without_exponent)
Count = Annotated[int, Ge(1), Le(LARGEST), INTEGER]
Natural = Annotated[int, Ge(0), Le(LARGEST), INTEGER]
AtLeastTwo = Annotated[int, Ge(2), Le(LARGEST), INTEGER]
Even = Annotated[int, Ge(2), Le(LARGEST), MultipleOf(2), INTEGER]
Seed = Annotated[int, Ge(0), Le(2**32 - 1), INTEGER]
MinusOne = Annotated[int, Ge(-1), Le(-1), Words("-1"), INTEGER]
MinusOneFloat = Annotated[float, Ge(-1), Le(-1), Words("-1")]
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]
ShareBelowOne = Annotated[float, Ge(0), Lt(1)]
Auto = Literal["auto"]
TextPath = Annotated[
    str,
    matching(
        r"(?![A-Za-z][A-Za-z0-9+.-]*://).*|(gs|s3|az|https)://[A-Za-z0-9].*",
        "a path that is mounted on every host, https:// with one file, or gs://, s3:// or az:// "
        "with a bucket and a path or glob",
    ),
]


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


def shorten(value: Any, length: int = MAX_SHOWN) -> str:
    """Return a value as it is written in a file, cut to a length that fits a message."""
    text = show(value)
    return text if len(text) <= length else f"{text[:length]}..."


def element(annotation: Any) -> Any:
    """Return the type of a value, or of the entries of a list, without limits."""
    is_nested = typing.get_origin(annotation) in (Annotated, tuple)
    return element(typing.get_args(annotation)[0]) if is_nested else annotation


def choices(annotation: Any) -> tuple[str, ...]:
    """Return the words that a type, or a list of it, accepts; empty if it accepts other values."""
    kind = element(annotation)
    return tuple(map(str, typing.get_args(kind))) if typing.get_origin(kind) is Literal else ()


_WORDS = {
    bool: "true or false",
    str: "text",
    int: "an integer",
    float: "a number",
    type(None): "null",
}
_SIGNS = {
    Ge: ">=",
    MinLen: ">=",
    Gt: ">",
    Le: "<=",
    MaxLen: "<=",
    Lt: "<",
    MultipleOf: "a multiple of",
}


def expected(annotation: Any, metadata: Sequence[Any] = (), *, brief: bool = False) -> str:
    """Describe the values of a type, such as `an integer >= 1`.

    Args:
      annotation: the type.
      metadata: limits of the values.
      brief: whether to name only limits and choices, such as `>= 1`, for a line about the key.
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return expected(arguments[0], (*arguments[1:], *metadata), brief=brief)
    for words in metadata:
        if isinstance(words, Words):
            return words.text
    if origin in (typing.Union, types.UnionType):
        parts = [expected(one, brief=brief) for one in reversed(arguments)]
        return " or ".join(part for part in parts if part)
    names = ", ".join(name or '""' for name in choices(annotation))
    if origin is Literal:
        return f"one of {names}" if len(arguments) > 1 else names
    limit = " and ".join(
        f"{_SIGNS[type(one)]} {dataclasses.astuple(one)[0]}"
        for one in metadata
        if type(one) in _SIGNS and not (brief and one == Le(LARGEST))
    )
    if origin is tuple:
        kind = "" if brief else "a list [...]"
        parts = (kind, f"of {names}" if names else "", f"({limit} entries)" if limit else "")
        return " ".join(filter(None, parts))
    kind = "" if brief else _WORDS.get(annotation, "a table {...}")
    return f"{kind} {limit}".strip()
