"""One save, from arrays on the host to a folder that survives a power cut.

Every process writes its part of the arrays. Then the first process finishes the checkpoint. It
writes meta and seal, and calls fsync for each file and folder. A rename makes the checkpoint
visible, and fsync of the parent folder keeps it. In a bucket a commit file replaces the rename.
"""

import errno
import json
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from etils import epath

from maxdiloco.checkpoint import files, orbax_io, seal, staging
from maxdiloco.cluster import coordination
from maxdiloco.storage import durable
from maxdiloco.storage.os_errors import reason
from maxdiloco.storage.run_folder import free_bytes, is_local, megabytes

UNFINISHED = ".maxdiloco-saving"  # suffix of an unfinished save, which readers ignore
WRITTEN = "written"  # the outcome of a part that is complete


class Save(NamedTuple):
    """The content of one save and where it becomes visible.

    Attributes:
      target: folder of the finished checkpoint.
      items: names of the items with arrays.
      files: content of further files, by <folder>/<name>.
      note: content of META.
      attempt: number of failed attempts before this one; threads may still write to their folders.
      key: key under which each other process reports the outcome of its part to the first one.
      deadline: deadline for the parts of all processes, as time.monotonic().
      arrays: staging folder to which this process writes its arrays; None if it is `folder`.
    """

    target: epath.Path
    items: tuple[str, ...]
    files: Mapping[str, bytes]
    note: Mapping[str, Any]
    attempt: int = 0
    key: str = ""
    deadline: float = 0.0
    arrays: epath.Path | None = None

    @property
    def folder(self) -> epath.Path:
        """The folder to write to; in a bucket, which has no folders to rename, the target."""
        if not is_local(self.target):
            return self.target
        number = f"-{self.attempt}" if self.attempt else ""
        return self.target.parent / f"{self.target.name}{UNFINISHED}{number}"


def mark_of(target: epath.Path) -> epath.Path:
    """Return the object that marks the objects of a step in a bucket as an unfinished save."""
    return target.parent / f"{target.name}{UNFINISHED}"


def prepare(save: Save, *, nbytes: int, is_alone: bool = False) -> bool:
    """Create the folders of a save; only the first process calls it.

    Args:
      save: the save.
      nbytes: bytes of the arrays, uncompressed.
      is_alone: whether no other process writes to the folder, so that an unfinished save in it
        may be removed.

    Returns:
      False if the checkpoint exists.

    Raises:
      OSError: the disk is too small, or another program's files block the path.
    """
    folder, target = save.folder, save.target
    if files.is_complete(target):
        if is_local(target):
            durable.sync_folder(target.parent)  # the save that made it may have failed in this call
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
        for name in (*save.items, files.META):
            (folder / name).mkdir(parents=True)
    else:
        mark_of(target).write_text("")
    return True


def _in_the_way(path: epath.Path) -> OSError:
    why = f"{path.name} exists and is not a checkpoint, so it is not replaced: move it"
    return OSError(errno.EEXIST, why)


def wait_for_arrays(save: Save, writes: orbax_io.Writes) -> None:
    """Wait until the arrays of this process are written.

    Raises:
      TimeoutError: they were not written before the deadline.
      OSError, ValueError, RuntimeError: a write failed.
    """
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


def commit(save: Save, writer: Any) -> None:
    """Make a checkpoint durable, then visible; only the first process calls it.

    Args:
      save: the save, whose arrays all processes have written.
      writer: the writer from orbax_io.open_writer.

    Raises:
      OSError, ValueError: a file cannot be written.
    """
    folder, local = save.folder, is_local(save.target)
    if save.arrays is not None:
        staging.download(folder, save.arrays)  # the parts of the others
    for name in save.items:
        writer.finalize((save.arrays or folder) / name)  # merges the parts of the processes
    staging.upload(save.arrays, folder)
    for name in save.items:
        if not local:  # Orbax's readers require it there
            (folder / name / files.COMMIT).write_text("complete\n")
    (folder / files.META / files.META_FILE).write_text(json.dumps(save.note))
    for name, content in save.files.items():
        if local:
            (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    seal.write(folder)
    # Also on a file system: a checkpoint that is copied to a bucket needs this file.
    (folder / files.COMMIT).write_text("complete\n")
    if local:
        durable.sync_tree(folder)
        folder.rename(save.target)
        durable.sync_folder(save.target.parent)
    else:
        mark_of(save.target).unlink(missing_ok=True)


def discard(folder: epath.Path) -> None:
    """Remove the files of a failed save.

    Raises:
      OSError: the files cannot be removed; the next start tries again.
    """
    if folder.exists():
        folder.rmtree()


def wait_for_others(save: Save) -> None:
    """Wait for the parts of the other processes; only the first process calls it.

    Raises:
      OSError, TimeoutError: another process failed, or was too slow.
    """
    for process in range(1, jax.process_count()):
        left = save.deadline - time.monotonic()
        try:
            outcome = coordination.get(f"{save.key}/{process}", timeout_s=left)
        except jax.errors.JaxRuntimeError as error:
            raise TimeoutError(f"process {process} has not written its part in time") from error
        if outcome != WRITTEN:
            raise OSError(errno.EIO, f"process {process}: {outcome}")


def write_part(save: Save, writes: orbax_io.Writes) -> None:
    """Wait for the arrays of this process and publish the outcome; not for the first process."""
    outcome = "ended"
    try:
        wait_for_arrays(save, writes)
        staging.upload(save.arrays, save.folder)
        outcome = WRITTEN
    except (OSError, ValueError, RuntimeError) as error:
        outcome = reason(error)
        raise
    finally:
        staging.end(save.arrays)
        coordination.put(f"{save.key}/{jax.process_index()}", outcome)
