"""One part of a source: its text to tokens, its tokens to a file, a function of these alone."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from maxdiloco.data import shards
from maxdiloco.data.kinds import Reader
from maxdiloco.data.sources.spans import PIECE, Damaged, Item, Span, Text, check_damage
from maxdiloco.data.tokenizer_base import Tokenizer
from maxdiloco.storage import durable

# Documents that are given to the tokenizer at once, besides their PIECE characters. Our choice.
_MOST_DOCUMENTS = 1024
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


def facts_path(folder: str, number: int) -> str:
    """The facts of a part, which are written last: without them the part has to be made."""
    return os.path.join(folder, f"part-{number:05d}.json")


def make_part(work: Work, out: str, todo: Sequence[tuple[int, Sequence[Span]]], index: int) -> dict:
    """Tokenise a part and write its files; returns its facts without the lengths.

    todo: numbers and spans of the parts that are made; index: of this one there.
    Facts: lengths of the documents [tokens], tokens, documents, bytes and sha256 of the file,
    damaged [(place, why)], files [(number, documents that begin)]; continues: the first document
    began in an earlier part.
    Raises DataError for unreadable text and for more damaged records than allowed, OSError.
    """
    from array_record.python.array_record_module import ArrayRecordWriter

    # Each process has a core of its own; tokenizers would take all of them in each.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    number, spans = todo[index]
    facts = {"continues": False, "damaged": [], "files": []}
    lengths: list[int] = []

    def tokens():
        for span in spans:
            for found in _tokens(work.source.read(span), work.tokenizer):
                if isinstance(found, Damaged):
                    facts["damaged"].append(list(found))
                    check_damage(facts["damaged"], work.allowed)
                else:
                    _count(*found, span.file, facts, lengths)
                    yield found[0]

    whole = os.path.join(out, shards.part_name(number))
    with durable.replacing(whole) as path:
        with contextlib.closing(ArrayRecordWriter(os.fspath(path), _OPTIONS)) as file:
            for record in _records(tokens(), dtype_of(work.tokenizer)):
                file.write(record.tobytes())
    facts |= {"tokens": sum(lengths), "documents": len(lengths)}
    facts |= {"bytes": os.path.getsize(whole), "sha256": shards.file_hash(whole)}
    with durable.replacing(facts_path(out, number)) as path:
        path.write_text(json.dumps(facts | {"lengths": lengths}))
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


def _count(tokens, begins, file, facts, lengths):
    """Note tokens of a document, or of a piece of one, which a file of the source holds."""
    if not begins and lengths:
        lengths[-1] += len(tokens)
        return
    lengths.append(len(tokens))
    if not begins:
        facts["continues"] = True
        return
    files = facts["files"]
    if not files or files[-1][0] != file:
        files.append([file, 0])
    files[-1][1] += 1


def _tokens(items: Iterable[Item], tokenizer: Tokenizer) -> Iterator[tuple | Damaged]:
    """(tokens, whether a document begins) of items, in order; documents without any are left out"""
    before, after = ([] if token is None else [token] for token in (tokenizer.bos, tokenizer.eos))
    for batch in _batches(_short(items)):
        if isinstance(batch, Damaged):
            yield batch
            continue
        found = tokenizer.encode_all([item.text for item in batch])
        for item, tokens in zip(batch, found, strict=True):
            first, last = before if item.begins else [], after if item.ends else []
            tokens = np.concatenate([first, tokens, last]).astype(np.int32)
            if len(tokens) or not (item.begins and item.ends):
                yield tokens, item.begins


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
