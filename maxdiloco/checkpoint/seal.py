"""The seal of a checkpoint: sizes and checksums of its files, so that damage is seen before use.

Orbax notices a missing or cut file only while it reads, with an untyped exception, and reads some
damaged bytes as numbers.
"""

import json
import os
import sys
import zlib
from collections.abc import Container
from typing import NamedTuple

from etils import epath

from maxdiloco import json_text
from maxdiloco.checkpoint.orbax_io import SEAL as FILE
from maxdiloco.storage import object_store
from maxdiloco.storage.run_folder import is_local

# Reading back takes about 0.3 s per GB from the page cache; above this the seal has sizes alone.
CONTENT_LIMIT_BYTES = 16 << 30  # our choice
_BLOCK_BYTES = 1 << 24
SEAL = -1  # the index of the seal itself


class Damage(NamedTuple):
    """A file that is not as it was written. index: in the list of the seal. what: a few words."""

    index: int
    what: str


def write(folder: epath.Path) -> None:
    """List the files below the item folders of a checkpoint with size and, locally, CRC-32."""
    sizes = {path: size for path, size in _sizes(folder).items() if path.parent != folder}
    with_content = is_local(folder) and sum(sizes.values()) <= CONTENT_LIMIT_BYTES
    entries = {
        str(path.relative_to(folder)): [size, _crc32(path) if with_content else None]
        for path, size in sorted(sizes.items())
    }
    (folder / FILE).write_text(json.dumps({"files": entries}, indent=0))


def damage(folder: epath.Path, indices: Container[int] = range(sys.maxsize)) -> Damage | None:
    """The first damage of the sealed files of a checkpoint, or None.

    indices: look at these files of the list, so that several processes share the reading. Raises
    OSError, as for a folder that may not be read.
    """
    try:
        listed = json_text.parse((folder / FILE).read_bytes())["files"]
        entries = sorted((name, int(size), crc32) for name, (size, crc32) in listed.items())
    except FileNotFoundError:
        return Damage(SEAL, f"{FILE} is missing")
    except (ValueError, KeyError, TypeError, AttributeError):
        return Damage(SEAL, f"{FILE} is damaged")
    sizes = None if is_local(folder) else object_store.sizes(folder)
    for index, (name, size, crc32) in enumerate(entries):
        if index not in indices:
            continue
        path = folder / name
        if sizes is not None:
            size_now = sizes.get(path)
        else:
            size_now = os.path.getsize(path) if path.exists() else None
        if size_now is None:
            return Damage(index, f"{name} is missing")
        if size_now != size:
            return Damage(index, f"{name} has {size_now} bytes instead of {size}")
        if crc32 is not None and _crc32(path) != crc32:
            return Damage(index, f"{name} has other contents than were written")
    return None


def nbytes(folder: epath.Path) -> int:
    """Bytes of all files of a checkpoint."""
    return sum(_sizes(folder).values())


def _sizes(folder: epath.Path) -> dict[epath.Path, int]:
    if not is_local(folder):
        return object_store.sizes(folder)
    sizes = {}
    for path in folder.iterdir():
        sizes |= _sizes(path) if path.is_dir() else {path: os.path.getsize(path)}
    return sizes


def _crc32(path: epath.Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            value = zlib.crc32(block, value)
    return value
