"""One save, from arrays on the host to a folder that survives a power cut; and what may go then.

Every process writes its part of the arrays. Then the first process finishes the checkpoint: meta
and seal; fsync of each file and folder; the rename that makes it visible; fsync of the folder it is
in. In a bucket a commit file takes the place of the rename.

Others may have files in the folder of checkpoints too: people, other runs, a process that saves
right now. A Checkpointer changes what its run made, under a lock, when it saves.
"""

import errno
import fcntl
import itertools
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
from etils import epath

from maxdiloco.checkpoint import metadata, orbax_io, read, seal, staging
from maxdiloco.cluster import coordination
from maxdiloco.errors import CheckpointError
from maxdiloco.storage import durable
from maxdiloco.storage.run_folder import free_bytes, is_local, megabytes, reason

# Suffixes of what no reader may take for a checkpoint, and of nothing that others make.
UNFINISHED, DELETED = ".maxdiloco-saving", ".maxdiloco-deleted"
_LEFT = re.compile(rf"([0-9]+)(?:\{UNFINISHED}(?:-[0-9]+)?|\{DELETED})")  # both begin with a dot
WRITTEN = "written"  # the outcome of a part that is


class Save(NamedTuple):
    """The content of one save and where it becomes visible."""

    target: epath.Path
    items: tuple[str, ...]  # names of those with arrays
    files: Mapping[str, bytes]  # content of others, by <folder>/<name>
    note: Mapping[str, Any]  # the content of META
    attempt: int = 0  # failed tries before this one, in whose own folders a thread may still write
    key: str = ""  # by which the first process learns of the outcome of each other's part
    deadline: float = 0.0  # for the parts of all processes, of time.monotonic()
    arrays: epath.Path | None = None  # where this process writes them, if not there: of staging

    @property
    def folder(self) -> epath.Path:
        """Where the files are written; in a bucket, which has none to rename, the target."""
        if not is_local(self.target):
            return self.target
        number = f"-{self.attempt}" if self.attempt else ""
        return self.target.parent / f"{self.target.name}{UNFINISHED}{number}"


def mark_of(target: epath.Path) -> epath.Path:
    """In a bucket: the object that says of a step's objects that they are an unfinished save."""
    return target.parent / f"{target.name}{UNFINISHED}"


def prepare(save: Save, *, nbytes: int, is_alone: bool = False) -> bool:
    """Make the folders of a save; False when the checkpoint exists. For the first process.

    nbytes: of the arrays, uncompressed. is_alone: whether an unfinished save in the folder is that
    of no living process, and makes room. Raises OSError, also for what others have there.
    """
    folder, target = save.folder, save.target
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
        for name in (*save.items, orbax_io.META):
            (folder / name).mkdir(parents=True)
    else:
        mark_of(target).write_text("")
    return True


def _in_the_way(path: epath.Path) -> OSError:
    why = f"{path.name} is there and is no checkpoint, and nothing of others is removed: move it"
    return OSError(errno.EEXIST, why)


def wait_for_arrays(save: Save, writes: orbax_io.Writes) -> None:
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


