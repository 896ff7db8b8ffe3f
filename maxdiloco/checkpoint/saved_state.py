"""Save the state of a trainer, and restore it, also with another number of replicas.

# R replicas
"""

import functools
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax

from maxdiloco.checkpoint import metadata, read
from maxdiloco.checkpoint.arrays import Cycled
from maxdiloco.checkpoint.checkpointer import Checkpointer
from maxdiloco.cluster import agree
from maxdiloco.engine.trainer import SavedLayout, Trainer
from maxdiloco.errors import NumericsError


def save_state(checkpointer: Checkpointer, trainer: Trainer, state: Any) -> None:
    """Write a state concurrently with the training. All processes make the same call.

    Args:
      checkpointer: the checkpointer of the folder.
      trainer: the trainer of the state, such as DiLoCo.
      state: the state; it may be passed to `step` as soon as the call returns.

    Raises:
      NumericsError: the state is not finite.
      SaveError, CheckpointError: as Checkpointer.save.
    """
    require_finite(trainer, state)
    items, metadata = trainer.checkpoint(state)
    checkpointer.save(state.t, items, metadata | {"specs": _specs(trainer)})


def restore_state(checkpointer: Checkpointer, trainer: Trainer) -> Any | None:
    """Return the newest undamaged state that `save_state` wrote, or None if there is none.

    The saved state may have other replicas, mesh, schedule, fragments, wire format, alpha,
    aggregation, outer learning rate and momentum. The checkpointer prints the differences.

    Args:
      checkpointer: the checkpointer of the folder.
      trainer: bound to the parameters (DiLoCo.bind).

    Raises:
      CheckpointError: parameters or optimizers differ, or nothing can be read.
    """

    def layout(note):
        return read_layout(note, same_rules=note["specs"] == _specs(trainer))

    restore = functools.partial(checkpointer.restore, needs=(*metadata.OF_STATE, "specs"))
    found, state = read_state(restore, trainer, layout)
    if found is None:
        return None
    _, own = trainer.checkpoint(trainer.abstract_state)
    before, now = found.meta["exchange"], own["exchange"]
    changed = [
        f"{name} {before[name]} -> {now[name]}"
        for name in sorted(before.keys() & now.keys())
        if before[name] != now[name]
    ]
    if changed:
        checkpointer.say(f"changed since the checkpoint: {', '.join(changed)}")
    for line in trainer.restore_plan(layout(found.meta)).lines(state.t):
        checkpointer.say(line)
    return state


def read_layout(note: Mapping[str, Any], *, same_rules: bool) -> SavedLayout:
    """Return the layout of the state in a checkpoint from its meta; see SavedLayout."""
    given = {name: note[name] for name in SavedLayout._fields if name in note}
    return SavedLayout(**given, same_rules=same_rules)


def read_state(
    restore: Callable[[read.AbstractOf], read.Restored | None],
    trainer: Trainer,
    layout: Callable[[Mapping[str, Any]], SavedLayout],
) -> tuple[read.Restored | None, Any]:
    """Read the state of a checkpoint for a trainer, which may have another layout.

    Args:
      restore: Checkpointer.restore, or read.restore_from of one path.
      trainer: bound to the parameters.
      layout: maps the meta of the checkpoint to the layout of its state.

    Returns:
      The checkpoint and the state; None and None without a checkpoint.

    Raises:
      CheckpointError: as `restore`.
    """
    found = restore(lambda note: abstract_items(trainer, layout(note)))
    if found is None:
        return None, None
    plan = trainer.restore_plan(layout(found.meta))
    return found, plan.state_of(found.items, t=found.step)


def require_finite(trainer: Trainer, state: Any) -> None:
    """Raise NumericsError in all processes, which all call it, if one has a NaN or infinity."""
    found = None
    try:
        trainer.check_finite(state)
    except NumericsError as error:
        found = error
    if agree.in_any_process(found is not None):
        raise found or NumericsError(
            f"step {state.t}: a replica of another process is not finite, see its output."
        )


def _specs(trainer: Trainer) -> int:
    """Return a checksum of the parameters' shardings, on which receive buffers depend."""
    leaves = jax.tree.leaves(trainer.exported.like)
    return zlib.crc32(" ".join(str(x.sharding.spec) for x in leaves).encode())


def nbytes(trainer: Trainer) -> int:
    """Return the bytes of the arrays of a checkpoint, uncompressed."""
    items, _ = trainer.checkpoint(trainer.abstract_state)
    leaves = jax.tree.leaves(items)
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)


def abstract_items(trainer: Trainer, saved: SavedLayout) -> dict[str, Any]:
    """Return the items to read, as trees of ShapeDtypeStruct or Cycled.

    With another number of replicas, replica r gets the values of saved replica r mod the saved M.
    """
    plan = trainer.restore_plan(saved)
    if saved.num_replicas == trainer.num_replicas:
        return plan.items
    return plan.items | {
        name: jax.tree.map(lambda x: Cycled(x, stored=saved.num_replicas), plan.items[name])
        for name in plan.replica_items
    }
