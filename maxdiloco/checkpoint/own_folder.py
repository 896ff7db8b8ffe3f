"""What a Checkpointer may change in its folder: what its run made, under a lock, when it saves.

Others may have files there too: people, other runs, a process that saves right now. A Checkpointer
that only reads changes nothing.
"""

import fcntl
import os
import re
from collections.abc import Callable, Iterable

from etils import epath

from maxdiloco.checkpoint import orbax_io, read
from maxdiloco.checkpoint.write import DELETED, UNFINISHED
from maxdiloco.errors import CheckpointError
from maxdiloco.storage import durable, object_store
from maxdiloco.storage.run_folder import is_local, reason

_DAMAGED = ".damaged"
_LEFT = re.compile(rf"([0-9]+)(?:\{UNFINISHED}(?:-[0-9]+)?|\{DELETED})")  # both begin with a dot


class OwnFolder:
    """The folder of a run's checkpoints, for the process that writes to it.

    locked: whether the caller holds a lock on the folder; else `begin` takes one. say: prints a
    line. steps: the steps that this run saved, in this process or before; no others are removed.
    run: the name by which checkpoints of one run know each other. is_alone: whether no other
    process writes here, by a lock; then what is unfinished is nobody's.
    """

    def __init__(self, path: epath.Path, *, run: str, locked: bool, say: Callable[[str], None]):
        self._path, self._say = path, say
        self._lock: int | None = None  # the open folder that holds it
        self._begun = False
        self.run, self.is_alone = run, locked
        self.steps: set[int] = set()

    def adopt(self, path: epath.Path, *, older: bool) -> None:
        """Go on with the run of a checkpoint that was restored. Raises as orbax_io.read_note.

        older: whether to look for those that the run saved before it.
        """
        newest = orbax_io.read_note(path)
        self.run, self.steps = newest.run, {newest.step}
        earlier = (step for step in read.steps(self._path) if step < newest.step)
        self.steps |= set(filter(self.includes, earlier)) if older else set()

    def includes(self, step: int) -> bool:
        """Whether a checkpoint says that it is this run's; one that cannot be read does not.

        A save may have failed after its checkpoint became visible.
        """
        try:
            return orbax_io.read_note(self._path / str(step)).run == self.run
        except (OSError, CheckpointError):
            return False

    def begin(self, step: int, damaged: Iterable[epath.Path]) -> None:
        """Make the folder ready for a save; for later ones than the first it sets damaged aside.

        damaged: checkpoints to set aside. Raises CheckpointError when another process saves here,
        OSError.
        """
        if not self._begun:
            if is_local(self._path):  # object stores have no folders
                durable.make_folder(self._path)
            if not self.is_alone:
                self._take_lock()
        for path in damaged:
            self._set_aside(path)
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
            target = path.rename(_free(path, DELETED))
            durable.sync_folder(self._path)  # the rename reaches the disk before the deletions
            object_store.remove(target)
        else:
            mark = self._path / f"{path.name}{DELETED}"
            mark.write_text("")
            (path / orbax_io.COMMIT).unlink(missing_ok=True)
            object_store.remove(path)
            mark.unlink()
        self.steps.discard(step)

    def _take_lock(self) -> None:
        if not is_local(self._path):
            return
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
        except FileNotFoundError:  # on gs://, where there is no folder without an object
            return []
        return [(path, int(match[1])) for path, match in found if match]

    def _remove_left(self) -> None:
        for path, step in self._left():
            if not is_local(path):  # a mark beside the objects of a step
                folder = self._path / str(step)
                if folder.exists() and not orbax_io.is_complete(folder):
                    object_store.remove(folder)
                path.unlink()
            elif path.is_dir():
                object_store.remove(path)
            else:
                continue
            self._say(f"removed what an earlier save left in {self._path}: {path.name}")

    def _set_aside(self, path: epath.Path) -> None:
        if path.exists():
            path.rename(_free(path, _DAMAGED))
            if is_local(path):
                durable.sync_folder(path.parent)


def _free(path: epath.Path, suffix: str) -> epath.Path:
    """A name that nothing has, beside path: with the suffix, or with the suffix and a number."""
    target, count = path.parent / f"{path.name}{suffix}", 1
    while target.exists():
        target, count = path.parent / f"{path.name}{suffix}-{count + 1}", count + 1
    return target
