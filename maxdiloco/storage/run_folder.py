"""The folder of one run: the names in it, and how it is opened."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator

from etils import epath

from maxdiloco.errors import CheckpointError
from maxdiloco.storage import object_store
from maxdiloco.storage.durable import make_folder
from maxdiloco.storage.object_lock import ObjectLock
from maxdiloco.storage.os_errors import replace_os_error
from maxdiloco.storage.run_lock import hold_lock
from maxdiloco.storage.store import is_local

_PROBE_BYTES = 1 << 20  # with less free space than for some log lines, no run is of use
# The remedy for a path that cannot be read.
CHECK_AND_RESTART = "Check that it can be, and start again."


class RunFolder:
    """`base_output_directory`/`run_name` and the names inside it."""

    def __init__(self, path: epath.Path, require_lock: Callable[[], None] = lambda: None):
        """Name the files of a run; nothing is made."""
        self.path = path
        # In a bucket: raises CheckpointError when another process has taken the lock over.
        self.require_lock = require_lock
        self.checkpoints = path / "checkpoints"  # one folder per saved step
        # In a bucket the next two are folders of numbered chunks, see metrics.line_files.
        self.metrics = path / "metrics.jsonl"  # one JSON object per logged step
        self.history = path / "history.jsonl"  # one JSON object per start and end of the run
        self.tensorboard = path / "tensorboard"  # event files


def absolute(path: epath.PathLike, *, key: str = "base_output_directory") -> epath.Path:
    """Return an absolute path.

    Args:
      path: local or in a bucket.
      key: the configuration key that gave it, for messages.

    Raises:
      CheckpointError: the path is in a bucket, and obstore is not installed.
    """
    if not is_local(path):
        object_store.prepare(path, key)
        return epath.Path(path)
    return epath.Path(os.path.expanduser(path)).resolve()


def locate(base_output_directory: str, run_name: str) -> RunFolder:
    """Return the folder of a run, which need not exist.

    Raises:
      CheckpointError: run_name is not the name of a folder.
    """
    if run_name in ("", ".", "..") or "/" in run_name:
        raise CheckpointError(
            f"run_name={run_name!r} must be the name of one folder below base_output_directory: "
            "use letters, digits, '-', '_' and '.'."
        )
    return RunFolder(absolute(base_output_directory) / run_name)


def require_usable(base_output_directory: str, run_name: str) -> None:
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
    """Make the folder of a run, lock it and check that it can be written.

    The lock is an flock of the file `lock`, or in a bucket an object that is renewed.

    Args:
      base_output_directory: folder of runs.
      run_name: of this run.
      primary: whether this process is the first of the run; the others lock and check nothing.
      warn: prints a line if the file system has no locks, or when a wait for the lock begins.

    Yields:
      The folder.

    Raises:
      CheckpointError: the folder cannot be made or written, another run holds it, or it belongs to
        a run whose name differs only in case.
    """
    folder = locate(base_output_directory, run_name)
    if not primary:
        if is_local(folder.path):
            with contextlib.suppress(OSError):  # the process's log file reports it
                make_folder(folder.path)
        yield folder
        return
    with contextlib.ExitStack() as stack:
        with _holding(base_output_directory, run_name):
            if is_local(folder.path):
                make_folder(folder.path)
                _refuse_other_case(folder.path)
                stack.enter_context(hold_lock(folder.path, run_name, warn))
                with tempfile.TemporaryFile(dir=folder.path) as probe:  # without a name, if it can
                    probe.write(bytes(_PROBE_BYTES))
                    probe.flush()
                    os.fsync(probe.fileno())  # some file systems report a full disk only here
            else:  # a bucket needs no folders, and writing the lock is the probe
                key, otherwise = f"run_name={run_name}", "set another run_name"
                lock = ObjectLock(folder.path / "lock", key=key, otherwise=otherwise, say=warn)
                stack.enter_context(lock)
                folder = RunFolder(folder.path, lock.require)
        yield folder


def _refuse_other_case(path: epath.Path) -> None:
    """Raise CheckpointError if the folder belongs to a name that differs only in case."""
    try:
        names = os.listdir(path.parent)
    except PermissionError:  # a folder may be entered that may not be listed
        return
    if path.name in names:
        return
    for name in names:  # a file system may also change a name in another way, e.g. compose it
        if name.casefold() == path.name.casefold():
            raise CheckpointError(
                f"run_name={path.name} is the folder of run_name={name}, since the file system of "
                f"{path.parent} ignores case. Set run_name={name} to resume that run, or a name "
                "that differs in more than case."
            )


def _holding(base_output_directory: str, run_name: str) -> contextlib.AbstractContextManager[None]:
    free = " and has free space" if is_local(base_output_directory) else ""
    return replace_os_error(
        CheckpointError,
        f"base_output_directory={base_output_directory} cannot hold run_name={run_name}",
        f"Choose a folder that can be written{free}.",
    )


def free_bytes(folder: epath.PathLike) -> int | None:
    """Return the free bytes of the disk that a folder is on, or will be; None in a bucket."""
    if not is_local(folder):
        return None
    folder = epath.Path(folder)
    return shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free


def megabytes(nbytes: int) -> str:
    """Format a number of bytes: 1500000 -> '1.5 MB'."""
    return f"{nbytes / 1e6:,.1f} MB"
