"""Files that grow line by line, on a disk and on an object store: metrics.jsonl and log.txt."""

import collections
import os
from collections.abc import Callable

from etils import epath

from maxdiloco.storage import object_store
from maxdiloco.storage.durable import sync_folder

# Object stores cannot append: there the whole file is written anew, at most this often.
REMOTE_FLUSH_SECONDS = 60.0  # our choice
# The newest lines, kept while they cannot be written: some 60 MB. Our choice.
MOST_KEPT = 100_000


class LocalLines:
    """Lines appended to a file; the kernel has each of them when write returns.

    write raises OSError when a line cannot be written and keeps it; the next call tries again.
    """

    def __init__(self, path: epath.Path):
        self._file = open(path, "ab", buffering=0)
        self._size = os.fstat(self._file.fileno()).st_size  # of whole lines
        self._torn = False  # whether the file ends with a part of a line
        self._kept: collections.deque[bytes] = collections.deque(maxlen=MOST_KEPT)
        self._named = False  # whether the file's name is on the disk

    def write(self, line: str) -> None:
        """Add a line."""
        self._kept.append(line.encode() + b"\n")
        self._write_kept()

    def sync(self) -> None:
        """Force the lines written so far to the disk, or to the object store."""
        self._write_kept()
        os.fsync(self._file.fileno())
        if not self._named:
            sync_folder(os.path.dirname(self._file.name))
            self._named = True

    def close(self) -> None:
        """Write what is left."""
        try:
            self._write_kept()
        finally:
            self._file.close()

    def _write_kept(self) -> None:
        while self._kept:
            if self._torn:
                self._file.truncate(self._size)
            self._torn = True
            rest = line = self._kept[0]
            while rest:  # a nearly full disk takes a part of it
                rest = rest[self._file.write(rest) :]
            self._torn = False
            self._size += len(line)
            self._kept.popleft()


class RemoteLines:
    """Lines kept in memory; the whole file is written anew from time to time.

    text: what the file has so far. clock: seconds, monotonic. require_lock: of RunFolder.
    """

    def __init__(
        self,
        path: epath.Path,
        text: str,
        clock: Callable[[], float],
        require_lock: Callable[[], None],
    ):
        self._path, self._text, self._clock = path, text, clock
        self._require_lock = require_lock
        self._written = clock()
        self._whole = True

    def write(self, line: str) -> None:
        """Add a line."""
        self._require_lock()  # at every logged step
        self._text += line + "\n"
        self._whole = False
        if self._clock() - self._written >= REMOTE_FLUSH_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Force the lines written so far to the disk, or to the object store."""
        self._require_lock()
        self._written = self._clock()
        with object_store.as_os_errors(self._path):
            self._path.write_text(self._text)
        self._whole = True

    def close(self) -> None:
        """Write what is left."""
        if not self._whole:
            self.sync()
