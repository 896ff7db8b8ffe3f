"""Files that grow line by line: one file on a disk, numbered chunks in a bucket.

An object in a bucket cannot be appended to. There `metrics.jsonl` is the folder `metrics`, whose
objects `000001.jsonl`, `000002.jsonl` ... hold the lines in their order. Each is written once, so
what is transferred is what is stored. `read` returns either, and both of a folder that was copied.
"""

import collections
import contextlib
import errno
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from etils import epath

from maxdiloco import json_text, small_files
from maxdiloco.errors import CheckpointError
from maxdiloco.processes import output
from maxdiloco.storage.durable import replacing, sync_folder
from maxdiloco.storage.run_folder import RunFolder, is_local, reason

# A line is in the bucket after a minute at most, of which the upload takes a part.
CHUNK_S = 50.0
# Memory for one upload. Full chunks occur above 80 kB/s only, so their size matters little.
CHUNK_BYTES = 4 << 20
MAX_PENDING_BYTES = 64 << 20  # the newest lines, kept while a store is away: 100,000 rows or more
RETRY_S = 10.0  # between two tries of an upload, each of which obstore repeats for 30 s
WAIT_S = 30.0  # for uploads before a save and at the end: as long as obstore repeats a request
READERS = 32  # requests at once: a day has 1,700 chunks, which take 3 s at 50 ms each
MAX_FILE_BYTES = 1 << 32  # of a file that is read whole: seven million rows of 600 bytes
# The newest lines, kept while they cannot be written: some 60 MB. Our choice.
MOST_KEPT = 100_000
MOST_STEPS = 10_000  # of a period in a line of history.jsonl; our choice
_DIGITS = 6  # of a chunk's number; 580 days


class LocalLines:
    """Bytes appended to a file; the kernel has each line of them when write returns.

    write raises OSError when a line cannot be written and keeps it; the next call tries again.
    """

    def __init__(self, path: epath.Path):
        self._file = open(path, "a+b", buffering=0)
        self._kept: collections.deque[bytes] = collections.deque(maxlen=MOST_KEPT)
        size = os.fstat(self._file.fileno()).st_size
        # A process that was killed may have left half a line.
        if size and os.pread(self._file.fileno(), 1, size - 1) != b"\n":
            self._kept.append(b"\n")

    def write(self, line: bytes) -> None:
        """Add a line, with what ends it."""
        self._kept.append(line)
        self._write_kept()

    def sync(self) -> None:
        """Force the lines written so far, and the file's name, to the disk."""
        self._write_kept()
        os.fsync(self._file.fileno())
        sync_folder(os.path.dirname(self._file.name))

    def close(self) -> None:
        """Write what is left."""
        with self._file:
            self._write_kept()

    def _write_kept(self) -> None:
        if not os.fstat(self._file.fileno()).st_nlink:  # removed: the kernel would take them still
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._file.name)
        while self._kept:
            taken = self._file.write(self._kept[0])  # a nearly full disk takes a part of it
            self._kept[0] = self._kept[0][taken:]
            if not self._kept[0]:
                self._kept.popleft()


