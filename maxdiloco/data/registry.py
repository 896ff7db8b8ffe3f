"""The values of dataset_type, each with its file suffixes and the function that opens its text."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from maxdiloco import output
from maxdiloco.data import corpus, paths, shards
from maxdiloco.data.sources import files, tables
from maxdiloco.errors import ConfigError, DataError

Reader = files.Files | tables.Hub  # a source of text that is not yet tokenised


class Source(NamedTuple):
    """A text: the dataset_type, the path, and the column or field that holds the text."""

    kind: str
    path: str
    column: str


class DatasetType(NamedTuple):
    """A value of dataset_type."""

    # (path, key, column) -> source of text; None: this dataset_type does not read text.
    open: Callable[[str, str, str], Reader] | None = None
    suffixes: tuple[str, ...] = ()  # suffixes of the files in a folder; empty: reads no folder


DATASET_TYPES: Mapping[str, DatasetType] = MappingProxyType({
    "text": DatasetType(partial(files.open_files, files.TEXT, files.check_text), files.TEXT),
    "parquet": DatasetType(
        partial(files.open_files, files.PARQUET, files.check_parquet), files.PARQUET
    ),
    "arrayrecord": DatasetType(
        partial(files.open_files, files.ARRAYRECORD, files.check_arrayrecord), files.ARRAYRECORD
    ),
    "hf": DatasetType(tables.open_hub),
    "synthetic": DatasetType(),
})  # fmt: skip


def open_source(source: Source, key: str) -> Reader:
    """Open text that is not yet tokenised.

    Args:
      source: the text to open.
      key: the key that has its path, for messages.

    Raises:
      DataError: the text is missing, unreadable or already tokenised.
      ConfigError: the dataset_type does not read text, or a package is missing.
    """
    kind, path, column = source
    readers = {name: row.open for name, row in DATASET_TYPES.items() if row.open}
    if kind not in readers:
        raise ConfigError(
            f"dataset_type={kind} has no text to read. Use one of {', '.join(readers)}."
        )
    if shards.is_folder(path):
        raise DataError(
            f"{key}={path} is prepared already: it holds tokens, not text. Train with "
            f"dataset_path={path}, or give the text that it was made from."
        )
    return readers[kind](path, key, column)


def open_for_user(source: Source) -> Reader:
    """Open the SOURCE of a command line, and warn about files in its folder that are not read."""
    text = open_source(source, "SOURCE")
    for line in left_out_lines(source, "SOURCE"):
        output.say(line)
    return text


def left_out_lines(source: Source, key: str) -> Iterator[str]:
    """Yield a warning with the number of files in a folder that a source does not read, if any."""
    kind, path, _ = source
    read, folder = DATASET_TYPES[kind].suffixes, os.path.expanduser(path)
    no_folder = paths.is_https(path)
    if paths.is_local(path):
        no_folder = not os.path.isdir(folder)
    if not path or not read or no_folder or shards.is_folder(path):
        return
    names = corpus.in_folder(folder, ("",), (), path)
    others = Counter(os.path.splitext(n)[1] for n in names if not n.endswith((*read, ".")))
    named = [f"{count:,} {suffix or 'without a suffix'}" for suffix, count in others.most_common(8)]
    tables = "; dataset_type=parquet reads those" if others[".parquet"] else ""
    if others:
        yield (
            f"warning: {others.total():,} other files in {key}={path} are not read: "
            f"{', '.join(named)}{tables}."
        )
