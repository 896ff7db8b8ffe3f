"""A DiLoCo state as items of a checkpoint, and back, also with another M or mesh.

    # R replicas
"""

from typing import Any

import jax

from maxdiloco.diloco.schedule import Event, Schedule
from maxdiloco.engine.state import Layout, State
from maxdiloco.engine.trainer import OUTER_PARAMS, SavedLayout
from maxdiloco.parallel.sharding import zeros

IN_FLIGHT = ("flight", "diagnostics")


def items_of(state: State, layout: Layout) -> dict[str, Any]:
    """{item: tree of leaves}; a state of arrays or of ShapeDtypeStructs."""
    return {
        "params": state.params,
        "opt_state": state.opt_state,
        "outer_opt": state.outer_opt,
        "flight": {"outgoing": state.outgoing, "incoming": state.incoming},
        "diagnostics": {"bad": state.bad, "sizes": state.sizes},
        _outer_item(layout): state.outer,
    }


def _outer_item(layout: Layout) -> str:
    # Eager updates keep one theta a replica; its mean is saved as OUTER_PARAMS besides.
    return "outer" if layout.per_replica_outer else OUTER_PARAMS


def replica_items(layout: Layout) -> tuple[str, ...]:
    """Items whose leaves begin with R, but for IN_FLIGHT."""
    return ("params", "opt_state") + ("outer", "outer_opt") * layout.per_replica_outer


def keeps_flight(layout: Layout, schedule: Schedule, saved: SavedLayout) -> bool:
    """Whether the saved chunks in flight are laid out as this run lays them out."""
    same_mesh = saved.mesh == dict(layout.mesh.shape) and saved.same_rules
    return (same_mesh or schedule.max_chunks == 0) and saved.num_replicas == layout.num_replicas


def dropped(layout: Layout, schedule: Schedule, saved: SavedLayout, t: int) -> tuple[Event, ...]:
    """The exchanges in flight after step t that `state_of` drops, oldest first."""
    if keeps_flight(layout, schedule, saved):
        return ()
    return tuple(send for send in schedule.pending(t) if send.send_step > saved.dropped_until)


def abstract_items(layout: Layout, schedule: Schedule, saved: SavedLayout) -> dict[str, Any]:
    """The items to read, as ShapeDtypeStructs; IN_FLIGHT is left out where it is dropped."""
    items = items_of(layout.state, layout)
    if keeps_flight(layout, schedule, saved):
        return items
    return {name: tree for name, tree in items.items() if name not in IN_FLIGHT}


def state_of(
    items: dict[str, Any], layout: Layout, schedule: Schedule, saved: SavedLayout, *, t: int
) -> State:
    """The state after inner step t from the items of `abstract_items`.

    With another M or mesh what was in flight is dropped: nothing is applied for it, and in eager
    and delayed mode the history restarts as in round 1.
    """
    dropped_until = saved.dropped_until
    if not keeps_flight(layout, schedule, saved):
        items, dropped_until = items | _nothing_sent(layout), t
    return State(
        t=t,
        params=items["params"],
        opt_state=items["opt_state"],
        outer=items[_outer_item(layout)],
        outer_opt=items["outer_opt"],
        outgoing=items["flight"]["outgoing"],
        incoming=items["flight"]["incoming"],
        bad=items["diagnostics"]["bad"],
        bad_before=items["diagnostics"]["bad"],
        sizes=items["diagnostics"]["sizes"],
        dropped_until=dropped_until,
    )


def _nothing_sent(layout: Layout) -> dict[str, Any]:
    """IN_FLIGHT as it is before any send."""
    items = items_of(layout.state, layout)
    abstract = {name: items[name] for name in IN_FLIGHT}
    return jax.jit(
        lambda: jax.tree.map(zeros, abstract),
        out_shardings=jax.tree.map(lambda x: x.sharding, abstract),
    )()
