"""Checkpoints of the run under way: written beside the training, each whole or not there.

checkpoints/120/            the state after inner step 120
    <item>/                 a tree of arrays, written by Orbax; one folder per item, so that
                            the outer parameters can be read without the rest
    meta/                   JSON: what the caller gave (t, data position, config ...), and the
                            names, shapes and dtypes of all arrays
    seal.json               sizes and CRC-32 of these files
checkpoints/130.damaged/    a checkpoint that could not be used, set aside
checkpoints/140.orbax-checkpoint-tmp/   an unfinished save; removed by the next start
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from etils import epath

from maxdiloco import (
    checkpoint_io,
    checkpoint_read,
    checkpoint_seal,
    object_store,
    shared_folder,
)
from maxdiloco.checkpoint_read import (
    PARAMETERS,
    AbstractOf,
    Report,
    Restored,
    restore_from,
    restore_parameters,
)
from maxdiloco.errors import CheckpointError
from maxdiloco.run_folder import absolute, is_local, reason, require_space

__all__ = ["PARAMETERS", "Checkpointer", "Restored", "restore_from", "restore_parameters"]

_DAMAGED = ".damaged"
_DELETED = ".deleted"
_REMEDY = "Set the keys of the model and the optimizer back, or set another run_name."


class Checkpointer:
    """Saves and restores the state of one run. All processes of the run call it alike.

    folder: RunFolder.checkpoints, a folder that all processes see.
    max_to_keep: complete checkpoints that stay, at least 1; None keeps all.
    use_async: save() returns as soon as the arrays are copied to the host.
    report: takes one line for the user; called in the first process only.
    gather_axis: the mesh axis that joins the slices (see checkpoint_io.read_item).
    A context manager: leaving it waits for the save that runs. Imports Orbax. Raises
    CheckpointError when the folder cannot be used.
    """

    def __init__(
        self,
        folder: epath.PathLike,
        *,
        max_to_keep: int | None,
        use_async: bool = True,
        report: Report = print,
        gather_axis: str = "diloco",
    ):
        self._folder = absolute(folder)
        self._max_to_keep = max_to_keep
        self._use_async = use_async
        self._primary = jax.process_index() == 0
        self._report = report if self._primary else checkpoint_read.say_nothing
        self._gather_axis = gather_axis
        self._saving: int | None = None  # the step whose save runs
        self._sealing: int | None = None  # the step that _before_commit finds; never reset
        self._known_good: set[epath.Path] = set()
        if self._primary:
            with self._one_line("cannot be used"):
                if is_local(self._folder):  # elsewhere a folder is the names of its objects
                    self._folder.mkdir(parents=True, exist_ok=True)
                self._remove_unfinished()
        shared_folder.require(self._folder)  # and nobody looks before the first has cleaned up
        self._writer = checkpoint_io.open_writer(self._before_commit)

    def __enter__(self) -> "Checkpointer":
        logging.getLogger("absl").addFilter(_not_from_orbax)
        return self

    def __exit__(self, kind, exception, traceback) -> None:
        try:
            self.wait()
        except CheckpointError as error:
            if exception is None:
                raise
            self._report(str(error))  # the exception under way goes on
        finally:
            self._writer.close()
            logging.getLogger("absl").removeFilter(_not_from_orbax)

    def steps(self) -> list[int]:
        """The steps that have a complete checkpoint, oldest first."""
        return checkpoint_read.steps(self._folder)

    def save(self, step: int, items: Mapping[str, Any], meta: Mapping[str, Any]) -> bool:
        """Write a checkpoint; does nothing and returns False when this step has one.

        items: {name: tree of arrays}; the caller may donate or delete them afterwards.
        meta: JSON-able.
        Waits for the save before this one. Raises CheckpointError when that failed, or when
        there is no room for this one; a failure leaves the complete checkpoints as they are.
        """
        self.wait()
        if checkpoint_io.from_first_process(step in self.steps()):
            return False
        require_space(self._folder, sum(checkpoint_io.nbytes(tree) for tree in items.values()))
        with self._one_line(f"cannot take the checkpoint of step {step}"):
            self._sealing = step
            arguments = checkpoint_io.save_arguments(step, items, meta)
            self._writer.save(self._folder / str(step), args=arguments)
            self._saving = step
        if not self._use_async:
            self.wait()
        return True

    def wait(self) -> None:
        """Wait until the save that runs, if any, is complete; then drop the oldest ones.

        Raises CheckpointError when the save failed.
        """
        if self._saving is None:
            return
        step, self._saving = self._saving, None
        with self._one_line(f"cannot take the checkpoint of step {step}"):
            self._writer.wait_until_finished()
        if self._primary and self._max_to_keep is not None:
            with self._one_line("cannot remove an old checkpoint"):
                for old in self.steps()[: -self._max_to_keep]:
                    self._remove(self._folder / str(old))

    def restore(self, abstract_of: AbstractOf) -> Restored | None:
        """Read the newest checkpoint that is not damaged; None when there is none at all.

        A damaged one is reported and set aside as <step>.damaged, and the one before it is used.
        `restore(lambda meta: {}).meta` tells what is there before anything is built. Raises
        CheckpointError when all are damaged or when shapes or dtypes are not what abstract_of
        says, and whatever abstract_of raises.
        """
        self.wait()
        with checkpoint_read.reading(self._folder, "base_output_directory"):
            restored, damaged = checkpoint_read.first_undamaged(
                checkpoint_read.newest_first(self._folder),
                abstract_of,
                report=self._report,
                axis=self._gather_axis,
                remedy=lambda meta: _REMEDY,
                known_good=self._known_good,
            )
        if restored is not None:
            self._known_good.add(restored.path)
        if self._primary:
            with self._one_line("cannot set a damaged checkpoint aside"):
                for path in damaged:
                    self._set_aside(path)
        return restored

    def _before_commit(self) -> None:
        # Called in Orbax's thread. The folder has a suffix until it is complete, or none where
        # folders cannot be renamed at once.
        for path in self._folder.iterdir():
            if path.name.partition(".orbax")[0] == str(self._sealing):
                checkpoint_seal.write(path)

    def _remove_unfinished(self) -> None:
        # The lock of the run folder says that nobody is writing these now.
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            step, suffix, _ = path.name.partition(".")
            if not step.isdigit() or path.name.endswith(_DAMAGED):
                continue
            if suffix or not checkpoint_io.is_complete(path):
                object_store.remove(path)

    def _remove(self, path: epath.Path) -> None:
        if is_local(path):
            # Gone at once: a half-deleted folder must not look like a checkpoint.
            path = path.rename(path.parent / (path.name + _DELETED))
        else:
            (path / checkpoint_io.COMMIT).unlink(missing_ok=True)
        object_store.remove(path)

    def _set_aside(self, path: epath.Path) -> None:
        target = path.parent / (path.name + _DAMAGED)
        if target.exists():
            object_store.remove(target)
        path.rename(target)

    @contextlib.contextmanager
    def _one_line(self, what: str) -> Iterator[None]:
        try:
            yield
        # ValueError: the file layer below Orbax.
        except (OSError, ValueError, *object_store.errors(self._folder)) as error:
            raise CheckpointError(
                f"base_output_directory: {what} in {self._folder}: {reason(error)}. Free some "
                f"space or set another folder; complete checkpoints: {self.steps() or 'none'}."
            ) from error


def _not_from_orbax(record: logging.LogRecord) -> bool:
    # Orbax logs a failed save with several stack traces; wait() raises the same as one line.
    return "/orbax/" not in record.pathname
