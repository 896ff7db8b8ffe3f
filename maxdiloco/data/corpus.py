"""The documents of a data set: a table of where they are and how long; their bytes on demand.

A file is one document; each line of a .jsonl file is one. Only the table is in memory.
"""

import contextlib
import dataclasses
import errno
import glob
import itertools
import os
import stat
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import BinaryIO

import numpy as np

from maxdiloco import json_text
from maxdiloco.data.line_index import LineIndex, Stamp
from maxdiloco.data.tokenizer_base import to_bytes
from maxdiloco.errors import DataError

# Suffixes that a folder is searched for; a file or a glob may have any.
SUFFIXES = (".txt", ".md", ".py", ".jsonl")
# Folders below the standard library that are not it, or that not every distribution ships; test
# data are not all text.
_NOT_STDLIB = ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test")
# The longest .jsonl line [bytes]: a line is in memory as a whole. Our choice.
MAX_LINE = 1 << 30


@dataclasses.dataclass(frozen=True)
class Documents:
    """Table of documents in file order; arrays int64 [documents].

    file: index into paths; offset, stored: where the document or its .jsonl line is [bytes];
    size: length of its text [bytes], never 0. column: field of a .jsonl line with the text.
    stamps: of each path, when the table was made.
    """

    paths: tuple[str, ...]
    stamps: tuple[Stamp, ...]
    file: np.ndarray
    offset: np.ndarray
    stored: np.ndarray
    size: np.ndarray
    column: str

    def __len__(self) -> int:
        return len(self.size)


def find_files(path: str, key: str, suffixes: tuple[str, ...] = SUFFIXES) -> list[str]:
    """Files of a data set, sorted by path.

    path: a folder (searched with its subfolders for suffixes, hidden ones left out), a file or a
      glob; empty: the source of the running Python's standard library. Links to folders inside a
      folder, and below the ** of a glob, are not followed: they may be cycles.
    key: the flag of the path, for messages.
    Raises DataError when there is none or a folder cannot be read.
    """
    expanded, given = os.path.expanduser(path), f"{key}={path}"
    if not path:
        root = sysconfig.get_paths()["stdlib"]
        files = _in_folder(root, (".py",), _NOT_STDLIB, f"{key} is empty")
        why = (
            f"{key} is empty, and the standard library in {root} has no .py files. "
            f"Set {key} to text of your own."
        )
    elif os.path.isdir(expanded):
        files = _in_folder(expanded, suffixes, (), given)
        why = (
            f"{given} has no files that end in {' '.join(suffixes)}. "
            f"Name others by a glob, as in {os.path.join(path, '**', '*.rst')}."
        )
    elif os.path.isfile(expanded):
        files, why = [expanded], ""
    elif glob.has_magic(expanded) and "\0" not in expanded:
        # A dangling link stays: opening it raises an error that names it.
        files = sorted(name for name in _matches(expanded, given) if not os.path.isdir(name))
        why = f"{given} matches no file. Correct the pattern."
    else:
        files = []
        why = (
            f"{given} does not exist or is out of reach. Give a folder, a file or a glob; empty "
            "takes the source of Python's standard library."
        )
    if not files:
        raise DataError(why)
    return files


def left_out(path: str, suffixes: tuple[str, ...] = SUFFIXES) -> Counter[str]:
    """Files of a folder that find_files leaves out: how many there are of each suffix.

    Hidden ones do not count; a file, a glob and the standard library leave nothing out.
    """
    found: Counter[str] = Counter()
    expanded = os.path.expanduser(path)
    if path and os.path.isdir(expanded):
        for _, names in _folders(expanded, (), path):
            others = [name for name in names if not name.endswith((*suffixes, "."))]
            found.update(os.path.splitext(n)[1] for n in others if not n.startswith("."))
    return found


