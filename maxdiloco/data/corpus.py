"""The documents of a data set: which files they are in, where, and how long; their bytes on demand.

A file is one document; each line of a .jsonl file is one. Only the table is held in memory.
"""

import dataclasses
import glob
import itertools
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator

import numpy as np

from maxdiloco.data.tokenizer import to_bytes
from maxdiloco.errors import DataError

# What a folder is searched for; a glob or a file names its own.
SUFFIXES = (".txt", ".md", ".py", ".jsonl")
# Folders of the standard library that hold other people's code or data for tests, some of it no
# text on purpose, and that not every distribution ships.
_NOT_BUILT_IN = ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test")


@dataclasses.dataclass(frozen=True)
class Documents:
    """Table of documents in file order; arrays int64 [documents].

    file: index into paths; offset, stored: where the document or its .jsonl line is [bytes];
    size: length of its text [bytes], never 0. column: field of a .jsonl line with the text.
    """

    paths: tuple[str, ...]
    file: np.ndarray
    offset: np.ndarray
    stored: np.ndarray
    size: np.ndarray
    column: str

    def __len__(self) -> int:
        return len(self.size)


def find_files(path: str, key: str) -> list[str]:
    """Files of a data set in their order: sorted by path.

    path: a folder (searched with its subfolders for SUFFIXES, hidden ones left out), a file or a
      glob; empty: the source of the running Python's standard library.
    key: the flag that holds it, for messages.
    Raises DataError when there is none or a folder cannot be read.
    """
    if not path:
        root = sysconfig.get_paths()["stdlib"]
        files = _in_folder(root, (".py",), _NOT_BUILT_IN, f"{key} is empty")
        wanted = f"{root} has no .py files. Set {key} to text of your own."
        return _some(files, f"{key} is empty, and the standard library in {wanted}")
    expanded = os.path.expanduser(path)
    if os.path.isdir(expanded):
        files = _in_folder(expanded, SUFFIXES, (), f"{key}={path}")
        return _some(
            files,
            f"{key}={path} has no files that end in {' '.join(SUFFIXES)}. "
            f"Name others by a glob, as in {os.path.join(path, '**', '*.rst')}.",
        )
    if os.path.isfile(expanded):
        return [expanded]
    if glob.has_magic(expanded):
        found = set(glob.glob(expanded, recursive=True))
        files = sorted(name for name in found if os.path.isfile(name))
        return _some(files, f"{key}={path} matches no file. Correct the pattern.")
    raise DataError(
        f"{key}={path} does not exist or is out of reach. Give a folder, a file or a glob; empty "
        "takes the source of Python's standard library."
    )


def read_table(paths: Iterable[str], *, column: str) -> Documents:
    """Table of the documents in files; empty ones and blank .jsonl lines are left out.

    Text files are only measured; .jsonl files are read through, 60 MB a second on one core.
    Raises DataError for a file that cannot be read and for a .jsonl line without the text.
    """
    paths = tuple(paths)
    table = np.fromiter(_rows(paths, column), np.dtype((np.int64, 4)))
    return Documents(paths, *np.ascontiguousarray(table.T), column=column)


def read_pieces(
    documents: Documents, pieces: Iterable[tuple[int, int, int]]
) -> Iterator[np.ndarray]:
    """Bytes of parts of documents, uint8, one array for each piece.

    pieces: (document, begin, end), begin and end in bytes of its text.
    Raises DataError for a file that is gone or has another length than the table says.
    """
    for number, run in itertools.groupby(pieces, key=lambda piece: documents.file[piece[0]]):
        path = documents.paths[number]
        try:
            with open(path, "rb") as file:
                for document, begin, end in run:
                    yield np.frombuffer(_piece(documents, file, document, begin, end), np.uint8)
        except OSError as error:
            raise _unreadable(path, error) from error


def _rows(paths, column):
    for number, path in enumerate(paths):
        try:
            if path.endswith(".jsonl"):
                yield from ((number, *line) for line in _lines(path, column) if line[-1])
            elif size := _size(path):
                yield number, 0, size, size
        except OSError as error:
            raise _unreadable(path, error) from error


def _size(path):
    # Opened, not only asked for its size: a file that cannot be read is told at the start.
    with open(path, "rb") as file:
        return os.fstat(file.fileno()).st_size


def _piece(documents, file, document, begin, end):
    offset, stored = int(documents.offset[document]), int(documents.stored[document])
    size = int(documents.size[document])
    if file.name.endswith(".jsonl"):
        file.seek(offset)
        text = _text(file.read(stored), documents.column, f"{file.name} byte {offset}")
        found, data = len(text), text[begin:end]
    else:
        file.seek(begin)
        found, data = os.fstat(file.fileno()).st_size, file.read(end - begin)
    if found != size:
        raise DataError(
            f"{file.name} has changed since the run began: a document of {size} bytes has "
            f"{found} now. Leave data alone while it is read; start again."
        )
    return data


def _lines(path, column):
    offset = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield offset, len(line), len(_text(line, column, f"{path} line {number}"))
            offset += len(line)


def _text(line, column, where):
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise DataError(
            f"{where} is not JSON: {error}. Every line of a .jsonl file is one JSON object."
        ) from error
    if not isinstance(fields, dict) or column not in fields:
        there = ", ".join(fields) if isinstance(fields, dict) else type(fields).__name__
        raise DataError(
            f"text_column={column} is not in {where}, which has {there or 'no field'}. Set "
            "text_column to the field that holds the text."
        )
    if not isinstance(fields[column], str):
        raise DataError(
            f"text_column={column} is a {type(fields[column]).__name__} in {where}, not a string. "
            "Set text_column to the field that holds the text."
        )
    return to_bytes(fields[column])


def _in_folder(root, suffixes, left_out, described):
    def refuse(error):
        raise DataError(
            f"{described}: folder {error.filename} cannot be read ({error.strerror}). Give this "
            "user the right to read it, or choose another."
        ) from error

    files = []
    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = [
            name for name in subfolders if name not in left_out and not name.startswith(".")
        ]
        files += [
            os.path.join(folder, name)
            for name in names
            if name.endswith(suffixes) and not name.startswith(".")
        ]
    return sorted(files)


def _some(files, otherwise):
    if not files:
        raise DataError(otherwise)
    return files


def _unreadable(path, error):
    return DataError(
        f"{path} cannot be read ({error.strerror}). Give this user the right to read it, or leave "
        "it out of dataset_path."
    )