def commit(save: Save, writer: Any) -> None:
    """First process: make a checkpoint durable, then visible. Raises OSError, ValueError.

    writer: of orbax_io.open_writer.
    """
    folder, local = save.folder, is_local(save.target)
    if save.arrays is not None:
        staging.download(folder, save.arrays)  # the parts of the others
    for name in save.items:
        writer.finalize((save.arrays or folder) / name)  # merges the parts of the processes
    staging.upload(save.arrays, folder)
    for name in save.items:
        if not local:  # Orbax's readers ask for it there
            (folder / name / orbax_io.COMMIT).write_text("complete\n")
    (folder / orbax_io.META / orbax_io.META_FILE).write_text(json.dumps(save.note))
    for name, content in save.files.items():
        if local:
            (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    seal.write(folder)
    # On a mounted file system for a copy in a bucket, where a folder without it is no checkpoint.
    (folder / orbax_io.COMMIT).write_text("complete\n")
    if local:
        durable.sync_tree(folder)
        folder.rename(save.target)
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


def write_part(save: Save, writes: orbax_io.Writes) -> None:
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
        staging.end(save.arrays)
        coordination.put(f"{save.key}/{jax.process_index()}", outcome)


class OwnFolder:
    """The folder of a run's checkpoints, for the process that writes to it.

    locked: whether the caller holds a lock on the folder; else `begin` takes one.
    run: the name by which checkpoints of one run know each other. steps: those that the run saved;
    no others are removed. is_alone: whether, by a lock, no other process writes here; then what is
    unfinished is nobody's.
    """

    def __init__(self, path: epath.Path, *, run: str, locked: bool, say: Callable[[str], None]):
        self._path, self._say = path, say
        self._lock: int | None = None  # the open folder that holds it
        self._begun = False
        self.run, self.is_alone = run, locked
        self.steps: set[int] = set()

    def adopt(self, path: epath.Path, *, older: bool) -> None:
        """Go on with the run of a restored checkpoint. older: also find the ones before it."""
        newest = metadata.read_note(path)
        self.run, self.steps = newest.run, {newest.step}
        earlier = (step for step in read.steps(self._path) if step < newest.step)
        self.steps |= set(filter(self.includes, earlier)) if older else set()

    def includes(self, step: int) -> bool:
        """Whether a checkpoint, which a failed save may have left, says that it is this run's."""
        try:
            return metadata.read_note(self._path / str(step)).run == self.run
        except (OSError, CheckpointError):
            return False

    def begin(self, step: int, damaged: Iterable[epath.Path]) -> None:
        """Set damaged ones aside, at first also lock and clean. Raises CheckpointError, OSError."""
        if not self._begun:
            if is_local(self._path):  # object stores have no folders
                durable.make_folder(self._path)
            if not self.is_alone and is_local(self._path):
                self._take_lock()
        for path in damaged:
            if path.exists():
                self._rename(path, ".damaged")
        if self._begun:
            return
        if self.is_alone:
            self._remove_left()
        later = [other for other in read.steps(self._path) if other > step]
        if later:
            self._say(
                f"warning: step {step} is saved below step {later[-1]} in {self._path}, from which "
                "a restart would go on. Move the later ones away, or use a folder for each run."
            )
        self._begun = True

    def close(self) -> None:
        """Give the lock back."""
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # a child process may have inherited it
            os.close(self._lock)
            self._lock = None

    def remove(self, step: int) -> None:
        """Remove a checkpoint, so that no half of it ever looks like one. Raises OSError."""
        path = self._path / str(step)
        if is_local(path):
            self._rename(path, DELETED).rmtree()
        else:
            mark = self._path / f"{path.name}{DELETED}"
            mark.write_text("")
            (path / orbax_io.COMMIT).unlink(missing_ok=True)
            path.rmtree(missing_ok=True)
            mark.unlink()
        self.steps.discard(step)

    def keep(self, count: int) -> None:
        """Remove all but the newest `count` checkpoints of the run. Raises OSError."""
        for step in self._there()[:-count]:
            self.remove(step)

    def free(self) -> float:
        """Free bytes of the disk; without a limit in a bucket."""
        nbytes = free_bytes(self._path)
        return math.inf if nbytes is None else nbytes

    def in_the_way(self, nbytes: int, *, kept: int | None) -> list[int]:
        """The run's oldest checkpoints without which one of nbytes fits; none where it never would.

        kept: the newest step known to be whole, which stays, as later ones; None: the newest stays.
        """
        free, removed = self.free(), []
        own = self._there() if free < nbytes else []
        for step in own[:-1] if kept is None else [step for step in own if step < kept]:
            if free < nbytes:
                removed.append(step)
                free += seal.nbytes(self._path / str(step))
        return removed if free >= nbytes else []

    def shortage(self, nbytes: int, *, count: int | None) -> list[str]:
        """The line where the disk, without this run's checkpoints, has no room for `count` more."""
        if count is None or (free := self.free()) >= count * nbytes:
            return []
        free += sum(seal.nbytes(self._path / str(step)) for step in self._there())
        if free >= count * nbytes:
            return []
        return [
            f"warning: max_num_checkpoints_to_keep={count} checkpoints take up to "
            f"{megabytes(count * nbytes)}, and {self._path} has {megabytes(free)} for them: older "
            f"ones are removed where a new one does not fit."
        ]

    def _there(self) -> list[int]:
        """The run's steps that have a complete checkpoint, oldest first."""
        return [step for step in read.steps(self._path) if step in self.steps]

    def _take_lock(self) -> None:
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise CheckpointError(
                f"folder={self._path}: another process saves checkpoints to it. Wait for it, stop "
                "it, or give another folder."
            ) from error
        except OSError as error:
            os.close(descriptor)
            if self._left():
                self._say(
                    f"warning: {self._path} cannot be locked ({reason(error)}): what earlier saves "
                    "left unfinished stays there. Remove it when no process saves."
                )
            return
        self._lock, self.is_alone = descriptor, True

    def _left(self) -> list[tuple[epath.Path, int]]:
        """What earlier saves and removals have left, each with its step."""
        try:
            found = [(path, _LEFT.fullmatch(path.name)) for path in self._path.iterdir()]
        except FileNotFoundError:  # in a bucket, where there is no folder without an object
            return []
        return [(path, int(match[1])) for path, match in found if match]

    def _remove_left(self) -> None:
        for path, step in self._left():
            if not is_local(path):  # a mark beside the objects of a step
                folder = self._path / str(step)
                if folder.exists() and not orbax_io.is_complete(folder):
                    folder.rmtree()
                path.unlink()
            elif path.is_dir():
                path.rmtree()
            else:
                continue
            self._say(f"removed what an earlier save left in {self._path}: {path.name}")

    def _rename(self, path: epath.Path, suffix: str) -> epath.Path:
        """Give a checkpoint a name that nothing has: with the suffix, or also with a number."""
        names = (f"{path.name}{suffix}{f'-{n}' if n > 1 else ''}" for n in itertools.count(1))
        target = path.rename(next(t for name in names if not (t := path.parent / name).exists()))
        if is_local(path):
            durable.sync_folder(path.parent)  # before anything of it is deleted
        return target
