"""The folder of one run: who may write to it, and where its parts are."""

import contextlib
import dataclasses
import fcntl
import os
import shutil
import socket
from collections.abc import Callable, Iterator

from etils import epath

from maxdiloco import object_store
from maxdiloco.errors import CheckpointError
from maxdiloco.object_lock import ObjectLock
from maxdiloco.object_store import is_local

# A few log lines and a small checkpoint fit: less free space than this ends any run at once.
_PROBE_BYTES = 1 << 20  # our choice


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """`base_output_directory`/`run_name` and the names inside it."""

    path: epath.Path
    # Raises CheckpointError when another process has taken the lock over; only on gs://.
    require_lock: Callable[[], None] = lambda: None

    @property
    def checkpoints(self) -> epath.Path:
        """One folder per saved step."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> epath.Path:
        """metrics.jsonl: one JSON object per logged step."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> epath.Path:
        """TensorBoard's event files."""
        return self.path / "tensorboard"


def absolute(path: epath.PathLike, *, key: str = "base_output_directory") -> epath.Path:
    """The path with ~ expanded and, on a mounted file system, made absolute.

    key: what gave the path, for messages.
    Raises CheckpointError for gs:// without the packages that it needs.
    """
    if not is_local(path):
        object_store.prepare(path, key)
        return epath.Path(path)
    return epath.Path(path).expanduser().resolve()


def locate(base_output_directory: str, run_name: str) -> RunFolder:
    """The folder of a run, whether it exists or not.

    Raises CheckpointError when run_name is not the name of one folder.
    """
    if run_name in ("", ".", "..") or "/" in run_name:
        raise CheckpointError(
            f"run_name={run_name!r} must be the name of one folder below base_output_directory: "
            "use letters, digits, '-', '_' and '.'."
        )
    return RunFolder(absolute(base_output_directory) / run_name)


@contextlib.contextmanager
def open_run_folder(
    base_output_directory: str,
    run_name: str,
    *,
    primary: bool = True,
    warn: Callable[[str], None] = print,
) -> Iterator[RunFolder]:
    """Create the run's folder, lock it and check that it can be written.

    base_output_directory: a local folder, or gs://bucket/path through etils.epath.
    primary: whether this process is the first of the run; the others create and lock nothing.
    warn: takes one line when the file system knows no locks.
    The lock is an flock, held until the context ends and let go by the kernel when the process
    dies, so that kill -9 leaves nothing to clean; on gs:// it is an object that goes stale when
    nobody renews it (object_lock.py). Imports no JAX.
    Raises CheckpointError when the folder cannot be made or written, or another run holds it.
    """
    folder = locate(base_output_directory, run_name)
    if not primary:
        yield folder
        return
    with contextlib.ExitStack() as stack:
        try:
            if is_local(folder.path):
                folder.path.mkdir(parents=True, exist_ok=True)
                stack.enter_context(_locked(folder, run_name, warn))
                _probe(folder.path)
            else:  # folders need not be made there, and the lock is a probe
                lock = ObjectLock(folder.path / "lock", run_name=run_name, say=warn)
                stack.enter_context(lock)
                folder = dataclasses.replace(folder, require_lock=lock.require)
        except (OSError, *object_store.errors(folder.path)) as error:
            free = " and has free space" if is_local(folder.path) else ""
            raise CheckpointError(
                f"base_output_directory={base_output_directory} cannot hold run_name={run_name}: "
                f"{reason(error)}. Choose a folder that can be written{free}."
            ) from error
        yield folder


def require_space(folder: epath.PathLike, nbytes: int) -> None:
    """Refuse to go on when a checkpoint of nbytes would not fit beside what is there.

    nbytes: size of the arrays; compression usually makes the files smaller, so this errs on
    the safe side. Folders on gs:// have no limit to ask for. Raises CheckpointError.
    """
    if not is_local(folder):
        return
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise CheckpointError(
            f"{folder} has {megabytes(free)} free, but one checkpoint takes {megabytes(nbytes)}: "
            "free some space, set another base_output_directory, or set "
            "enable_checkpointing=false."
        )


def megabytes(nbytes: int) -> str:
    """1500000 -> '1.5 MB'."""
    return f"{nbytes / 1e6:,.1f} MB"


def reason(error: BaseException) -> str:
    """The last, most particular part of an error's text, in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if answer := object_store.reason(error):
        return answer
    # The file layer writes "while doing a: while doing b: why [code]", then details in lines.
    first_line = str(error).partition("\n")[0].partition(" [")[0]
    parts = [part for part in first_line.split(": ") if part]
    return ": ".join(parts[-2:]).rstrip(".") if parts else type(error).__name__


@contextlib.contextmanager
def _locked(folder: RunFolder, run_name: str, warn: Callable[[str], None]) -> Iterator[None]:
    # Opened for appending: the holder's line must survive until the lock is ours.
    with open(folder.path / "lock", "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip()
            raise CheckpointError(
                f"run_name={run_name} is in use: {holder or 'another process'} writes to "
                f"{folder.path}. Wait for it, stop it, or set another run_name."
            ) from None
        except OSError as error:
            warn(
                f"warning: {folder.path} is on a file system without locks ({reason(error)}): "
                f"a second run with run_name={run_name} would not be noticed."
            )
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def _probe(path: epath.Path) -> None:
    probe = path / "write-probe"
    try:
        probe.write_bytes(bytes(_PROBE_BYTES))
        with open(probe, "rb") as file:
            os.fsync(file.fileno())  # some file systems notice a full disk only here
    finally:
        probe.unlink(missing_ok=True)
