"""What every source gives: spans of its files, and the texts of a span."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from maxdiloco.errors import DataError

# The longest piece of a text file that is tokenised at once [bytes]; our choice: a tokenizer needs
# some 30 times that while it works, and a cut every million bytes changes next to no token.
PIECE = 1 << 20


class Span(NamedTuple):
    """A part of one file that is read on its own."""

    file: int  # index into the source's names
    begin: int  # [bytes] of the file, or rows of a hub's data
    end: int
    size: int  # about how many bytes will be read


class Text(NamedTuple):
    """A document, or a piece of one: begins and ends say where its first and last piece are."""

    text: str
    begins: bool = True
    ends: bool = True


# Called for a record that cannot be read: the file and place in it, and why.
Skip = Callable[[str, str], None]


def skip(damaged: list[list[str]], allowed: int, where: str, why: str) -> None:
    """Add a damaged record to others: a Skip of the first two. Raises DataError (check_damage)."""
    damaged.append([where, why])
    check_damage(damaged, allowed)


def check_damage(damaged: Sequence[Sequence[str]], allowed: int) -> None:
    """Raise DataError for more damaged records than max_corrupted_records allows."""
    if len(damaged) > allowed:
        where, why = damaged[-1]
        why = why.removeprefix(f"{where} ")
        raise DataError(
            f"{where}: {why}{'' if why.endswith('.') else '.'} max_corrupted_records={allowed} "
            "damaged records are skipped. Repair the file, leave it out, or allow more."
        )
