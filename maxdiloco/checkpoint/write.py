"""One save, from arrays on the host to a folder that survives a power cut.

Every process writes its part of the arrays. Then the first process finishes the checkpoint: meta
and seal; fsync of each file and folder; the rename that makes it visible; fsync of the folder it is
in. In a bucket a commit file takes the place of the rename.
"""

import dataclasses
import errno
import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from etils import epath

from maxdiloco.checkpoint import orbax_io, seal, staging
from maxdiloco.checkpoint.orbax_io import COMMIT, META, META_FILE
from maxdiloco.processes import coordination
from maxdiloco.storage import durable
from maxdiloco.storage.run_folder import free_bytes, is_local, megabytes, reason

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

# Suffixes of what no reader may take for a checkpoint, and of nothing that others make.
UNFINISHED, DELETED = ".maxdiloco-saving", ".maxdiloco-deleted"
WRITTEN = "written"  # the outcome of a part that is


@dataclasses.dataclass(frozen=True)
class Save:
    """The content and the folders of one save."""

    folder: epath.Path  # where the files are written
    target: epath.Path  # where they become visible; the same in a bucket, which has none to rename
    items: tuple[str, ...]  # names of those with arrays
    files: Mapping[str, bytes]  # content of others, by <folder>/<name>
    note: Mapping[str, Any]  # the content of META
    deadline: float  # for the parts of all processes, of time.monotonic()
    arrays: epath.Path  # where this process writes the arrays; of staging.begin
    key: str = ""  # by which the first process learns of the outcome of each other's part


def folder_of(target: epath.Path, *, attempt: int) -> epath.Path:
    """The folder of a try after `attempt` failed ones, in whose own a thread may still write."""
    if not is_local(target):
        return target
    return target.parent / f"{target.name}{UNFINISHED}{f'-{attempt}' if attempt else ''}"


def mark_of(target: epath.Path) -> epath.Path:
    """In a bucket: the object that says of a step's objects that they are an unfinished save."""
    return target.parent / f"{target.name}{UNFINISHED}"


def prepare(
    folder: epath.Path,
    target: epath.Path,
    items: Sequence[str],
    *,
    nbytes: int,
    is_alone: bool = False,
) -> bool:
    """Make the folders of a save; False when the checkpoint exists. For the first process.

    nbytes: of the arrays, uncompressed. is_alone: whether an unfinished save in the folder is that
    of no living process, and makes room. Raises OSError, also for what others have there.
    """
    if orbax_io.is_complete(target):
        if is_local(target):
            durable.sync_folder(target.parent)  # in which the save that made it may have failed
        return False
    if is_local(target) and target.exists():
        raise _in_the_way(target)
    if folder.exists():
        if not is_alone or not (is_local(folder) or mark_of(target).exists()):
            raise _in_the_way(folder)
        folder.rmtree()
    free = free_bytes(target.parent)  # with compression the files are usually smaller
    if free is not None and free < nbytes:
        why = f"{megabytes(free)} are free but it takes {megabytes(nbytes)}"
        raise OSError(errno.ENOSPC, why)
    if is_local(folder):
        for name in (*items, META):
            (folder / name).mkdir(parents=True)
    else:
        mark_of(target).write_text("")
    return True


def _in_the_way(path: epath.Path) -> OSError:
    why = f"{path.name} is there and is no checkpoint, and nothing of others is removed: move it"
    return OSError(errno.EEXIST, why)


def wait_for_arrays(save: Save, writes: Sequence["ocp.future.Future"]) -> None:
    """Wait for every thread. Raises TimeoutError, OSError, ValueError, RuntimeError."""
    errors: list[Exception] = []
    for write in writes:
        try:
            write.result(timeout=max(0.0, save.deadline - time.monotonic()))
        except (OSError, ValueError, RuntimeError) as error:
            errors.append(error)
    if errors and time.monotonic() >= save.deadline:
        raise TimeoutError("the arrays were not written in time") from errors[0]
    if errors:
        raise errors[0]


def commit(save: Save, writer: "ocp.PyTreeCheckpointHandler") -> None:
    """First process: make a checkpoint durable, then visible. Raises OSError, ValueError."""
    local = is_local(save.folder)
    if save.arrays != save.folder:
        staging.download(save.folder, save.arrays)  # the parts of the others
    for name in save.items:
        writer.finalize(save.arrays / name)  # merges the parts of the processes
    staging.upload(save.arrays, save.folder)
    for name in save.items:
        if not local:  # Orbax's readers ask for it there
            (save.folder / name / COMMIT).write_text("complete\n")
    (save.folder / META / META_FILE).write_text(json.dumps(save.note))
    for name, content in save.files.items():
        if local:
            (save.folder / name).parent.mkdir(exist_ok=True)
        (save.folder / name).write_bytes(content)
    seal.write(save.folder)
    # On a mounted file system for a copy in a bucket, where a folder without it is no checkpoint.
    (save.folder / COMMIT).write_text("complete\n")
    if local:
        durable.sync_tree(save.folder)
        save.folder.rename(save.target)
        durable.sync_folder(save.target.parent)
    else:
        mark_of(save.target).unlink(missing_ok=True)


def discard(folder: epath.Path) -> None:
    """Remove the files of a failed save. Raises OSError; the next start tries again."""
    if folder.exists():
        folder.rmtree()


def wait_for_others(save: Save) -> None:
    """First process: wait for the parts of the others. Raises OSError, TimeoutError."""
    for process in range(1, jax.process_count()):
        left = save.deadline - time.monotonic()
        try:
            outcome = coordination.get(f"{save.key}/{process}", timeout_s=left)
        except jax.errors.JaxRuntimeError as error:
            raise TimeoutError(f"process {process} has not written its part in time") from error
        if outcome != WRITTEN:
            raise OSError(errno.EIO, f"process {process}: {outcome}")


def write_part(save: Save, writes: Sequence["ocp.future.Future"]) -> None:
    """Wait for this process's arrays and publish the outcome. For all but the first process."""
    outcome = "ended"
    try:
        wait_for_arrays(save, writes)
        staging.upload(save.arrays, save.folder)
        outcome = WRITTEN
    except (OSError, ValueError, RuntimeError) as error:
        outcome = reason(error)
        raise
    finally:
        staging.end(save.arrays, save.folder)
        coordination.put(f"{save.key}/{jax.process_index()}", outcome)
