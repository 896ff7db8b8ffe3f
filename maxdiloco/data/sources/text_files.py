"""Text files, JSON lines, and JSON lines compressed with gzip or zstd, span by span.

A text file is one document. A long one is cut at the ends of lines; a line of a .jsonl file
belongs to the span that it begins in.
"""

import codecs
import io
from collections.abc import Iterator
from typing import BinaryIO

from maxdiloco.data import corpus
from maxdiloco.data.sources.packages import require
from maxdiloco.data.sources.spans import PIECE, Damaged, Item, Text
from maxdiloco.errors import DataError

# Bytes of text that are decompressed at once, and lost before the place where a file was cut.
_BUFFER = 1 << 16


def read_text(path: str, begin: int, end: int, size: int) -> Iterator[Item]:
    """Pieces of a text file that begin in [begin, end). size: of the file [bytes]."""
    with open(path, "rb") as file:
        begin, end = (_line_start(file, place, size) for place in (begin, end))
        while begin < end:
            data = _piece(file, begin, end)
            stop = begin + len(data)
            first, last = begin == 0, stop == size
            try:
                text = codecs.decode(data, "utf-8")
            except UnicodeDecodeError as error:
                yield Damaged(f"{path} byte {begin + error.start}", f"not UTF-8 ({error.reason})")
                text = ""
            if text or not (first and last):
                yield Text(text, first, last)
            begin = stop


def read_lines(path: str, begin: int, end: int, column: str) -> Iterator[Item]:
    """Documents of the lines of a .jsonl file that begin in [begin, end)."""
    with open(path, "rb") as file:
        if begin:
            file.seek(begin - 1)
            _skip_line(file)
        for item, offset in _documents(file, path, file.tell(), column):
            if offset >= end:
                return
            if item is not None:
                yield item


def read_compressed(path: str, column: str) -> Iterator[Item]:
    """Documents of a file of JSON lines that is compressed with gzip or zstd."""
    # pyarrow's stream, not the package zstandard's: that one ends quietly where a file was cut.
    pyarrow = require("pyarrow", f"{path} is compressed")
    codec = "zstd" if path.endswith(".zst") else "gzip"
    read = 0
    try:
        with pyarrow.input_stream(path, compression=codec) as stream:
            for item, offset in _documents(io.BufferedReader(stream, _BUFFER), path, 0, column):
                read = offset
                if item is not None:
                    yield item
    except OSError as error:
        if error.errno is not None:
            raise
        yield Damaged(f"{path} after byte {read} of its text", str(error))


def _documents(file, path, offset, column):
    """Items of the lines from an offset on, None for blank ones, and where their lines begin."""
    for line in _lines(file):
        yield _document(line, path, offset, column), offset
        offset += len(line)


def _lines(file: BinaryIO) -> Iterator[bytes]:
    return iter(lambda: file.readline(corpus.MAX_LINE + 1), b"")


def _document(line: bytes, path: str, offset: int, column: str) -> Item | None:
    where = f"{path} byte {offset}"
    if len(line) > corpus.MAX_LINE:
        raise DataError(
            f"{where}: a line is longer than {corpus.MAX_LINE} bytes. Every line is one JSON "
            "object with one document."
        )
    if not line.strip():
        return None
    try:
        text = corpus.line_text(line, column, where)
    except DataError as error:
        return Damaged(where, str(error))
    return Text(text) if text else None


def _skip_line(file):
    while (line := file.readline(PIECE)) and not line.endswith(b"\n"):
        continue


def _line_start(file, place, size):
    """The start of the first line at or behind a place; of a character in a line without end."""
    if place <= 0 or place >= size:
        return min(max(place, 0), size)
    file.seek(place - 1)
    data = file.read(PIECE)
    line_feed = data.find(b"\n")
    return place + line_feed if line_feed >= 0 else place + inside_character(data[1:])


def inside_character(data: bytes) -> int:
    """Number of bytes at the start that go on with a character of UTF-8, at most 3."""
    count = 0
    while count < min(3, len(data)) and data[count] & 0xC0 == 0x80:
        count += 1
    return count


def _piece(file, begin, end):
    """The bytes from begin on that are tokenised at once; they end with a line if they can."""
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
    # The last character may go on behind the piece, and is left to the next one.
    return data[:-tail] if data[-tail] & 0xC0 == 0xC0 else data
