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
from concurrent.futures import Future, ThreadPoolExecutor
from typing import BinaryIO, NamedTuple

from maxdiloco import small_files
from maxdiloco.data.packages import require
from maxdiloco.data.read_ahead import REQUESTS, in_threads
from maxdiloco.storage import store
from maxdiloco.storage.store import is_local

# Bytes of the first and of the largest request of a sequential reader; two requests are in memory.
# 4 MiB in 20 ms are 200 MB/s.
_LEAST = 1 << 16
_MOST = 1 << 22


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
        """Return the stamp of a file that `opened` returned."""
        if isinstance(file.raw, ObjectFile):
            return file.raw.stamp
        status = os.fstat(file.fileno())
        return cls(status.st_size, status.st_mtime_ns)

    @classmethod
    def of_entry(cls, entry: store.Entry) -> "Stamp":
        """Return the stamp of an object. Quotes are removed, since Azure's listings have none."""
        return cls(entry.size, entry.version.get("e_tag", "").removeprefix("W/").strip('"'))


def opened(path: str, stamp: Stamp | None = None, span: tuple[int, int] | None = None) -> BinaryIO:
    """Open a file to read, for a `with`.

    Args:
      path: local, in a bucket or on https.
      stamp: the version of an object to read. None: the present version.
      span: (begin, end) in bytes of an object that will be read, with one request.
    """
    if is_local(path):
        return small_files.open_regular(path)
    return io.BufferedReader(ObjectFile(*_bucket(path), stamp, span))


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
    """An object as a file.

    For a sequential reader, a thread fetches the next bytes ahead. Each request is twice as large
    as the previous one, up to _MOST.
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
        self._place = 0  # position of the reader [bytes]
        self._begin, self._data = 0, b""  # offset and content of the bytes in memory
        self._size = _LEAST  # size of the next request [bytes]
        self._ahead: Future[bytes] | None = None  # the bytes after self._data

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
        """Read bytes at the reader's position, at most up to the end of the bytes in memory."""
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
            kept = self._data[-_LEAST:]  # a reader that splits text seeks back to a line end
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
        """Close the file, after the request that is in progress."""
        if self._pool:
            self._pool.shutdown(cancel_futures=True)
        super().close()
