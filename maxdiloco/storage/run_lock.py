"""The lock of a run's folder on a file system: an flock, with a line that names its holder."""

import contextlib
import fcntl
import itertools
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from etils import epath

from maxdiloco.errors import CheckpointError
from maxdiloco.small_files import read_bytes
from maxdiloco.storage.os_errors import reason

# NFS keeps the lock of a dead client for its lease, 90 s on Linux, and a grace period.
LOCK_WAIT_S = 120.0
_LOCK_POLL_S = 1.0
# The whole content of a lock file that a run wrote. Process number and host are for a person: they
# do not identify a process, since containers that start one after the other under one name are
# process 1 on the same host.
_HOLDER = re.compile(
    r"(process (\d{1,9}) on .{0,255}?)(?: \((boot [0-9a-f-]{36}, start \d{1,20})\))?\n?"
)
_MOST_HOLDER = 400  # characters to read, more than _HOLDER matches


@contextlib.contextmanager
def hold_lock(path: epath.Path, run_name: str, warn: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a run's folder during a `with`; kill -9 releases it.

    Args:
      path: the folder.
      run_name: for messages.
      warn: prints a line if the file system has no locks, or when a wait begins.

    Raises:
      CheckpointError: another process holds the lock for LOCK_WAIT_S, or runs on this host.
    """
    # Opened for appending: the line of the holder must stay until this process has the lock.
    with open(path / "lock", "a+", encoding="utf-8", errors="replace") as file:
        try:
            _lock(file, path, run_name, warn)
        except OSError as error:
            warn(
                f"warning: {path} is on a file system without locks ({reason(error)}): a second "
                f"run with run_name={run_name} would not be noticed."
            )
        if _holder(file) is not None:
            file.truncate(0)
            file.write(_own_line() + "\n")
            file.flush()
        yield


def _own_line() -> str:
    """Return the line that identifies this process, as _HOLDER reads it."""
    moment = _moment(os.getpid())
    who = f"process {os.getpid()} on {socket.gethostname()}"
    return f"{who} ({moment})" if moment else who


def _holder(file: TextIO) -> str | None:
    """Return the line of a lock file; "" if it is empty, None if no run wrote it."""
    file.seek(0)
    text = file.read(_MOST_HOLDER)
    return text.strip() if not text or _HOLDER.fullmatch(text) else None


def _lock(file: TextIO, path: epath.Path, run_name: str, warn: Callable[[str], None]) -> None:
    """Wait for the lock. Raises CheckpointError after LOCK_WAIT_S, or if its holder runs here."""
    limit = time.monotonic() + LOCK_WAIT_S
    for attempt in itertools.count():
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        holder = _HOLDER.fullmatch(_holder(file) or "")
        who = holder[1] if holder else "another process"
        if (holder and _runs_here(holder)) or time.monotonic() >= limit:
            raise CheckpointError(
                f"run_name={run_name} is in use: {who} writes to {path}. Wait for it, stop it, or "
                "set another run_name."
            )
        if attempt == 0:
            warn(
                f"run_name={run_name} is locked by {who}: waiting up to {LOCK_WAIT_S:g} s, since "
                "a file server keeps the lock of a host that died for a while"
            )
        time.sleep(min(_LOCK_POLL_S, LOCK_WAIT_S))


def _runs_here(holder: re.Match[str]) -> bool:
    """Tell whether a match of _HOLDER names a process of this host that this process can see.

    The process number does not suffice: a container reuses the numbers of a dead one.
    """
    return holder[3] is not None and holder[3] == _moment(int(holder[2]))


def _moment(pid: int) -> str | None:
    """Return the boot id and the start of a process in clock ticks since then; None if unknown."""
    try:
        boot = read_bytes("/proc/sys/kernel/random/boot_id", 64).decode().strip()
        stat = read_bytes(f"/proc/{pid}/stat", 4096).decode(errors="replace")
    except OSError:  # it has ended, or this system has no /proc
        return None
    # proc(5): field 22; the name in parentheses, field 2, may contain blanks and parentheses.
    return f"boot {boot}, start {stat.rpartition(')')[2].split()[19]}"