class ChunkedLines:
    """Bytes uploaded to a bucket by a thread, as numbered objects that are each written once.

    No method makes a request in the thread of its caller. A chunk is uploaded when its first line
    is CHUNK_S old, when it has CHUNK_BYTES, and by `sync` and `close`. A failed upload is repeated
    until it succeeds; meanwhile `write` keeps each line and raises OSError, as in LocalLines.

    Args:
      folder: where the chunks are. Numbers continue after those that it has.
      require_lock: of RunFolder. Called before each write and each upload.
      prefix, suffix: what a chunk's name has before and after its number.
      header: the bytes that every chunk begins with.
    """

    def __init__(
        self,
        folder: epath.Path,
        require_lock: Callable[[], None],
        *,
        prefix: str = "",
        suffix: str = "",
        header: bytes = b"",
    ):
        self._folder, self._require_lock, self._header = folder, require_lock, header
        self._prefix, self._suffix = prefix, suffix
        self._number = 0  # of the next chunk; 0: the folder was not listed yet
        self._changed = threading.Condition()  # guards what follows
        self._lines: collections.deque[bytes] = collections.deque()
        self._size = 0  # of the lines, in bytes
        self._oldest = 0.0  # time.monotonic() when the first of the lines was added
        self._chunk = b""  # taken from the lines, and not stored yet
        self._is_urgent = self._is_closing = self._has_ended = False
        self._error: OSError | None = None  # of the newest try
        self._tried = 0.0  # when it failed
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name="upload-lines", daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        """Add a line, with what ends it. Raises OSError while uploads fail."""
        self._require_lock()
        with self._changed:
            if not self._lines:
                self._oldest = time.monotonic()
            self._lines.append(line)
            self._size += len(line)
            while self._size > MAX_PENDING_BYTES:
                self._size -= len(self._lines.popleft())
            if len(self._lines) == 1 or self._size >= CHUNK_BYTES:
                self._changed.notify_all()
            self._raise_error()

    def sync(self) -> None:
        """Wait until the lines are stored, WAIT_S at most. Raises OSError if they are not."""
        self._require_lock()
        with self._changed:
            failures, self._is_urgent = self._failures, True
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: not self._is_pending() or self._failures > failures or self._has_ended,
                WAIT_S,
            )
            self._require_stored()

    def close(self) -> None:
        """Upload what is left and end the thread, in WAIT_S. Raises OSError for lines left."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(WAIT_S)
        with self._changed:
            self._has_ended = True  # also for a thread whose request has not returned
            self._require_stored()

    def _require_stored(self) -> None:
        if self._is_pending():
            self._require_lock()
            self._raise_error()
            raise TimeoutError(errno.ETIMEDOUT, f"not stored within {WAIT_S:g} s")

    def _raise_error(self) -> None:
        if self._error is not None:  # a new one: the traceback of one that is raised again grows
            raise OSError(self._error.errno, self._error.strerror) from self._error

    def _is_pending(self) -> bool:
        return bool(self._lines or self._chunk)

    def _wait_s(self) -> float | None:
        """Seconds until the next upload; None where there is nothing to upload."""
        if self._is_closing:
            return 0.0
        if not self._is_pending():
            return None
        if self._is_urgent or (self._size >= CHUNK_BYTES and self._error is None):
            return 0.0
        due = self._oldest + CHUNK_S if self._error is None else self._tried + RETRY_S
        return max(0.0, due - time.monotonic())

    def _run(self) -> None:
        try:
            # Another run has the folder: write, sync and close raise the error in their thread.
            with contextlib.suppress(CheckpointError):
                more = True
                while more:
                    more = self._take() and self._try_upload()
        finally:
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()

    def _try_upload(self) -> bool:
        """Upload the chunk; whether another upload may follow."""
        error = None
        try:
            self._upload()
        except OSError as caught:
            error = caught
        with self._changed:
            self._error = error
            if error is None:
                self._chunk = b""
            else:
                self._tried = time.monotonic()
                self._failures += 1
                self._is_urgent = False
            self._changed.notify_all()
            return error is None or not self._is_closing

    def _take(self) -> bool:
        """Wait for the next chunk and take its lines; False at the end."""
        with self._changed:
            while (seconds := self._wait_s()) != 0:
                self._changed.wait(seconds)
            if self._has_ended or not self._is_pending():
                return False
            if not self._chunk:
                taken, size = [], 0
                while self._lines and size < CHUNK_BYTES:
                    taken.append(self._lines.popleft())
                    size += len(taken[-1])
                self._size -= size
                self._chunk = self._header + b"".join(taken)
            if not self._lines:
                self._is_urgent = False
            return True

    def _upload(self) -> None:
        bucket = self._folder.bucket()
        if not self._number:
            numbers = _numbered(self._folder, self._prefix, self._suffix)
            self._number = max(numbers, default=0) + 1
        while True:
            self._require_lock()
            path = self._folder / f"{self._prefix}{self._number:0{_DIGITS}}{self._suffix}"
            # Another object of this name is a chunk that the listing lacked, or this one, of whose
            # upload the answer was lost.
            stored = bucket.put_if(path.key, self._chunk, None) is not None
            stored = stored or path.read_bytes() == self._chunk
            self._number += 1
            if stored:
                return


def open_lines(path: epath.Path, require_lock: Callable[[], None]) -> LocalLines | ChunkedLines:
    """The file, to add lines to those that it has. require_lock: of RunFolder. Raises OSError."""
    if not is_local(path):
        return ChunkedLines(_chunk_folder(path), require_lock, suffix=path.suffix)
    if chunks := chunks_of(path):  # of a folder that was copied from a bucket
        with replacing(path) as new:
            new.write_bytes(read(path) or b"")
        for chunk in chunks:
            chunk.unlink()
    return LocalLines(path)


def read(path: epath.Path) -> bytes | None:
    """The content of a file that grows, whole or in chunks; None where there is neither.

    Raises OSError.
    """
    parts = read_parts(path)
    return b"".join(parts.values()) if parts else None


def read_parts(path: epath.Path) -> dict[epath.Path, bytes]:
    """{file or object: content}, in the order of the lines. Raises OSError.

    The file comes first: a run that has one and chunks began on a disk. Every part but the last
    ends with a newline.
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
    """The chunks of a file that grows, oldest first. Raises OSError."""
    found = _numbered(_chunk_folder(path), "", path.suffix)
    return [found[number] for number in sorted(found)]


