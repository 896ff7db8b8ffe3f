"""Text files, JSON lines, and JSON lines compressed with gzip or zstd, span by span.

A text file is one document. A long one is cut at the ends of lines; a line of a .jsonl file
belongs to the span that it begins in.
"""

import codecs
import io
import os
from collections.abc import Iterator

from maxdiloco.data import corpus
from maxdiloco.data.packages import require
from maxdiloco.data.sources.spans import PIECE, Damaged, Item, Text
from maxdiloco.errors import DataError

# Bytes of text that are decompressed at once, and lost before the place where a file was cut.
_BUFFER = 1 << 16
# refuse_other looks at so many blocks of a file, spread evenly, of so many bytes. Our choice: a
# folder of 100,000 files is looked at in seconds; a file that is no text has some byte that is none
# in nearly every block.
_BLOCKS = 16
_BLOCK = 1 << 13


def read_text(path: str, begin: int, end: int, column: str) -> Iterator[Item]:
    """Pieces of a text file that begin in [begin, end). column: not used."""
    del column
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
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
            while (line := file.readline(PIECE)) and not line.endswith(b"\n"):
                continue
        for offset, line in corpus.lines(file, path, file.tell()):
            if offset >= end:
                return
            yield from _document(line, f"{path} byte {offset}", column)


def read_compressed(path: str, begin: int, end: int, column: str) -> Iterator[Item]:
    """Documents of a file of JSON lines, compressed with gzip or zstd; [begin, end) is all of it"""
    del begin, end
    # pyarrow's stream, not the package zstandard's: that one ends quietly where a file was cut.
    pyarrow = require("pyarrow", path, extra="data")
    codec = "zstd" if path.endswith(".zst") else "gzip"
    read = 0
    try:
        with pyarrow.input_stream(path, compression=codec) as stream:
            for offset, line in corpus.lines(io.BufferedReader(stream, _BUFFER), path, 0):
                read = offset
                yield from _document(line, f"{path} byte {offset}", column)
    except OSError as error:
        if error.errno is not None:
            raise
        yield Damaged(f"{path} after byte {read} of its text", str(error))


def _document(line: bytes, where: str, column: str) -> Iterator[Item]:
    try:
        text = corpus.line_text(line, column, where)
    except DataError as error:
        yield Damaged(where, str(error))
        return
    if text:
        yield Text(text)


def _line_start(file, place, size):
    """The start of the first line at or behind a place; of a character in a line without end."""
    if place <= 0 or place >= size:
        return min(max(place, 0), size)
    file.seek(place - 1)
    data = file.read(PIECE)
    line_feed = data.find(b"\n")
    return place + line_feed if line_feed >= 0 else place + _inside_character(data[1:])


def _inside_character(data: bytes) -> int:
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


def refuse_other(paths: list[str], key: str) -> None:
    """Raise DataError for the first file with a block that is no UTF-8 or has a NUL byte.

    .jsonl files are left out: they are read through as JSON. key: the flag of the path.
    """
    for path in paths:
        if path.endswith(".jsonl"):
            continue
        with corpus.reading(path):
            place = _first_wrong(path)
        if place is not None:
            offset, why = place
            raise DataError(
                f"{path} is no UTF-8 text: byte {offset} {why}. Convert it (as iconv -f LATIN1 -t "
                f"UTF-8 does), or leave it out of {key}."
            )


def _first_wrong(path: str) -> tuple[int, str] | None:
    """Place of a byte that is no text, and why; None where the blocks are text."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        last = max(0, size - _BLOCK)
        starts = {last * number // (_BLOCKS - 1) for number in range(_BLOCKS)}
        if size <= _BLOCK * _BLOCKS:
            starts = set(range(0, size, _BLOCK))
        for start in sorted(starts):
            file.seek(start)
            data = file.read(_BLOCK)
            begin = _inside_character(data) if start else 0
            if (nul := data.find(b"\0")) >= 0:
                return start + nul, "is NUL"
            # Not the last block: its last character may go on behind it.
            final = start + len(data) >= size
            try:
                codecs.getincrementaldecoder("utf-8")().decode(data[begin:], final)
            except UnicodeDecodeError as error:
                value = data[begin + error.start]
                return start + begin + error.start, f"is 0x{value:02x} ({error.reason})"
    return None
