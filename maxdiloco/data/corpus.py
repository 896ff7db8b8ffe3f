"""Find the files of a data set, describe parts of a source, and count damaged records.

The readers of the file formats are in `sources/`.
"""

import contextlib
import glob
import itertools
import os
import sysconfig
from collections.abc import Callable, Sequence
from typing import NamedTuple

from maxdiloco.data import paths
from maxdiloco.data.paths import Stamp, is_local
from maxdiloco.errors import DataError
from maxdiloco.storage.os_errors import replace_os_error

# Suffixes of the files that are read in a folder. The path of a file or a glob may have any suffix.
SUFFIXES = (".txt", ".md", ".py", ".jsonl")
# Subfolders of the standard library's folder that are not read. They hold other packages, or are
# missing in some distributions; test data are not all text.
_NOT_STDLIB = ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test")

# The longest piece of a text file that is tokenised at once [bytes]. A tokenizer needs about 30
# times as much memory, and a cut every million bytes changes next to no token.
PIECE = 1 << 20


class Span(NamedTuple):
    """A part of one file, which a process reads independently."""

    file: int  # index into the source's names
    begin: int  # offset in the file [bytes]; for a data set of the hub, a row number
    end: int  # exclusive
    size: int  # approximate number of bytes to read


class Text(NamedTuple):
    """A document or a piece of one. begins and ends are True for its first and last piece."""

    text: str
    begins: bool = True
    ends: bool = True


# Called for a record that cannot be read, with its file and position, and with the reason.
Skip = Callable[[str, str], None]


def skip(damaged: list[list[str]], allowed: int, where: str, why: str) -> None:
    """Append a damaged record to `damaged`, and raise DataError if there are now too many.

    Args:
      damaged: [position, reason] of each record skipped before.
      allowed: max_corrupted_records.
      where: the file and the position of the record in it.
      why: the reason.
    """
    damaged.append([where, why])
    check_damage(damaged, allowed)


def check_damage(damaged: Sequence[Sequence[str]], allowed: int) -> None:
    """Raise DataError if there are more damaged records than max_corrupted_records allows."""
    if len(damaged) > allowed:
        where, why = damaged[-1]
        raise DataError(
            f"{where}: {why}{'' if why.endswith('.') else '.'} max_corrupted_records={allowed} "
            "damaged records are skipped. Repair the file, leave it out, or allow more."
        )


def find(path: str, key: str, suffixes: tuple[str, ...] = SUFFIXES) -> dict[str, Stamp | None]:
    """Find the files of a data set.

    Links to folders inside a folder, and below the ** of a glob, are not followed.

    Args:
      path: a folder, a file or a glob, local or in a bucket, or the https address of a file. A
        folder is searched with its subfolders, except hidden ones. Empty: the source of Python's
        standard library.
      key: the key that has the path, for messages.
      suffixes: suffixes of the files to find in a folder.

    Returns:
      {path: stamp}, sorted by path. Local files have the stamp None.

    Raises:
      DataError: no file was found, or a folder cannot be read.
    """
    given = f"{key}={path}"
    if not path:
        root = sysconfig.get_paths()["stdlib"]
        given, suffixes = f"{key}= (Python's standard library in {root})", (".py",)
        files = in_folder(root, suffixes, _NOT_STDLIB, given)
    elif is_local(path):
        files = _mounted(path, given, suffixes)
    else:
        with replace_read_error(given):
            files = _in_bucket(path, suffixes)
    if not files:
        raise DataError(
            f"{given} names no file to read. Give a file, a glob that matches files, or a folder, "
            f"except on https, with files that end in {' '.join(suffixes)}."
        )
    return files if isinstance(files, dict) else dict.fromkeys(files)


def _mounted(path, given, suffixes):
    expanded = os.path.expanduser(path)
    if os.path.isdir(expanded):
        return in_folder(expanded, suffixes, (), given)
    if os.path.isfile(expanded):
        return [expanded]
    if "\0" in expanded:
        return []
    # A dangling link stays: opening it raises an error that names it.
    return sorted(name for name in _matches(expanded, given) if not os.path.isdir(name))


def _in_bucket(path, suffixes):
    if paths.is_https(path):
        stamp = paths.find(path) if path.endswith(suffixes) else None
        return {path: stamp} if stamp else {}
    if below := paths.objects(path):
        return _chosen(below, path, suffixes)
    if stamp := paths.find(path):
        return {path: stamp}
    fixed = itertools.takewhile(lambda part: not glob.has_magic(part), path.split("/"))
    below = paths.objects("/".join(fixed)) if glob.has_magic(path) else {}
    return {name: below[name] for name in sorted(below) if paths.fits(name, path)}


def _chosen(objects, folder, suffixes):
    """Filter the objects below a folder by the rules of `in_folder` for files."""
    start = len(folder.rstrip("/"))
    hidden = {name for name in objects if "/." in name[start:]}
    names = [name for name in sorted(objects.keys() - hidden) if name.endswith(suffixes)]
    return {name: objects[name] for name in names}


def in_folder(
    root: str, suffixes: tuple[str, ...], skipped: tuple[str, ...], source: str
) -> list[str]:
    """Return the files below a folder that have one of the suffixes, except hidden ones.

    Args:
      root: the folder, local or in a bucket.
      suffixes: suffixes of the files to return.
      skipped: names of subfolders that are not searched.
      source: key and value, for messages.

    Raises:
      DataError: a folder cannot be read.
    """
    if not is_local(root):
        with replace_read_error(source):
            return list(_chosen(paths.objects(root), root, suffixes))
    return sorted(
        os.path.join(folder, name)
        for folder, names in _folders(root, skipped, source)
        for name in names
        if name.endswith(suffixes) and not name.startswith(".")
    )


def _folders(root, skipped, source):
    """Yield a folder and its subfolders with the names of their files. Links are not followed."""

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
    """Return the names that a glob matches, without following links to folders below **.

    With a link that leads to a folder above, glob.glob lists everything 40 times. With two such
    links it never ends.
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


def stamp(path: str) -> Stamp:
    """Return the stamp of a local file. Raises DataError if it cannot be opened."""
    with replace_read_error(path), paths.open_file(path) as file:
        return Stamp.of_file(file)


def replace_read_error(path: str, remedy: str = "") -> contextlib.AbstractContextManager[None]:
    """Turn an OSError inside the `with` into a DataError.

    Args:
      path: the file, for the message.
      remedy: one or more sentences. Empty: the message proposes to repair or leave out the file.
    """
    if not is_local(path):
        remedy = "Check that it exists, can be read and does not change, and start again."
    remedy = remedy or "Make the file readable for this user, or leave it out of dataset_path."
    return replace_os_error(DataError, f"{path} cannot be read", remedy)


def changed(path: str) -> DataError:
    """Return the error for a source file that changed while it was prepared."""
    return DataError(
        f"{path} has changed since it was listed. Do not modify data while they are prepared; "
        "start again."
    )
