"""From what a user writes to the folder of a run or of one of its checkpoints."""

from typing import Any

from etils import epath

from maxdiloco.checkpoint import orbax_io, read, seal
from maxdiloco.errors import CheckpointError
from maxdiloco.storage.run_folder import absolute, is_local

NEWEST = -1  # as a step: the newest undamaged checkpoint


def locate(run: str, *, base_output_directory: str, step: int = NEWEST, key: str) -> epath.Path:
    """The folder that read.restore_from takes.

    run: name of a run in base_output_directory, its folder, or the folder of one checkpoint, also
    in a bucket. step: of the run, or NEWEST. key: what gave run, for messages.
    Reads names only and needs no devices. Raises CheckpointError when there is no such checkpoint.
    """
    named = absolute(base_output_directory) / run
    is_name = "/" not in run and run not in ("", ".", "..")
    folder = absolute(run, key=key)
    with read.reading(folder, key):
        if is_name and _exists(named):
            folder = named
        elif not _exists(folder):
            names = f" and {named}" if is_name else ""
            raise CheckpointError(
                f"{key}={run}: there is no {folder}{names}. Give the name of a run in "
                f"base_output_directory={base_output_directory}, or the path of its folder."
            )
        if step == NEWEST:
            return folder
        if (folder / seal.FILE).exists():
            raise CheckpointError(
                f"step={step}, but {key}={run} is one checkpoint already. Leave step out, or give "
                "the folder of the run."
            )
        saved = read.steps(folder / "checkpoints")
    if step not in saved:
        listed = f"checkpoints of the steps {', '.join(map(str, saved))}"
        raise CheckpointError(
            f"step={step}: {key}={run} has {listed if saved else 'no checkpoint'}. Give one of "
            "these, or leave step out."
        )
    return folder / "checkpoints" / str(step)


def _exists(folder: epath.Path) -> bool:
    if is_local(folder):
        return folder.is_dir()
    return (folder / seal.FILE).exists() or bool(read.steps(folder / "checkpoints"))


def newest_meta(folder: epath.Path, *, key: str) -> dict[str, Any]:
    """The meta of the newest checkpoint that has a readable one, undamaged or not.

    For what has to be known before JAX's backends start. folder: of `locate`.
    Raises CheckpointError when there is none.
    """
    with read.reading(folder, key):
        paths = [folder]
        if not (folder / seal.FILE).exists():
            saved = folder / "checkpoints"
            paths = [saved / str(step) for step in reversed(read.steps(saved))]
        for path in paths:
            try:
                return orbax_io.read_note(path).meta
            except (FileNotFoundError, orbax_io.DamagedError):  # damaged: the one before it
                continue
    raise read.no_checkpoint(folder, key)
