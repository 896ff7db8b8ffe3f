"""A part of a folder of shards in a bucket: the bytes of a record, and the record in these bytes.

ArrayRecord keeps each record in a chunk of its own. Behind them is a chunk that says where each
begins, and in the last 64 KiB one that says where that is (google/array_record, cpp/layout.proto;
google/riegeli, doc/riegeli_records_file_format.md).
"""

import contextlib
import os
import threading

import numpy as np

from maxdiloco.data import places
from maxdiloco.data.packages import require
from maxdiloco.data.places import Stamp

_BLOCK = 1 << 16  # a chunk is interrupted at each multiple of it in the file
_BLOCK_HEADER, _CHUNK_HEADER = 24, 40
_FIRST = _BLOCK_HEADER + _CHUNK_HEADER  # of a file, a chunk without data, is before the first
_PADDED = "group_size:1,pad_to_block_boundary:true"
AT_RANDOM = "readahead_buffer_size:0,max_parallelism:0"  # nothing is read ahead
# Of the end that is read at once [bytes]: the index of 2,000 records, of 64 MB of text, has 6 KB.
_END = 3 * _BLOCK


class Decoder:
    """Hands chunks to ArrayRecord's reader, which checks their checksums: in a file in memory with
    one record, whose chunk is written over. Raises ConfigError without the package pyarrow, for the
    user that is named."""

    def __init__(self, user: str):
        from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

        self.pyarrow = require("pyarrow", user, extra="data")  # of the indices
        self._lock = threading.Lock()
        self._file = os.fdopen(os.memfd_create("maxdiloco-record"), "r+b", buffering=0)
        path = f"/proc/self/fd/{self._file.fileno()}"
        with contextlib.closing(ArrayRecordWriter(path, _PADDED)) as writer:
            writer.write(b"")
        self._reader = ArrayRecordReader(path, options=AT_RANDOM)

    def record(self, chunk: bytes) -> bytes:
        """The record of a chunk without block headers. Raises RuntimeError, ValueError."""
        if len(chunk) > _BLOCK - _FIRST:
            raise ValueError(f"a record of {len(chunk)} bytes is larger than those of prepare")
        with self._lock:
            os.pwrite(self._file.fileno(), chunk, _FIRST)
            (record,) = self._reader.read([0])
        return record


class RemotePart:
    """Reads records by one request each, in any thread. The first one reads the end of the file,
    from which the places of all stay in memory."""

    def __init__(self, path: str, stamp: Stamp, decoder: Decoder):
        self._path, self._stamp, self._decoder = path, stamp, decoder
        self._starts = np.zeros(0, np.int64)  # of each record, and the end of the last
        self._lock = threading.Lock()

    def read(self, record: int) -> bytes:
        """A record. Raises OSError, RuntimeError, ValueError and IndexError for damage."""
        with self._lock:
            if not len(self._starts):
                self._starts = self._read_starts()
        begin, end = int(self._starts[record]), int(self._starts[record + 1])
        return self._decoder.record(_without_block_headers(self._bytes(begin, end), begin))

    def _bytes(self, begin: int, end: int) -> bytes:
        with places.opened(self._path, self._stamp, (begin, end)) as file:
            file.seek(begin)
            return file.read(end - begin)

    def _read_starts(self) -> np.ndarray:
        size = self._stamp.size
        begin = max(size - _END, 0)
        data = self._bytes(begin, size)
        last = size - _BLOCK
        (footer, *_) = map(_first_field, self._records(data[last - begin :], last))
        if footer < begin:
            data = self._bytes(footer, begin) + data
            begin = footer
        index = data[footer - begin : last - begin]
        (_, *chunks) = self._records(index, footer)  # the first is about the file
        return np.array([*map(_first_field, chunks), footer], np.int64)

    def _records(self, data: bytes, place: int) -> list[bytes]:
        """The records of a chunk that begins at a place of the file."""
        chunk = _without_block_headers(data, place)
        size = int.from_bytes(chunk[8:16], "little")
        body = chunk[_CHUNK_HEADER : _CHUNK_HEADER + size]
        codec, (count, at) = body[0], _varint(body, 1)
        sizes, values = self._inflated(codec, body[at : at + count]), body[at + count :]
        values, at, begin, records = self._inflated(codec, values), 0, 0, []
        while at < len(sizes):
            length, at = _varint(sizes, at)
            records.append(values[begin : begin + length])
            begin += length
        return records

    def _inflated(self, codec: int, data: bytes) -> bytes:
        if not codec:
            return data
        size, at = _varint(data, 0)
        try:
            name = {ord("z"): "zstd"}[codec]
            return self._decoder.pyarrow.decompress(data[at:], size, name, asbytes=True)
        except (OSError, KeyError) as error:
            raise ValueError(f"its index is damaged: {error}") from error


def _without_block_headers(data: bytes, place: int) -> bytes:
    pieces, end = [], place + len(data)
    for block in range(place - place % _BLOCK, end, _BLOCK):
        begin = place if block < place else block + _BLOCK_HEADER
        pieces.append(data[begin - place : block + _BLOCK - place])
    return b"".join(pieces)


def _first_field(message: bytes) -> int:
    """Field 1 of a protocol buffer, a whole number."""
    if message[0] != 8:
        raise ValueError("its index is damaged: a record without a place")
    return _varint(message, 1)[0]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number in groups of seven bits, the lowest first, and where it ends."""
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        shift, at = shift + 7, at + 1
        if data[at - 1] < 128:
            return value, at
