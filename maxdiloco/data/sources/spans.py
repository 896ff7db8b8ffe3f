"""What every source gives: spans of its files, and the texts and damaged records of a span."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from maxdiloco.errors import DataError

# The longest piece of a text file that is tokenised at once [bytes]; our choice: a tokenizer needs
# some 30 times that while it works, and a cut every million bytes changes next to no token.
PIECE = 1 << 20


class Span(NamedTuple):
    """A part of one file that is read on its own.

    file: index into the source's names. begin, end: bytes of the file, or rows of a hub's data.
    size: about how many bytes will be read.
    """

    file: int
    begin: int
    end: int
    size: int


class Text(NamedTuple):
    """A document, or a piece of one: begins and ends say where its first and last piece are."""

    text: str
    begins: bool = True
    ends: bool = True


class Damaged(NamedTuple):
    """A record that cannot be read: the file and place in it, and why."""

    where: str
    why: str


Item = Text | Damaged


class Reader(Protocol):
    """A source of text. Pickled into processes.

    names: what a message calls its files. column: field or column that holds the text.
    """

    names: tuple[str, ...]
    column: str

    def spans(self, limit: int) -> Iterator[Span]:
        """The whole source in its order; limit: bytes of a span, where a file can be cut."""

    def read(self, span: Span) -> Iterator[Item]:
        """Documents of a span in order, empty ones left out.

        Raises DataError for what no skipping helps: a missing file, a column that is not there.
        """

    def version(self) -> list[list]:
        """What tells two versions of the source apart, as JSON."""


def check_damage(damaged: Sequence[Sequence[str]], allowed: int) -> None:
    """Raise DataError for more damaged records than max_corrupted_records allows."""
    if len(damaged) > allowed:
        where, why = damaged[-1]
        why = why.removeprefix(f"{where} ")
        raise DataError(
            f"{where}: {why}{'' if why.endswith('.') else '.'} max_corrupted_records={allowed} "
            "damaged records are skipped. Repair the file, leave it out, or allow more."
        )
