"""Find the checkpoint that a user names, and read the newest undamaged one of a folder."""

import contextlib
import re
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
from etils import epath

from maxdiloco import output
from maxdiloco.checkpoint import arrays, files, metadata, seal, trees
from maxdiloco.cluster import agree
from maxdiloco.engine.trainer import DIAGNOSTICS
from maxdiloco.errors import CheckpointError
from maxdiloco.storage import shared_folder
from maxdiloco.storage.os_errors import replace_os_error
from maxdiloco.storage.run_folder import CHECK_AND_RESTART, absolute

_STEP = re.compile("0|[1-9][0-9]*")  # as a save names its folder
NEWEST = -1  # as a step: the newest undamaged checkpoint
_ATTEMPTS = 12  # reads of a file that only some hosts find damaged, within shared_folder.WAIT_S

# Maps the meta of a checkpoint to {item: tree of jax.ShapeDtypeStruct with shardings, or of
# arrays.Cycled}. Other items are not read. It is called for each checkpoint that is tried.
AbstractOf = Callable[[dict[str, Any]], Mapping[str, Any]]
# Maps the meta of a checkpoint to the remedy if its shapes differ from the run's.
Remedy = Callable[[dict[str, Any]], str]
Say = Callable[[str], None]  # prints a line for the user


class Restored(NamedTuple):
    """A checkpoint that was read.

    Attributes:
      step: number of inner steps before it was saved.
      items: {item: tree of arrays}.
      meta: the caller's fields of META.
      path: its folder; restore_from(path) reads the same one again.
    """

    step: int
    items: dict[str, Any]
    meta: dict[str, Any]
    path: epath.Path


def locate(run: str, *, base_output_directory: str, step: int = NEWEST) -> epath.Path:
    """Return the folder for a program's argument RUN, to be read by restore_from.

    The function reads only names of files.

    Args:
      run: name of a run in base_output_directory, its folder, or the folder of one checkpoint;
        folders may be in a bucket.
      base_output_directory: folder of runs.
      step: step of a checkpoint of the run, or NEWEST.

    Raises:
      CheckpointError: there is no such checkpoint.
    """
    named = absolute(base_output_directory) / run
    is_name = "/" not in run and run not in ("", ".", "..")
    folder = absolute(run, key="RUN")
    with replace_read_error(folder, "RUN"):
        if is_name and named.is_dir():
            folder = named
        elif not folder.is_dir():
            names = f" and {named}" if is_name else ""
            raise CheckpointError(
                f"RUN={run}: there is no {folder}{names}. Give the name of a run in "
                f"base_output_directory={base_output_directory}, or the path of its folder."
            )
        if step == NEWEST:
            return folder
        if (folder / seal.FILE).exists():
            raise CheckpointError(
                f"step={step} cannot be combined with RUN={run}, which is one checkpoint. Leave "
                "step out, or give the folder of the run."
            )
        saved = steps(folder / "checkpoints")
    if step not in saved:
        listed = f"checkpoints of the steps {', '.join(map(str, saved))}"
        raise CheckpointError(
            f"step={step}: RUN={run} has {listed if saved else 'no checkpoint'}. Give one of "
            "these, or leave step out."
        )
    return folder / "checkpoints" / str(step)


def newest_meta(
    folder: epath.Path, *, key: str, needs: Collection[str] = metadata.OF_MODEL
) -> dict[str, Any]:
    """Return the meta of the newest checkpoint whose meta is undamaged.

    The arrays are not examined, so it can be called before JAX's backends start.

    Args:
      folder: as `locate` returns it.
      key: the key or argument that gave the folder, for messages.
      needs: fields that the meta must have.

    Raises:
      CheckpointError: no checkpoint has an undamaged meta.
    """
    with replace_read_error(folder, key):
        paths = [folder]
        if not (folder / seal.FILE).exists():
            saved = folder / "checkpoints"
            paths = [saved / str(step) for step in reversed(steps(saved))]
        for path in paths:
            try:
                meta = metadata.read_note(path).meta
            except (FileNotFoundError, metadata.DamagedError):  # damaged: try the previous one
                continue
            metadata.require(meta, needs, path)
            return meta
    raise _no_checkpoint(folder, key)


