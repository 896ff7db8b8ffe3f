"""The seal of a checkpoint: what its files must look like, so that damage is seen before use.

Orbax finds a missing or cut file only while it reads, with an untyped exception, and takes some
damaged bytes for numbers. So the last file written before a checkpoint becomes visible lists all
others with their sizes and, on mounted file systems and up to a limit, their CRC-32.
"""

import json
import zlib
from collections.abc import Collection
from typing import NamedTuple

from etils import epath

from maxdiloco.storage import object_store
from maxdiloco.storage.run_folder import is_local

FILE = "seal.json"
# Reading back costs about 0.3 s per GB from the page cache; above this only sizes are kept.
CONTENT_LIMIT_BYTES = 16 << 30  # our choice
_BLOCK_BYTES = 1 << 24


SEAL = -1  # the place of the seal itself


class Damage(NamedTuple):
    """A file that is not as it was written. place: in the list of the seal; what: a few words."""

    place: int
    what: str


def write(folder: epath.Path) -> None:
    """List the files below folder's item folders with size and, when few enough, CRC-32.

    folder: a whole checkpoint, not yet visible to readers. Files directly in it are written after
    this and are left out. Raises OSError.
    """
    sizes = {path: size for path, size in _sizes(folder).items() if path.parent != folder}
    with_content = is_local(folder) and sum(sizes.values()) <= CONTENT_LIMIT_BYTES
    entries = {
        str(path.relative_to(folder)): [size, _crc32(path) if with_content else None]
        for path, size in sorted(sizes.items())
    }
    (folder / FILE).write_text(json.dumps({"files": entries}, indent=0))


def damage(
    folder: epath.Path, *, part: int = 0, parts: int = 1, places: Collection[int] | None = None
) -> Damage | None:
    """What is wrong with the sealed files of a checkpoint, or None.

    part, parts: look at every parts-th file only, so that several processes share the reading.
    places: look at these files of the list instead.
    Raises nothing for damage; other OSErrors (a folder that may not be read) pass through.
    """
    try:
        listed = json.loads((folder / FILE).read_text())["files"]
        entries = sorted((name, int(size), crc32) for name, (size, crc32) in listed.items())
    except FileNotFoundError:
        return Damage(SEAL, f"{FILE} is missing")
    except (ValueError, KeyError, TypeError, AttributeError):
        return Damage(SEAL, f"{FILE} is damaged")
    sizes = None if is_local(folder) else object_store.sizes(folder)
    for place, (name, size, crc32) in enumerate(entries):
        if place % parts != part if places is None else place not in places:
            continue
        path = folder / name
        found = _size(path) if sizes is None else sizes.get(path)
        if found is None:
            return Damage(place, f"{name} is missing")
        if found != size:
            return Damage(place, f"{name} has {found} bytes instead of {size}")
        if crc32 is not None and _crc32(path) != crc32:
            return Damage(place, f"{name} has other contents than were written")
    return None


def _sizes(folder: epath.Path) -> dict[epath.Path, int]:
    if not is_local(folder):
        return object_store.sizes(folder)
    found = {}
    for path in folder.iterdir():
        found |= _sizes(path) if path.is_dir() else {path: path.stat().length}
    return found


def _size(path: epath.Path) -> int | None:
    return path.stat().length if path.exists() else None


def _crc32(path: epath.Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            value = zlib.crc32(block, value)
    return value
