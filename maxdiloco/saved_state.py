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
from maxdiloco.diloco.schedule import Event

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


class Origin(NamedTuple):
    """How the saved state was laid out, from the note of its checkpoint.

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


def keeps_flight(trainer: DiLoCo, origin: Origin) -> bool:
    """Whether the chunks in flight are laid out as this trainer lays them out."""
    same_mesh = origin.mesh == dict(trainer.mesh.shape) and origin.same_rules
    return (same_mesh or trainer.schedule.window == 0) and (
        origin.num_replicas == trainer.num_replicas
    )


def dropped(trainer: Trainer, origin: Origin, t: int) -> tuple[Event, ...]:
    """The exchanges in flight after step t that `state_of` drops, oldest first."""
    if isinstance(trainer, DataParallel) or keeps_flight(trainer, origin):
        return ()
    return tuple(s for s in trainer.schedule.pending(t) if s.send_step > origin.dropped_until)


def abstract_items(trainer: Trainer, origin: Origin) -> dict[str, Any]:
    """{item: tree of ShapeDtypeStructs} of a state that was saved with `origin`.

    Arrays of another M are read with R spread over `diloco` only where it divides.
    """
    if isinstance(trainer, DataParallel):
        return _arrays(trainer, trainer.abstract_state)
    abstract = _arrays(trainer, trainer.layout.state)
    if keeps_flight(trainer, origin):
        return abstract
    del abstract["flight"], abstract["diagnostics"]
    spread = origin.num_replicas % trainer.mesh.shape["diloco"] == 0

    def of_old(x):
        if x.sharding.spec[:1] != ("diloco",):
            return x
        spec = x.sharding.spec if spread else P(None, *x.sharding.spec[1:])
        sharding = NamedSharding(trainer.mesh, spec, memory_kind=x.sharding.memory_kind)
        return jax.ShapeDtypeStruct((origin.num_replicas, *x.shape[1:]), x.dtype, sharding=sharding)

    return jax.tree.map(of_old, abstract)


def state_of(trainer: Trainer, items: dict[str, Any], origin: Origin, *, t: int) -> Any:
    """The state of a trainer from the items read by `abstract_items`.

    With another M, replica r takes what was replica r mod the old M; theta and the outer
    optimizer state stay. With another M or layout, what was in flight is dropped: nothing is
    applied for it, and in eager and delayed mode the history restarts as in round 1.
    """
    if isinstance(trainer, DataParallel):
        return DataParallelState(t, items[PARAMETERS], items["opt_state"])
    if keeps_flight(trainer, origin):
        return _state(trainer, items, t, origin.dropped_until)
    items = _dealt_anew(trainer, items, origin.num_replicas)
    return _state(trainer, items, t, dropped_until=t)


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
        "diagnostics": {"bad": like.bad, "sizes": like.sizes},
    }
    fresh = jax.jit(
        lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), nothing_sent),
        out_shardings=jax.tree.map(lambda x: x.sharding, nothing_sent),
    )()
    return jax.jit(deal, out_shardings=lies)(items) | fresh
