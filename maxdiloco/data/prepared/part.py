"""One part of a source: its text to tokens, its tokens to a file.

What is written depends on the source, the tokenizer and the part's spans alone.
"""

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from maxdiloco.data import shards
from maxdiloco.data.sources.spans import PIECE, Damaged, Item, Reader, Span, Text, check_damage
from maxdiloco.data.tokenizer_base import Tokenizer
from maxdiloco.storage import durable

# Documents that are given to the tokenizer at once, besides their PIECE characters. Our choice.
_MOST_DOCUMENTS = 1024
_OPTIONS = "group_size:1"  # each record is found and checked on its own; compressed by zstd


@dataclasses.dataclass(frozen=True)
class Work:
    """What to prepare, and how.

    name: of the source, for messages. allowed: max_corrupted_records. processes: 0: all cores.
    part_bytes: of the source in a part; 0: prepare.part_bytes_of it.
    """

    source: Reader
    tokenizer: Tokenizer
    name: str
    allowed: int = 0
    processes: int = 0
    part_bytes: int = 0


class Tokens(NamedTuple):
    """Tokens of a document, or of a piece of one. file: of the source."""

    tokens: np.ndarray
    begins: bool
    file: int


class Names(NamedTuple):
    """Files of a part. Its facts are written last: without them the part has to be made."""

    tokens: str
    lengths: str
    facts: str


def names_of(folder: str, number: int) -> Names:
    """The files of a part in a folder."""
    return Names(
        os.path.join(folder, shards.part_name(number)),
        os.path.join(folder, f"part-{number:05d}.lengths.npy"),
        os.path.join(folder, f"part-{number:05d}.json"),
    )


def make_part(work: Work, out: str, todo: Sequence[tuple[int, Sequence[Span]]], index: int) -> dict:
    """Tokenise a part and write its files; returns its facts.

    todo: numbers and spans of the parts that are made; index: of this one there.
    Facts: tokens, documents, bytes and sha256 of the file, damaged [(place, why)], files [(number,
    documents that begin)]; continues: the first document began in an earlier part.
    Raises DataError for unreadable text and for more damaged records than allowed, OSError.
    """
    # Each process has a core of its own; tokenizers would take all of them in each.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    number, spans = todo[index]
    names = names_of(out, number)
    facts = {"tokens": 0, "documents": 0, "continues": False, "damaged": [], "files": []}
    lengths: list[int] = []
    with durable.replacing(names.tokens) as path:
        writer = _Writer(os.fspath(path), dtype_of(work.tokenizer))
        try:
            for found in _tokens(work.source, spans, work.tokenizer):
                if isinstance(found, Damaged):
                    facts["damaged"].append(list(found))
                    check_damage(facts["damaged"], work.allowed)
                    continue
                _count(found, facts, lengths)
                writer.add(found.tokens)
        finally:
            writer.close()
    facts |= {"tokens": sum(lengths), "documents": len(lengths)}
    facts["bytes"] = os.path.getsize(names.tokens)
    facts["sha256"] = shards.file_hash(names.tokens)
    with durable.replacing(names.lengths) as path, path.open("wb") as file:
        np.save(file, np.array(lengths, np.int64))
    with durable.replacing(names.facts) as path:
        path.write_text(json.dumps(facts))
    return facts


def dtype_of(tokenizer: Tokenizer) -> str:
    """The stored type of tokens, as NumPy names it."""
    return "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"


class _Writer:
    """Tokens into records of shards.RECORD."""

    def __init__(self, path: str, dtype: str):
        from array_record.python.array_record_module import ArrayRecordWriter

        self._file = ArrayRecordWriter(path, _OPTIONS)
        self._dtype = dtype
        self._waiting: list[np.ndarray] = []
        self._count = 0

    def add(self, tokens: np.ndarray) -> None:
        """Append tokens."""
        self._waiting.append(tokens)
        self._count += len(tokens)
        if self._count >= shards.RECORD:
            self._write(self._count // shards.RECORD * shards.RECORD)

    def close(self) -> None:
        """Write what is left, as a shorter record."""
        if self._count:
            self._write(self._count)
        self._file.close()

    def _write(self, count):
        tokens = np.concatenate(self._waiting).astype(self._dtype)
        for begin in range(0, count, shards.RECORD):
            self._file.write(tokens[begin : min(begin + shards.RECORD, count)].tobytes())
        self._waiting, self._count = [tokens[count:]], len(tokens) - count


def _count(found: Tokens, facts: dict, lengths: list[int]) -> None:
    if not found.begins and lengths:
        lengths[-1] += len(found.tokens)
        return
    lengths.append(len(found.tokens))
    if not found.begins:
        facts["continues"] = True
        return
    files = facts["files"]
    if not files or files[-1][0] != found.file:
        files.append([found.file, 0])
    files[-1][1] += 1


def _tokens(
    source: Reader, spans: Iterable[Span], tokenizer: Tokenizer
) -> Iterator[Tokens | Damaged]:
    """Items of spans as tokens, in their order; documents without any are left out."""
    before, after = ([] if token is None else [token] for token in (tokenizer.bos, tokenizer.eos))
    for span in spans:
        for batch in _batches(_short(source.read(span))):
            if isinstance(batch, Damaged):
                yield batch
                continue
            found = tokenizer.encode_all([item.text for item in batch])
            for item, tokens in zip(batch, found, strict=True):
                around = before if item.begins else [], after if item.ends else []
                tokens = np.concatenate([around[0], tokens, around[1]]).astype(np.int32)
                if len(tokens) or not (item.begins and item.ends):
                    yield Tokens(tokens, item.begins, span.file)


def _batches(items: Iterable[Item]) -> Iterator[Damaged | list[Text]]:
    """Runs of texts, which are tokenised together; damaged records on their own."""
    batch: list[Text] = []
    size = 0
    for item in items:
        damaged = isinstance(item, Damaged)
        if batch and (damaged or size >= PIECE or len(batch) >= _MOST_DOCUMENTS):
            yield batch
            batch, size = [], 0
        if damaged:
            yield item
        else:
            batch.append(item)
            size += len(item.text)
    if batch:
        yield batch


def _short(items: Iterable[Item]) -> Iterator[Item]:
    """The same items, long texts in pieces that end with a line where they can."""
    for item in items:
        if isinstance(item, Damaged) or len(item.text) <= PIECE:
            yield item
            continue
        begin = 0
        while begin < len(item.text):
            end = min(begin + PIECE, len(item.text))
            if end < len(item.text):
                end = item.text.rfind("\n", begin, end) + 1 or end
            first, last = begin == 0, end == len(item.text)
            yield Text(item.text[begin:end], item.begins and first, item.ends and last)
            begin = end
