"""The documents of a split, train or eval: which there are, and which of them are held out."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from maxdiloco.data import corpus, shards, tokenizer
from maxdiloco.data.documents import ByteDocuments, Chosen, TokenDocuments
from maxdiloco.data.line_index import LineIndex
from maxdiloco.data.sources import plain_text
from maxdiloco.data.sources.files import COMPRESSED, check_kind
from maxdiloco.errors import DataError

# Without eval_dataset_path, 1 in 20 files or windows is held out: our choice, 5 %.
HELD_OUT = 20


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


def source_of(cfg, path: str) -> tuple[str, str, str]:
    """What names a source in `prepared`: its kind, its path and the column with its text."""
    return cfg.dataset_type, path, cfg.text_column


def open_split(
    cfg,
    *,
    split: str,
    index: LineIndex | None = None,
    prepared: Mapping[tuple[str, str, str], str] | None = None,
) -> Split:
    """The documents of a split.

    index: known documents of .jsonl files; those of the other files are added to it.
    prepared: {source_of: its folder of shards} of what was tokenised at this start. A path that
    is such a folder itself is read as one, whatever dataset_type is.
    eval_dataset_path, when set, is the eval split, and all of dataset_path is for training.
    Empty: files 0, 20, 40, ... of dataset_path are held out for eval; of fewer than 20 files the
    windows are divided.
    Raises DataError for data that are missing, damaged, empty, or of another tokenizer.
    """
    tokens = tokenizer.build(cfg)
    key, path = split_path(cfg, split)
    folder = (prepared or {}).get(source_of(cfg, path), path)
    shared = not cfg.eval_dataset_path
    if cfg.dataset_type == "arrayrecord" or shards.is_folder(folder):
        return _of_shards(cfg, folder, key, tokens, split, shared)
    files = corpus.find_files(path, key)
    for file in files:
        check_kind("text", file)
    by_file = shared and len(files) >= HELD_OUT
    if by_file:
        files = [file for i, file in enumerate(files) if (i % HELD_OUT == 0) == (split == "eval")]
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
    return Split(ByteDocuments.of(table, tokens.bos), name, shared and not by_file)


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


def _of_shards(cfg, folder, key, tokens, split, shared):
    name = f"{key}={folder}"
    documents = shards.open_shards(folder, key)
    flags = f"tokenizer_type={cfg.tokenizer_type}"
    shards.refuse_other_tokenizer(documents, tokens.files(), name, flags)
    if not shared or len(documents.manifest.files) < HELD_OUT:
        return Split(documents, name, shared)
    held_out = np.arange(len(documents.manifest.files)) % HELD_OUT == 0
    numbers = shards.of_files(documents, held_out == (split == "eval"))
    if not len(numbers):
        raise DataError(f"{name} holds no text for {split}. Give more, or set eval_dataset_path.")
    return Split(Chosen.of(documents, numbers), name, False)
