"""Read tokenised documents from a folder of flat token files, an index of offsets and a manifest.

    # D documents  F files of the source  N blocks of all parts, in order

FOLDER/manifest.json    describes the folder; written last, so an unfinished folder has none
FOLDER/offsets.npy      int64 [D + 1], first token of each document, counted over all parts, and end
FOLDER/checksums.npy    uint32 [N], CRC-32 of each block
FOLDER/tokenizer/       the tokenizer's files
FOLDER/part-00000.bin   token ids of the documents end to end, little-endian uint16 or uint32

A part is checked in blocks of BLOCK tokens; the last block of a part may be shorter. Parts are read
by positional reads (`os.pread`), not through a memory map. With a memory map, a truncated file or a
failing disk would kill the process with SIGBUS, which Python cannot turn into an error.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np

from maxdiloco import json_text
from maxdiloco.data import paths
from maxdiloco.data.corpus import replace_read_error
from maxdiloco.data.packing import Piece, starts_of
from maxdiloco.data.paths import Stamp, is_local
from maxdiloco.data.read_ahead import REQUESTS, in_threads
from maxdiloco.data.tokenizer_base import SETTINGS, Tokenizer
from maxdiloco.errors import DataError

# Tokens of a block, 16 or 32 KiB. A window of 1,024 tokens is in one or two blocks, and computing
# the checksum of a block costs less than reading it.
BLOCK = 8192
FORMAT = 3  # version of the folder's format; increase it when older folders cannot be read
MANIFEST = "manifest.json"
OFFSETS = "offsets.npy"
CHECKSUMS = "checksums.npy"
TOKENIZER = "tokenizer"
# Neighbouring pieces are read together up to this many tokens: 32 windows of 2,048.
_LONGEST = 1 << 16
# Number of parts, spread over all, whose first and last block are read at the start of a run. This
# detects overwritten and partly copied files before compilation; a changed bit is detected later,
# when its block is read.
_PARTS_TRIED = 64
# Limit of open files of one process, far below the usual system limit of 1,024.
_MOST_OPEN = 128
# Largest manifest [bytes]: 100 bytes for each of ten million source files.
_MOST_MANIFEST = 1 << 30
_REMEDY = "Copy the folder again, or remove it and run python -m maxdiloco.prepare."


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Contents of manifest.json."""

    tokenizer: str  # fingerprint of the tokenizer
    vocab_size: int
    dtype: str  # NumPy's name of the type of the stored tokens
    block: int  # tokens of a block
    parts: list[list]  # (tokens, sha256) of each part
    offsets: list  # (number of documents, sha256 of the table)
    checksums: list  # (number of blocks, sha256 of the table)
    files: list[list]  # (name, number of documents that begin in it) of each file of the source
    damaged: list[list]  # (position, reason) of each skipped record

    def to_bytes(self) -> bytes:
        """Return the file's content: a hash of the body in the first line, then the body."""
        body = json.dumps({"format": FORMAT} | dataclasses.asdict(self), indent=0).encode()
        return hashlib.sha256(body).hexdigest().encode() + b"\n" + body + b"\n"


def part_name(number: int) -> str:
    """Return the name of the file with the tokens of a part."""
    return f"part-{number:05d}.bin"


def is_folder(path: str) -> bool:
    """Return True if a path is a complete folder of shards."""
    names = [os.path.join(os.path.expanduser(path), name) for name in (MANIFEST, OFFSETS)]
    if is_local(path):
        return bool(path) and all(map(os.path.isfile, names))
    with replace_read_error(path):
        return all(map(paths.find, names))


def read_manifest(folder: str, where: str) -> Manifest:
    """Read the manifest of a folder.

    Args:
      folder: path of the folder, local, in a bucket or on https.
      where: key and value that name the folder, for messages.

    Raises:
      DataError: the manifest is missing or damaged, or has another FORMAT.
    """
    path = os.path.join(folder, MANIFEST)
    with replace_read_error(f"{where}: {path}", _REMEDY):
        content = paths.read_whole(path, _MOST_MANIFEST)
    checksum, _, body = content.partition(b"\n")
    if checksum.decode("ascii", "replace") != hashlib.sha256(body.removesuffix(b"\n")).hexdigest():
        raise DataError(f"{where}: {MANIFEST} is damaged. {_REMEDY}")
    fields = json_text.parse(body)
    if fields.pop("format") != FORMAT:
        raise DataError(f"{where} is of another version of maxdiloco.prepare. {_REMEDY}")
    return Manifest(**fields)


