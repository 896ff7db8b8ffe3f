"""Read a source of files span by span: text, JSON lines, compressed JSON lines, and tables.

A text file is one document, cut at the ends of lines. A line of a .jsonl file belongs to the span
in which it begins.
"""

import dataclasses
import io
import os
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import BinaryIO

from maxdiloco import json_text
from maxdiloco.data import corpus, paths
from maxdiloco.data.corpus import PIECE, Skip, Span, Text
from maxdiloco.data.packages import require
from maxdiloco.data.paths import Stamp, is_local
from maxdiloco.data.sources import records, tables
from maxdiloco.errors import DataError

# Suffixes of compressed files of JSON lines.
COMPRESSED = (".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst")
# The suffixes of the files that are read in a folder, by dataset_type.
SUFFIXES: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "text": corpus.SUFFIXES + COMPRESSED,
    "parquet": (".parquet",),
    "arrayrecord": (".arrayrecord", ".array_record"),
})  # fmt: skip
# Suffixes of files that are not text.
_NO_TEXT = (".gz", ".zst", ".bz2", ".xz", ".zip", ".tar", ".tgz", ".parquet", ".arrow", ".npy")
# The longest .jsonl line [bytes]. Each line is in memory as a whole.
MAX_LINE = 1 << 30
# Bytes of text that are decompressed at once. Up to this many are lost at the end of a cut file.
_BUFFER = 1 << 16


def read_text(file: BinaryIO, path: str, span: Span, _column: str, skip: Skip) -> Iterator[Text]:
    """Yield the pieces of a text file that begin in a span."""
    size = Stamp.of_file(file).size
    begin, end = (_line_start(file, place, size) for place in (span.begin, span.end))
    while begin < end:
        data = _piece(file, begin, end)
        stop = begin + len(data)
        first, last = begin == 0, stop == size
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            skip(f"{path} byte {begin + error.start}", f"not UTF-8 ({error.reason})")
            text = ""
        if "\0" in text:  # as in UTF-16, or in a binary file
            skip(f"{path} byte {begin + data.index(0)}", "a NUL byte, which text does not contain")
            text = ""
        if text or not (first and last):
            yield Text(text, first, last)
        begin = stop


def read_lines(file: BinaryIO, path: str, span: Span, column: str, skip: Skip) -> Iterator[Text]:
    """Yield the documents of the lines of a .jsonl file that begin in a span."""
    if span.begin:
        file.seek(span.begin - 1)
        while (line := file.readline(PIECE)) and not line.endswith(b"\n"):
            continue
    for offset, line in lines(file, path, file.tell()):
        if offset >= span.end:
            return
        yield from _document(line, f"{path} byte {offset}", column, skip)


def read_compressed(
    file: BinaryIO, path: str, _span: Span, column: str, skip: Skip
) -> Iterator[Text]:
    """Yield the documents of a file of compressed JSON lines, which is one span."""
    # pyarrow's stream, because the package zstandard ends a truncated file without an error.
    pyarrow = require("pyarrow", path, extra="data")
    codec = "zstd" if path.endswith(".zst") else "gzip"
    read = 0
    try:
        source = path if is_local(path) else file  # pyarrow reads a local path faster
        with pyarrow.input_stream(source, compression=codec) as stream:
            for offset, line in lines(io.BufferedReader(stream, _BUFFER), path, 0):
                read = offset
                yield from _document(line, f"{path} byte {offset}", column, skip)
    except OSError as error:
        if error.errno is not None:
            raise
        skip(f"{path} after byte {read} of its text", str(error))


def _document(line, where, column, skip):
    """Yield the text in a .jsonl line. A blank line has none."""
    if not line.strip():
        return
    try:
        fields = json_text.parse(line)
    except ValueError as error:
        skip(where, f"not JSON: {error}")
        return
    text = fields.get(column) if isinstance(fields, dict) else None
    if not isinstance(text, str):
        names = ", ".join(fields) if isinstance(fields, dict) else type(fields).__name__
        skip(where, f"text_column={column} is not one of its texts: it has {names or 'no field'}")
    elif text:
        yield Text(text)


def _line_start(file, place, size):
    """Return the first line start at or after an offset; in a long line, a character's start."""
    if place <= 0 or place >= size:
        return min(max(place, 0), size)
    file.seek(place - 1)
    data = file.read(PIECE)
    line_feed = data.find(b"\n")
    return place + line_feed if line_feed >= 0 else place + _inside_character(data[1:])


