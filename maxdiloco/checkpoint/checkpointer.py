"""Checkpoints of a run, written while it trains; each is whole or absent.

checkpoints/120/            the state after inner step 120
    <item>/                 a tree of arrays, written by Orbax; can be read without the others
    meta/                   JSON: the caller's meta, and names, shapes and dtypes of all arrays
    tokenizer/              further files of the run
    seal.json               sizes and CRC-32 of these files
checkpoints/130.damaged/    a damaged checkpoint, set aside
checkpoints/140.maxdiloco-saving/   an unfinished save; removed by the next good save
"""

import contextlib
import itertools
import os
import secrets
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

import jax
from etils import epath

from maxdiloco import output
from maxdiloco.checkpoint import metadata, orbax_io, read, staging, trees, write
from maxdiloco.checkpoint.files import is_complete
from maxdiloco.checkpoint.own_folder import OwnFolder
from maxdiloco.cluster import agree
from maxdiloco.errors import CheckpointError, SaveError
from maxdiloco.storage import durable, shared_folder
from maxdiloco.storage.os_errors import reason, replace_os_error
from maxdiloco.storage.run_folder import absolute, is_local

_REMEDY = (
    "Restore the keys of the model and the optimizer to their earlier values, or set another "
    "run_name."
)

# The outcomes of starting a save; the first process decides.
_RUNS, _EXISTS, _FAILED, _REFUSED = range(4)
# Errors that neither a disk nor a store raises: the run exits with a traceback.
_BUGS = (AssertionError, AttributeError, LookupError, NameError, TypeError)


