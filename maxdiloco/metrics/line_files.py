"""Files that grow line by line: one file on a disk, numbered chunks in a bucket.

An object in a bucket cannot be appended to. There `metrics.jsonl` is the folder `metrics`, whose
objects `000001.jsonl`, `000002.jsonl` ... hold the lines in their order. Each is written once, so
no byte is transferred twice. `read` returns either, and both of a folder that was copied.
"""

import contextlib
import errno
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from etils import epath

from maxdiloco import small_files
from maxdiloco.metrics.line_writer import LineWriter
from maxdiloco.storage.durable import atomic_write, sync_folder
from maxdiloco.storage.os_errors import reason
from maxdiloco.storage.run_folder import is_local

# A line is in the bucket after a minute at most, of which the upload takes a part.
CHUNK_S = 50.0
# A healthy disk stores a line in well below 1 ms. A slow one may delay a step by a tenth of a
# second, which a person does not notice.
STALL_S = 0.1
UPLOAD_S = 30.0  # for uploads before a save and at the end: as long as obstore repeats a request
READERS = 32  # requests at once: a day has 1,700 chunks, which take 3 s at 50 ms each
MAX_FILE_BYTES = 1 << 32  # of a file that is read whole: seven million rows of 600 bytes
_DIGITS = 6  # of a chunk's number; 580 days


class FileTarget:
    """A file that is appended to. Raises OSError if it cannot be opened."""

    delay_s = 0.0
    deadline_s = None  # a disk has no deadline: a checkpoint must not outlive its rows

    def __init__(self, path: epath.Path):
        """Open the file, and make it if it does not exist."""
        self.stall_s = STALL_S
        self._file = open(path, "a+b", buffering=0)
        size = os.fstat(self._file.fileno()).st_size
        # A process that was killed may have left half a line.
        self._is_torn = size > 0 and os.pread(self._file.fileno(), 1, size - 1) != b"\n"

    def append(self, data: bytes) -> int:
        """See Target. A nearly full disk takes a part of the data."""
        if not os.fstat(self._file.fileno()).st_nlink:  # removed: the kernel would accept the data
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._file.name)
        if self._is_torn:
            self._file.write(b"\n")
            self._is_torn = False
        return self._file.write(data)

    def sync(self) -> None:
        """Force the file's contents and its name to the disk."""
        os.fsync(self._file.fileno())
        sync_folder(os.path.dirname(self._file.name))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class ChunkTarget:
    """Numbered objects in a bucket, each written once. Numbers continue those that exist."""

    def __init__(
        self,
        folder: epath.Path,
        require_lock: Callable[[], None],
        *,
        prefix: str = "",
        suffix: str = "",
        header: bytes = b"",
    ):
        """Find the next number.

        Args:
          folder: where the chunks are.
          require_lock: called before each request, see LineWriter.
          prefix: of a chunk's name, before its number.
          suffix: of a chunk's name, after its number.
          header: first bytes of every chunk.
        """
        self.delay_s, self.stall_s, self.deadline_s = CHUNK_S, 0.0, UPLOAD_S
        self._folder, self._require_lock, self._header = folder, require_lock, header
        self._prefix, self._suffix = prefix, suffix
        self._number = 0  # of the next chunk; 0: the folder was not listed yet

    def append(self, data: bytes) -> int:
        """Upload the data as the next chunk."""
        bucket, content = self._folder.bucket(), self._header + data
        if not self._number:
            numbers = _numbered(self._folder, self._prefix, self._suffix)
            self._number = max(numbers, default=0) + 1
        while True:
            self._require_lock()
            path = self._folder / f"{self._prefix}{self._number:0{_DIGITS}}{self._suffix}"
            # Another object of this name is a chunk that the listing lacked, or this one, of whose
            # upload the answer was lost.
            stored = bucket.put_if(path.key, content, None) is not None
            stored = stored or path.read_bytes() == content
            self._number += 1
            if stored:
                return len(data)

    def sync(self) -> None:
        """Do nothing: a bucket stores an object before it answers."""

    def close(self) -> None:
        """Do nothing: the bucket keeps the connections."""


def open_lines(path: epath.Path, require_lock: Callable[[], None]) -> LineWriter:
    """Open a file, to add lines to those that it has.

    Args:
      path: the file, or in a bucket the name that its chunks have together.
      require_lock: of RunFolder; used in a bucket only.

    Raises:
      OSError: the file cannot be opened.
    """
    if not is_local(path):
        target = ChunkTarget(_chunk_folder(path), require_lock, suffix=path.suffix)
        return LineWriter(target, require_lock)
    if chunks := chunks_of(path):  # of a folder that was copied from a bucket
        with atomic_write(path) as new:
            new.write_bytes(read(path) or b"")
        for chunk in chunks:
            chunk.unlink()
    return LineWriter(FileTarget(path))


def read(path: epath.Path) -> bytes | None:
    """Read a file that grows, whole or in chunks; None if there is neither. Raises OSError."""
    parts = read_parts(path)
    return b"".join(parts.values()) if parts else None


def read_parts(path: epath.Path) -> dict[epath.Path, bytes]:
    """Read a file that grows as {file or object: content}, in the order of the lines.

    The file comes first: a run that has one and chunks began on a disk. Every part but the last
    ends with a line feed. Raises OSError.
    """
    parts = {}
    with contextlib.suppress(FileNotFoundError):
        parts[path] = _content(path)
    chunks = chunks_of(path)
    with ThreadPoolExecutor(READERS, thread_name_prefix="read-lines") as pool:
        parts |= zip(chunks, pool.map(_content, chunks), strict=True)
    if chunks and path in parts and not parts[path].endswith(b"\n"):
        parts[path] += b"\n"
    return parts


def chunks_of(path: epath.Path) -> list[epath.Path]:
    """Return the chunks of a file that grows, oldest first. Raises OSError."""
    found = _numbered(_chunk_folder(path), "", path.suffix)
    return [found[number] for number in sorted(found)]


def _content(path: epath.Path) -> bytes:
    if is_local(path):
        return small_files.read_bytes(path, MAX_FILE_BYTES)
    return path.read_bytes()  # by one request: a run has many chunks


def _chunk_folder(path: epath.Path) -> epath.Path:
    return path.parent / path.stem


def _numbered(folder: epath.Path, prefix: str, suffix: str) -> dict[int, epath.Path]:
    """Return {number: chunk}, in no order."""
    form = re.compile(rf"{re.escape(prefix)}([0-9]{{{_DIGITS},18}}){re.escape(suffix)}")
    try:
        names = {path: form.fullmatch(path.name) for path in folder.iterdir()}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return {int(match[1]): path for path, match in names.items() if match}


@contextlib.contextmanager
def log_failure(
    path: epath.Path, say: Callable[[str], None], action: str = "written", consequence: str = ""
) -> Iterator[None]:
    """Print a line if an access to a path fails: it cannot be `action`, and the consequence."""
    try:
        yield
    except OSError as error:
        say(f"note: {path} cannot be {action} ({reason(error)}){consequence}.")