def read_table(
    paths: Iterable[str], *, column: str, index: LineIndex | None = None, allowed: int = 0
) -> Documents:
    """Table of the documents in files; empty ones and blank .jsonl lines are left out.

    Text files are only measured; .jsonl files are read through, 60 MB a second on one core,
    unless index knows them; it learns the others.
    allowed: .jsonl lines without the text that are left out, each told to the user.
    Raises DataError for a file that cannot be read and for one such line more.
    """
    paths = tuple(paths)
    index = LineIndex(column) if index is None else index
    # Another source of a mixture may have the text of the same file in another field.
    names = [path if column == index.column else f"{path}\0{column}" for path in paths]
    # All files are opened before the first is read through, which may take an hour.
    stamps = [stamp(path) for path in paths]
    files = zip(paths, names, stamps, strict=True)
    tables = [_known(path, name, stamp, index) for path, name, stamp in files]
    unread = [number for number, table in enumerate(tables) if table is None]
    if unread:
        size = sum(stamps[number].size for number in unread)
        index.report(f"reading {len(unread)} .jsonl files through: {size / 1e6:,.1f} MB")
    for number in unread:
        tables[number], left_out = _read_through(paths[number], stamps[number], column, allowed)
        allowed -= len(left_out)
        for error in left_out:
            index.report(f"left out: {error}")
        if not left_out:  # another start may allow fewer
            index.add(names[number], stamps[number], tables[number])
    file = np.repeat(np.arange(len(paths)), [len(table) for table in tables])
    columns = np.ascontiguousarray(np.concatenate([_rows(), *tables]).T)
    return Documents(paths, tuple(stamps), file, *columns, column=column)


def read_pieces(
    documents: Documents, pieces: Iterable[tuple[int, int, int]]
) -> Iterator[np.ndarray]:
    """Bytes of parts of documents, uint8, one array for each piece.

    pieces: (document, begin, end), begin and end in bytes of its text.
    Raises DataError for a file that is gone or was changed since the table was made.
    """
    for number, run in itertools.groupby(pieces, key=lambda piece: documents.file[piece[0]]):
        path = documents.paths[number]
        with reading(path), open(path, "rb") as file:
            for document, begin, end in run:
                data = _piece(documents, file, document, begin, end)
                now, before = _stamp_of(file), documents.stamps[number]
                if now.size == before.size and now != before:  # a .jsonl file may grow
                    raise changed(path, int(documents.size[document]), "was written over")
                yield np.frombuffer(data, np.uint8)


def stamp(path: str) -> Stamp:
    """Size and time of the last change of a file; raises DataError when it cannot be read."""
    with reading(path):
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise DataError(
                f"{path} cannot be read: it is no regular file. Leave it out of dataset_path."
            )
        # Opened, not only measured: an unreadable file is an error at the start.
        with open(path, "rb") as file:
            return _stamp_of(file)


def _stamp_of(file):
    status = os.fstat(file.fileno())
    return Stamp(status.st_size, status.st_mtime_ns)


def _known(path, name, stamp, index):
    """Table of a file, int64 [D, 3] as in LineIndex; None when it has to be read through."""
    if not stamp.size:
        return _rows()
    if path.endswith(".jsonl"):
        return index.find(name, stamp)
    return _rows((0, stamp.size, stamp.size))


def _rows(*rows):
    return np.array(rows, np.int64).reshape(-1, 3)


def _read_through(path, stamp, column, allowed):
    left_out = []

    def rows(file):
        for number, (offset, line) in enumerate(lines(file, path, 0), start=1):
            try:
                text = line_text(line, column, f"{path} line {number}")
            except DataError as error:
                if len(left_out) >= allowed:
                    raise
                left_out.append(error)
                continue
            if text:
                yield offset, len(line), len(to_bytes(text))

    with reading(path), open(path, "rb") as file:
        table = np.fromiter(rows(file), np.dtype((np.int64, 3)))
        if _stamp_of(file) != stamp:
            raise DataError(
                f"{path} has changed while it was read. Start again when it is complete."
            )
    return table, left_out


