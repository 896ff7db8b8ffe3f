"""The values of dataset_type, and the function that opens their text."""

import os
from collections import Counter
from collections.abc import Iterator
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


# The values of dataset_type.
DATASET_TYPES = (*files.SUFFIXES, "hf", "synthetic")


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
    if kind not in DATASET_TYPES or kind == "synthetic":
        raise ConfigError(
            f"dataset_type={kind} has no text to read. Use one of {', '.join(DATASET_TYPES[:-1])}."
        )
    if shards.is_folder(path):
        raise DataError(
            f"{key}={path} is prepared already: it holds tokens, not text. Train with "
            f"dataset_path={path}, or give the text that it was made from."
        )
    if kind == "hf":
        return tables.open_hub(path, key, column)
    return files.open_files(kind, path, key, column)


def open_for_user(source: Source) -> Reader:
    """Open the SOURCE of a command line, and warn about files in its folder that are not read."""
    text = open_source(source, "SOURCE")
    for line in left_out_lines(source, "SOURCE"):
        output.say(line)
    return text


def left_out_lines(source: Source, key: str) -> Iterator[str]:
    """Yield a warning with the number of files in a folder that a source does not read, if any."""
    read, path = files.SUFFIXES.get(source.kind), source.path
    folder = os.path.expanduser(path)
    is_file = not os.path.isdir(folder) if paths.is_local(path) else paths.is_https(path)
    if not path or not read or is_file or shards.is_folder(path):
        return
    names = corpus.in_folder(folder, ("",), (), path)
    others = Counter(os.path.splitext(n)[1] for n in names if not n.endswith((*read, ".")))
    named = [f"{count:,} {suffix or 'without a suffix'}" for suffix, count in others.most_common(8)]
    if others:
        yield (
            f"warning: {others.total():,} other files in {key}={path} are not read: "
            f"{', '.join(named)}."
        )
