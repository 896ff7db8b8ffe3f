"""The kinds of data sets, dataset_type: what of a folder each reads, and who opens its text."""

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

Reader = files.Files | tables.Hub  # of text that is not yet tokenised


class Source(NamedTuple):
    """What names a text: the dataset_type, the path, and the column or field that holds it."""

    kind: str
    path: str
    column: str


class Kind(NamedTuple):
    """A value of dataset_type."""

    # (path, key, column) -> text that is not yet tokenised; None: there is no text.
    open: Callable[[str, str, str], Reader] | None = None
    suffixes: tuple[str, ...] = ()  # of the files of a folder; empty: not a folder of files


KINDS: Mapping[str, Kind] = MappingProxyType({
    "text": Kind(partial(files.open_files, files.TEXT, files.check_text), files.TEXT),
    "parquet": Kind(partial(files.open_files, files.PARQUET, files.check_parquet), files.PARQUET),
    "arrayrecord": Kind(
        partial(files.open_files, files.ARRAYRECORD, files.check_arrayrecord), files.ARRAYRECORD
    ),
    "hf": Kind(tables.open_hub),
    "synthetic": Kind(),
})  # fmt: skip


def open_source(source: Source, key: str) -> Reader:
    """Text that is not yet tokenised. key: of its path. Raises DataError for data that are missing,
    unreadable or prepared, ConfigError for a kind that has no text, and without a package."""
    kind, path, column = source
    readers = {name: row.open for name, row in KINDS.items() if row.open}
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
    """open_source of a program's SOURCE, after a warning of what of its folder is not read."""
    text = open_source(source, "SOURCE")
    for line in left_out_lines(source, "SOURCE"):
        output.say(line)
    return text


def left_out_lines(source: Source, key: str) -> Iterator[str]:
    """A warning that counts the files of a folder that its source does not read, if there are."""
    kind, path, _ = source
    read, folder = KINDS[kind].suffixes, os.path.expanduser(path)
    no_folder = paths.lists_nothing(path)
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