def _piece(documents, file, document, begin, end):
    size = int(documents.size[document])
    if file.name.endswith(".jsonl"):
        offset, stored = int(documents.offset[document]), int(documents.stored[document])
        file.seek(offset)
        where = f"{file.name} byte {offset}"
        try:
            text = to_bytes(line_text(file.read(stored), documents.column, where))
        except DataError as error:  # it was a document when the run began
            raise changed(file.name, size, f"at byte {offset} is no longer there") from error
        size_now, data = len(text), text[begin:end]
    else:
        file.seek(begin)
        data = file.read(end - begin)
        size_now = os.fstat(file.fileno()).st_size
    if size_now != size:
        raise changed(file.name, size, f"has {size_now} now")
    return data


def lines(file: BinaryIO, path: str, offset: int) -> Iterator[tuple[int, bytes]]:
    """The lines of a file of JSON lines from its place on, and where they begin [bytes].

    offset: of the place. Raises DataError for a line of more than MAX_LINE.
    """
    while line := file.readline(MAX_LINE + 1):
        if len(line) > MAX_LINE:
            raise DataError(
                f"{path} byte {offset}: a line is longer than {MAX_LINE} bytes. Every line is one "
                "JSON object with one document."
            )
        yield offset, line
        offset += len(line)


def line_text(line: bytes, column: str, where: str) -> str:
    """The text in a .jsonl line; of a blank one none.

    Raises DataError, which names where, for a line without it.
    """
    if not line.strip():
        return ""
    try:
        fields = json_text.parse(line)
    except ValueError as error:
        raise DataError(
            f"{where} is not JSON: {error}. Every line of a .jsonl file is one JSON object."
        ) from error
    if not isinstance(fields, dict) or column not in fields:
        names = ", ".join(fields) if isinstance(fields, dict) else type(fields).__name__
        raise DataError(
            f"text_column={column} is not in {where}, which has {names or 'no field'}. Set "
            "text_column to the field that holds the text."
        )
    if not isinstance(fields[column], str):
        raise DataError(
            f"text_column={column} is a {type(fields[column]).__name__} in {where}, not a string. "
            "Set text_column to the field that holds the text."
        )
    return fields[column]


def _in_folder(root, suffixes, skipped, source):
    return sorted(
        os.path.join(folder, name)
        for folder, names in _folders(root, skipped, source)
        for name in names
        if name.endswith(suffixes) and not name.startswith(".")
    )


def _folders(root, skipped, source):
    """A folder and those inside it with the names of their files; links are not followed."""

    def refuse(error):
        raise DataError(
            f"{source}: folder {error.filename} cannot be read ({error.strerror}). Give this "
            "user the right to read it, or choose another."
        ) from error

    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = [
            name for name in subfolders if name not in skipped and not name.startswith(".")
        ]
        yield folder, names


def _matches(pattern, source):
    """Names that a glob matches; unlike glob.glob, links to folders below ** are not followed.

    With one that leads back up glob.glob lists everything 40 times, with two it never ends.
    """
    parts = pattern.split(os.sep)
    if "**" not in parts:
        return set(glob.glob(pattern))
    first = parts.index("**")
    above = os.sep.join(parts[:first]) or (os.sep if first else os.curdir)
    rest = os.sep.join(parts[first + 1 :]) or "*"
    names = set()
    for root in filter(os.path.isdir, glob.glob(above)):
        for folder, _ in _folders(root, (), source):
            names |= _matches(os.path.join(glob.escape(folder), rest), source)
    return {name.removeprefix(os.path.join(os.curdir, "")) for name in names}


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Raises DataError for a file that the system refuses to read inside the `with`."""
    try:
        yield
    except OSError as error:
        remedy = "Give this user the right to read it"
        if error.errno not in (errno.EACCES, errno.EPERM):
            remedy = "Put the file or its disk in order"
        raise DataError(
            f"{path} cannot be read ({error.strerror}). {remedy}, or leave it out of dataset_path."
        ) from error


def changed(path: str, size: int, now: str) -> DataError:
    """The error of a file that is not what it was. now: its state, said of a document."""
    return DataError(
        f"{path} has changed since the run began: a document of {size} bytes {now}. Leave data "
        "alone while it is read; start again."
    )
