"""Room on the disk for checkpoints: what is in the way of the next one, what all of them take."""

from collections.abc import Collection

from etils import epath

from maxdiloco.checkpoint import read, seal
from maxdiloco.storage.run_folder import free_bytes, megabytes


def is_short(folder: epath.Path, nbytes: int) -> bool:
    """Whether nbytes do not fit on the disk of a folder."""
    free = free_bytes(folder)
    return free is not None and free < nbytes


def in_the_way(
    folder: epath.Path, nbytes: int, *, own: Collection[int], kept: int | None
) -> list[int]:
    """The oldest checkpoints without which one of nbytes fits; none where it fits, or never would.

    folder: of the checkpoints. own: the steps that may go. kept: the step of the newest that is
    known to be whole: it and later ones stay; None: the newest stays.
    """
    if not is_short(folder, nbytes):
        return []
    free, steps = free_bytes(folder), [step for step in read.steps(folder) if step in own]
    removed: list[int] = []
    for step in steps[:-1] if kept is None else [step for step in steps if step < kept]:
        removed.append(step)
        free += seal.nbytes(folder / str(step))
        if free >= nbytes:
            return removed
    return []


def shortage(folder: epath.Path, nbytes: int, *, count: int, own: Collection[int]) -> list[str]:
    """The line that tells that the disk is too small for `count` checkpoints of nbytes, if it is.

    folder: of the checkpoints. own: the steps that may go; those that are there make room in time.
    """
    free = free_bytes(folder)
    if free is None or free >= count * nbytes:
        return []
    free += sum(seal.nbytes(folder / str(step)) for step in read.steps(folder) if step in own)
    if free >= count * nbytes:
        return []
    return [
        f"warning: max_num_checkpoints_to_keep={count} checkpoints take up to "
        f"{megabytes(count * nbytes)}, and {folder} has {megabytes(free)} for them: older ones are "
        f"removed where a new one does not fit."
    ]
