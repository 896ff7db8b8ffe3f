"""Files that grow line by line, on a disk and on an object store."""

import collections
import contextlib
import errno
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from etils import epath

from maxdiloco import json_text
from maxdiloco.errors import CheckpointError
from maxdiloco.processes import output
from maxdiloco.storage.durable import sync_folder
from maxdiloco.storage.run_folder import RunFolder, is_local, reason

# Object stores cannot append: there the whole file is written anew, at most this often.
REMOTE_FLUSH_SECONDS = 60.0  # our choice
# The newest lines, kept while they cannot be written: some 60 MB. Our choice.
MOST_KEPT = 100_000
MOST_STEPS = 10_000  # of a period in a line of history.jsonl; our choice


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


class RemoteLines:
    """Bytes kept in memory after `content`; the whole file is written anew from time to time."""

    def __init__(self, path: epath.Path, content: bytes, require_lock: Callable[[], None]):
        self._path, self._require_lock = path, require_lock
        self._content, self._whole = bytearray(content), True
        self._written = time.monotonic()

    def write(self, line: bytes) -> None:
        """Add a line, with what ends it."""
        self._require_lock()  # at every logged step
        self._content += line
        self._whole = False
        if time.monotonic() - self._written >= REMOTE_FLUSH_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Write the file to the object store."""
        self._require_lock()
        self._written = time.monotonic()
        self._path.write_bytes(bytes(self._content))
        self._whole = True

    def close(self) -> None:
        """Write what is left."""
        if not self._whole:
            self.sync()


def open_lines(path: epath.Path, require_lock: Callable[[], None]) -> LocalLines | RemoteLines:
    """The file, to add lines to those that it has. require_lock: of RunFolder. Raises OSError."""
    if is_local(path):
        return LocalLines(path)
    return RemoteLines(path, text_of(path).encode(), require_lock)


def text_of(path: epath.Path) -> str:
    """The text of a file; "" where there is none. Raises OSError."""
    try:
        return path.read_bytes().decode(errors="replace")
    except FileNotFoundError:
        return ""


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
         last step, "processes", "devices", "replicas", "owners": whether slots own parts of the
         fragments, "bytes_sent": of each inner step of a period in which all exchanges are under
         way, by a replica to all other slices; of MOST_STEPS at most}
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
    events = map(json_text.fields, text_of(folder.history).splitlines())
    return [event for event in events if event.get("event") in ("start", "end")]
