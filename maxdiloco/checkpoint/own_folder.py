"""The checkpoints of one run, in a folder that others may use too.

Users, other runs and another process that is saving may have files in the folder of checkpoints. A
Checkpointer therefore changes only files of its own run, only when it saves, and under a lock.
"""

import fcntl
import itertools
import math
import os
import re
from collections.abc import Callable, Iterable

from etils import epath

from maxdiloco.checkpoint import files, metadata, read, seal
from maxdiloco.checkpoint.write import UNFINISHED
from maxdiloco.errors import CheckpointError
from maxdiloco.storage import durable
from maxdiloco.storage.os_errors import reason
from maxdiloco.storage.run_folder import free_bytes, is_local, megabytes

DELETED = ".maxdiloco-deleted"  # suffix of a checkpoint that is being removed
_LEFT = re.compile(rf"([0-9]+)(?:\{UNFINISHED}(?:-[0-9]+)?|\{DELETED})")  # both begin with a dot


class OwnFolder:
    """The folder of a run's checkpoints, for the process that writes to it.

    Attributes:
      run: the random name in all checkpoints of the run.
      steps: steps that the run saved; no others are removed.
      is_alone: whether a lock excludes other processes, so that unfinished saves can be removed.
    """

    def __init__(self, path: epath.Path, *, run: str, locked: bool, say: Callable[[str], None]):
        """Keep the arguments; the folder is not changed yet.

        Args:
          path: the folder, which need not exist.
          run: name of the run.
          locked: whether the caller holds a lock on the folder; otherwise `begin` takes one.
          say: prints a line.
        """
        self._path, self._say = path, say
        self._lock: int | None = None  # file descriptor of the locked folder
        self._begun = False
        self.run, self.is_alone = run, locked
        self.steps: set[int] = set()

    def adopt(self, path: epath.Path, *, older: bool) -> None:
        """Continue the run of a restored checkpoint. older: also find the checkpoints before it."""
        newest = metadata.read_note(path)
        self.run, self.steps = newest.run, {newest.step}
        earlier = (step for step in read.steps(self._path) if step < newest.step)
        self.steps |= set(filter(self.includes, earlier)) if older else set()

    def includes(self, step: int) -> bool:
        """Tell whether a checkpoint, perhaps left by a failed save, belongs to this run."""
        try:
            return metadata.read_note(self._path / str(step)).run == self.run
        except (OSError, CheckpointError):
            return False

    def begin(self, step: int, damaged: Iterable[epath.Path]) -> None:
        """Rename damaged checkpoints; before the first save also lock and clean the folder.

        Raises:
          CheckpointError: another process holds the lock.
          OSError: the folder cannot be changed.
        """
        if not self._begun:
            if is_local(self._path):  # object stores have no folders
                durable.make_folder(self._path)
            if not self.is_alone and is_local(self._path):
                self._acquire_lock()
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
                "a restart would resume. Move the later ones away, or use a folder for each run."
            )
        self._begun = True

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # a child process may have inherited it
            os.close(self._lock)
            self._lock = None

    def remove(self, step: int) -> None:
        """Remove a checkpoint of the run; at no time does a part of it look complete."""
        path = self._path / str(step)
        if is_local(path):
            self._rename(path, DELETED).rmtree()
        else:
            mark = self._path / f"{path.name}{DELETED}"
            mark.write_text("")
            (path / files.COMMIT).unlink(missing_ok=True)
            path.rmtree(missing_ok=True)
            mark.unlink()
        self.steps.discard(step)

    def keep(self, count: int) -> None:
        """Remove all but the newest `count` checkpoints of the run."""
        for step in self._saved()[:-count]:
            self.remove(step)

    def free(self) -> float:
        """Return the free bytes of the disk; infinity in a bucket."""
        nbytes = free_bytes(self._path)
        return math.inf if nbytes is None else nbytes

    def steps_to_remove(self, nbytes: int, *, kept: int | None) -> list[int]:
        """Choose the oldest checkpoints of the run whose removal makes room for a new one.

        Args:
          nbytes: bytes of the new checkpoint.
          kept: the newest step known to be whole: it and later ones stay. None: the newest stays.

        Returns:
          Their steps; none if the new checkpoint would not fit even without them.
        """
        free, removed = self.free(), []
        own = self._saved() if free < nbytes else []
        for step in own[:-1] if kept is None else [step for step in own if step < kept]:
            if free < nbytes:
                removed.append(step)
                free += seal.nbytes(self._path / str(step))
        return removed if free >= nbytes else []

    def shortage(self, nbytes: int, *, count: int | None) -> list[str]:
        """Return a warning if the disk has no room for `count` checkpoints of this run.

        Args:
          nbytes: bytes of each checkpoint.
          count: number of checkpoints to keep; None: all, for which no disk suffices.
        """
        if count is None or (free := self.free()) >= count * nbytes:
            return []
        free += sum(seal.nbytes(self._path / str(step)) for step in self._saved())
        if free >= count * nbytes:
            return []
        return [
            f"warning: max_num_checkpoints_to_keep={count} checkpoints need up to "
            f"{megabytes(count * nbytes)}, but {self._path} has {megabytes(free)} for them: an "
            f"older one is removed when a new one does not fit."
        ]

    def _saved(self) -> list[int]:
        """Return the steps of the run that have a complete checkpoint, oldest first."""
        return [step for step in read.steps(self._path) if step in self.steps]

    def _acquire_lock(self) -> None:
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
                    f"warning: {self._path} cannot be locked ({reason(error)}): unfinished "
                    "earlier saves stay there. Remove them when no process saves."
                )
            return
        self._lock, self.is_alone = descriptor, True

    def _left(self) -> list[tuple[epath.Path, int]]:
        """Return the remains of earlier saves and removals, each with its step."""
        try:
            found = [(path, _LEFT.fullmatch(path.name)) for path in self._path.iterdir()]
        except FileNotFoundError:  # in a bucket, where a folder needs an object
            return []
        return [(path, int(match[1])) for path, match in found if match]

    def _remove_left(self) -> None:
        for path, step in self._left():
            if not is_local(path):  # the marker object of a step, next to its objects
                folder = self._path / str(step)
                if folder.exists() and not files.is_complete(folder):
                    folder.rmtree()
                path.unlink()
            elif path.is_dir():
                path.rmtree()
            else:
                continue
            self._say(f"removed the remains of an earlier save in {self._path}: {path.name}")

    def _rename(self, path: epath.Path, suffix: str) -> epath.Path:
        """Add a suffix to a checkpoint's name, and a number if that name is taken."""
        names = (f"{path.name}{suffix}{f'-{n}' if n > 1 else ''}" for n in itertools.count(1))
        target = path.rename(next(t for name in names if not (t := path.parent / name).exists()))
        if is_local(path):
            durable.sync_folder(path.parent)  # before any of its files is deleted
        return target
