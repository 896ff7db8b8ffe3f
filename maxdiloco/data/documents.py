"""Text of the byte tokenizer, read where it is: its documents, and any piece of any of them.

A file is one document; each line of a .jsonl file is one. Only their table is in memory.

    # D documents of a file
"""

import dataclasses
import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from etils import epath

from maxdiloco import json_text
from maxdiloco.data import corpus, places
from maxdiloco.data.packing import Piece
from maxdiloco.data.places import Stamp
from maxdiloco.data.read_ahead import in_threads
from maxdiloco.data.sources.files import Files, line_text, lines
from maxdiloco.data.tokenizer_base import BYTES, to_bytes
from maxdiloco.errors import DataError
from maxdiloco.storage import durable

# A text is compared by this many pieces spread over its bytes and as many over its documents, so
# that a start reads 2 MiB of it at most. Our choice.
SAMPLES = 256
SAMPLE_BYTES = 4096
# Pieces are read as one up to this distance from each other, and this many bytes of a file [bytes].
# Our choice: less than what a store sends in the time of a request.
_GAP = 1 << 16
_LONGEST = 1 << 20
# Files in a bucket that are read through at once; each has up to 8 MiB in memory. Our choice.
_FILES_AT_ONCE = 8
# Of the index, with a checksum of the rest. Count its number up when the tokenizer changes
# documents' sizes.
_HEAD = b"maxdiloco line index 1 %08x\n"