def restore_from(
    path: epath.PathLike,
    abstract_of: AbstractOf,
    *,
    key: str,
    remedy: Remedy = lambda meta: "Set the model keys of the run that wrote it.",
    cast: bool = False,
    needs: Collection[str] = (),
) -> Restored:
    """Read the newest undamaged checkpoint of any run's folder, or one checkpoint in it.

    The function changes nothing at the path.

    Args:
      path: the folder of a run or of one checkpoint.
      abstract_of: the arrays to read.
      key: the config key or argument that gave the path, for messages.
      remedy: the remedy in the message if shapes differ.
      cast: whether dtypes may differ.
      needs: fields that the meta must have.

    Raises:
      CheckpointError: the folder has no undamaged checkpoint, a field is absent, or shapes or
        dtypes differ from abstract_of.
    """
    folder = absolute(path, key=key)
    with replace_read_error(folder, key):
        candidates: Iterable[epath.Path] = [folder]
        if not agree.from_first_process((folder / seal.FILE).exists()):
            candidates = newest_first(folder / "checkpoints")
        restored, _ = first_undamaged(
            candidates,
            abstract_of,
            say=primary_only(output.say),
            remedy=remedy,
            otherwise=f"or give {key} another path",
            cast=cast,
            needs=needs,
        )
    if restored is None:
        raise _no_checkpoint(path, key)
    return restored


def primary_only(say: Say) -> Say:
    """Return `say` in the first process, and a function that prints nothing in the others."""
    return say if jax.process_index() == 0 else lambda line: None


def _no_checkpoint(path: epath.PathLike, key: str) -> CheckpointError:
    """Return the error for a folder without a checkpoint."""
    return CheckpointError(
        f"{key}={path} has no checkpoint. Give the folder of a run that has saved one, or one of "
        "the folders in its checkpoints/."
    )


def replace_read_error(folder: epath.Path, key: str) -> contextlib.AbstractContextManager[None]:
    """Raise CheckpointError if access to a folder fails inside a `with`."""
    return replace_os_error(CheckpointError, f"{key}: {folder} cannot be read", CHECK_AND_RESTART)


