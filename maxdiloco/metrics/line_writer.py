"""Write lines in a thread, so that no step waits for a slow disk or a bucket that is away."""

import collections
import contextlib
import errno
import threading
import time
from collections.abc import Callable
from typing import Protocol

from maxdiloco.errors import CheckpointError

BATCH_BYTES = 4 << 20  # bytes of one append; above 80 kB/s only, so their size matters little
# The newest lines are kept while they cannot be written: 100,000 rows of 600 bytes or more.
MAX_PENDING_BYTES = 64 << 20
RETRY_S = 10.0  # between two tries of an upload, each of which obstore repeats for 30 s


class Target(Protocol):
    """The destination of a LineWriter. Its methods run in the writer's thread and raise OSError.

    Attributes:
      delay_s: how long a line waits for others, to be stored with them.
      stall_s: how long `write` waits for the line to be stored, or 0.
      deadline_s: how long `sync` and `close` wait for the target; None: without a limit.
    """

    delay_s: float
    stall_s: float
    deadline_s: float | None

    def append(self, data: bytes) -> int:
        """Store bytes; returns how many were stored, at least one."""

    def sync(self) -> None:
        """Force the stored lines to the disk."""

    def close(self) -> None:
        """Release the target."""


class LineWriter:
    """Appends lines to a target, in their order, from a thread.

    A failed append is repeated until it succeeds. Meanwhile `write` keeps each line and raises
    OSError. Any thread may call the methods.
    """

    def __init__(self, target: Target, require_lock: Callable[[], None] = lambda: None):
        """Start the thread.

        Args:
          target: where the lines go.
          require_lock: called before each line and each wait. It raises CheckpointError if
            another process has taken over the run's folder.
        """
        self._target, self._require_lock = target, require_lock
        self._changed = threading.Condition()  # guards the attributes below
        self._lines: collections.deque[bytes] = collections.deque()
        self._size = 0  # of the lines, in bytes
        self._oldest = 0.0  # time.monotonic() when the first of the lines was added
        self._batch = b""  # taken from the lines, and not stored yet
        self._is_urgent = self._wants_sync = self._is_closing = self._has_ended = False
        self._is_slow = False  # a write has waited for the target in vain
        self._error: OSError | None = None  # of the newest attempt
        self._tried = 0.0  # time.monotonic() of the newest failure
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name="write-lines", daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        """Add a line, with its line feed.

        A line for a healthy disk is in the file when `write` returns, so kill -9 does not lose it.
        A slow target delays the caller once by its stall_s, and not again until it has caught up.

        Raises:
          OSError: the newest attempt has failed. The line is kept for the next one.
          CheckpointError: another process has taken over the folder.
        """
        self._require_lock()
        with self._changed:
            if not self._lines:
                self._oldest = time.monotonic()
            self._lines.append(line)
            self._size += len(line)
            while self._size > MAX_PENDING_BYTES:
                self._size -= len(self._lines.popleft())
            self._is_urgent = self._is_urgent or self._target.stall_s > 0
            if self._is_urgent or len(self._lines) == 1 or self._size >= BATCH_BYTES:
                self._changed.notify_all()
            if self._target.stall_s and not self._is_slow:
                self._is_slow = not self._wait_for_attempt(self._target.stall_s)
            self._raise_error()

    def sync(self) -> None:
        """Wait until the lines are stored and forced to the disk, deadline_s at most.

        Raises OSError or CheckpointError if they are not.
        """
        self._require_lock()
        with self._changed:
            self._wants_sync = True
            self._changed.notify_all()
            self._wait_for_attempt(self._target.deadline_s)
            self._require_stored()

    def close(self) -> None:
        """Store the remaining lines and end the thread, in deadline_s at most.

        Raises OSError or CheckpointError if lines are left.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(self._target.deadline_s)
        with self._changed:
            self._has_ended = True  # also of a thread whose append has not returned
            if self._is_pending():
                self._require_stored()

    def _is_pending(self) -> bool:
        return bool(self._lines or self._batch)

    def _wait_for_attempt(self, seconds: float | None) -> bool:
        """Wait until all is stored, or an attempt has failed; False if neither happens in time."""
        failures = self._failures
        return self._changed.wait_for(
            lambda: (
                not (self._is_pending() or self._wants_sync)
                or self._failures > failures
                or self._has_ended
            ),
            seconds,
        )

    def _require_stored(self) -> None:
        if self._is_pending() or self._wants_sync or self._error is not None:
            self._require_lock()
            self._raise_error()
            raise TimeoutError(errno.ETIMEDOUT, "not stored in time")

    def _raise_error(self) -> None:
        if self._error is not None:  # a new one: the traceback of one that is raised again grows
            raise OSError(self._error.errno, self._error.strerror) from self._error

    def _run(self) -> None:
        try:
            # Another run has the folder: write, sync and close raise the error in their thread.
            with contextlib.suppress(CheckpointError):
                while self._wait_until_due() and self._attempt():
                    continue
        finally:
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()
            self._target.close()

    def _wait_until_due(self) -> bool:
        """Wait until lines are to be stored; False at the end."""
        with self._changed:
            while (seconds := self._seconds_until_due()) != 0:
                self._changed.wait(seconds)
            return not self._has_ended and (not self._is_closing or self._is_pending())

    def _seconds_until_due(self) -> float | None:
        if self._is_urgent or self._wants_sync or self._is_closing:
            return 0.0
        if not self._is_pending():
            return None
        if self._error is not None:
            return max(0.0, self._tried + RETRY_S - time.monotonic())
        if self._size >= BATCH_BYTES:
            return 0.0
        return max(0.0, self._oldest + self._target.delay_s - time.monotonic())

    def _attempt(self) -> bool:
        """Store a batch, and sync if that was the last one; False after a failure at the end."""
        with self._changed:
            self._is_urgent = False
            if not self._batch:
                self._batch = self._next_lines()
            syncs = self._wants_sync and not self._lines
        error = None
        try:
            while self._batch:
                self._batch = self._batch[self._target.append(self._batch) :]
            if syncs:
                self._target.sync()
        except OSError as caught:
            error = caught
        with self._changed:
            self._error = error
            if error is None:
                self._is_slow = False
                self._wants_sync = self._wants_sync and not syncs
            else:
                self._tried, self._wants_sync = time.monotonic(), False
                self._failures += 1
            self._changed.notify_all()
            return error is None or not self._is_closing

    def _next_lines(self) -> bytes:
        """Take the oldest lines, about BATCH_BYTES."""
        taken, size = [], 0
        while self._lines and size < BATCH_BYTES:
            taken.append(self._lines.popleft())
            size += len(taken[-1])
        self._size -= size
        return b"".join(taken)