def _inside_character(data):
    """Return the number of leading bytes that continue a character of UTF-8, at most 3."""
    head = data[:3]
    return len(head) - len(head.lstrip(bytes(range(0x80, 0xC0))))


def _piece(file, begin, end):
    """Return the next bytes to tokenise, which end at the end of a line if possible."""
    file.seek(begin)
    data = file.read(min(PIECE, end - begin))
    if len(data) == end - begin:
        return data
    line_feed = data.rfind(b"\n")
    if line_feed >= 0:
        return data[: line_feed + 1]
    tail = 1
    while tail < 4 and data[-tail] & 0xC0 == 0x80:
        tail += 1
    # If the last character may continue after the piece, it is left for the next piece.
    return data[:-tail] if data[-tail] & 0xC0 == 0xC0 else data


def lines(file: BinaryIO, path: str, offset: int) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and the content of each line of a file, from the current position on.

    Args:
      file: the open file.
      path: path of the file, for messages.
      offset: the current position in the file [bytes].

    Raises:
      DataError: a line is longer than MAX_LINE.
    """
    while line := file.readline(MAX_LINE + 1):
        if len(line) > MAX_LINE:
            raise DataError(
                f"{path} byte {offset}: a line is longer than {MAX_LINE} bytes. Every line is one "
                "JSON object with one document."
            )
        yield offset, line
        offset += len(line)


# (suffixes, (file, path, span, column, skip) -> texts); the first row that matches is used.
_READERS = (
    (SUFFIXES["parquet"], tables.read),
    (SUFFIXES["arrayrecord"], records.read),
    (COMPRESSED, read_compressed),
    ((".jsonl",), read_lines),
    (("",), read_text),
)


@dataclasses.dataclass(frozen=True)
class Files:
    """Files of a data set, in the order in which they are read. Worker processes get a copy."""

    names: tuple[str, ...]
    stamps: tuple[Stamp, ...]  # stamp of each file when the data set was opened
    column: str  # field or column that holds the text

    def spans(self, limit: int) -> Iterator[Span]:
        """Yield spans of at most `limit` bytes. A compressed file is one span."""
        for number, (name, (size, _)) in enumerate(zip(self.names, self.stamps, strict=True)):
            step = size if name.endswith(COMPRESSED) else limit
            for begin in range(0, size, max(step, 1)):
                end = min(begin + step, size)
                yield Span(number, begin, end, end - begin)

    def read(self, span: Span, skip: Skip) -> Iterator[Text]:
        """Yield the documents of a span that are not empty.

        Raises:
          DataError: a file is missing, has changed or lacks the column; or an error of `skip`.
        """
        path, before = self.names[span.file], self.stamps[span.file]
        with corpus.replace_read_error(path), paths.open_file(path, before) as file:
            if Stamp.of_file(file) != before:
                raise corpus.changed(path)
            read = next(read for suffixes, read in _READERS if path.endswith(suffixes))
            yield from read(file, path, span, self.column, skip)
            if Stamp.of_file(file) != before:
                raise corpus.changed(path)

    def version(self) -> list[list]:
        """Return the name and stamp of each file, as JSON, to compare sources."""
        names = (os.path.abspath(name) if is_local(name) else name for name in self.names)
        return [[name, *stamp] for name, stamp in zip(names, self.stamps, strict=True)]


def open_files(kind: str, path: str, key: str, column: str) -> Files:
    """Open a data set of files, sorted by path. No file is read.

    Args:
      kind: dataset_type, a key of SUFFIXES.
      path: as for `corpus.find`.
      key: as for `corpus.find`.
      column: field or column that holds the text.

    Raises:
      DataError: no file was found, or a file cannot be opened or is of another kind.
    """
    suffixes = SUFFIXES[kind]
    if kind == "arrayrecord" and not is_local(path):
        raise DataError(
            f"dataset_type=arrayrecord: {path} is not local, which the package array_record needs. "
            "Copy the files to a disk, or prepare them on a machine with the files."
        )
    found = corpus.find(path, key, suffixes)
    for name in found:
        # A text file may have any suffix that no other format has.
        if not name.endswith(suffixes) and (kind != "text" or name.endswith(_NO_TEXT)):
            raise DataError(
                f"dataset_type={kind}: {name} is not one of its files ({' '.join(suffixes)}). "
                "Select those by a glob, or set the dataset_type of this file."
            )
    stamps = (stamp or corpus.stamp(name) for name, stamp in found.items())
    return Files(tuple(found), tuple(stamps), column)
