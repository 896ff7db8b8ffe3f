"""A source of files, each of the kind that its name ends with."""

import dataclasses
import os
from collections import Counter
from collections.abc import Iterator

from maxdiloco.data import corpus
from maxdiloco.data.sources import parquet, text_files
from maxdiloco.data.sources.spans import Item, Span
from maxdiloco.errors import DataError

# JSON lines in a compressed file.
COMPRESSED = (".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst")
PARQUET = (".parquet",)
# Files that are no text; whoever names one means something else.
_NO_TEXT = (".gz", ".zst", ".bz2", ".xz", ".zip", ".tar", ".tgz", ".parquet", ".arrow", ".npy")


@dataclasses.dataclass(frozen=True)
class Files:
    """Text files, JSON lines or parquet files, in their order.

    sizes [bytes], changed [ns]: of each file when it was opened. column: with the text.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    changed: tuple[int, ...]
    column: str

    def spans(self, limit: int) -> Iterator[Span]:
        """Spans of at most limit bytes; a compressed file is one."""
        for number, (name, size) in enumerate(zip(self.names, self.sizes, strict=True)):
            step = size if name.endswith(COMPRESSED) else limit
            for begin in range(0, size, max(step, 1)):
                end = min(begin + step, size)
                yield Span(number, begin, end, end - begin)

    def read(self, span: Span) -> Iterator[Item]:
        """Documents of a span (spans.Source)."""
        path, size = self.names[span.file], self.sizes[span.file]
        try:
            status = os.stat(path)
            if (status.st_size, status.st_mtime_ns) != (size, self.changed[span.file]):
                raise corpus.changed(path, size, "of text is no longer there")
            if path.endswith(PARQUET):
                yield from parquet.read(path, span.begin, span.end, self.column)
            elif path.endswith(COMPRESSED):
                yield from text_files.read_compressed(path, self.column)
            elif path.endswith(".jsonl"):
                yield from text_files.read_lines(path, span.begin, span.end, self.column)
            else:
                yield from text_files.read_text(path, span.begin, span.end, size)
        except OSError as error:
            raise corpus.unreadable(path, error) from error

    def stamps(self) -> list[list]:
        """Name, size and time of the last change of each file."""
        paths = [os.path.abspath(name) for name in self.names]
        return [list(stamp) for stamp in zip(paths, self.sizes, self.changed, strict=True)]


def open_files(kind: str, path: str, key: str, column: str) -> Files:
    """The files of a data set, sorted by path; each is looked at, none is read.

    kind: text or parquet, of dataset_type. path, key: as for corpus.find_files.
    Raises DataError when there is none, and for a file that cannot be of this kind.
    """
    suffixes = PARQUET if kind == "parquet" else corpus.SUFFIXES + COMPRESSED
    names = corpus.find_files(path, key, suffixes)
    for name in names:
        check_kind(kind, name)
    stamps = [corpus.stamp(name) for name in names]
    return Files(
        tuple(names),
        tuple(stamp.size for stamp in stamps),
        tuple(stamp.mtime for stamp in stamps),
        column,
    )


def left_out_line(kind: str, path: str, key: str) -> str:
    """A warning that counts the files of a folder that its source does not read; empty: none.

    kind, path, key: of open_files; a data set of the hub leaves nothing out.
    """
    read = {"text": corpus.SUFFIXES + COMPRESSED, "parquet": PARQUET}
    others = corpus.left_out(path, read[kind]) if kind in read else Counter()
    if not others:
        return ""
    named = [f"{count:,} {suffix or 'without a suffix'}" for suffix, count in others.most_common(8)]
    tables = "; dataset_type=parquet reads those" if others[".parquet"] else ""
    return (
        f"warning: {others.total():,} other files in {key}={path} are not read: "
        f"{', '.join(named)}{tables}."
    )


def check_kind(kind: str, name: str) -> None:
    """Raise DataError for a file whose suffix says that it is not of a kind, text or parquet."""
    if kind == "parquet" and not name.endswith(PARQUET):
        raise DataError(
            f"dataset_type=parquet: {name} does not end in .parquet. Use dataset_type=text for "
            "text and JSON lines, or name the parquet files by a glob."
        )
    if kind == "text" and name.endswith(_NO_TEXT) and not name.endswith(COMPRESSED):
        remedy = f"JSON lines may be compressed, as {' '.join(COMPRESSED)}"
        if name.endswith(PARQUET):
            remedy = "Set dataset_type=parquet"
        raise DataError(f"dataset_type=text: {name} is no text. {remedy}; or leave the file out.")
