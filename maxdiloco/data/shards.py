"""Documents that were tokenised once: a folder of ArrayRecord files, a table and a manifest.

    # D documents  F files of the source  N records of all parts, in order

FOLDER/manifest.json        what is in the folder; written last, so an unfinished one has none
FOLDER/lengths.npy          int64 [D], tokens of each document
FOLDER/checksums.npy        uint32 [N], CRC-32 of each record
FOLDER/tokenizer/           the tokenizer's files
FOLDER/part-00000.arrayrecord   tokens of the documents end to end: records of RECORD tokens, the
                            last one of a file shorter, little-endian uint16 or uint32
"""

import contextlib
import dataclasses
import errno
import hashlib
import itertools
import json
import os
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from maxdiloco import json_text
from maxdiloco.data import places
from maxdiloco.data.corpus import reading
from maxdiloco.data.packing import Piece, starts_of
from maxdiloco.data.places import Stamp, is_local
from maxdiloco.data.read_ahead import REQUESTS, in_threads
from maxdiloco.data.remote_part import AT_RANDOM, Decoder, RemotePart
from maxdiloco.data.tokenizer_base import SETTINGS, Tokenizer, meaning
from maxdiloco.errors import DataError

# Tokens of a record: our choice. A window of 1,024 is in one record or two; reading it takes 50 us.
RECORD = 8192
FORMAT = 2  # of the folder; count it up when one of this program could not read the new one
MANIFEST = "manifest.json"
LENGTHS = "lengths.npy"
CHECKSUMS = "checksums.npy"
TOKENIZER = "tokenizer"
# Parts of which a start reads two records, spread over all: our choice. What was overwritten or
# never arrived is found before anything is compiled; single bits are when their record is read.
_PARTS_TRIED = 64
# Open files of one process: our choice, well below the usual limit of 1,024.
_MOST_OPEN = 128
# Bytes of a manifest: one with a name of 100 bytes for each of ten million files of the source.
_MOST_MANIFEST = 1 << 30
_REMEDY = "Copy the folder again, or remove it and run python -m maxdiloco.prepare."


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a folder of shards holds."""

    tokenizer: str  # its fingerprint
    vocab_size: int
    dtype: str  # of the stored tokens
    record: int  # tokens of one
    parts: list[list]  # (tokens, bytes, sha256) of each part file
    lengths: list  # (documents, sha256) of the table
    checksums: list  # (records, sha256) of the table
    files: list[list]  # (name, documents that begin in it) of each file of the source
    damaged: list[list]  # (place, why) of each record that was skipped

    def to_bytes(self) -> bytes:
        """The content of the file; its first line is a hash of the others."""
        body = json.dumps({"format": FORMAT} | dataclasses.asdict(self), indent=0).encode()
        return hashlib.sha256(body).hexdigest().encode() + b"\n" + body + b"\n"


def part_name(number: int) -> str:
    """Name of the file with the tokens of a part."""
    return f"part-{number:05d}.arrayrecord"


def is_folder(path: str) -> bool:
    """Whether a path is a complete folder of shards, which no other kind of source looks like."""
    paths = [os.path.join(os.path.expanduser(path), name) for name in (MANIFEST, LENGTHS)]
    if is_local(path):
        return bool(path) and all(map(os.path.isfile, paths))
    with reading(path):
        return all(map(places.find, paths))


def read_manifest(folder: str, where: str) -> Manifest:
    """The manifest of a folder. where: its flag and value. Raises DataError when there is none, or
    it is damaged or of another version of this program."""
    try:
        with places.opened(os.path.join(folder, MANIFEST)) as file:
            content = file.read(_MOST_MANIFEST + 1)
        if len(content) > _MOST_MANIFEST:
            raise OSError(errno.EFBIG, f"larger than {_MOST_MANIFEST:,} bytes")
        checksum, _, body = content.partition(b"\n")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError(
            f"{where} holds no {MANIFEST}: it is no folder that python -m maxdiloco.prepare has "
            "finished. Run that command again, with the same flags, or give its out folder."
        ) from error
    except OSError as error:
        remedy = "Put the disk in order."
        if not is_local(folder):
            remedy = "Once the store answers, start again."
        why = f"{where}: {MANIFEST} cannot be read ({error.strerror}). {remedy}"
        raise DataError(why) from error
    if checksum.decode("ascii", "replace") != hashlib.sha256(body.removesuffix(b"\n")).hexdigest():
        raise DataError(f"{where}: {MANIFEST} is damaged. {_REMEDY}")
    fields = json_text.parse(body)
    if fields.pop("format") != FORMAT:
        raise DataError(f"{where} is of another version of maxdiloco.prepare. {_REMEDY}")
    return Manifest(**fields)


class Shards:
    """Documents of a folder of shards, as documents.ByteDocuments are of text.

    A copy in another process opens readers of its own. Every record that is read is compared with
    the table of checksums, which is in memory since the start: a part that was replaced by another
    with records of the same sizes is refused, whenever that happened.

    Args:
      where: the flag and value of the folder, for messages.
      manifest: of the folder.
      of_all: int64 [D], tokens of each document.
      checksums: uint32 [N], of the records of all parts.
      chosen: numbers of the documents that are read; None: all.
      stamps: of the parts in a bucket; none: they are mounted.
    """

    def __init__(
        self,
        where: str,
        folder: str,
        manifest: Manifest,
        of_all: np.ndarray,
        checksums: np.ndarray,
        chosen: np.ndarray | None = None,
        stamps: Sequence[Stamp] = (),
    ):
        self._where, self.folder, self.manifest, self._stamps = where, folder, manifest, stamps
        self.lengths = of_all if chosen is None else of_all[chosen]
        self._of_all, self._checksums, self._chosen = of_all, checksums, chosen
        records = [-(-tokens // manifest.record) for tokens, *_ in manifest.parts]
        self._first_records = starts_of(np.array(records, np.int64))  # of each part, in the table
        self._starts = starts_of(of_all)
        self._part_starts = starts_of(np.array([tokens for tokens, *_ in manifest.parts], np.int64))
        self._readers: dict[int, Any] = {}  # dropping one closes its file
        self._lock = threading.Lock()
        decoder = Decoder(f"the folder of shards in a bucket, {folder},") if stamps else None
        paths = [os.path.join(folder, part_name(number)) for number in range(len(stamps))]
        self._remote = [RemotePart(*pair, decoder) for pair in zip(paths, stamps, strict=True)]
        # How many requests for objects may be under way at once; 0: the files are mounted.
        self.requests = REQUESTS if stamps else 0

    def __reduce__(self):
        tables = self._of_all, self._checksums, self._chosen
        return type(self), (self._where, self.folder, self.manifest, *tables, self._stamps)

    def read(self, pieces: Iterable[Piece]) -> Iterator[np.ndarray]:
        """Tokens of pieces (ByteDocuments)."""
        cuts_of = [list(self._cuts(*piece)) for piece in pieces]
        # Neighbouring pieces are often of one record.
        wanted = (cut[0] for cut in itertools.chain.from_iterable(cuts_of))
        keys = (key for key, _ in itertools.groupby(wanted))
        records = in_threads(lambda key: self._record(*key), keys, self.requests)
        last, data = None, np.zeros(0, self.manifest.dtype)
        for cuts in cuts_of:
            found = [data[:0]]
            for key, begin, end in cuts:
                if key != last:
                    last, data = key, next(records)
                found.append(data[begin:end])
            yield found[1] if len(found) == 2 else np.concatenate(found)

    def _cuts(self, document, begin, end):
        """The records that hold a piece, each by its part and number, and the tokens there."""
        size, number = self.manifest.record, document
        if self._chosen is not None:
            number = self._chosen[document]
        start = int(self._starts[number])
        place, stop = start + begin, start + end
        while place < stop:
            part = int(np.searchsorted(self._part_starts, place, side="right")) - 1
            record, offset = divmod(place - int(self._part_starts[part]), size)
            length = min(size, self.manifest.parts[part][0] - record * size)
            cut = min(offset + stop - place, length)
            yield (part, record), offset, cut
            place += cut - offset

    def summary(self) -> str:
        """Files of the source, unless some are left out, documents and tokens, for the user."""
        files = f"{len(self.manifest.files):,} files, " if self._chosen is None else ""
        return f"{files}{len(self.lengths):,} documents, {int(self.lengths.sum()):,} tokens"

    def contents(self) -> Iterator[bytes]:
        """The tokenizer and the hashes of every part: the tokens themselves."""
        yield f"shards {self.manifest.tokenizer} {self.manifest.lengths}\n".encode()
        for part in self.manifest.parts:
            yield f"{part}\n".encode()
        if self._chosen is not None:
            yield self._chosen.tobytes()

    def sizes(self) -> list[int]:
        """Tokens of the documents that begin in each file of the source."""
        counts = [documents for _, documents in self.manifest.files]
        return np.diff(self._starts[starts_of(counts)]).tolist()

    def chosen(self, files: np.ndarray) -> "Shards":
        """The documents of some files of the source. files: bool [F]."""
        documents = np.repeat(files, [documents for _, documents in self.manifest.files])
        chosen, tables = np.flatnonzero(documents), (self._of_all, self._checksums)
        return Shards(self._where, self.folder, self.manifest, *tables, chosen, self._stamps)

    def try_part(self, part: int) -> None:
        """Read the first and the last record of a part. Raises DataError."""
        if tokens := self.manifest.parts[part][0]:
            for record in {0, (tokens - 1) // self.manifest.record}:
                self._record(part, record)
        self._readers.clear()  # a mixture may have many sources

    def _record(self, part, record):
        name = part_name(part)
        path, named = os.path.join(self.folder, name), f"{self._where}: {name}"
        size = self.manifest.record
        expected = min(size, self.manifest.parts[part][0] - record * size)
        with reading(named, _REMEDY):
            try:
                if self._remote:
                    data = self._remote[part].read(record)
                else:
                    with self._lock:
                        (data,) = self._reader(part, path).read([record])
            except (RuntimeError, ValueError, IndexError) as error:
                why = f"{named} record {record} cannot be read: {error}"
                raise DataError(f"{why}. {_REMEDY}") from error
        found = np.frombuffer(data, self.manifest.dtype)
        if len(found) != expected:
            raise DataError(
                f"{named} record {record} has {len(found)} tokens, not {expected}: the file has "
                f"changed. {_REMEDY}"
            )
        if zlib.crc32(data) != self._checksums[self._first_records[part] + record]:
            raise DataError(
                f"{named} record {record} has other tokens than {CHECKSUMS} of this folder says: "
                f"the file was replaced. {_REMEDY}"
            )
        return found

    def _reader(self, part, path):
        from array_record.python.array_record_module import ArrayRecordReader

        if part not in self._readers:
            if len(self._readers) >= _MOST_OPEN:
                del self._readers[next(iter(self._readers))]
            self._readers[part] = ArrayRecordReader(path, options=AT_RANDOM)
        return self._readers[part]


def open_shards(path: str, key: str) -> Shards:
    """The documents of a folder that maxdiloco.prepare has written.

    The manifest, the sizes of all files, the tables, and the first and last record of up to
    _PARTS_TRIED parts are checked here, every other record when it is read.
    key: the flag of the path. Raises DataError for a folder that is unfinished or damaged.
    """
    where = f"{key}={path}"
    folder = os.path.expanduser(path)
    manifest = read_manifest(folder, where)
    names = [part_name(number) for number in range(len(manifest.parts))]
    stamps = []
    if not is_local(folder):
        with reading(where):
            stamps = places.stamps(folder, names)
    for number, (name, (_, size, _)) in enumerate(zip(names, manifest.parts, strict=True)):
        part = os.path.join(folder, name)
        with reading(part, _REMEDY):
            size_now = stamps[number].size if stamps else os.path.getsize(part)
        if size_now != size:
            raise DataError(f"{where}: {name} has {size_now} bytes, not {size}. {_REMEDY}")
    lengths = _read_table(folder, LENGTHS, manifest.lengths[1], where)
    checksums = _read_table(folder, CHECKSUMS, manifest.checksums[1], where)
    shards = Shards(where, folder, manifest, lengths, checksums, stamps=stamps)
    tried = range(0, len(names), -(-len(names) // _PARTS_TRIED) or 1)
    list(in_threads(shards.try_part, tried, shards.requests))
    return shards


def _read_table(folder, name, digest, where):
    path = os.path.join(folder, name)
    if file_hash(path) != digest:
        raise DataError(f"{where}: {name} is damaged. {_REMEDY}")
    with reading(path, _REMEDY), places.opened(path) as file:
        return np.load(file, allow_pickle=False)


def check_contents(shards: Shards) -> None:
    """Read all files and compare them with their hashes. Raises DataError for the first damage."""
    manifest = shards.manifest
    expected = {part_name(i): digest for i, (*_, digest) in enumerate(manifest.parts)}
    expected |= {LENGTHS: manifest.lengths[1], CHECKSUMS: manifest.checksums[1]}
    for name, digest in expected.items():
        path = os.path.join(shards.folder, name)
        if file_hash(path) != digest:
            raise DataError(f"{path} is damaged: its hash is not that of {MANIFEST}. {_REMEDY}")


def file_hash(path: str) -> str:
    """SHA-256 of a file, hexadecimal. Raises DataError."""
    with reading(path, _REMEDY), places.opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def refuse_other_tokenizer(documents: Shards, tokenizer: Tokenizer, where: str) -> None:
    """Raise DataError, with what differs, when the tokens are not of the tokenizer asked for."""
    if documents.manifest.tokenizer == tokenizer.fingerprint:
        return
    own, files = os.path.join(documents.folder, TOKENIZER), tokenizer.files()
    settings = os.path.join(own, SETTINGS)
    with reading(settings, _REMEDY):
        there = read_fields(settings)
    kind = there.get("tokenizer_type")
    keys = {}  # of the folder's tokenizer, where they are others
    wrong = []
    if kind != tokenizer.kind:
        keys["tokenizer_type"] = kind
        if kind == "byte":
            keys["tokenizer_path"] = ""  # does nothing with byte, and is refused beside it
        wrong.append(f"tokenizer_type={kind}, not {tokenizer.kind}")
    else:
        for name in files.keys() - {SETTINGS}:
            path = os.path.join(own, name)
            with reading(path, _REMEDY), places.opened(path) as file:
                if meaning(file.read()) != meaning(files[name]):
                    wrong.append(f"another {name}")
    for key, token, mine in (("add_bos", "bos", tokenizer.bos), ("add_eos", "eos", tokenizer.eos)):
        theirs = there.get(token)
        if (mine is None) != (theirs is None):
            keys[key] = "false" if theirs is None else "true"
            wrong.append(f"{key}={keys[key]}")
        elif mine != theirs and not wrong:
            wrong.append(f"token {theirs} as {token}, not {mine}")
    of_file = "tokenizer_type" in keys or len(wrong) > len(keys)
    if kind not in (None, "byte") and of_file:
        keys["tokenizer_path"] = own
    remedy = " ".join(f"{key}={value}" for key, value in keys.items())
    raise DataError(
        f"{where} was tokenised otherwise than with tokenizer_type={tokenizer.kind}: with "
        f"{', '.join(wrong) or 'another tokenizer'}. "
        f"{f'Set {remedy}, or prepare' if remedy else 'Prepare'} the text again."
    )


def read_fields(path: os.PathLike | str) -> dict[str, Any]:
    """The fields of a file; {} where it is absent or no such JSON. Raises OSError."""
    with contextlib.suppress(FileNotFoundError), places.opened(os.fspath(path)) as file:
        return json_text.fields(file.read())
    return {}
