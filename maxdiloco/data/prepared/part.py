"""One part of a source: its text to tokens, its tokens to a file.

What is written depends on the source, the tokenizer and the part's spans alone.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from maxdiloco.data import shards
from maxdiloco.data.sources.spans import PIECE, Damaged, Item, Source, Span, Text
from maxdiloco.errors import DataError
from maxdiloco.storage import durable

# Documents that are given to the tokenizer at once, besides their PIECE characters. Our choice.
_MOST_DOCUMENTS = 1024
_OPTIONS = "group_size:1"  # each record is found and checked on its own; compressed by zstd


class Tokens(NamedTuple):
    """Tokens of a document, or of a piece of one; file: of the source."""

    tokens: np.ndarray
    begins: bool
    ends: bool
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


def make_part(
    source: Source, tokenizer, spans: Sequence[Span], folder: str, number: int, allowed: int
) -> dict:
    """Tokenise the spans of a part and write its files; returns its facts.

    allowed: damaged records of the whole source that are skipped. Facts: tokens, documents, bytes
    and sha256 of the file, damaged [(place, why)], files [(number, documents that begin)];
    continues: the first document began in an earlier part.
    Raises DataError for unreadable text and for more damaged records than allowed, OSError.
    """
    names = names_of(folder, number)
    facts = {"tokens": 0, "documents": 0, "continues": False, "damaged": [], "files": []}
    lengths: list[int] = []
    with durable.replacing(names.tokens) as path:
        writer = _Writer(os.fspath(path), dtype_of(tokenizer.vocab_size))
        try:
            for found in _tokens(source, spans, tokenizer):
                if isinstance(found, Damaged):
                    facts["damaged"].append(list(found))
                    check_damage(facts["damaged"], allowed)
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


def dtype_of(vocab_size: int) -> str:
    """The stored type of tokens, as NumPy names it."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def check_damage(damaged: Sequence[Sequence[str]], allowed: int) -> None:
    """Raise DataError for more damaged records than max_corrupted_records allows."""
    if len(damaged) > allowed:
        where, why = damaged[-1]
        why = why.removeprefix(f"{where} ")
        raise DataError(
            f"{where}: {why}{'' if why.endswith('.') else '.'} max_corrupted_records={allowed} "
            "damaged records are skipped. Repair the file, leave it out, or allow more."
        )


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
    if not found.begins:
        if lengths:
            lengths[-1] += len(found.tokens)
        else:
            facts["continues"] = True
            lengths.append(len(found.tokens))
        return
    lengths.append(len(found.tokens))
    files = facts["files"]
    if not files or files[-1][0] != found.file:
        files.append([found.file, 0])
    files[-1][1] += 1


def _tokens(source: Source, spans: Iterable[Span], tokenizer) -> Iterator[Tokens | Damaged]:
    """Items of spans as tokens, in their order; documents without any are left out."""
    for span in spans:
        for batch in _batches(_short(source.read(span))):
            if isinstance(batch, Damaged):
                yield batch
            elif batch[0].begins and batch[0].ends:
                for tokens in tokenizer.encode_batch([item.text for item in batch]):
                    if len(tokens):
                        yield Tokens(tokens, True, True, span.file)
            else:
                (piece,) = batch
                tokens = _piece(piece, tokenizer)
                yield Tokens(tokens, piece.begins, piece.ends, span.file)


def _piece(piece, tokenizer):
    before = [tokenizer.bos] if piece.begins and tokenizer.bos is not None else []
    after = [tokenizer.eos] if piece.ends and tokenizer.eos is not None else []
    return np.array([*before, *tokenizer.encode(piece.text), *after], np.int64)


def _batches(items: Iterable[Item]) -> Iterator[Damaged | list[Text]]:
    """Runs of whole documents; damaged records and pieces of documents on their own."""
    batch: list[Text] = []
    size = 0
    for item in items:
        whole = isinstance(item, Text) and item.begins and item.ends
        if batch and (not whole or size >= PIECE or len(batch) >= _MOST_DOCUMENTS):
            yield batch
            batch, size = [], 0
        if whole:
            batch.append(item)
            size += len(item.text)
        else:
            yield item if isinstance(item, Damaged) else [item]
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
