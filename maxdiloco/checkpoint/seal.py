"""The seal of a checkpoint: sizes and checksums of its files, so that damage is found before use.

Orbax notices a missing or truncated file only while it reads, with an untyped exception, and reads
some damaged bytes as numbers.
"""

import json
import os
import sys
import zlib
from collections.abc import Container
from typing import Any, NamedTuple

from etils import epath

from maxdiloco import json_text, small_files
from maxdiloco.checkpoint.files import META
from maxdiloco.checkpoint.files import SEAL as FILE
from maxdiloco.storage import object_store
from maxdiloco.storage.run_folder import is_local

# Reading back takes about 0.3 s per GB from the page cache, which is 5 s for this limit. The seal
# of a larger checkpoint has sizes only.
CONTENT_LIMIT_BYTES = 16 << 30
_BLOCK_BYTES = 1 << 24
_OTHER_CONTENTS = "does not have the contents that were written"
SEAL = -1  # the index of the seal itself


class Damage(NamedTuple):
    """A file that changed after it was written.

    Attributes:
      index: index of the file in the list of the seal.
      what: the damage, in a few words.
    """

    index: int
    what: str


class Entry(NamedTuple):
    """A file as it was written.

    Attributes:
      name: path relative to the checkpoint.
      size: bytes.
      crc32: CRC-32 of the content; None if the seal has sizes only.
    """

    name: str
    size: int
    crc32: int | None


def write(folder: epath.Path) -> None:
    """Write the list of files below the item folders, with sizes and, on local disks, CRC-32.

    META, which is read first, has its CRC-32 in checkpoints of any size.
    """
    sizes = {path: size for path, size in _sizes(folder).items() if path.parent != folder}
    small = sum(sizes.values()) <= CONTENT_LIMIT_BYTES
    entries = {}
    for path, size in sorted(sizes.items()):
        with_content = is_local(folder) and (small or path.parent == folder / META)
        crc32 = _crc32(path, size) if with_content else None
        entries[str(path.relative_to(folder))] = [size, crc32]
    (folder / FILE).write_text(json.dumps({"files": entries}, indent=0))


def read(folder: epath.Path) -> list[Entry]:
    """Read the list of sealed files, in order of name.

    Raises:
      ValueError: `write` does not write such a list; for example, a name leads out of the folder.
      OSError: the seal cannot be read.
    """
    stored = json_text.parse(small_files.read_bytes(folder / FILE))
    listed = stored.get("files") if isinstance(stored, dict) else None
    if not isinstance(listed, dict):
        raise ValueError("it has no list of files")
    return [_entry(name, fields) for name, fields in sorted(listed.items())]


def _entry(name: str, fields: Any) -> Entry:
    parts = name.split("/")
    if "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{name!r} is not the name of a file in the checkpoint")
    if not isinstance(fields, list) or len(fields) != 2:
        raise ValueError(f"{name} has no size and checksum")
    size, crc32 = fields
    if type(size) is not int or size < 0 or not (crc32 is None or type(crc32) is int):
        raise ValueError(f"size or checksum of {name} is not an integer")
    return Entry(name, size, crc32)


def damage(folder: epath.Path, indices: Container[int] = range(sys.maxsize)) -> Damage | None:
    """Return the first damage of the sealed files of a checkpoint, or None.

    Args:
      folder: folder of the checkpoint.
      indices: indices in the list of the files to examine; several processes share the reading.

    Raises:
      OSError: a file cannot be read.
    """
    entries = _entries(folder)
    if isinstance(entries, Damage):
        return entries
    sizes = None if is_local(folder) else object_store.sizes(folder)
    for index, (name, size, crc32) in enumerate(entries):
        if index not in indices:
            continue
        path = folder / name
        if sizes is not None:
            size_now = sizes.get(path)
        else:
            if path.exists() and not _is_own_file(folder, path):
                return Damage(index, f"{name} is not a file in the checkpoint")
            size_now = os.path.getsize(path) if path.exists() else None
        if size_now is None:
            return Damage(index, f"{name} is missing")
        if size_now != size:
            return Damage(index, f"{name} has {size_now} bytes instead of {size}")
        if crc32 is not None and _crc32(path, size) != crc32:
            return Damage(index, f"{name} {_OTHER_CONTENTS}")
    return None


def damage_of(folder: epath.Path, name: str, content: bytes) -> Damage | None:
    """Return the damage of one file by its content, or None; a file that is not listed has none.

    Raises:
      OSError: the seal cannot be read.
    """
    entries = _entries(folder)
    if isinstance(entries, Damage):
        return entries
    for index, entry in enumerate(entries):
        if entry.name != name:
            continue
        if len(content) != entry.size:
            return Damage(index, f"{name} has {len(content)} bytes instead of {entry.size}")
        if entry.crc32 is not None and zlib.crc32(content) != entry.crc32:
            return Damage(index, f"{name} {_OTHER_CONTENTS}")
    return None


def _entries(folder: epath.Path) -> list[Entry] | Damage:
    """Return the list of the seal, or the damage of the seal itself."""
    try:
        return read(folder)
    except FileNotFoundError:
        return Damage(SEAL, f"{FILE} is missing")
    except ValueError:
        return Damage(SEAL, f"{FILE} is damaged")
    except OSError as error:
        if error.errno in small_files.NOT_SMALL_FILE:
            return Damage(SEAL, f"{FILE} is {error.strerror}")
        raise


def _is_own_file(folder: epath.Path, path: epath.Path) -> bool:
    """Tell whether a path leads to a regular file in the folder; a link may lead out of it."""
    inside = os.path.realpath(path).startswith(f"{os.path.realpath(folder)}{os.sep}")
    return inside and os.path.isfile(path)


def nbytes(folder: epath.Path) -> int:
    """Return the bytes of all files of a checkpoint."""
    return sum(_sizes(folder).values())


def _sizes(folder: epath.Path) -> dict[epath.Path, int]:
    if not is_local(folder):
        return object_store.sizes(folder)
    sizes = {}
    for path in folder.iterdir():
        sizes |= _sizes(path) if path.is_dir() else {path: os.path.getsize(path)}
    return sizes


def _crc32(path: epath.Path, size: int) -> int:
    """Return the CRC-32 of the first `size` bytes, also of a file that is still growing."""
    value, left = 0, size
    with path.open("rb") as file:
        while block := file.read(min(_BLOCK_BYTES, left)):
            value, left = zlib.crc32(block, value), left - len(block)
    return value
