"""Paths of data: local files, and objects in a bucket or behind https, read by ranges.

All are opened in the same way. An open object is one version of it; another version is an OSError
with ESTALE. Every failure is an OSError, or a ConfigError if obstore is not installed.
"""

import errno
import fnmatch
import io
import os
import urllib.parse
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import BinaryIO, NamedTuple

from maxdiloco import small_files
from maxdiloco.data.packages import require
from maxdiloco.data.read_ahead import REQUESTS, in_threads
from maxdiloco.storage import store
from maxdiloco.storage.store import is_local

# Bytes of the first request of a sequential reader, and of the largest one; two of these are in
# memory. 4 MiB in 20 ms are 200 MB/s.
_LEAST = 1 << 16
_MOST = 1 << 22


def lists_nothing(path: str) -> bool:
    """Return True if a path is an https address, which cannot be listed."""
    return path.startswith("https://")


class Stamp(NamedTuple):
    """A version of a file.

    Attributes:
      size: in bytes.
      version: the time of the last change [ns], or the ETag of an object.
    """

    size: int
    version: int | str

    @classmethod
    def of(cls, file: BinaryIO) -> "Stamp":
        """Return the stamp of a file that `opened` returned."""
        if isinstance(file.raw, ObjectFile):
            return file.raw.stamp
        status = os.fstat(file.fileno())
        return cls(status.st_size, status.st_mtime_ns)

    @classmethod
    def of_entry(cls, entry: store.Entry) -> "Stamp":
        """Return the stamp of an object. Listings of Azure have ETags without quotes."""
        return cls(entry.size, entry.version.get("e_tag", "").removeprefix("W/").strip('"'))


def opened(path: str, stamp: Stamp | None = None, span: tuple[int, int] | None = None) -> BinaryIO:
    """Open a file to read, for a `with`.

    Args:
      path: local, in a bucket or on https.
      stamp: the version of an object. None: the present one.
      span: bytes of an object that will be read, with one request.
    """
    if is_local(path):
        return small_files.open_regular(path)
    return io.BufferedReader(ObjectFile(*_bucket(path), stamp, span))


def objects(path: str) -> dict[str, Stamp]:
    """Return the objects below a folder, by path. There is no such folder if there are none."""
    bucket, name = _bucket(path)
    root = path[: path.index("/", path.index("://") + 3) + 1] if name else f"{path.rstrip('/')}/"
    return {root + entry.name: Stamp.of_entry(entry) for entry in bucket.list_all(name)}


def find(path: str) -> Stamp | None:
    """Return the stamp of the object at a path, or None."""
    bucket, name = _bucket(path)
    entry = None
    try:
        entry = bucket.head(name) if name else None
    except PermissionError:  # as S3 says behind https of what is not there
        if not lists_nothing(path):
            raise
    return None if entry is None else Stamp.of_entry(entry)


def is_folder(path: str) -> bool:
    """Return True if there is an object below a path."""
    bucket, name = _bucket(path)
    return not lists_nothing(path) and any(True for _ in bucket.list_all(name))


def stamps(folder: str, names: Sequence[str]) -> list[Stamp]:
    """Return the stamps of objects in a folder, by one listing if possible.

    Raises:
      FileNotFoundError: there is no such object.
    """
    paths = [f"{folder.rstrip('/')}/{name}" for name in names]
    if lists_nothing(folder):
        there = dict(zip(paths, in_threads(find, paths, REQUESTS), strict=True))
    else:
        there = objects(folder)
    for path in paths:
        if not there.get(path):
            raise FileNotFoundError(errno.ENOENT, f"there is no {path}")
    return [there[path] for path in paths]


def fits(name: str, pattern: str) -> bool:
    """Return True if a glob matches the path of an object, as corpus.find matches files."""
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
    """Return bytes begin to end of one version of an object, by one request. Raises OSError."""
    bucket, name = _bucket(path)
    data, entry = bucket.get_part(name, begin, end)
    if Stamp.of_entry(entry) != stamp:
        raise OSError(errno.ESTALE, "another object is in its place")
    return data


def _bucket(path: str) -> tuple[store.Bucket, str]:
    """Return the bucket of a path, and the name in it."""
    # Imported here, because synthetic data must work where etils is not installed.
    from maxdiloco.storage import object_store

    require("obstore", path, extra="buckets")
    scheme, _, rest = path.partition("://")
    bucket, _, name = rest.partition("/")
    if lists_nothing(path):
        name = urllib.parse.unquote(name)
    return object_store.BucketPath.client(scheme, bucket), name.strip("/")


class ObjectFile(io.RawIOBase):
    """An object as a file.

    For a sequential reader a thread fetches the next bytes, twice as many each time.
    """

    def __init__(
        self,
        bucket: store.Bucket,
        name: str,
        stamp: Stamp | None = None,
        span: tuple[int, int] | None = None,
    ):
        """Open an object. Raises FileNotFoundError. See `opened` for stamp and span."""
        self._bucket, self._name, self._span = bucket, name, span or (0, 0)
        self._pool: ThreadPoolExecutor | None = None  # the thread that fetches ahead
        if stamp is None:
            if (entry := bucket.head(name)) is None:
                raise FileNotFoundError(errno.ENOENT, "there is no such object")
            stamp = Stamp.of_entry(entry)
        self.stamp = stamp
        self._place = 0  # of the reader
        self._begin, self._data = 0, b""  # what was fetched last
        self._size = _LEAST  # of the next request
        self._ahead: Future[bytes] | None = None  # what follows it

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
        """Read bytes at the position, at most those that are fetched."""
        if not self._begin <= self._place < self._end and self._place < self.stamp.size:
            self._fetch(len(buffer))
        start = self._place - self._begin
        data = self._data[start : start + len(buffer)]
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)

    @property
    def _end(self) -> int:
        return self._begin + len(self._data)

    def _fetch(self, count: int) -> None:
        begin, ahead, kept = self._place, self._ahead, b""
        goes_on = begin == self._end and bool(self._data)
        if goes_on:
            kept = self._data[-_LEAST:]  # who splits text goes back to the end of a line
        if goes_on and ahead is not None:
            data = ahead.result()
        elif self._span[0] <= begin < self._span[1]:
            data = self._get(begin, self._span[1])
        else:
            data = self._get(begin, begin + max(count, self._size))
        self._begin, self._data, self._ahead = begin - len(kept), kept + data, None
        if goes_on and self._end < self.stamp.size:
            self._size = min(2 * self._size, _MOST)
            self._pool = self._pool or ThreadPoolExecutor(1)
            self._ahead = self._pool.submit(self._get, self._end, self._end + self._size)

    def _get(self, begin: int, end: int) -> bytes:
        end = min(end, self.stamp.size, begin + store.BLOCK_BYTES)
        data, entry = self._bucket.get_part(self._name, begin, end)
        if Stamp.of_entry(entry) != self.stamp:
            raise OSError(errno.ESTALE, "another object is in its place")
        return data

    def close(self) -> None:
        """Wait for the thread."""
        if self._pool:
            self._pool.shutdown(cancel_futures=True)
        super().close()
