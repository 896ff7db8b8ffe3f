"""The folder of one run: its lock, and the names in it."""

import contextlib
import fcntl
import itertools
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator

from etils import epath

from maxdiloco.errors import CheckpointError
from maxdiloco.small_files import read_bytes
from maxdiloco.storage import object_store
from maxdiloco.storage.durable import make_folder
from maxdiloco.storage.object_lock import ObjectLock
from maxdiloco.storage.store import is_local

# Less free space than for some log lines and a small checkpoint ends any run at once. Our choice.
_PROBE_BYTES = 1 << 20
# NFS keeps the lock of a dead client for its lease, 90 s on Linux, and a grace period.
LOCK_WAIT_S = 120.0
_LOCK_POLL_S = 1.0  # our choice
# All of a lock file that a run wrote. The number and the host are for a person: containers that
# start one after the other under one name have both in common, process 1 on the same host.
_HOLDER = re.compile(
    r"(process (\d{1,9}) on .{0,255}?)(?: \((boot [0-9a-f-]{36}, start \d{1,20})\))?\n?"
)
_MOST_HOLDER = 400  # characters that are looked at
AGAIN = "See that it can be, and start again."  # the remedy for what cannot be read


class RunFolder:
    """`base_output_directory`/`run_name` and the names inside it."""

    def __init__(self, path: epath.Path, require_lock: Callable[[], None] = lambda: None):
        self.path = path
        # In a bucket: raises CheckpointError when another process has taken the lock over.
        self.require_lock = require_lock
        self.checkpoints = path / "checkpoints"  # one folder per saved step
        # In a bucket the next two are folders of numbered chunks, see metrics.line_files.
        self.metrics = path / "metrics.jsonl"  # one JSON object per logged step
        self.history = path / "history.jsonl"  # one JSON object per start and end of the run
        self.tensorboard = path / "tensorboard"  # event files


def absolute(path: epath.PathLike, *, key: str = "base_output_directory") -> epath.Path:
    """The absolute path. key: what gave it. Raises CheckpointError for a bucket without obstore."""
    if not is_local(path):
        object_store.prepare(path, key)
        return epath.Path(path)
    return epath.Path(os.path.expanduser(path)).resolve()


def locate(base_output_directory: str, run_name: str) -> RunFolder:
    """The folder of a run, which need not exist. Raises CheckpointError for an unfit run_name."""
    if run_name in ("", ".", "..") or "/" in run_name:
        raise CheckpointError(
            f"run_name={run_name!r} must be the name of one folder below base_output_directory: "
            "use letters, digits, '-', '_' and '.'."
        )
    return RunFolder(absolute(base_output_directory) / run_name)


def require_place(base_output_directory: str, run_name: str) -> None:
    """Raise CheckpointError unless the local folder of a run could be made and written."""
    path = locate(base_output_directory, run_name).path
    if not is_local(path):
        return
    while not path.exists():
        path = path.parent
    with _holding(base_output_directory, run_name):
        tempfile.TemporaryFile(dir=path).close()


@contextlib.contextmanager
def open_run_folder(
    base_output_directory: str,
    run_name: str,
    *,
    primary: bool = True,
    warn: Callable[[str], None] = print,
) -> Iterator[RunFolder]:
    """Make the run's folder, lock it and check that it can be written.

    primary: whether this process is the first of the run; the others make and lock nothing.
    warn: called with one line when the file system has no locks, or during a wait for the lock.
    The lock is an flock of the file `lock`, whose line names the holder unless the file is another
    program's; kill -9 releases it. In a bucket it is an object that is renewed (object_lock).
    Raises CheckpointError when the folder cannot be made or written, another run holds it, or it is
    that of a run whose name differs by case only.
    """
    folder = locate(base_output_directory, run_name)
    if not primary:
        yield folder
        return
    with contextlib.ExitStack() as stack:
        with _holding(base_output_directory, run_name):
            if is_local(folder.path):
                make_folder(folder.path)
                _refuse_other_case(folder.path)
                stack.enter_context(_locked(folder.path, run_name, warn))
                with tempfile.TemporaryFile(dir=folder.path) as probe:  # without a name, if it can
                    probe.write(bytes(_PROBE_BYTES))
                    probe.flush()
                    os.fsync(probe.fileno())  # some file systems report a full disk only here
            else:  # there are no folders to make, and writing the lock is the probe
                key, otherwise = f"run_name={run_name}", "set another run_name"
                lock = ObjectLock(folder.path / "lock", key=key, otherwise=otherwise, say=warn)
                stack.enter_context(lock)
                folder = RunFolder(folder.path, lock.require)
        yield folder


