"""The seal of a checkpoint: what its files must look like, so that damage is seen before use.

Orbax finds a missing or cut file only while it reads, with an untyped exception, and takes some
damaged bytes for numbers. So the last file written before a checkpoint becomes visible lists all
others with their sizes and, on mounted file systems and up to a limit, their CRC-32.
"""

import json
import zlib

from etils import epath

from maxdiloco.run_folder import is_local

FILE = "seal.json"
# Reading back costs about 0.3 s per GB from the page cache; above this only sizes are kept.
CONTENT_LIMIT_BYTES = 16 << 30  # our choice
_BLOCK_BYTES = 1 << 24


def write(folder: epath.Path, *, content_limit_bytes: int = CONTENT_LIMIT_BYTES) -> None:
    """List the files below folder's item folders with size and, when few enough, CRC-32.

    folder: a whole checkpoint, not yet visible to readers. Files directly in it are written after
    this and are left out. Raises OSError.
    """
    sizes = {path: path.stat().length for item in _folders(folder) for path in _files(item)}
    with_content = is_local(folder) and sum(sizes.values()) <= content_limit_bytes
    entries = {
        str(path.relative_to(folder)): [size, _crc32(path) if with_content else None]
        for path, size in sorted(sizes.items())
    }
    (folder / FILE).write_text(json.dumps({"files": entries}, indent=0))


def damage(folder: epath.Path, *, part: int = 0, parts: int = 1) -> str | None:
    """What is wrong with the sealed files of a checkpoint, in a few words, or None.

    part, parts: look at every parts-th file only, so that several processes share the reading.
    Raises nothing for damage; other OSErrors (a folder that may not be read) pass through.
    """
    try:
        listed = json.loads((folder / FILE).read_text())["files"]
        entries = sorted((name, int(size), crc32) for name, (size, crc32) in listed.items())
    except FileNotFoundError:
        return f"{FILE} is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{FILE} is damaged"
    for name, size, crc32 in entries[part::parts]:
        path = folder / name
        if not path.exists():
            return f"{name} is missing"
        found = path.stat().length
        if found != size:
            return f"{name} has {found} bytes instead of {size}"
        if crc32 is not None and _crc32(path) != crc32:
            return f"{name} has other contents than were written"
    return None


def _folders(folder: epath.Path) -> list[epath.Path]:
    return [path for path in folder.iterdir() if path.is_dir()]


def _files(folder: epath.Path) -> list[epath.Path]:
    found = []
    for path in folder.iterdir():
        found.extend(_files(path) if path.is_dir() else [path])
    return found


def _crc32(path: epath.Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            value = zlib.crc32(block, value)
    return value