class Checkpointer:
    """Saves and restores the state of one run. All processes of the run make the same calls.

    It is a context manager, whose exit waits for the save in progress.

    A failed save is a warning, and the next one tries again. Two in a row raise SaveError in all
    processes; the complete checkpoints stay as they are.
    """

    def __init__(
        self,
        folder: epath.PathLike,
        *,
        max_to_keep: int | None,
        use_async: bool = True,
        timeout_s: float = 3600,
        files: Mapping[str, bytes] = MappingProxyType({}),
        say: read.Say = output.say,
        locked: bool = False,
    ):
        """Check that all processes can use the folder.

        Args:
          folder: a folder that all processes see. The first save creates it and removes unfinished
            saves of the run; restoring changes nothing.
          max_to_keep: number of complete checkpoints of this run to keep, at least 1; None keeps
            all. Checkpoints of other runs stay and do not count. A restored run is continued: its
            checkpoints count.
          use_async: save() returns as soon as the arrays are copied to the host.
          timeout_s: time limit for the processes to write the arrays of one save [s].
          files: further files of each checkpoint: content by path in it, <folder>/<name>.
          say: prints a line; called in the first process only.
          locked: whether the caller holds a lock on the folder; otherwise the first save takes
            one, until the context is left.

        Raises:
          CheckpointError: the folder cannot be used.
        """
        self._folder = absolute(folder)
        self._max_to_keep = max_to_keep
        self._use_async = use_async
        self._timeout_s = timeout_s
        self._files = files
        self._primary = jax.process_index() == 0
        self.say = read.primary_only(say)
        self._saving: tuple[int, Future] | None = None  # the step whose save runs
        self._failures = 0  # failed saves since the last good one
        self._newest: int | None = None  # the newest step known to be saved
        self._removal: Future | None = None  # of checkpoints that are not kept
        self._known_good: set[epath.Path] = set()
        self._damaged: list[epath.Path] = []  # found by restore; the next save sets them aside
        self._failed_folders: set[epath.Path] = set()  # folders that may still have files
        run = secrets.token_hex(8)
        self._own = OwnFolder(self._folder, run=run, locked=locked, say=self.say)
        if self._primary and is_local(self._folder):
            what = f"base_output_directory: cannot be used in {self._folder}"
            with replace_os_error(CheckpointError, what, "Free some space or set another folder."):
                if jax.process_count() > 1:  # shared_folder.require writes a file there
                    durable.make_folder(self._folder)
                with contextlib.suppress(FileNotFoundError):
                    os.listdir(self._folder)
        shared_folder.require(self._folder)
        saves = agree.from_first_process(secrets.randbelow(1 << 31))
        self._save_keys = (f"maxdiloco/saves/{saves}/{count}" for count in itertools.count(1))
        self._writer: Future | None = None  # see open_writer
        # A future keeps the error of a thread. One thread writes a save in order; the other one
        # removes old checkpoints, which may take longer.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._remover = ThreadPoolExecutor(max_workers=1, thread_name_prefix="old-checkpoints")

    def __enter__(self) -> "Checkpointer":
        """Start to filter Orbax's log."""
        self._closing = contextlib.ExitStack()
        self._closing.enter_context(orbax_io.silence_logs())
        self._closing.callback(self._own.close)
        self._closing.callback(self._close_writer)
        self._closing.enter_context(self._remover)
        self._closing.enter_context(self._thread)
        return self

    def __exit__(self, kind, exception, traceback) -> None:
        """Wait for the save in progress; after an exception, warn if it failed.

        Raises:
          SaveError: the save failed, and no other exception was raised.
        """
        with self._closing:
            if exception is None:
                self.wait(last=True)
            elif self._saving is not None:
                # The processes do not agree on the outcome: others may not reach this line.
                step, saved = self._saving
                if (error := saved.exception()) is not None:
                    self.say(f"warning: {self._failure(step, reason(error))}")

    def open_writer(self) -> Future:
        """Start to import Orbax in a thread and return a future of the writer.

        A save waits for the writer. The import takes most of a second, so a run starts it after its
        first step; a program that only reads never starts it.
        """
        if self._writer is None:
            self._writer = self._thread.submit(orbax_io.open_writer)
        return self._writer

    def _close_writer(self) -> None:
        if self._writer is not None:
            self._writer.result().close()

    def steps(self) -> list[int]:
        """Return the steps, of any run, with a complete checkpoint that was not found damaged."""
        damaged = {path.name for path in self._damaged}
        return [step for step in read.steps(self._folder) if str(step) not in damaged]

    def shortage(self, nbytes: int) -> list[str]:
        """Return a warning if the disk is too small for max_to_keep checkpoints of nbytes each."""
        return self._own.shortage(nbytes, count=self._max_to_keep) if self._primary else []

    def save(
        self, step: int, items: Mapping[str, Any], meta: Mapping[str, Any], *, last: bool = False
    ) -> bool:
        """Write a checkpoint, after waiting for the previous save.

        Args:
          step: number of inner steps.
          items: {name: tree of arrays}; the caller may donate or delete them afterwards.
          meta: further fields of META, of JSON's types.
          last: whether it is the last save: wait until it is on the disk, and retry once,
            immediately, if it fails.

        Returns:
          False if this step has a checkpoint already; then nothing is written.

        Raises:
          SaveError: two saves in a row have failed.
          CheckpointError: another process saves to the folder.
        """
        self._end_of_save(limit=None if last else 2)
        if self._removal is not None and self._removal.done():
            self._end_of_removal()
        started = self._start(step, items, meta)
        if last and started != _EXISTS and not self._end_of_save(limit=None):
            self._start(step, items, meta)
            self._end_of_save(limit=1)
        elif started == _FAILED or not self._use_async:
            self.wait()
        return started != _EXISTS

    def wait(self, *, last: bool = False) -> None:
        """Wait until the save in progress is on the disk and older checkpoints are removed.

        Args:
          last: whether it is the last save, so that its failure is final.

        Raises:
          SaveError: the save failed, and it is the last one or the previous save also failed.
        """
        self._end_of_save(limit=1 if last else 2)
        self._end_of_removal()
        self._thread.submit(bool).result()  # by now the files of a failed save are removed

    def restore(
        self, abstract_of: read.AbstractOf, *, needs: Collection[str] = ()
    ) -> read.Restored | None:
        """Read the newest undamaged checkpoint.

        A damaged checkpoint causes a warning, and the previous one is read. The next save renames
        the damaged one to <step>.damaged.

        Args:
          abstract_of: the arrays to read; `lambda meta: {}` reads none.
          needs: fields that the meta must have.

        Returns:
          The checkpoint; None if the folder has none.

        Raises:
          CheckpointError: all are damaged, a field is absent, or shapes or dtypes differ from
            abstract_of.
        """
        self._end_of_save()
        with read.replace_read_error(self._folder, "base_output_directory"):
            newest_first = read.newest_first(self._folder)
            restored, damaged = read.first_undamaged(
                (path for path in newest_first if path not in self._damaged),
                abstract_of,
                say=self.say,
                remedy=lambda meta: _REMEDY,
                needs=needs,
                known_good=self._known_good,
            )
            if restored is not None and self._primary:
                self._own.adopt(restored.path, older=self._max_to_keep is not None)
        self._damaged += damaged
        if restored is not None:
            self._known_good.add(restored.path)
            self._newest = restored.step
        return restored

    def _start(self, step: int, items: Mapping[str, Any], meta: Mapping[str, Any]) -> int:
        """Start a save, in all processes or in none; return _RUNS, _EXISTS or _FAILED."""
        arrays = {
            name: nested for name, tree in items.items() if (nested := trees.to_nested_dicts(tree))
        }
        note = metadata.note_of(step, items, meta, run=self._own.run)
        target = self._folder / str(step)
        key = next(self._save_keys)
        save = write.Save(target, tuple(arrays), self._files, note, self._failures, key)
        nbytes = sum(array.nbytes for array in jax.tree.leaves(dict(items)))
        nbytes += sum(map(len, self._files.values()))
        prepared = self._thread.submit(self._prepare, save, nbytes)
        error = prepared.exception()
        started = _REFUSED if isinstance(error, CheckpointError) else _FAILED
        if error is None:
            started = _RUNS if prepared.result() else _EXISTS
        started = agree.from_first_process(started)
        if started == _REFUSED:
            raise error or CheckpointError(f"folder={self._folder}: see the output of process 0.")
        if started != _FAILED:
            self._damaged.clear()
        if started == _RUNS:
            save = save._replace(deadline=time.monotonic() + self._timeout_s)
            writer = self.open_writer().result()
            try:
                save = save._replace(arrays=staging.begin(save.folder))
                writes = orbax_io.start_writing(writer, save.arrays or save.folder, arrays)
            except OSError as begun:  # this process's part has failed; the others' may succeed
                writes = [failed := Future()]
                failed.set_exception(begun)
            finish = self._complete if self._primary else write.write_part
            self._saving = step, self._thread.submit(finish, save, writes)
        elif started == _FAILED:
            self._saving = step, prepared
            others = isinstance(error, FileExistsError)  # the folder in the way is another's
            if error is not None and is_local(self._folder) and not others:
                self._failed_folders.add(save.folder)
        return started

    def _prepare(self, save: write.Save, nbytes: int) -> bool:
        # Runs in the thread.
        if not self._primary:
            return True
        own, target, step = self._own, save.target, int(save.target.name)
        own.begin(step, self._damaged)
        exists = is_complete(target)
        if exists and own.includes(step):
            own.steps.add(step)
        elif exists:
            self.say(
                f"warning: step {step} is not saved: {target} exists already and belongs to "
                "another run. Use a folder for each run."
            )
        elif self._max_to_keep is not None:
            if self._removal is not None and own.free() < nbytes:
                self._removal.exception()  # wait for the removal, which also frees disk space
            for old in own.steps_to_remove(nbytes, kept=self._newest):
                own.remove(old)
                self.say(
                    f"the disk of {self._folder} is nearly full: checkpoint {old} was removed to "
                    f"make room for {step}"
                )
        return write.prepare(save, nbytes=nbytes, is_alone=own.is_alone)

    def _complete(self, save: write.Save, writes: orbax_io.Writes) -> None:
        # Runs in the thread.
        with contextlib.ExitStack() as always, contextlib.ExitStack() as failed:
            always.callback(staging.end, save.arrays)
            failed.callback(self._thread.submit, write.discard, save.folder)  # the disk may be full
            if is_local(save.folder):  # elsewhere the next try writes to the same one
                failed.callback(self._failed_folders.add, save.folder)
            write.wait_for_arrays(save, writes)
            write.wait_for_others(save)
            write.commit(save, self.open_writer().result())
            self._own.steps.add(int(save.target.name))
            failed.pop_all()
        while self._failed_folders:  # again, since threads may have written late
            self._thread.submit(write.discard, self._failed_folders.pop())
        if self._max_to_keep is not None:
            self._removal = self._remover.submit(self._own.keep, self._max_to_keep)

    def _end_of_save(self, *, limit: int | None = 2) -> bool:
        """Wait for the save in progress and return whether it succeeded.

        Raises:
          SaveError: it is the `limit`-th failure in a row.
        """
        if self._saving is None:
            return True
        step, saved = self._saving
        error = saved.exception()
        self._saving = None
        if isinstance(error, _BUGS):
            raise error
        failed = agree.in_any_process(error is not None)
        if not failed:
            self._failures, self._newest = 0, step
            return True
        self._failures += 1
        why = "another process failed, see its output" if error is None else reason(error)
        line = self._failure(step, why)
        if limit is not None and self._failures >= limit:
            raise SaveError(
                f"base_output_directory: {line} Free some space or repair the disk; then the same "
                "command resumes."
            ) from error
        self.say(f"warning: {line} The next save tries again.")
        return False

    def _failure(self, step: int, why: str) -> str:
        newest = "no step was saved since the start"
        if self._newest is not None:
            newest = f"the last step saved is {self._newest}"
        return f"step {step} could not be saved in {self._folder}: {why}; {newest}."

    def _end_of_removal(self) -> None:
        """Wait until the older checkpoints are removed; a failure is a warning."""
        removal, self._removal = self._removal, None
        if removal is not None and (error := removal.exception()) is not None:
            self.say(
                f"warning: an old checkpoint in {self._folder} could not be removed: "
                f"{reason(error)}. The next save tries again; remove it if the disk fills up."
            )
