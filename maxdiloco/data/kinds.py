"""The kinds of data sets, dataset_type: what of a folder each reads, and who opens its text."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from maxdiloco import output
from maxdiloco.data import corpus, places, shards
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

    # (path, key, column) -> text that is not yet tokenised; None: there is none to tokenise.
    open: Callable[[str, str, str], Reader] | None = None
    suffixes: tuple[str, ...] = ()  # of the files read of a folder; empty: all, or it is none
    in_place: bool = False  # the bytes of some are tokens as they are, for the byte tokenizer


KINDS: Mapping[str, Kind] = MappingProxyType({
    "text": Kind(partial(files.open_files, files.TEXT, files.check_text), files.TEXT, True),
    "parquet": Kind(partial(files.open_files, files.PARQUET, files.check_parquet), files.PARQUET),
    "hf": Kind(tables.open_hub),
    "arrayrecord": Kind(),
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


def needs_tokenising(source: Source, key: str, *, of_bytes: bool) -> bool:
    """Whether a source has no known token counts: not a folder of shards, nor read in place.

    of_bytes: whether the byte tokenizer reads it. Raises DataError when the files cannot be listed.
    """
    kind = KINDS[source.kind]
    if kind.open is None or shards.is_folder(source.path):
        return False
    if not (of_bytes and kind.in_place):
        return True
    names = corpus.find(source.path, key, kind.suffixes)
    return any(name.endswith(files.COMPRESSED) for name in names)


def left_out_lines(source: Source, key: str) -> Iterator[str]:
    """A warning that counts the files of a folder that its source does not read, if there are."""
    kind, path, _ = source
    read, folder = KINDS[kind].suffixes, os.path.expanduser(path)
    no_folder = places.lists_nothing(path)
    if places.is_local(path):
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