def _refuse_other_case(path):
    """Raise CheckpointError where the folder of a name is that of one in other case."""
    try:
        names = os.listdir(path.parent)
    except PermissionError:  # a folder may be entered that may not be listed
        return
    if path.name in names:
        return
    for name in names:  # a file system may change a name otherwise, as to composed characters
        if name.casefold() == path.name.casefold():
            raise CheckpointError(
                f"run_name={path.name} is the folder of run_name={name}, since the file system of "
                f"{path.parent} ignores case. Set run_name={name} to resume that run, or a name "
                "that differs in more than case."
            )


def _holding(base_output_directory, run_name):
    free = " and has free space" if is_local(base_output_directory) else ""
    return refusing(
        CheckpointError,
        f"base_output_directory={base_output_directory} cannot hold run_name={run_name}",
        f"Choose a folder that can be written{free}.",
    )


def free_bytes(folder: epath.PathLike) -> int | None:
    """Free space of the disk that a folder is on, or will be; None in a bucket, without a limit."""
    if not is_local(folder):
        return None
    folder = epath.Path(folder)
    return shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free


def megabytes(nbytes: int) -> str:
    """1500000 -> '1.5 MB'."""
    return f"{nbytes / 1e6:,.1f} MB"


def reason(error: BaseException) -> str:
    """The last, most specific part of an error's text, in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.rstrip(".")
    # The file layer writes "while doing a: while doing b: why [code]", then lines of details.
    first_line = str(error).partition("\n")[0].partition(" [")[0]
    parts = [part for part in first_line.split(": ") if part]
    return ": ".join(parts[-2:]).rstrip(".") if parts else type(error).__name__


@contextlib.contextmanager
def refusing(kind: type[Exception], what: str, remedy: str) -> Iterator[None]:
    """Raise an error of this kind where the system refuses something inside the `with`.

    what: the thing, and what cannot be done with it. remedy: sentences.
    """
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {reason(error)}. {remedy}") from error


@contextlib.contextmanager
def _locked(path, run_name, warn):
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


def _own_line():
    """Return the line that identifies this process, as _HOLDER reads it."""
    moment = _moment(os.getpid())
    who = f"process {os.getpid()} on {socket.gethostname()}"
    return f"{who} ({moment})" if moment else who


def _holder(file):
    """The line of a lock file, "" where it is empty; None where no run wrote it."""
    file.seek(0)
    text = file.read(_MOST_HOLDER)
    return text.strip() if not text or _HOLDER.fullmatch(text) else None


def _lock(file, path, run_name, warn):
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


def _runs_here(holder):
    """Whether a match of _HOLDER names a process that lives on this host, as far as is visible.

    Its number is not enough: a container sees other processes under the numbers of a dead one's.
    """
    return holder[3] is not None and holder[3] == _moment(int(holder[2]))


def _moment(pid):
    """The boot of the kernel and the start of a process in it [clock ticks]; None if unknown."""
    try:
        boot = read_bytes("/proc/sys/kernel/random/boot_id", 64).decode().strip()
        stat = read_bytes(f"/proc/{pid}/stat", 4096).decode(errors="replace")
    except OSError:  # it has ended, or this system has no /proc
        return None
    # proc(5): field 22; the name in parentheses, field 2, may hold blanks and parentheses.
    return f"boot {boot}, start {stat.rpartition(')')[2].split()[19]}"