def steps(folder: epath.PathLike) -> list[int]:
    """Return the steps that have a complete checkpoint in a folder, oldest first."""
    try:
        paths = [path for path in epath.Path(folder).iterdir() if _STEP.fullmatch(path.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(path.name) for path in paths if files.is_complete(path))


def newest_first(folder: epath.Path) -> Iterator[epath.Path]:
    """Yield the complete checkpoints of a folder, the same ones in every process."""
    left = steps(folder) if jax.process_index() == 0 else []
    while (step := agree.from_first_process(left.pop() if left else -1)) >= 0:
        yield folder / str(step)


def first_undamaged(
    candidates: Iterable[epath.Path],
    abstract_of: AbstractOf,
    *,
    say: Say,
    remedy: Remedy,
    otherwise: str = "or set another run_name to start from the beginning",
    cast: bool = False,
    needs: Collection[str] = (),
    known_good: Collection[epath.Path] = (),
) -> tuple[Restored | None, list[epath.Path]]:
    """Read the first undamaged candidate. The processes share the checks and agree on the result.

    Args:
      candidates: folders of checkpoints.
      abstract_of: the arrays to read.
      say: prints a line.
      remedy: the remedy in the message if shapes differ.
      otherwise: the remedy if all are damaged and no copy exists.
      cast: whether dtypes may differ.
      needs: fields that the meta must have.
      known_good: candidates that were examined before.

    Returns:
      The restored checkpoint, or None without a candidate; and the damaged candidates before it.

    Raises:
      CheckpointError: as restore_from; also for a checkpoint of a later format.
    """
    damaged: dict[epath.Path, str] = {}
    for path in candidates:
        note = None
        with contextlib.suppress(
            OSError, metadata.DamagedError
        ):  # the seal has more detail on damage
            note = metadata.read_note(path)  # first: a later format may have another seal
        problem = None if path in known_good else _damage(path)
        if problem is None:
            note, problem = _agreed_note(path, note)
        if problem is not None:
            say(f"warning: checkpoint {path} is damaged and is not used: {problem}.")
            damaged[path] = problem
            continue
        metadata.require(note.meta, needs, path)
        abstract = abstract_of(note.meta)
        _refuse_mismatch(path, note, abstract, remedy=remedy, cast=cast)
        items = {
            name: arrays.read_item(path, name, tree, absent=_not_saved(note, name, tree))
            for name, tree in abstract.items()
        }
        return Restored(note.step, items, note.meta, path), list(damaged)
    if damaged:
        folder = next(iter(damaged)).parent
        each = "; ".join(f"{path.name}: {problem}" for path, problem in damaged.items())
        raise CheckpointError(
            f"no undamaged checkpoint is left in {folder} ({each}). Check that the whole disk is "
            f"mounted, put a copy of a checkpoint there, {otherwise}."
        )
    return None, []


def _agreed_note(
    path: epath.Path, note: metadata.Note | None
) -> tuple[metadata.Note | None, str | None]:
    """Return the Note of a checkpoint whose files match their seal, or the damage of META.

    Args:
      path: path of the checkpoint.
      note: the Note that this process has read; None if it could not read it.

    Raises:
      DamagedError: only this process finds the checkpoint damaged; the first process decides.
    """
    error = None
    if note is None:
        try:
            note = metadata.read_note(path)
        except metadata.DamagedError as found:
            error = found
    if agree.from_first_process(error is not None):
        what = error.what if error else "see the output of process 0"
        return None, f"{files.META}: {what}"
    if error is not None:
        raise error
    return note, None


def _damage(path: epath.Path) -> str | None:
    """Return the damage of a checkpoint or None, agreed by all processes.

    Damage counts only if the first process also sees it: another host may see a file late, or see
    another folder.

    Raises:
      CheckpointError: processes still see different files after shared_folder.WAIT_S.
    """
    nothing = seal.SEAL - 1
    mine = seal.damage(path, range(jax.process_index(), sys.maxsize, jax.process_count()))
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(shared_folder.WAIT_S / _ATTEMPTS)
            mine = mine and seal.damage(path, [mine.index])
        indices = agree.from_all(nothing if mine is None else mine.index)
        bad = [process for process, index in enumerate(indices) if index != nothing]
        if not bad:
            return None
        confirmed = None
        if jax.process_index() == 0:
            confirmed = seal.damage(path, indices)
        if agree.from_first_process(confirmed is not None):
            return confirmed.what if confirmed else "see the output of process 0"
    here = f" Process {jax.process_index()} on {socket.gethostname()}: {mine.what}." if mine else ""
    raise CheckpointError(
        f"checkpoint {path} is complete for process 0, but not for process "
        f"{', '.join(map(str, bad))}.{here} Use a folder that all machines share, or a bucket, "
        "and start again."
    )


def _refuse_mismatch(
    path: epath.Path,
    note: metadata.Note,
    abstract: Mapping[str, Any],
    *,
    remedy: Remedy,
    cast: bool,
) -> None:
    """Raise CheckpointError for a leaf of another shape or dtype, except in DIAGNOSTICS."""
    for item, tree in abstract.items():
        if item == DIAGNOSTICS:
            continue
        wanted, saved = trees.shapes(tree), note.arrays.get(item, {})
        for name in [*wanted, *saved]:
            there, here = saved.get(name), wanted.get(name)
            if there == here or (cast and there and here and there[0] == here[0]):
                continue
            raise CheckpointError(
                f"{item}.{name} is {_array(there)} in checkpoint {path} but {_array(here)} in "
                f"this run. {remedy(note.meta)}"
            )


def _not_saved(note: metadata.Note, item: str, tree: Any) -> set[str]:
    """Return the leaves of DIAGNOSTICS that the checkpoint lacks, or has with another shape."""
    if item != DIAGNOSTICS:
        return set()
    saved = note.arrays.get(item, {})
    return {name for name, leaf in trees.shapes(tree).items() if saved.get(name) != leaf}


def _array(shape_and_dtype: list[Any] | None) -> str:
    if shape_and_dtype is None:
        return "absent"
    shape, dtype = shape_and_dtype
    return f"{dtype}{list(shape)}"