@dataclasses.dataclass(frozen=True)
class ByteDocuments:
    """Table of documents in file order; arrays int64 [documents]."""

    source: Files  # when the table was made
    file: np.ndarray  # index into its names
    offset: np.ndarray  # where the document or its .jsonl line begins [bytes]
    stored: np.ndarray  # its length there
    size: np.ndarray  # length of the text [bytes], never 0

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, int64 [documents]: its start, then its bytes."""
        return self.size + 1

    @property
    def requests(self) -> int:
        """How many requests for objects may be under way at once; 0: the files are mounted."""
        return self.source.requests

    def read(self, pieces: Iterable[Piece]) -> Iterator[np.ndarray]:
        """Tokens of pieces, uint16, one array for each, in the order of the pieces. Neighbouring
        pieces of one file cost one open, or one request. Raises DataError for a file that is gone
        or has changed since the table was made."""
        for arrays in in_threads(self._read_run, self._runs(pieces), self.requests):
            yield from arrays

    def _runs(self, pieces):
        """Neighbouring pieces: the file, its bytes from the first to the last, and the pieces."""
        number, start, stop, run = -1, 0, 0, []
        for document, begin, end in pieces:
            file, first, last = int(self.file[document]), max(begin - 1, 0), end - 1
            if self.source.names[file].endswith(".jsonl"):
                first = int(self.offset[document])
                last = first + int(self.stored[document])
            near = start <= first <= stop + _GAP and last - start <= _LONGEST
            if run and (file != number or not near):
                yield number, start, stop, run
                run = []
            if not run:
                number, start, stop = file, first, last
            run.append((document, begin, end))
            stop = max(stop, last)
        if run:
            yield number, start, stop, run

    def _read_run(self, found):
        number, start, stop, run = found
        path, before = self.source.names[number], self.source.stamps[number]
        arrays = []
        with corpus.reading(path), places.opened(path, before, (start, stop)) as file:
            for document, begin, end in run:
                first = np.array([BYTES] if begin == 0 else [], np.uint16)
                data = self._bytes(file, path, document, max(begin - 1, 0), end - 1)
                arrays.append(np.concatenate([first, np.frombuffer(data, np.uint8)]))
            now = Stamp.of(file)
        if now.size == before.size and now != before:  # a .jsonl file may grow
            raise corpus.changed(path, int(self.size[run[0][0]]), "was written over")
        return arrays

    def _bytes(self, file, path, document, begin, end):
        size = int(self.size[document])
        if path.endswith(".jsonl"):
            offset, stored = int(self.offset[document]), int(self.stored[document])
            file.seek(offset)
            where = f"{path} byte {offset}"
            try:
                text = to_bytes(line_text(file.read(stored), self.source.column, where))
            except DataError as error:  # it was a document when the run began
                now = f"at byte {offset} is no longer there"
                raise corpus.changed(path, size, now) from error
            size_now, data = len(text), text[begin:end]
        else:
            file.seek(begin)
            data = file.read(end - begin)
            size_now = Stamp.of(file).size
        if size_now != size:
            raise corpus.changed(path, size, f"has {size_now} now")
        return data

    def summary(self) -> str:
        """Files, documents and bytes of text, for the user."""
        size = int(self.size.sum())
        return f"{len(self.source.names):,} files, {len(self.size):,} documents, {size:,} bytes"

    def contents(self) -> Iterator[bytes]:
        """Lengths of the documents and a hash of `sampled` pieces, which are read."""
        yield self.size.tobytes()
        digest = hashlib.sha256()
        of_tokens = ((number, begin + 1, end + 1) for number, begin, end in sampled(self.size))
        for tokens in self.read(of_tokens):
            digest.update(tokens.astype(np.uint8))
        yield digest.digest()


def sampled(sizes: np.ndarray) -> list[Piece]:
    """Pieces of a text that stand for all of it, in its order; begin and end are in bytes.

    sizes: int64 [documents], bytes of each. They hold all of a text of up to SAMPLES documents and
    SAMPLES * SAMPLE_BYTES bytes, and a part of each stretch of a longer one.
    """
    ends = np.cumsum(sizes)
    starts, total = ends - sizes, int(ends[-1])
    by_document = starts[:: -(-len(sizes) // SAMPLES)]
    by_byte = np.arange(0, total, max(SAMPLE_BYTES, -(-total // SAMPLES)))
    places = np.unique(np.concatenate([by_document, by_byte]))
    documents = np.searchsorted(ends, places, side="right")
    begins = places - starts[documents]
    stops = np.minimum(begins + SAMPLE_BYTES, sizes[documents])
    return list(zip(documents.tolist(), begins.tolist(), stops.tolist(), strict=True))


class LineIndex:
    """Documents of .jsonl files, kept in a file so that a restart need not read them through.

    By path; a NUL and a field follow that of another than column.
    """

    def __init__(self, column: str, report: Callable[[str], None] = lambda line: None):
        self.column = column  # the field that holds the text
        self.report = report  # called with one line for the user
        # Of a file int64 [D, 3]: offset and length of a line, size of its text [bytes].
        self._known: dict[str, tuple[Stamp, np.ndarray]] = {}
        self._used: set[str] = set()
        self._changed = False

    def find(self, path: str, stamp: Stamp) -> np.ndarray | None:
        """Documents of a file; None when it is unknown or has changed."""
        known, documents_D3 = self._known.get(path, (None, None))
        if known != stamp:
            return None
        self._used.add(path)
        return documents_D3

    def add(self, path: str, stamp: Stamp, documents_D3: np.ndarray) -> None:
        """Remember a file that has been read through."""
        self._known[path] = (stamp, documents_D3)
        self._used.add(path)
        self._changed = True

    def load(self, path: epath.Path) -> None:
        """Read what `save` wrote; a missing, damaged or other file is ignored. Raises OSError."""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return
        begin = data.find(b"\n") + 1
        if data[:begin] != _HEAD % zlib.crc32(memoryview(data)[begin:]):
            self.report(f"note: {path} is damaged or of another version: .jsonl files are read.")
            return
        end = data.index(b"\n", begin) + 1
        about = json_text.parse(data[begin:end])
        if about["column"] != self.column:
            return
        documents_D3 = np.frombuffer(data, "<i8", offset=end).reshape(-1, 3)
        ends = np.cumsum([count for *_, count in about["files"]], dtype=np.int64)
        for (name, size, mtime, count), stop in zip(about["files"], ends, strict=True):
            self._known[name] = (Stamp(size, mtime), documents_D3[stop - count : stop])

    def save(self, path: epath.Path) -> None:
        """Write the index of the files in use, unless it has not changed. Raises OSError."""
        if not self._changed:
            return
        used = [(name, *self._known[name]) for name in sorted(self._used)]
        files = [[name, *stamp, len(table)] for name, stamp, table in used]
        about = json.dumps({"column": self.column, "files": files}).encode() + b"\n"
        documents_D3 = np.concatenate([table for *_, table in used]).astype("<i8")
        checksum = zlib.crc32(documents_D3, zlib.crc32(about))
        with durable.replacing(path) as part:
            part.write_bytes(b"".join([_HEAD % checksum, about, documents_D3]))
        self._changed = False


def read_table(source: Files, *, index: LineIndex | None = None, allowed: int = 0) -> ByteDocuments:
    """Table of the documents in files; empty ones and blank .jsonl lines are left out.

    Text files are only measured; .jsonl files that index does not know are read through, 60 MB a
    second on one core. allowed: lines without the text that are left out, each told to the user.
    Raises DataError for a file that cannot be read and for one such line more.
    """
    paths, stamps, column = source.names, source.stamps, source.column
    index = LineIndex(column) if index is None else index
    # Another source of a mixture may have the text of the same file in another field.
    names = [path if column == index.column else f"{path}\0{column}" for path in paths]
    tables = []
    for path, name, stamp in zip(paths, names, stamps, strict=True):
        if path.endswith(".jsonl") and stamp.size:
            tables.append(index.find(name, stamp))  # None: it has to be read through
        else:
            tables.append(_rows((0, stamp.size, stamp.size)) if stamp.size else _rows())
    unread = [number for number, table in enumerate(tables) if table is None]
    if unread:
        size = sum(stamps[number].size for number in unread)
        index.report(f"reading {len(unread)} .jsonl files through: {size / 1e6:,.1f} MB")

    def through(number):
        return _read_through(paths[number], stamps[number], column, allowed)

    found = in_threads(through, unread, min(source.requests, _FILES_AT_ONCE))
    for number, (tables[number], left_out) in zip(unread, found, strict=True):
        if len(left_out) > allowed:
            raise left_out[allowed]
        allowed -= len(left_out)
        for error in left_out:
            index.report(f"left out: {error}")
        if not left_out:  # another start may allow fewer
            index.add(names[number], stamps[number], tables[number])
    file = np.repeat(np.arange(len(paths)), [len(table) for table in tables])
    columns = np.ascontiguousarray(np.concatenate([_rows(), *tables]).T)
    return ByteDocuments(source, file, *columns)


def _rows(*rows):
    """Table of a file, int64 [D, 3] as in LineIndex."""
    return np.array(rows, np.int64).reshape(-1, 3)


def _read_through(path, stamp, column, allowed):
    """Documents of a file, and the errors of lines without text: up to one more than allowed."""
    left_out = []

    def rows(file):
        for number, (offset, line) in enumerate(lines(file, path, 0), start=1):
            try:
                text = line_text(line, column, f"{path} line {number}")
            except DataError as error:
                left_out.append(error)
                if len(left_out) > allowed:
                    return
                continue
            if text:
                yield offset, len(line), len(to_bytes(text))

    with corpus.reading(path), places.opened(path, stamp) as file:
        table = np.fromiter(rows(file), np.dtype((np.int64, 3)))
        if Stamp.of(file) != stamp:
            raise DataError(
                f"{path} has changed while it was read. Start again when it is complete."
            )
    return table, left_out
