"""Open and list data at a path: local files, and objects in a bucket or behind https.

All are opened in the same way; objects are read by ranges. Every read of an open object returns
bytes of one version; if the object has changed, it raises OSError with ESTALE. Every failure is an
OSError, or a ConfigError if obstore is not installed.
"""

import errno
import fnmatch
import io
import os
import urllib.parse
from collections.abc import Sequence
from typing import BinaryIO, NamedTuple

from maxdiloco import small_files
from maxdiloco.data.packages import require
from maxdiloco.data.read_ahead import REQUESTS, in_threads
from maxdiloco.storage import store
from maxdiloco.storage.store import is_local

# Bytes of a request of a sequential reader. 4 MiB in 20 ms are 200 MB/s, and tokenising them takes
# far longer, so nothing is fetched ahead.
_REQUEST = 1 << 22


def is_https(path: str) -> bool:
    """Return True if a path is an https address, which cannot be listed."""
    return path.startswith("https://")


class Stamp(NamedTuple):
    """A version of a file.

    Attributes:
      size: size in bytes.
      version: the time of the last change [ns], or the ETag of an object.
    """

    size: int
    version: int | str

    @classmethod
    def of_file(cls, file: BinaryIO) -> "Stamp":
        """Return the stamp of a file that `open_file` returned."""
        if isinstance(file.raw, ObjectFile):
            return file.raw.stamp
        status = os.fstat(file.fileno())
        return cls(status.st_size, status.st_mtime_ns)

    @classmethod
    def of_entry(cls, entry: store.Entry) -> "Stamp":
        """Return the stamp of an object. Quotes are removed, since Azure's listings have none."""
        return cls(entry.size, entry.version.get("e_tag", "").removeprefix("W/").strip('"'))


def open_file(path: str, stamp: Stamp | None = None) -> BinaryIO:
    """Open a file to read, for a `with`.

    Args:
      path: local, in a bucket or on https.
      stamp: the version of an object to read. None: the present version.
    """
    if is_local(path):
        return small_files.open_regular(path)
    return io.BufferedReader(ObjectFile(path, stamp or _present(path)), _REQUEST)


def _present(path: str) -> Stamp:
    """Return the stamp of an object. Raises FileNotFoundError."""
    bucket, name = _bucket(path)
    if (entry := bucket.head(name)) is None:
        raise FileNotFoundError(errno.ENOENT, "there is no such object")
    return Stamp.of_entry(entry)


def read_whole(path: str, most: int) -> bytes:
    """Return the content of a file of at most `most` bytes. Raises OSError; EFBIG if larger."""
    if is_local(path):
        return small_files.read_bytes(path, most)
    with open_file(path) as file:
        if Stamp.of_file(file).size > most:
            raise OSError(errno.EFBIG, f"larger than {most:,} bytes")
        return file.read()


def objects(path: str) -> dict[str, Stamp]:
    """Return {path: stamp} of the objects below a folder; {} if the folder does not exist."""
    bucket, name = _bucket(path)
    root = path[: path.index("/", path.index("://") + 3) + 1] if name else f"{path.rstrip('/')}/"
    return {root + entry.name: Stamp.of_entry(entry) for entry in bucket.list_all(name)}


def find(path: str) -> Stamp | None:
    """Return the stamp of the object at a path, or None if the object does not exist."""
    bucket, name = _bucket(path)
    entry = None
    try:
        entry = bucket.head(name) if name else None
    except PermissionError:  # the response of S3 over https for a missing object
        if not is_https(path):
            raise
    return None if entry is None else Stamp.of_entry(entry)


def is_folder(path: str) -> bool:
    """Return True if there is an object below a path."""
    bucket, name = _bucket(path)
    return not is_https(path) and any(True for _ in bucket.list_all(name))


def stamps(folder: str, names: Sequence[str]) -> list[Stamp]:
    """Return the stamps of objects in a folder, by one listing if possible.

    Raises:
      FileNotFoundError: an object does not exist.
    """
    paths = [f"{folder.rstrip('/')}/{name}" for name in names]
    if is_https(folder):
        there = dict(zip(paths, in_threads(find, paths, REQUESTS), strict=True))
    else:
        there = objects(folder)
    for path in paths:
        if not there.get(path):
            raise FileNotFoundError(errno.ENOENT, f"there is no {path}")
    return [there[path] for path in paths]


def fits(name: str, pattern: str) -> bool:
    """Return True if a glob matches the path of an object, by the rules of corpus.find."""
    return _fit(name.split("/"), pattern.split("/"))


def _fit(parts: list[str], pattern: list[str]) -> bool:
    if not parts or not pattern:
        return not parts and not pattern
    first, *rest = pattern
    hidden = parts[0].startswith(".")
    if first == "**":
        below = not hidden and len(parts) > 1 and _fit(parts[1:], pattern)
        return below or _fit(parts, rest or ["*"])
    is_match = fnmatch.fnmatchcase(parts[0], first) and hidden <= first.startswith(".")
    return is_match and _fit(parts[1:], rest)


def read_range(path: str, stamp: Stamp, begin: int, end: int) -> bytes:
    """Return the bytes [begin, end) of a version of an object, in one request. Raises OSError."""
    bucket, name = _bucket(path)
    data, entry = bucket.get_part(name, begin, end)
    if Stamp.of_entry(entry) != stamp:
        raise OSError(errno.ESTALE, "another object is in its place")
    return data


def _bucket(path: str) -> tuple[store.Bucket, str]:
    """Return the bucket of a path, and the name of the object in the bucket."""
    # Imported here, because synthetic data must work without etils.
    from maxdiloco.storage import object_store

    require("obstore", path, extra="buckets")
    scheme, _, rest = path.partition("://")
    bucket, _, name = rest.partition("/")
    if is_https(path):
        name = urllib.parse.unquote(name)
    return object_store.BucketPath.client(scheme, bucket), name.strip("/")


class ObjectFile(io.RawIOBase):
    """A version of an object as a file, of which each read is one request."""

    def __init__(self, path: str, stamp: Stamp):
        """Begin to read at the start. No request is made."""
        self._path, self.stamp = path, stamp
        self._place = 0  # position of the reader [bytes]

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position of the reader."""
        self._place = offset + (0, self._place, self.stamp.size)[whence]
        return self._place

    def readinto(self, buffer: bytearray) -> int:
        """Read bytes at the reader's position, at most BLOCK_BYTES."""
        begin, count = self._place, min(len(buffer), store.BLOCK_BYTES)
        end = min(begin + count, self.stamp.size)
        if begin >= end:
            return 0
        buffer[: end - begin] = read_range(self._path, self.stamp, begin, end)
        self._place = end
        return end - begin

    def readall(self) -> bytes:
        """Read all bytes from the reader's position on."""
        return b"".join(iter(lambda: self.read(store.BLOCK_BYTES), b""))
