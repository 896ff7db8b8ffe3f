"""What a Checkpointer may change in its folder: what its run made, under a lock, when it saves.

Others may have files there too: people, other runs, a process that saves right now. A Checkpointer
that only reads changes nothing.
"""

import fcntl
import os
import re
from collections.abc import Callable, Iterable

from etils import epath

from maxdiloco.checkpoint import orbax_io, read, seal
from maxdiloco.checkpoint.write import DELETED, UNFINISHED
from maxdiloco.errors import CheckpointError
from maxdiloco.storage import durable
from maxdiloco.storage.run_folder import free_bytes, is_local, megabytes, reason

_LEFT = re.compile(rf"([0-9]+)(?:\{UNFINISHED}(?:-[0-9]+)?|\{DELETED})")  # both begin with a dot


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
        newest = orbax_io.read_note(path)
        self.run, self.steps = newest.run, {newest.step}
        earlier = (step for step in read.steps(self._path) if step < newest.step)
        self.steps |= set(filter(self.includes, earlier)) if older else set()

    def includes(self, step: int) -> bool:
        """Whether a checkpoint, which a failed save may have left, says that it is this run's."""
        try:
            return orbax_io.read_note(self._path / str(step)).run == self.run
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

    def lacks(self, nbytes: int) -> bool:
        """Whether nbytes do not fit on the disk."""
        free = free_bytes(self._path)
        return free is not None and free < nbytes

    def in_the_way(self, nbytes: int, *, kept: int | None) -> list[int]:
        """The run's oldest checkpoints without which one of nbytes fits; none where it never would.

        kept: the newest step known to be whole, which stays, as later ones; None: the newest stays.
        """
        if not self.lacks(nbytes):
            return []
        free, removed = free_bytes(self._path), []
        own = [step for step in read.steps(self._path) if step in self.steps]
        for step in own[:-1] if kept is None else [step for step in own if step < kept]:
            removed.append(step)
            free += seal.nbytes(self._path / str(step))
            if free >= nbytes:
                return removed
        return []

    def shortage(self, nbytes: int, *, count: int | None) -> list[str]:
        """The line where the disk, without this run's checkpoints, has no room for `count` more."""
        if count is None or not self.lacks(count * nbytes):
            return []
        own = [step for step in read.steps(self._path) if step in self.steps]
        free = free_bytes(self._path) + sum(seal.nbytes(self._path / str(step)) for step in own)
        if free >= count * nbytes:
            return []
        return [
            f"warning: max_num_checkpoints_to_keep={count} checkpoints take up to "
            f"{megabytes(count * nbytes)}, and {self._path} has {megabytes(free)} for them: older "
            f"ones are removed where a new one does not fit."
        ]

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
        target, count = path.parent / f"{path.name}{suffix}", 1
        while target.exists():
            count += 1
            target = path.parent / f"{path.name}{suffix}-{count}"
        target = path.rename(target)
        if is_local(path):
            durable.sync_folder(path.parent)  # before anything of it is deleted
        return target
