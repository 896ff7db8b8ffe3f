"""One part of a source: its text to tokens, its tokens to a file, a function of these alone."""

import contextlib
import dataclasses
import functools
import json
import math
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from maxdiloco.data import corpus, shards
from maxdiloco.data.corpus import PIECE, Span, Text
from maxdiloco.data.kinds import Reader
from maxdiloco.data.tokenizer_base import Tokenizer
from maxdiloco.storage import durable
from maxdiloco.storage.run_folder import absolute

# Documents that are given to the tokenizer at once, besides their PIECE characters. Our choice.
_MOST_DOCUMENTS = 1024
T = TypeVar("T")
TABLES = ("lengths", "checksums")  # what a part adds to the tables of the folder
_OPTIONS = "group_size:1"  # each record is found and checked on its own; compressed by zstd


@dataclasses.dataclass(frozen=True)
class Work:
    """What to prepare, and how."""

    source: Reader
    tokenizer: Tokenizer
    name: str  # of the source, for messages
    allowed: int = 0  # max_corrupted_records
    processes: int = 0  # 0: one for each core
    part_bytes: int = 0  # of the source in a part; 0: prepare.part_bytes_of it


def facts_name(number: int) -> str:
    """Name of the facts of a part, which are written last: without them it has to be made."""
    return f"part-{number:05d}.json"


def make_part(work: Work, out: str, todo: Sequence[tuple[int, Sequence[Span]]], index: int) -> dict:
    """Tokenise a part and write its files; returns its facts without TABLES.

    out: the folder, also in a bucket. todo: numbers and spans of the parts that are made; index: of
    this one there.
    Facts: lengths of the documents [tokens], checksums of the records, tokens, documents, bytes and
    sha256 of the file, damaged [(place, why)], files [(number, documents that begin)]; continues:
    the first document began in an earlier part.
    Raises DataError for unreadable text and for more damaged records than allowed, OSError.
    """
    from array_record.python.array_record_module import ArrayRecordWriter

    # Each process has a core of its own; tokenizers would take all of them in each.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    number, part = todo[index]
    damaged: list[list[str]] = []
    checksums: list[int] = []
    pieces: list[tuple[int, bool, int]] = []  # tokens of each, whether a document begins, its file

    def tokens():
        skip = functools.partial(corpus.skip, damaged, work.allowed)
        for span in part:
            for found, begins in _tokens(work.source.read(span, skip), work.tokenizer):
                pieces.append((len(found), begins, span.file))
                yield found

    folder = absolute(out, key="out")
    with durable.made_here(folder / shards.part_name(number)) as path:
        with contextlib.closing(ArrayRecordWriter(os.fspath(path), _OPTIONS)) as file:
            for record in _records(tokens(), dtype_of(work.tokenizer)):
                data = record.tobytes()
                checksums.append(zlib.crc32(data))
                file.write(data)
        nbytes, digest = os.path.getsize(path), shards.file_hash(os.fspath(path))
    tokens_P, begins_P, file_P = np.array(pieces, np.int64).reshape(-1, 3).T
    firsts = np.flatnonzero(begins_P | (np.arange(len(pieces)) == 0))
    facts = {
        "continues": bool(len(pieces)) and not begins_P[0],
        "damaged": damaged,
        "files": list(Counter(file_P[begins_P > 0].tolist()).items()),
        "tokens": int(tokens_P.sum()),
        "documents": len(firsts),
        "bytes": nbytes,
        "sha256": digest,
    }
    lengths = np.add.reduceat(tokens_P, firsts).tolist()
    with durable.replacing(folder / facts_name(number)) as path:
        path.write_text(json.dumps(facts | {"lengths": lengths, "checksums": checksums}))
    return facts


def dtype_of(tokenizer: Tokenizer) -> str:
    """The stored type of tokens, as NumPy names it."""
    return "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"


def _records(arrays: Iterable[np.ndarray], dtype: str) -> Iterator[np.ndarray]:
    """Tokens in records of shards.RECORD; the last one may be shorter."""
    waiting, count = [], 0
    for array in arrays:
        waiting.append(array)
        count += len(array)
        if count >= shards.RECORD:
            tokens = np.concatenate(waiting).astype(dtype)
            end = count // shards.RECORD * shards.RECORD
            yield from tokens[:end].reshape(-1, shards.RECORD)
            waiting, count = [tokens[end:]], count - end
    if count:
        yield np.concatenate(waiting).astype(dtype)


def _tokens(texts: Iterable[Text], tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, bool]]:
    """Tokens of texts, and whether a document begins; documents without any are left out"""
    before, after = ([] if token is None else [token] for token in (tokenizer.bos, tokenizer.eos))
    for batch in runs(_short(texts), lambda text: len(text.text), PIECE, most=_MOST_DOCUMENTS):
        found = tokenizer.encode_all([text.text for text in batch])
        for text, tokens in zip(batch, found, strict=True):
            first, last = before if text.begins else [], after if text.ends else []
            tokens = np.concatenate([first, tokens, last]).astype(np.int32)
            if len(tokens) or not (text.begins and text.ends):
                yield tokens, text.begins


def runs(
    items: Iterable[T], size_of: Callable[[T], int], least: int, most: float = math.inf
) -> Iterator[list[T]]:
    """Items in runs of at least this size or of that many; the last one may be smaller."""
    run, size = [], 0
    for item in items:
        run.append(item)
        size += size_of(item)
        if size >= least or len(run) >= most:
            yield run
            run, size = [], 0
    if run:
        yield run


def _short(texts: Iterable[Text]) -> Iterator[Text]:
    """The same texts, long ones in pieces that end with a line where they can."""
    for text, begins, ends in texts:
        begin = 0
        while len(text) - begin > PIECE:
            end = text.rfind("\n", begin, begin + PIECE) + 1 or begin + PIECE
            yield Text(text[begin:end], begins and begin == 0, False)
            begin = end
        yield Text(text[begin:], begins and begin == 0, ends)
