"""A source of files, each of the kind that its name ends with."""

import dataclasses
import os
from collections.abc import Iterator

from maxdiloco.data import corpus
from maxdiloco.data.sources import parquet, text_files
from maxdiloco.data.sources.spans import Item, Span
from maxdiloco.errors import DataError

# JSON lines in a compressed file.
COMPRESSED = (".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst")
TEXT = corpus.SUFFIXES + COMPRESSED
PARQUET = (".parquet",)
# Files that are no text; whoever names one means something else.
_NO_TEXT = (".gz", ".zst", ".bz2", ".xz", ".zip", ".tar", ".tgz", ".parquet", ".arrow", ".npy")
# Suffixes and (path, begin, end, column) -> items; the first that fits.
_READERS = (
    (PARQUET, parquet.read),
    (COMPRESSED, text_files.read_compressed),
    ((".jsonl",), text_files.read_lines),
    (("",), text_files.read_text),
)


@dataclasses.dataclass(frozen=True)
class Files:
    """Text files, JSON lines or parquet files, in their order (spans.Reader).

    sizes [bytes], changed [ns]: of each file when it was opened.
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
        """Documents of a span (spans.Reader)."""
        path, size = self.names[span.file], self.sizes[span.file]
        with corpus.reading(path):
            status = os.stat(path)
            if (status.st_size, status.st_mtime_ns) != (size, self.changed[span.file]):
                raise corpus.changed(path, size, "of text is no longer there")
            read = next(read for suffixes, read in _READERS if path.endswith(suffixes))
            yield from read(path, span.begin, span.end, self.column)

    def stamps(self) -> list[list]:
        """Name, size and time of the last change of each file."""
        paths = [os.path.abspath(name) for name in self.names]
        return [list(stamp) for stamp in zip(paths, self.sizes, self.changed, strict=True)]


def open_text(path: str, key: str, column: str) -> Files:
    """Text files and JSON lines, sorted by path; each is looked at, none is read.

    path, key: as for corpus.find_files. Raises DataError when there is none, and for a file that
    cannot be read or cannot be text.
    """
    return _open(path, key, column, TEXT, check_text)


def open_parquet(path: str, key: str, column: str) -> Files:
    """Parquet files, as `open_text`."""
    return _open(path, key, column, PARQUET, _check_parquet)


def _open(path, key, column, suffixes, check) -> Files:
    names = corpus.find_files(path, key, suffixes)
    for name in names:
        check(name)
    sizes, changed = zip(*map(corpus.stamp, names), strict=True)
    return Files(tuple(names), sizes, changed, column)


def check_text(name: str) -> None:
    """Raise DataError for a file whose suffix says that it is no text."""
    if name.endswith(_NO_TEXT) and not name.endswith(COMPRESSED):
        remedy = f"JSON lines may be compressed, as {' '.join(COMPRESSED)}"
        if name.endswith(PARQUET):
            remedy = "Set dataset_type=parquet"
        raise DataError(f"dataset_type=text: {name} is no text. {remedy}; or leave the file out.")


def _check_parquet(name: str) -> None:
    if not name.endswith(PARQUET):
        raise DataError(
            f"dataset_type=parquet: {name} does not end in .parquet. Use dataset_type=text for "
            "text and JSON lines, or name the parquet files by a glob."
        )
