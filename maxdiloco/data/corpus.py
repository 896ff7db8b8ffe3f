"""The documents of a data set: a table of where they are and how long; their bytes on demand.

A file is one document; each line of a .jsonl file is one. Only the table is in memory.
"""

import dataclasses
import errno
import glob
import itertools
import os
import stat
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from maxdiloco import json_text
from maxdiloco.data.line_index import LineIndex, Stamp
from maxdiloco.data.tokenizer import to_bytes
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
    if not path:
        root = sysconfig.get_paths()["stdlib"]
        files = _in_folder(root, (".py",), _NOT_STDLIB, f"{key} is empty")
        return _not_empty(
            files,
            f"{key} is empty, and the standard library in {root} has no .py files. "
            f"Set {key} to text of your own.",
        )
    expanded = os.path.expanduser(path)
    if os.path.isdir(expanded):
        files = _in_folder(expanded, suffixes, (), f"{key}={path}")
        return _not_empty(
            files,
            f"{key}={path} has no files that end in {' '.join(suffixes)}. "
            f"Name others by a glob, as in {os.path.join(path, '**', '*.rst')}.",
        )
    if os.path.isfile(expanded):
        return [expanded]
    if glob.has_magic(expanded) and "\0" not in expanded:
        names = _matches(expanded, f"{key}={path}")
        # A dangling link stays: opening it raises an error that names it.
        files = sorted(name for name in names if not os.path.isdir(name))
        return _not_empty(files, f"{key}={path} matches no file. Correct the pattern.")
    raise DataError(
        f"{key}={path} does not exist or is out of reach. Give a folder, a file or a glob; empty "
        "takes the source of Python's standard library."
    )


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
    tables = [_known(*file, index) for file in zip(paths, names, stamps, strict=True)]
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
        try:
            with open(path, "rb") as file:
                for document, begin, end in run:
                    data = _piece(documents, file, document, begin, end)
                    now, before = _stamp_of(file), documents.stamps[number]
                    if now.size == before.size and now != before:  # a .jsonl file may grow
                        raise changed(path, int(documents.size[document]), "was written over")
                    yield np.frombuffer(data, np.uint8)
        except OSError as error:
            raise unreadable(path, error) from error


def stamp(path: str) -> Stamp:
    """Size and time of the last change of a file; raises DataError when it cannot be read."""
    # Opened, not only measured: an unreadable file is an error at the start.
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise DataError(
                f"{path} cannot be read: it is no regular file. Leave it out of dataset_path."
            )
        with open(path, "rb") as file:
            return _stamp_of(file)
    except OSError as error:
        raise unreadable(path, error) from error


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

    def leave_out(error):
        if len(left_out) >= allowed:
            raise error
        left_out.append(error)

    try:
        with open(path, "rb") as file:
            table = np.fromiter(_lines(file, column, leave_out), np.dtype((np.int64, 3)))
            if _stamp_of(file) != stamp:
                raise DataError(
                    f"{path} has changed while it was read. Start again when it is complete."
                )
    except OSError as error:
        raise unreadable(path, error) from error
    return table, left_out


def _piece(documents, file, document, begin, end):
    size = int(documents.size[document])
    if file.name.endswith(".jsonl"):
        text = _reread_line(documents, file, document)
        size_now, data = len(text), text[begin:end]
    else:
        file.seek(begin)
        data = file.read(end - begin)
        size_now = os.fstat(file.fileno()).st_size
    if size_now != size:
        raise changed(file.name, size, f"has {size_now} now")
    return data


def _reread_line(documents, file, document):
    offset, stored = int(documents.offset[document]), int(documents.stored[document])
    file.seek(offset)
    try:
        return _text(file.read(stored), documents.column, f"{file.name} byte {offset}")
    except DataError as error:  # it was a document when the run began
        size = int(documents.size[document])
        raise changed(file.name, size, f"at byte {offset} is no longer there") from error


def _lines(file, column, leave_out):
    offset = 0
    lines = iter(lambda: file.readline(MAX_LINE + 1), b"")
    for number, line in enumerate(lines, start=1):
        if len(line) > MAX_LINE:
            raise DataError(
                f"{file.name} line {number} is longer than {MAX_LINE} bytes. Every line of a "
                ".jsonl file is one JSON object with one document."
            )
        if line.strip():
            try:
                size = len(_text(line, column, f"{file.name} line {number}"))
            except DataError as error:
                leave_out(error)
                size = 0
            if size:
                yield offset, len(line), size
        offset += len(line)


def line_text(line: bytes, column: str, where: str) -> str:
    """The text in a .jsonl line. Raises DataError, which names where, for a line without it."""
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


def _text(line, column, where):
    return to_bytes(line_text(line, column, where))


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


def _not_empty(files, message):
    if not files:
        raise DataError(message)
    return files


def unreadable(path: str, error: OSError) -> DataError:
    """The error of a file that the system refuses to read."""
    remedy = "Give this user the right to read it"
    if error.errno not in (errno.EACCES, errno.EPERM):
        remedy = "Put the file or its disk in order"
    return DataError(
        f"{path} cannot be read ({error.strerror}). {remedy}, or leave it out of dataset_path."
    )


def changed(path: str, size: int, now: str) -> DataError:
    """The error of a file that is not what it was. now: its state, said of a document."""
    return DataError(
        f"{path} has changed since the run began: a document of {size} bytes {now}. Leave data "
        "alone while it is read; start again."
    )
