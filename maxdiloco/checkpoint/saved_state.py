"""What of a state goes into a checkpoint, and how a state comes back, also with another M.

    # R replicas
"""

from typing import Any, NamedTuple

import jax

from maxdiloco.checkpoint.arrays import Cycled
from maxdiloco.checkpoint.read import PARAMETERS
from maxdiloco.diloco.schedule import Event
from maxdiloco.engine.data_parallel import DataParallel
from maxdiloco.engine.data_parallel import State as DataParallelState
from maxdiloco.engine.diloco import DiLoCo
from maxdiloco.engine.state import State
from maxdiloco.parallel.sharding import zeros

Trainer = DiLoCo | DataParallel


def items_of(trainer: Trainer, state: Any) -> dict[str, Any]:
    """{item: tree of arrays} of a state; theta is an item of its own, to be read alone."""
    items = _arrays(trainer, state)
    # Elsewhere theta is an item as it lies, also in host memory.
    return items if PARAMETERS in items else items | {PARAMETERS: trainer.outer_params(state)}


def _arrays(trainer: Trainer, state: Any) -> dict[str, Any]:
    if isinstance(trainer, DataParallel):
        return {PARAMETERS: state.params, "opt_state": state.opt_state}
    items = {
        "params": state.params,
        "opt_state": state.opt_state,
        "outer_opt": state.outer_opt,
        "flight": {"outgoing": state.outgoing, "incoming": state.incoming},
        "diagnostics": {"bad": state.bad, "sizes": state.sizes},
    }
    # Eager updates keep one theta a replica; the mean of them is saved besides.
    name = "outer" if _is_eager(trainer) else PARAMETERS
    return items | {name: state.outer}


def _is_eager(trainer: DiLoCo) -> bool:
    return trainer.schedule.overlap == "eager"


class SavedLayout(NamedTuple):
    """How a state in a checkpoint was laid out, from the note of the checkpoint.

    num_replicas M; mesh: sizes of the axes; same_rules: whether the logical axis rules were those
    of this run; dropped_until: State.dropped_until.
    """

    num_replicas: int
    mesh: dict[str, int]
    same_rules: bool
    dropped_until: int


def note_of(trainer: Trainer, state: Any) -> dict[str, Any]:
    """What the checkpoint's note has to say of a state besides its arrays."""
    dropped_until = 0 if isinstance(trainer, DataParallel) else state.dropped_until
    return {
        "num_replicas": trainer.num_replicas,
        "mesh": dict(trainer.mesh.shape),
        "dropped_until": dropped_until,
    }


def keeps_flight(trainer: DiLoCo, saved: SavedLayout) -> bool:
    """Whether the chunks in flight are laid out as this trainer lays them out."""
    same_mesh = saved.mesh == dict(trainer.mesh.shape) and saved.same_rules
    return (same_mesh or trainer.schedule.max_chunks == 0) and (
        saved.num_replicas == trainer.num_replicas
    )


def dropped(trainer: Trainer, saved: SavedLayout, t: int) -> tuple[Event, ...]:
    """The exchanges in flight after step t that `state_of` drops, oldest first."""
    if isinstance(trainer, DataParallel) or keeps_flight(trainer, saved):
        return ()
    return tuple(s for s in trainer.schedule.pending(t) if s.send_step > saved.dropped_until)


def abstract_items(trainer: Trainer, saved: SavedLayout) -> dict[str, Any]:
    """{item: tree of ShapeDtypeStruct or Cycled} of a state that was saved in the layout `saved`.

    With another M, replica r takes what was replica r mod the old M.
    """
    if isinstance(trainer, DataParallel):
        return _arrays(trainer, trainer.abstract_state)
    items = _arrays(trainer, trainer.layout.state)
    if not keeps_flight(trainer, saved):
        del items["flight"], items["diagnostics"]
    if saved.num_replicas == trainer.num_replicas:
        return items
    of_replicas = ["params", "opt_state"] + ["outer", "outer_opt"] * _is_eager(trainer)
    for name in of_replicas:
        items[name] = jax.tree.map(lambda x: Cycled(x, stored=saved.num_replicas), items[name])
    return items


def state_of(trainer: Trainer, items: dict[str, Any], saved: SavedLayout, *, t: int) -> Any:
    """The state of a trainer from the items read by `abstract_items`.

    With another M or layout, what was in flight is dropped: nothing is applied for it, and in
    eager and delayed mode the history restarts as in round 1.
    """
    if isinstance(trainer, DataParallel):
        return DataParallelState(t, items[PARAMETERS], items["opt_state"])
    if keeps_flight(trainer, saved):
        return _state(trainer, items, t, saved.dropped_until)
    return _state(trainer, items | _nothing_sent(trainer), t, dropped_until=t)


def _state(trainer: DiLoCo, items: dict[str, Any], t: int, dropped_until: int) -> State:
    return State(
        t=t,
        params=items["params"],
        opt_state=items["opt_state"],
        outer=items["outer" if _is_eager(trainer) else PARAMETERS],
        outer_opt=items["outer_opt"],
        outgoing=items["flight"]["outgoing"],
        incoming=items["flight"]["incoming"],
        bad=items["diagnostics"]["bad"],
        bad_before=items["diagnostics"]["bad"],
        sizes=items["diagnostics"]["sizes"],
        dropped_until=dropped_until,
    )


def _nothing_sent(trainer: DiLoCo) -> dict[str, Any]:
    """The items `flight` and `diagnostics` of a state before any send."""
    items = _arrays(trainer, trainer.layout.state)
    abstract = {name: items[name] for name in ("flight", "diagnostics")}
    return jax.jit(
        lambda: jax.tree.map(zeros, abstract),
        out_shardings=jax.tree.map(lambda x: x.sharding, abstract),
    )()
