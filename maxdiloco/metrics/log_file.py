"""The log of a run's terminal: log.txt in its folder, appended to by every start."""

import contextlib
import threading
import time
from collections.abc import Callable

from etils import epath

from maxdiloco.errors import CheckpointError
from maxdiloco.metrics.line_files import LocalLines, RemoteLines
from maxdiloco.storage import object_store
from maxdiloco.storage.run_folder import is_local, reason


class LogFile(contextlib.AbstractContextManager):
    """Lines with the time of day in front, appended to a file. A context manager.

    say: prints one line when the file cannot be written; the training goes on, and on a disk the
    lines are kept for later. require_lock: of RunFolder; a run that has lost its folder writes no
    more there. Any thread may write.
    """

    def __init__(
        self, path: epath.Path, *, say: Callable[[str], None], require_lock: Callable[[], None]
    ):
        self._path, self._say, self._require_lock = path, say, require_lock
        self._lock = threading.Lock()
        self._failing = False
        self._file: LocalLines | RemoteLines | None = None
        self._try(self._open)
        self.write(f"-- {time.strftime('%Y-%m-%d %H:%M:%S %z')}")

    def __exit__(self, kind, error, trace) -> None:
        if self._file is not None:
            self._try(self._file.close)

    def write(self, text: str) -> None:
        """Add a line, or several. They are in the file at once; on an object store a minute later
        at most, if more lines come, and at the end."""
        now = time.strftime("%H:%M:%S")
        lines = "\n".join(f"{now} {line}" for line in text.split("\n"))
        with self._lock:
            if self._file is not None:
                self._try(lambda: self._file.write(lines))

    def _open(self) -> None:
        if is_local(self._path):
            self._file = LocalLines(self._path)
            return
        text = ""
        with object_store.as_os_errors(self._path):
            if self._path.exists():
                text = self._path.read_bytes().decode(errors="replace")
        self._file = RemoteLines(self._path, text, time.monotonic, self._require_lock)

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except CheckpointError:  # the lock is another run's; the next row or save ends this one
            self._file = None
        except OSError as error:
            if not self._failing:
                self._say(f"note: {self._path} cannot be written: {reason(error)}.")
            self._failing = True
        else:
            self._failing = False
