"""Where data are read: mounted files, and objects in a bucket or behind https, by ranges.

All open in the same way. An object is one version of it: an answer of another is an OSError with
ESTALE. Every failure is an OSError, and ConfigError without the package.
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

# Of one request [bytes], where no more is known of what will be read: the least, and the most of
# a file that is read on and on, which has two in memory. Our choice: 4 MiB in 20 ms are 200 MB/s.
_LEAST = 1 << 16
_MOST = 1 << 22


def lists_nothing(path: str) -> bool:
    """Whether a path is behind https, where a file is found by its name alone."""
    return path.startswith("https://")


class Stamp(NamedTuple):
    """Identifies a version of a file. size [bytes]; version: the time of its last change [ns], of
    an object its ETag."""

    size: int
    version: int | str

    @classmethod
    def of(cls, file: BinaryIO) -> "Stamp":
        """That of a file of `opened`."""
        if isinstance(file.raw, ObjectFile):
            return file.raw.stamp
        status = os.fstat(file.fileno())
        return cls(status.st_size, status.st_mtime_ns)

    @classmethod
    def of_entry(cls, entry: store.Entry) -> "Stamp":
        """That of an object. Listings of Azure write an ETag without its quotes."""
        return cls(entry.size, entry.version.get("e_tag", "").removeprefix("W/").strip('"'))


def opened(path: str, stamp: Stamp | None = None, span: tuple[int, int] | None = None) -> BinaryIO:
    """A file to read; for a `with`. Of an object, stamp: the version that is wanted, None: the one
    that is there; span: the bytes that will be read, which are one request."""
    if is_local(path):
        return small_files.open_regular(path)
    return io.BufferedReader(ObjectFile(*_bucket(path), stamp, span))


def objects(path: str) -> dict[str, Stamp]:
    """The objects below a folder, by path; none: there is no such folder."""
    bucket, name = _bucket(path)
    root = path[: path.index("/", path.index("://") + 3) + 1] if name else f"{path.rstrip('/')}/"
    return {root + entry.name: Stamp.of_entry(entry) for entry in bucket.list_all(name)}


def find(path: str) -> Stamp | None:
    """The object at a path, if there is one."""
    bucket, name = _bucket(path)
    entry = None
    try:
        entry = bucket.head(name) if name else None
    except PermissionError:  # as S3 says behind https of what is not there
        if not lists_nothing(path):
            raise
    return None if entry is None else Stamp.of_entry(entry)


def is_folder(path: str) -> bool:
    """Whether there is an object below a path."""
    bucket, name = _bucket(path)
    return not lists_nothing(path) and any(True for _ in bucket.list_all(name))


def stamps(folder: str, names: Sequence[str]) -> list[Stamp]:
    """Those of objects in a folder, by one listing where there is one. Raises FileNotFoundError."""
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
    """Whether a glob matches the path of an object, as corpus.find matches files."""
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
    """The bucket of a path, and the name there."""
    # Here, not above: training on tokens made up has to work where etils is not installed.
    from maxdiloco.storage import object_store

    require("obstore", path, extra="buckets")
    scheme, _, rest = path.partition("://")
    bucket, _, name = rest.partition("/")
    if lists_nothing(path):
        name = urllib.parse.unquote(name)
    return object_store.BucketPath.client(scheme, bucket), name.strip("/")


class ObjectFile(io.RawIOBase):
    """An object as a file. While a reader goes on where it was, a thread fetches what comes next,
    twice as much each time."""

    def __init__(
        self,
        bucket: store.Bucket,
        name: str,
        stamp: Stamp | None = None,
        span: tuple[int, int] | None = None,
    ):
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
        """Set the place of the reader."""
        self._place = offset + (0, self._place, self.stamp.size)[whence]
        return self._place

    def readinto(self, buffer: bytearray) -> int:
        """Bytes from the place on; fewer than are asked for where what is fetched ends."""
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
