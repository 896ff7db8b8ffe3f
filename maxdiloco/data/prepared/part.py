"""Tokenise one part of a source into a file, whose content depends only on text and tokenizer."""

import dataclasses
import functools
import hashlib
import json
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from maxdiloco.data import corpus, shards
from maxdiloco.data.corpus import PIECE, Span, Text
from maxdiloco.data.registry import Reader
from maxdiloco.data.tokenizer_base import Tokenizer
from maxdiloco.storage import durable
from maxdiloco.storage.run_folder import absolute

# Most documents in one call of the tokenizer. A call also has at most about PIECE characters.
_MOST_DOCUMENTS = 1024
T = TypeVar("T")
TABLES = ("lengths", "checksums")  # facts of a part that become rows of the folder's tables


@dataclasses.dataclass(frozen=True)
class Work:
    """A source to prepare, and the settings."""

    source: Reader
    tokenizer: Tokenizer
    name: str  # name of the source, for messages
    allowed: int = 0  # max_corrupted_records
    processes: int = 0  # 0: one for each core
    part_bytes: int = 0  # bytes of the source in a part; 0: prepare.part_bytes_of the source


def facts_name(number: int) -> str:
    """Return the name of the file with the facts of a part, which is written after its tokens."""
    return f"part-{number:05d}.json"


def make_part(work: Work, out: str, todo: Sequence[tuple[int, Sequence[Span]]], index: int) -> dict:
    """Tokenise a part of the source and write its files.

    Args:
      work: the source and the tokenizer.
      out: the folder, local or in a bucket.
      todo: number and spans of each part to make.
      index: index of this part in todo.

    Returns:
      The facts of the part without TABLES: tokens, documents, bytes and sha256 of the file; damaged
      [(position, reason)]; files [(number, documents that begin in it)]; continues: whether the
      first document began in an earlier part. The stored facts also have TABLES: the lengths of the
      documents [tokens] and the checksums of the blocks.

    Raises:
      DataError: unreadable text, or more damaged records than allowed.
      OSError: the folder cannot be written.
    """
    number, part = todo[index]
    damaged: list[list[str]] = []
    checksums: list[int] = []
    pieces: list[tuple[int, bool, int]] = []  # (tokens, whether it begins a document, file)

    def tokens():
        skip = functools.partial(corpus.skip, damaged, work.allowed)
        for span in part:
            for found, begins in _tokens(work.source.read(span, skip), work.tokenizer):
                pieces.append((len(found), begins, span.file))
                yield found

    folder = absolute(out, key="out")
    with durable.atomic_write_local(folder / shards.part_name(number)) as path:
        digest, nbytes = hashlib.sha256(), 0
        with open(path, "wb") as file:
            for block in _blocks(tokens(), dtype_of(work.tokenizer)):
                data = block.tobytes()
                checksums.append(zlib.crc32(data))
                digest.update(data)
                nbytes += file.write(data)
    tokens_P, begins_P, file_P = np.array(pieces, np.int64).reshape(-1, 3).T
    firsts = np.flatnonzero(begins_P | (np.arange(len(pieces)) == 0))
    facts = {
        "continues": bool(len(pieces)) and not begins_P[0],
        "damaged": damaged,
        "files": list(Counter(file_P[begins_P > 0].tolist()).items()),
        "tokens": int(tokens_P.sum()),
        "documents": len(firsts),
        "bytes": nbytes,
        "sha256": digest.hexdigest(),
    }
    lengths = np.add.reduceat(tokens_P, firsts).tolist()
    with durable.atomic_write(folder / facts_name(number)) as path:
        path.write_text(json.dumps(facts | {"lengths": lengths, "checksums": checksums}))
    return facts


def dtype_of(tokenizer: Tokenizer) -> str:
    """Return the stored type of tokens, as NumPy names it."""
    return "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"


def _blocks(arrays: Iterable[np.ndarray], dtype: str) -> Iterator[np.ndarray]:
    """Yield the tokens in blocks of shards.BLOCK; the last one may be shorter."""
    waiting, count = [], 0
    for array in arrays:
        waiting.append(array)
        count += len(array)
        if count >= shards.BLOCK:
            tokens = np.concatenate(waiting).astype(dtype)
            end = count // shards.BLOCK * shards.BLOCK
            yield from tokens[:end].reshape(-1, shards.BLOCK)
            waiting, count = [tokens[end:]], count - end
    if count:
        yield np.concatenate(waiting).astype(dtype)


def _tokens(texts: Iterable[Text], tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, bool]]:
    """Yield the tokens of texts and whether a document begins. Empty documents are left out."""
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
    """Yield items in lists of total size >= `least` or of `most` items; the last may be smaller."""
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
    """Yield the texts, with long ones cut into pieces, at the end of a line if possible."""
    for text, begins, ends in texts:
        begin = 0
        while len(text) - begin > PIECE:
            end = text.rfind("\n", begin, begin + PIECE) + 1 or begin + PIECE
            yield Text(text[begin:end], begins and begin == 0, False)
            begin = end
        yield Text(text[begin:], begins and begin == 0, ends)