class Shards:
    """The documents of a folder of shards.

    Every block that is read is compared with the table of checksums, which stays in memory. A part
    that was replaced, truncated or damaged at any time therefore raises an error, even if its size
    is unchanged. A pickled copy in another process opens its own files.
    """

    def __init__(
        self,
        where: str,
        folder: str,
        manifest: Manifest,
        offsets: np.ndarray,
        checksums: np.ndarray,
        chosen: np.ndarray | None = None,
        stamps: Sequence[Stamp] = (),
    ):
        """Keep the tables. No file is opened.

        Args:
          where: key and value that name the folder, for messages.
          folder: path of the folder.
          manifest: manifest of the folder.
          offsets: int64 [D + 1], first token of each document; see the module.
          checksums: uint32 [N], CRC-32 of the blocks of all parts.
          chosen: numbers of the documents to use. None: all.
          stamps: versions of the parts in a bucket. Empty for local files.
        """
        self._where, self.folder, self.manifest, self._stamps = where, folder, manifest, stamps
        self._offsets, self._checksums, self._chosen = offsets, checksums, chosen
        lengths = np.diff(offsets)
        self.lengths = lengths if chosen is None else lengths[chosen]  # tokens of each document
        tokens = np.array([count for count, _ in manifest.parts], np.int64)
        self._part_starts = starts_of(tokens)
        self._first_blocks = starts_of(-(-tokens // manifest.block))  # first block of each part
        self._files: dict[int, BinaryIO] = {}  # the last reference closes a file
        self._lock = threading.Lock()
        # Requests that may be in flight at the same time; 0 for local files.
        self.requests = REQUESTS if stamps else 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without open files."""
        tables = self._offsets, self._checksums, self._chosen
        return type(self), (self._where, self.folder, self.manifest, *tables, self._stamps)

    def read(self, pieces: Iterable[Piece]) -> Iterator[np.ndarray]:
        """Read pieces of documents, in the order of the pieces.

        Adjacent pieces in the shards are read together, with one read or one request of a bucket.

        Args:
          pieces: (document, begin, end) of each piece, in tokens of the document.

        Yields:
          The tokens of each piece, of the stored type, read-only.

        Raises:
          DataError: a part is missing, unreadable or has changed.
        """
        for found in in_threads(self._read_run, self._runs(pieces), self.requests):
            yield from found

    def _runs(self, pieces: Iterable[Piece]) -> Iterator[list[tuple[int, int]]]:
        """Group adjacent pieces; yield (begin, end) of each in the tokens of all documents."""
        run: list[tuple[int, int]] = []
        for document, begin, end in pieces:
            number = document if self._chosen is None else self._chosen[document]
            start = int(self._offsets[number])
            span = start + begin, start + end
            if run and (span[0] != run[-1][1] or span[1] - run[0][0] > _LONGEST):
                yield run
                run = []
            run.append(span)
        if run:
            yield run

    def _read_run(self, run: list[tuple[int, int]]) -> list[np.ndarray]:
        first, last = run[0][0], run[-1][1]
        found, place = [], first
        while place < last:
            part = int(np.searchsorted(self._part_starts, place, side="right")) - 1
            start = int(self._part_starts[part])
            end = min(last, int(self._part_starts[part + 1]))
            found.append(self._read_part(part, place - start, end - start))
            place = end
        tokens = found[0] if len(found) == 1 else np.concatenate(found)
        return [tokens[begin - first : end - first] for begin, end in run]

    def _read_part(self, part: int, begin: int, end: int) -> np.ndarray:
        """Return the tokens [begin, end) of a part, after their blocks have been checked."""
        size, width = self.manifest.block, np.dtype(self.manifest.dtype).itemsize
        first, last = begin // size, -(-end // size)
        stop = min(last * size, self.manifest.parts[part][0])
        data = self._read_bytes(part, first * size * width, stop * width)
        for block in range(first, last):
            content = memoryview(data)[(block - first) * size * width :][: size * width]
            if zlib.crc32(content) != self._checksums[self._first_blocks[part] + block]:
                raise DataError(
                    f"{self._named(part)} block {block} does not match {CHECKSUMS}: the file is "
                    f"damaged or was replaced. {_REMEDY}"
                )
        return np.frombuffer(data, self.manifest.dtype)[begin - first * size : end - first * size]

    def _read_bytes(self, part: int, begin: int, end: int) -> bytes:
        named, path = self._named(part), os.path.join(self.folder, part_name(part))
        with replace_read_error(named, _REMEDY):
            if self._stamps:
                data = paths.read_range(path, self._stamps[part], begin, end)
            else:
                data = os.pread(self._file(part, path).fileno(), end - begin, begin)
        if len(data) != end - begin:
            raise DataError(
                f"{named} has {begin + len(data)} bytes, not {end} or more: it was truncated. "
                f"{_REMEDY}"
            )
        return data

    def _file(self, part: int, path: str) -> BinaryIO:
        with self._lock:
            if part not in self._files:
                if len(self._files) >= _MOST_OPEN:
                    del self._files[next(iter(self._files))]  # closed once no thread reads it
                self._files[part] = open(path, "rb", buffering=0)
            return self._files[part]

    def _named(self, part: int) -> str:
        return f"{self._where}: {part_name(part)}"

    def summary(self) -> str:
        """Describe the data: numbers of source files (only if all are used), documents, tokens."""
        files = f"{len(self.manifest.files):,} files, " if self._chosen is None else ""
        return f"{files}{len(self.lengths):,} documents, {int(self.lengths.sum()):,} tokens"

    def contents(self) -> Iterator[bytes]:
        """Yield the bytes that identify the tokens: hashes of the tokenizer, index and parts."""
        yield f"shards {self.manifest.tokenizer} {self.manifest.offsets}\n".encode()
        for part in self.manifest.parts:
            yield f"{part}\n".encode()
        if self._chosen is not None:
            yield self._chosen.tobytes()

    def sizes(self) -> list[int]:
        """Return, for each file of the source, the tokens of the documents that begin in it."""
        counts = [documents for _, documents in self.manifest.files]
        return np.diff(self._offsets[starts_of(counts)]).tolist()

    def chosen(self, files: np.ndarray) -> "Shards":
        """Return the documents of selected files of the source; files: bool [F]."""
        documents = np.repeat(files, [documents for _, documents in self.manifest.files])
        chosen, tables = np.flatnonzero(documents), (self._offsets, self._checksums)
        return Shards(self._where, self.folder, self.manifest, *tables, chosen, self._stamps)

    def check_ends(self, part: int) -> None:
        """Read the first and the last block of a part. Raises DataError."""
        if tokens := self.manifest.parts[part][0]:
            for token in {0, tokens - 1}:
                self._read_part(part, token, token + 1)
        self._files.clear()  # a mixture may have many sources


def open_shards(path: str, key: str) -> Shards:
    """Open a folder that maxdiloco.prepare has written.

    Checks the manifest, the sizes of all files, the tables, and the first and last block of up to
    _PARTS_TRIED parts. Every other block is checked when it is read.

    Args:
      path: the folder, local, in a bucket or on https.
      key: the key that names the folder, for messages.

    Raises:
      DataError: the folder is unfinished or damaged.
    """
    where = f"{key}={path}"
    folder = os.path.expanduser(path)
    manifest = read_manifest(folder, where)
    names = [part_name(number) for number in range(len(manifest.parts))]
    stamps = []
    if not is_local(folder):
        with replace_read_error(where):
            stamps = paths.stamps(folder, names)
    width = np.dtype(manifest.dtype).itemsize
    for number, (name, (tokens, _)) in enumerate(zip(names, manifest.parts, strict=True)):
        part = os.path.join(folder, name)
        with replace_read_error(part, _REMEDY):
            size_now = stamps[number].size if stamps else os.path.getsize(part)
        if size_now != tokens * width:
            raise DataError(
                f"{where}: {name} has {size_now} bytes, not {tokens * width}. {_REMEDY}"
            )
    offsets = _read_table(folder, OFFSETS, manifest.offsets[1], where)
    checksums = _read_table(folder, CHECKSUMS, manifest.checksums[1], where)
    shards = Shards(where, folder, manifest, offsets, checksums, stamps=stamps)
    tried = range(0, len(names), -(-len(names) // _PARTS_TRIED) or 1)
    list(in_threads(shards.check_ends, tried, shards.requests))
    return shards


def _read_table(folder: str, name: str, digest: str, where: str) -> np.ndarray:
    path = os.path.join(folder, name)
    if file_hash(path) != digest:
        raise DataError(f"{where}: {name} is damaged. {_REMEDY}")
    with replace_read_error(path, _REMEDY), paths.open_file(path) as file:
        return np.load(file, allow_pickle=False)


def check_contents(shards: Shards) -> None:
    """Compare all files with their hashes. Raises DataError for the first damaged one."""
    manifest = shards.manifest
    expected = {part_name(number): digest for number, (_, digest) in enumerate(manifest.parts)}
    expected |= {OFFSETS: manifest.offsets[1], CHECKSUMS: manifest.checksums[1]}
    for name, digest in expected.items():
        path = os.path.join(shards.folder, name)
        if file_hash(path) != digest:
            raise DataError(f"{path} is damaged: its hash is not the one in {MANIFEST}. {_REMEDY}")


def file_hash(path: str) -> str:
    """Return the SHA-256 of a file in hexadecimal. Raises DataError if it cannot be read."""
    with replace_read_error(path, _REMEDY), paths.open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def refuse_other_tokenizer(documents: Shards, tokenizer: Tokenizer, where: str) -> None:
    """Raise DataError, which names the keys to set, if another tokenizer made the tokens."""
    if documents.manifest.tokenizer == tokenizer.fingerprint:
        return
    own = os.path.join(documents.folder, TOKENIZER)
    settings = os.path.join(own, SETTINGS)
    with replace_read_error(settings, _REMEDY):
        there = read_fields(settings)
    kind, bos, eos = (there.get(name) for name in ("tokenizer_type", "bos", "eos"))
    added = f"add_bos={bos is not None} add_eos={eos is not None}".lower()
    raise DataError(
        f"{where} was not tokenised with the tokenizer of this run, but with the one in {own} "
        f"(bos={bos}, eos={eos}). Set tokenizer_type={kind} tokenizer_path="
        f"{'' if kind == 'byte' else own} {added}, or prepare the text again."
    )


def read_fields(path: os.PathLike | str) -> dict[str, Any]:
    """Return the fields of a JSON file; {} if it is missing or not an object. Raises OSError."""
    with contextlib.suppress(FileNotFoundError), paths.open_file(os.fspath(path)) as file:
        return json_text.fields(file.read())
    return {}
