"""One save, from arrays on the host to a folder that outlives a power cut.

Every process writes its part of the arrays. Then the first process finishes the checkpoint, in
this order: meta and seal; fsync of each file and folder; the rename that makes the checkpoint
visible; fsync of the folder it is in. On gs:// a commit file takes the place of the rename.
"""

import dataclasses
import errno
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from etils import epath

from maxdiloco.checkpoint import orbax_io, seal
from maxdiloco.checkpoint.orbax_io import COMMIT, META
from maxdiloco.processes import agree, coordination
from maxdiloco.storage import durable, object_store
from maxdiloco.storage.run_folder import is_local, reason, require_space

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

UNFINISHED = ".orbax-checkpoint-tmp"
KEY = "checkpoint_timeout_seconds"


@dataclasses.dataclass(frozen=True)
class Save:
    """What one save writes, and where.

    folder: where the files are written; target: where the checkpoint becomes visible. The same
    on gs://, where folders cannot be renamed.
    items: names of the items that hold arrays. note: what META says.
    deadline: of time.monotonic(), for all processes' parts.
    """

    folder: epath.Path
    target: epath.Path
    items: tuple[str, ...]
    note: Mapping[str, Any]
    deadline: float


def folder_of(target: epath.Path, *, attempt: int) -> epath.Path:
    """Where the files of a checkpoint are written. attempt: failed saves just before this one.

    A second try does not meet a file that the first one may still be writing.
    """
    if not is_local(target):
        return target
    return target.parent / f"{target.name}{UNFINISHED}{f'-{attempt}' if attempt else ''}"


def prepare(folder: epath.Path, target: epath.Path, items: Sequence[str], *, nbytes: int) -> bool:
    """Make the folders of a save; False when the checkpoint is there. For the first process.

    nbytes: room that the arrays may take. Raises CheckpointError without that room, OSError.
    """
    if orbax_io.is_complete(target):
        if is_local(target):
            durable.sync_folder(target.parent)  # the save that made it may have failed in this
        return False
    if folder.exists():
        object_store.remove(folder)
    require_space(target.parent, nbytes)
    if is_local(folder):
        for name in (*items, META):
            (folder / name).mkdir(parents=True)
    return True


def wait_for_arrays(save: Save, writes: Sequence["ocp.future.Future"]) -> None:
    """Wait until this process's part of the arrays is written, or has failed to the last thread.

    Raises TimeoutError at the deadline, OSError, ValueError and RuntimeError of the write.
    """
    errors: list[Exception] = []
    for write in writes:
        try:
            write.result(timeout=max(0.0, save.deadline - time.monotonic()))
        except (OSError, ValueError, RuntimeError) as error:
            errors.append(error)
    if errors and time.monotonic() >= save.deadline:
        raise TimeoutError(f"the arrays were not written within {KEY}") from errors[0]
    if errors:
        raise errors[0]


def commit(save: Save, writer: "ocp.PyTreeCheckpointHandler") -> None:
    """Make a checkpoint of which all arrays are written durable and visible, in this order.

    For the first process. Raises OSError, and ValueError from the file layer below Orbax.
    """
    for name in save.items:
        writer.finalize(save.folder / name)  # merges the parts of the processes
        if not is_local(save.folder):  # Orbax's own readers ask for it there
            (save.folder / name / COMMIT).write_text("complete\n")
    (save.folder / META / "metadata").write_text(json.dumps(save.note))
    seal.write(save.folder)
    if is_local(save.folder):
        # Of use in a copy on gs://, where a folder without it is not a checkpoint.
        (save.folder / COMMIT).write_text("complete\n")
        durable.sync_tree(save.folder)
        save.folder.rename(save.target)
        durable.sync_folder(save.target.parent)
    else:
        (save.folder / COMMIT).write_text("complete\n")


def discard(folder: epath.Path) -> None:
    """Remove what a failed save has left. Raises OSError; the next start tries again."""
    if folder.exists():
        object_store.remove(folder)


class Parts:
    """What the other processes tell the first one about their parts of a save.

    A process that fails is heard of at once: a barrier would keep the others until the deadline.
    """

    def __init__(self) -> None:
        self._run = agree.from_first_process(secrets.randbelow(1 << 31))
        self._count = 0

    def next(self) -> None:
        """Speak of the next save from now on; called by all processes alike."""
        self._count += 1

    def tell(self, problem: str) -> None:
        """Tell the first process what went wrong here, or "" when this part is written."""
        key = self._key(jax.process_index())
        coordination.put(key, problem or "written")

    def wait(self, deadline: float) -> None:
        """Wait for the parts of all others. For the first process; nothing to do for one alone.

        Raises OSError naming a process that failed, TimeoutError at the deadline.
        """
        for process in range(1, jax.process_count()):
            left = deadline - time.monotonic()
            try:
                problem = coordination.get(self._key(process), timeout_s=left)
            except jax.errors.JaxRuntimeError as error:
                raise TimeoutError(
                    f"process {process} has not written its part within {KEY}"
                ) from error
            if problem != "written":
                raise OSError(errno.EIO, f"process {process}: {problem}")

    def _key(self, process: int) -> str:
        return f"maxdiloco/saves/{self._run}/{self._count}/{process}"


def write_part(save: Save, writes: Sequence["ocp.future.Future"], parts: Parts) -> None:
    """Wait for this process's arrays and tell the first process. For the other processes."""
    problem = "ended"
    try:
        wait_for_arrays(save, writes)
        problem = ""
    except (OSError, ValueError, RuntimeError) as error:
        problem = reason(error)
        raise
    finally:
        parts.tell(problem)
