"""Files that grow line by line, on a disk and on an object store."""

import collections
import contextlib
import os
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from etils import epath

from maxdiloco import json_text
from maxdiloco.errors import USER_ERRORS, CheckpointError
from maxdiloco.processes import output
from maxdiloco.storage.durable import sync_folder
from maxdiloco.storage.run_folder import is_local, reason

# Object stores cannot append: there the whole file is written anew, at most this often.
REMOTE_FLUSH_SECONDS = 60.0  # our choice
# The newest lines, kept while they cannot be written: some 60 MB. Our choice.
MOST_KEPT = 100_000


class LocalLines:
    """Lines appended to a file; the kernel has each of them when write returns.

    write raises OSError when a line cannot be written and keeps it; the next call tries again.
    """

    def __init__(self, path: epath.Path):
        self._file = open(path, "a+b", buffering=0)
        self._size = os.fstat(self._file.fileno()).st_size  # of whole lines
        self._torn = False  # whether the file ends with a part of a line
        self._kept: collections.deque[bytes] = collections.deque(maxlen=MOST_KEPT)
        # A process that was killed may have left half a line.
        if self._size and os.pread(self._file.fileno(), 1, self._size - 1) != b"\n":
            self._kept.append(b"\n")

    def write(self, line: str) -> None:
        """Add a line."""
        self._kept.append(line.encode() + b"\n")
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
        while self._kept:
            if self._torn:
                self._file.truncate(self._size)
            self._torn = True
            rest = self._kept[0]
            while rest:  # a nearly full disk takes a part of it
                rest = rest[self._file.write(rest) :]
            self._torn = False
            self._size += len(self._kept.popleft())


class RemoteLines:
    """Lines kept in memory after `text`; the whole file is written anew from time to time."""

    def __init__(self, path: epath.Path, text: str, require_lock: Callable[[], None]):
        self._path, self._text, self._require_lock = path, text, require_lock
        self._written = time.monotonic()
        self._whole = True

    def write(self, line: str) -> None:
        """Add a line."""
        self._require_lock()  # at every logged step
        self._text += line + "\n"
        self._whole = False
        if time.monotonic() - self._written >= REMOTE_FLUSH_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Write the file to the object store."""
        self._require_lock()
        self._written = time.monotonic()
        self._path.write_text(self._text)
        self._whole = True

    def close(self) -> None:
        """Write what is left."""
        if not self._whole:
            self.sync()


def open_lines(path: epath.Path, require_lock: Callable[[], None]) -> LocalLines | RemoteLines:
    """The file, to add lines to those that it has. require_lock: of RunFolder. Raises OSError."""
    return LocalLines(path) if is_local(path) else RemoteLines(path, text_of(path), require_lock)


def text_of(path: epath.Path) -> str:
    """The text of a file; "" where there is none. Raises OSError."""
    try:
        return path.read_bytes().decode(errors="replace")
    except FileNotFoundError:
        return ""


def parsed(line: str) -> dict[str, Any]:
    """The JSON object in a line; {} where it is none, such as half a line of a killed process."""
    try:
        content = json_text.parse(line)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


@contextlib.contextmanager
def noted(
    path: epath.Path, say: Callable[[str], None], done: str = "written", so: str = ""
) -> Iterator[None]:
    """Access to a path whose failure is a line for the user: what cannot be `done`, and so what."""
    try:
        yield
    except OSError as error:
        say(f"note: {path} cannot be {done} ({reason(error)}){so}.")


class LogFile(contextlib.AbstractContextManager):
    """The log of a run's terminal: lines with the time of day in front, and the error at the end.

    say: prints one line when the file cannot be written; the training goes on, and on a disk the
    lines are kept for later. require_lock: of RunFolder; a run that has lost its folder writes no
    more there.
    """

    def __init__(
        self, path: epath.Path, *, say: Callable[[str], None], require_lock: Callable[[], None]
    ):
        self._path, self._say, self._failing = path, say, False
        self._file: LocalLines | RemoteLines | None = None
        with self._failures_told():
            self._file = open_lines(path, require_lock)
        self.write(f"-- {time.strftime('%Y-%m-%d %H:%M:%S %z')}")

    def __exit__(self, kind, error, trace) -> None:
        if isinstance(error, USER_ERRORS):
            self.write(output.one_line(f"{kind.__name__}: {error}"))
        elif error is not None:
            self.write("".join(traceback.format_exception(error)).rstrip("\n"))
        with self._failures_told():
            if self._file is not None:
                self._file.close()

    def write(self, text: str) -> None:
        """Add a line, or several. They are in the file at once; on an object store a minute later
        at most, if more lines come, and at the end."""
        now = time.strftime("%H:%M:%S")
        with self._failures_told():
            if self._file is not None:
                self._file.write("\n".join(f"{now} {line}" for line in text.split("\n")))

    @contextlib.contextmanager
    def _failures_told(self):
        try:
            yield
            self._failing = False
        except CheckpointError:  # the lock is another run's; the next row or save ends this one
            self._file = None
        except OSError as error:
            if not self._failing:
                self._say(f"note: {self._path} cannot be written: {reason(error)}.")
            self._failing = True
