"""What of a state goes into a checkpoint, and how a state comes back, also with another M.

    # R replicas
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiloco.algorithm import DiLoCo
from maxdiloco.algorithm_layout import State
from maxdiloco.checkpoint_read import PARAMETERS
from maxdiloco.data_parallel import DataParallel
from maxdiloco.data_parallel import State as DataParallelState
from maxdiloco.errors import CheckpointError
from maxdiloco.in_flight import OldLayout, apply_pending

Trainer = DiLoCo | DataParallel


def items_of(trainer: Trainer, state: Any) -> dict[str, Any]:
    """{item: tree of arrays} of a state; theta is an item of its own, to be read alone."""
    items = _arrays(trainer, state)
    return items | {PARAMETERS: trainer.outer_params(state)}


def _arrays(trainer: Trainer, state: Any) -> dict[str, Any]:
    if isinstance(trainer, DataParallel):
        return {PARAMETERS: state.params, "opt_state": state.opt_state}
    items = {
        "params": state.params,
        "opt_state": state.opt_state,
        "outer_opt": state.outer_opt,
        "flight": {"outgoing": state.outgoing, "incoming": state.incoming},
        "signs": {"bad": state.bad, "gram": state.gram},
    }
    # Eager updates keep one theta a replica; the mean of them is saved besides.
    name = "outer" if _is_eager(trainer) else PARAMETERS
    return items | {name: state.outer}


def _is_eager(trainer: DiLoCo) -> bool:
    return trainer.schedule.overlap == "eager"


class Origin(NamedTuple):
    """What the saved state was laid out for, and what its note says.

    num_replicas M; mesh: sizes of the axes; settled: State.settled; same_rules: whether the
    logical axis rules were those of this run.
    """

    num_replicas: int
    mesh: dict[str, int]
    settled: int
    same_rules: bool


def note_of(trainer: Trainer, state: Any) -> dict[str, Any]:
    """What the checkpoint's note has to say of a state besides its arrays."""
    settled = 0 if isinstance(trainer, DataParallel) else state.settled
    return {
        "num_replicas": trainer.num_replicas,
        "mesh": dict(trainer.mesh.shape),
        "settled": settled,
    }


def keeps_flight(trainer: DiLoCo, origin: Origin) -> bool:
    """Whether chunks in flight mean the same here as where they were saved."""
    same_layout = origin.mesh == dict(trainer.mesh.shape) and origin.same_rules
    return (same_layout or trainer.schedule.window == 0) and (
        origin.num_replicas == trainer.num_replicas
    )


def _pending(trainer: Trainer, origin: Origin, t: int) -> bool:
    """Whether exchanges of the old layout have to be applied before the first step."""
    if isinstance(trainer, DataParallel) or keeps_flight(trainer, origin):
        return False
    # The history of delayed and eager updates restarts as in round 1 instead.
    return trainer.schedule.overlap == "none" and any(
        send.send_step > origin.settled for send in trainer.schedule.pending(t)
    )


def refuse_in_flight(trainer: Trainer, origin: Origin, t: int) -> None:
    """Raise CheckpointError when fragments are in flight whose layout is not known any more."""
    if _pending(trainer, origin, t) and not origin.same_rules:
        raise CheckpointError(
            f"logical_axis_rules differ from those of the checkpoint of step {t}, which has "
            f"fragments in flight between {origin.num_replicas} replicas. Set them back, or change "
            f"them after a step at which nothing is in flight."
        )


def abstract_items(trainer: Trainer, origin: Origin, t: int) -> dict[str, Any]:
    """{item: tree of ShapeDtypeStructs} of a state that was saved with `origin` after step t.

    Arrays of another M are read with R spread over `diloco` only where it divides.
    """
    if isinstance(trainer, DataParallel):
        return _arrays(trainer, trainer.abstract_state)
    abstract = _arrays(trainer, trainer.layout.state)
    if keeps_flight(trainer, origin):
        return abstract
    del abstract["flight"], abstract["signs"]
    spread = origin.num_replicas % trainer.mesh.shape["diloco"] == 0

    def of_old(x):
        if x.sharding.spec[:1] != ("diloco",):
            return x
        spec = x.sharding.spec if spread else P(None, *x.sharding.spec[1:])
        sharding = NamedSharding(trainer.mesh, spec, memory_kind=x.sharding.memory_kind)
        return jax.ShapeDtypeStruct((origin.num_replicas, *x.shape[1:]), x.dtype, sharding=sharding)

    items = jax.tree.map(of_old, abstract)
    if _pending(trainer, origin, t):
        old = OldLayout(trainer, origin.num_replicas, origin.mesh)
        items["flight"] = old.abstract(trainer)
    return items


def state_of(trainer: Trainer, items: dict[str, Any], origin: Origin, *, t: int) -> Any:
    """The state of a trainer from the items read by `abstract_items`.

    With another M, replica r takes what was replica r mod the old M; theta and the outer
    optimizer state stay; exchanges in flight are applied; in eager and delayed mode the history
    restarts as in round 1. Raises NumericsError for a bad value in flight.
    """
    if isinstance(trainer, DataParallel):
        return DataParallelState(t, items[PARAMETERS], items["opt_state"])
    if keeps_flight(trainer, origin):
        return _state(trainer, items, origin, t)
    flight = items.pop("flight", None)
    state = _state(trainer, _dealt_anew(trainer, items, origin.num_replicas), origin, t)
    if flight is None:
        return state
    old = OldLayout(trainer, origin.num_replicas, origin.mesh)
    return apply_pending(trainer, state, old, flight)


def _state(trainer: DiLoCo, items: dict[str, Any], origin: Origin, t: int) -> State:
    return State(
        t=t,
        params=items["params"],
        opt_state=items["opt_state"],
        outer=items["outer" if _is_eager(trainer) else PARAMETERS],
        outer_opt=items["outer_opt"],
        outgoing=items["flight"]["outgoing"],
        incoming=items["flight"]["incoming"],
        bad=items["signs"]["bad"],
        gram=items["signs"]["gram"],
        settled=origin.settled,
    )


def _dealt_anew(trainer: DiLoCo, items: dict[str, Any], num_replicas: int) -> dict[str, Any]:
    like = trainer.layout.state
    target = {name: tree for name, tree in _arrays(trainer, like).items() if name in items}
    source = np.arange(trainer.num_replicas) % num_replicas

    def deal(old):
        return jax.tree.map(
            lambda x, new: x[source] if new.sharding.spec[:1] == ("diloco",) else x, old, target
        )

    lies = jax.tree.map(lambda x: x.sharding, target)
    nothing_sent = {
        "flight": {"outgoing": like.outgoing, "incoming": like.incoming},
        "signs": {"bad": like.bad, "gram": like.gram},
    }
    fresh = jax.jit(
        lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), nothing_sent),
        out_shardings=jax.tree.map(lambda x: x.sharding, nothing_sent),
    )()
    return jax.jit(deal, out_shardings=lies)(items) | fresh
