"""The documents of a split, train or eval: which there are, and which of them are held out."""

import os
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from maxdiloco.data import corpus, shards, tokenizer
from maxdiloco.data.documents import ByteDocuments, Chosen, TokenDocuments
from maxdiloco.data.line_index import LineIndex
from maxdiloco.data.sources import plain_text
from maxdiloco.data.sources.files import COMPRESSED, check_kind
from maxdiloco.errors import DataError

Source = tuple[str, str, str]  # what names a source: see source_of


class Split(NamedTuple):
    """Documents of a split. name: the flag and path, for messages.

    by_window: the documents are those of both splits, which divide their windows.
    """

    documents: TokenDocuments
    name: str
    by_window: bool


def split_path(cfg, split: str) -> tuple[str, str]:
    """The flag and the path of a split."""
    if split == "eval" and cfg.eval_dataset_path:
        return "eval_dataset_path", cfg.eval_dataset_path
    return "dataset_path", cfg.dataset_path


def source_of(cfg, path: str) -> Source:
    """What names a source in `prepared`: its kind, its path and the column with its text."""
    return cfg.dataset_type, path, cfg.text_column


def open_split(
    cfg,
    *,
    split: str,
    index: LineIndex | None = None,
    prepared: Mapping[Source, str] | None = None,
) -> Split:
    """The documents of a split.

    index: known documents of .jsonl files; those of the other files are added to it.
    prepared: {source_of: its folder of shards} of what was tokenised at this start. A path that
    is such a folder itself is read as one, whatever dataset_type is.
    eval_dataset_path, when set, is the eval split, and all of dataset_path is for training.
    Empty: held_out_files of dataset_path are for eval, or where there are none the windows are
    divided.
    Raises DataError for data that are missing, damaged, empty, or of another tokenizer.
    """
    tokens = tokenizer.build(cfg)
    key, path = split_path(cfg, split)
    folder = (prepared or {}).get(source_of(cfg, path), path)
    share = Fraction(0) if cfg.eval_dataset_path else held_out(cfg)
    if split == "eval" and not share and key != "eval_dataset_path":
        raise DataError(
            "eval_fraction=0 holds nothing out. Set eval_fraction or eval_dataset_path."
        )
    if cfg.dataset_type == "arrayrecord" or shards.is_folder(folder):
        return _of_shards(cfg, folder, key, tokens, split, share)
    files = corpus.find_files(path, key)
    for file in files:
        check_kind("text", file)
    whole = held_out_files(_sizes(files), share)
    if whole is not None:
        files = [file for file, held in zip(files, whole, strict=True) if held == (split == "eval")]
    if path:  # what Python's own source is written in is its own affair
        plain_text.refuse_other(files, key)
    table = corpus.read_table(
        files, column=cfg.text_column, index=index, allowed=cfg.max_corrupted_records
    )
    name = f"{key}={path}" if path else f"{key}= (Python's standard library)"
    if not len(table):
        raise DataError(
            f"{name} holds no text for {split}: {len(files)} files, all empty. Give text to read."
        )
    return Split(ByteDocuments.of(table, tokens.bos), name, share > 0 and whole is None)


def held_out(cfg) -> Fraction:
    """The share of a source that is held out of it, as it is written: 1/20 for 0.05."""
    return Fraction(str(cfg.eval_fraction))


def held_out_files(sizes: Sequence[int], share: Fraction) -> np.ndarray | None:
    """Which files are held out, bool [files]: 0, 20, 40, ... for a twentieth.

    sizes: of the files, in any unit. None where files are too few, or too unequal: with half to
    twice the share of what there is, and no less than half of the rest left to train on.
    """
    p, q = share.numerator, share.denominator
    if len(sizes) * share < 1:
        return None
    held = np.array([-(-(i + 1) * p // q) > -(-i * p // q) for i in range(len(sizes))])
    total, part = (
        sum(sizes),
        sum(size for size, is_held in zip(sizes, held, strict=True) if is_held),
    )
    within = share / 2 * total <= part <= min(2 * share, (1 + share) / 2) * total
    return held if total and within else None


def _sizes(paths: Sequence[str]) -> list[int]:
    """Bytes of files, which stand for their tokens: compared before the files are read."""
    sizes = []
    for path in paths:
        try:
            sizes.append(os.path.getsize(path))
        except OSError as error:
            raise corpus.unreadable(path, error) from error
    return sizes


def needs_tokenising(cfg, path: str, key: str) -> bool:
    """Whether a source has no known token counts: all but plain text and .jsonl read as bytes,
    and folders of shards.

    Raises DataError when the files cannot be listed.
    """
    if cfg.dataset_type in ("synthetic", "arrayrecord") or shards.is_folder(path):
        return False
    if cfg.dataset_type != "text" or cfg.tokenizer_type != "byte":
        return True
    names = corpus.find_files(path, key, corpus.SUFFIXES + COMPRESSED)
    return any(name.endswith(COMPRESSED) for name in names)


def _of_shards(cfg, folder, key, tokens, split, share):
    name = f"{key}={folder}"
    documents = shards.open_shards(folder, key)
    flags = f"tokenizer_type={cfg.tokenizer_type}"
    shards.refuse_other_tokenizer(documents, tokens.files(), name, flags)
    whole = held_out_files(shards.tokens_of_files(documents).tolist(), share)
    if whole is None:
        return Split(documents, name, share > 0)
    numbers = shards.of_files(documents, whole == (split == "eval"))
    return Split(Chosen.of(documents, numbers), name, False)