def _content(path: epath.Path) -> bytes:
    if is_local(path):
        return small_files.read_bytes(path, MAX_FILE_BYTES)
    return path.read_bytes()  # by one request: a run has many chunks


def _chunk_folder(path: epath.Path) -> epath.Path:
    return path.parent / path.stem


def _numbered(folder: epath.Path, prefix: str, suffix: str) -> dict[int, epath.Path]:
    """{number: chunk}, in no order."""
    form = re.compile(rf"{re.escape(prefix)}([0-9]{{{_DIGITS},18}}){re.escape(suffix)}")
    try:
        names = {path: form.fullmatch(path.name) for path in folder.iterdir()}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return {int(match[1]): path for path, match in names.items() if match}


@contextlib.contextmanager
def noted(
    path: epath.Path, say: Callable[[str], None], done: str = "written", so: str = ""
) -> Iterator[None]:
    """Access to a path whose failure is a line for the user: what cannot be `done`, and so what."""
    try:
        yield
    except OSError as error:
        say(f"note: {path} cannot be {done} ({reason(error)}){so}.")


class History(contextlib.AbstractContextManager):
    """Adds two lines to history.jsonl of a run's folder: for its start, and for how it ended.

        {"event": "start", "time": seconds since 1970, "step": inner steps done before, "until": the
         last step, "processes", "devices", "replicas", "reduce_scatter": whether slices average
         parts of the fragments, "bytes_sent": of each inner step of a period in which all exchanges
         are under way, by a replica to all other slices; of MOST_STEPS at most}
        {"event": "end", "time": ..., "why": the error that ended it, or "" for none}
    A start without an end was killed, or runs. Lines of earlier starts stay. A failed write is a
    warning. facts: the rest of the first line.
    """

    def __init__(self, folder: RunFolder, facts: Mapping[str, Any]):
        self._folder = folder
        self._lock, self._ended = threading.Lock(), False
        self._add("start", facts)

    def __exit__(self, kind, exception, traceback) -> None:
        self.end("" if exception is None else f"{kind.__name__}: {exception}")

    def end(self, why: str) -> None:
        """Add the line for the end, once. In any thread."""
        with self._lock:
            if not self._ended:
                self._ended = True
                self._add("end", {"why": output.one_line(why)})

    def _add(self, event: str, facts: Mapping[str, Any]) -> None:
        path = self._folder.history
        try:
            with contextlib.closing(open_lines(path, self._folder.require_lock)) as file:
                line = json.dumps({"event": event, "time": time.time(), **facts})
                file.write(f"{line}\n".encode())
        except (OSError, CheckpointError) as error:  # the latter: another process has the lock
            output.say(f"warning: base_output_directory: cannot write {path}: {reason(error)}.")


def read_history(folder: RunFolder) -> list[dict[str, Any]]:
    """The lines of history.jsonl, oldest first; none where there is no file. Raises OSError."""
    lines = (read(folder.history) or b"").decode(errors="replace").splitlines()
    events = map(json_text.fields, lines)
    return [event for event in events if event.get("event") in ("start", "end")]
