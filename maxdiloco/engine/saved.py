"""A DiLoCo state as items of a checkpoint, and back, also with another M, mesh or exchange.

    # R replicas
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiloco.diloco import slices
from maxdiloco.engine.plans import FragmentPlan
from maxdiloco.engine.state import Layout, State, fragment_structs, lay_out
from maxdiloco.engine.trainer import (
    DIAGNOSTICS,
    OUTER_OF_EACH,
    OUTER_PARAMS,
    ExchangeSettings,
    SavedLayout,
)
from maxdiloco.parallel import offload
from maxdiloco.parallel.replicas import broadcast, reduce_mean
from maxdiloco.parallel.sharding import of_parameters, shardings_of, zeros

_OF_NO_PARAMETER = -1
IN_FLIGHT = ("flight", DIAGNOSTICS)
RESIDUAL = "residual"


def items_of(state: State, layout: Layout) -> dict[str, Any]:
    """{item: tree of leaves}; a state of arrays or of ShapeDtypeStructs."""
    names = ("bad", "sizes", "update_ratio")
    diagnostics, residual = {name: vars(state)[name] for name in names}, {}
    if jax.tree.leaves(state.residual):
        residual = {RESIDUAL: state.residual}
        diagnostics["residual_norm"] = state.residual_norm_R
    flight = {"outgoing": state.outgoing, "incoming": state.incoming}
    if state.parts:
        flight |= {"parts": state.parts, "arrived": state.arrived}
    return residual | {
        "params": state.params,
        "opt_state": state.opt_state,
        "outer_opt": state.outer_opt,
        "flight": flight,
        DIAGNOSTICS: diagnostics,
        theta_item(layout): state.outer,
    }


def theta_item(layout: Layout) -> str:
    """The item that has theta. Eager updates keep one a replica, and who reads takes the mean."""
    return OUTER_OF_EACH if layout.per_replica_outer else OUTER_PARAMS


class Reader:
    """A run that reads a checkpoint: its own layout and settings, and those of the saved state.

    theta: as ShapeDtypeStructs, one copy, on the device. before: the settings of the run that wrote
    it; was_eager: whether each of its replicas had a theta. same_schedule: whether fragments and
    schedule are those of this run. keeps_residual, keeps_flight: whether the residuals are of this
    run's wire, and the chunks in flight laid out and used as in this run. replica_items: those of
    `items` whose leaves begin with R of this run, but for IN_FLIGHT.
    """

    def __init__(
        self,
        layout: Layout,
        settings: ExchangeSettings,
        optimizer: optax.GradientTransformation,
        layer_axis: Any,
        theta: Any,
        saved: SavedLayout,
    ):
        self.layout, self.settings, self.saved = layout, settings, saved
        self._optimizer, self._layer_axis, self._theta = optimizer, layer_axis, theta
        self.before = before = ExchangeSettings.from_dict(saved.exchange)
        self.was_eager = before.outer_overlap == "eager"
        self._theta_item = OUTER_OF_EACH if self.was_eager else OUTER_PARAMS
        of_wire = dict(exchange_dtype="", error_feedback=False, exchange="")
        self.same_schedule = before._replace(**of_wire) == settings._replace(**of_wire)
        same_wire = before.exchange_dtype == settings.exchange_dtype
        self.keeps_residual = same_wire and before.error_feedback and settings.error_feedback
        of_replicas = (saved.num_replicas, before.error_feedback)
        same_replicas = of_replicas == (layout.num_replicas, settings.error_feedback)
        same_mesh = saved.mesh == dict(layout.mesh.shape) and saved.same_rules
        same_chunks = before == settings and tuple(saved.chunk_pieces) == layout.all_pieces
        nothing_in_flight = self.same_schedule and settings.schedule.max_chunks == 0
        self.keeps_flight = same_replicas and (nothing_in_flight or (same_mesh and same_chunks))
        same_partition = before.partition == settings.partition
        self._same_outer = same_partition and self.was_eager == layout.per_replica_outer
        residual = (RESIDUAL,) * self.keeps_residual
        of_outer = (OUTER_OF_EACH, "outer_opt") * (self.was_eager and layout.per_replica_outer)
        self.replica_items = ("params", "opt_state", *residual, *of_outer)
        kept = {RESIDUAL: self.keeps_residual} | dict.fromkeys(IN_FLIGHT, self.keeps_flight)
        mine = items_of(layout.state, layout)
        self._unread = {name: mine[name] for name in kept if name in mine and not kept[name]}

    def items(self) -> dict[str, Any]:
        """The items to read, as ShapeDtypeStructs, without those that begin at zero."""
        items, eager = items_of(self.layout.state, self.layout), self.layout.per_replica_outer
        items = {name: tree for name, tree in items.items() if name not in self._unread}
        becomes_one = self.was_eager and not eager
        if self.was_eager != eager:
            del items[theta_item(self.layout)]
            whole = self._saved_replicas(self._old.state.outer) if becomes_one else self._theta
            items[self._theta_item] = whole
        if not self._same_outer:
            states = self._old.state.outer_opt
            items["outer_opt"] = self._saved_replicas(states) if becomes_one else states
        return items

    def state_of(self, items: dict[str, Any], *, t: int) -> State:
        """The state after inner step t from those of `items`.

        Nothing is applied for what was in flight and is dropped, and in eager and delayed mode the
        history restarts as in round 1. Residuals of another wire begin at zero; else each value
        keeps its own, also where what was sent with it is dropped.
        """
        # What is not read is as it is before any send.
        like = shardings_of(self._unread)
        items = items | jax.jit(lambda: jax.tree.map(zeros, self._unread), out_shardings=like)()
        outer, outer_opt = self._outer(items)
        diagnostics = dict(items[DIAGNOSTICS])
        residual_norm_R = diagnostics.pop("residual_norm", ())
        return State(
            t=t,
            params=items["params"],
            opt_state=items["opt_state"],
            outer=outer,
            outer_opt=outer_opt,
            **items["flight"],
            **diagnostics,
            bad_before=diagnostics["bad"],
            residual=items[RESIDUAL] if self.settings.error_feedback else (),
            residual_norm_R=residual_norm_R,
            dropped_until=self.saved.dropped_until if self.keeps_flight else t,
            schedule_since=self.saved.schedule_since if self.same_schedule else t,
        )

    @functools.cached_property
    def _old(self) -> Layout:
        """The saved state's layout on the mesh of this run, with the M of this run."""
        return lay_out(
            self._theta,
            (),
            self.before,
            layer_axis=self._layer_axis,
            num_replicas=self.layout.num_replicas,
            mesh=self.layout.mesh,
            optimizer=self._optimizer,
            outer_memory=offload.kind_of(jax.tree.leaves(self.layout.state.outer)[0]),
        )

    def _saved_replicas(self, tree: Any) -> Any:
        """Arrays [R, ...] with the R of the saved run: a mean is over all of them."""
        M, mesh = self.saved.num_replicas, self.layout.mesh
        front = "diloco" if M % mesh.shape["diloco"] == 0 else None

        def struct(x):
            spec, kind = P(front, *x.sharding.spec[1:]), x.sharding.memory_kind
            sharding = NamedSharding(mesh, spec, memory_kind=kind)
            return jax.ShapeDtypeStruct((M, *x.shape[1:]), x.dtype, sharding=sharding)

        return jax.tree.map(struct, tree)

    def _outer(self, items: dict[str, Any]) -> tuple[Any, Any]:
        """theta and the state of the outer optimizer of this run."""
        layout, eager = self.layout, self.layout.per_replica_outer

        def of_each(states):
            return jax.tree.map(lambda x: broadcast(x, layout.num_replicas), states)

        def converted(states):
            if self.was_eager and not eager:
                states = mean_of_replicas(states)
            plans, lead = (self._old.plans, layout.plans), int(self.was_eager and eager)
            states = resliced(states, *plans, self._theta, self._optimizer, lead=lead)
            return of_each(states) if eager and not self.was_eager else states

        theta = items[self._theta_item]
        if self.was_eager != eager:
            change = mean_of_replicas if self.was_eager else of_each
            theta = _program(change, layout.state.outer)(theta)
        if self._same_outer:
            return theta, items["outer_opt"]
        return theta, _program(converted, layout.state.outer_opt)(items["outer_opt"])


def _program(fn, like: Any):
    """fn of arrays that may be in host memory, to arrays like `like`."""

    def on_device(tree):
        return fn(jax.device_put(tree, jax.memory.Space.Device))

    return jax.jit(on_device, out_shardings=shardings_of(like))


# -- the outer optimizer's state, from the fragments of one run to those of another --------------


def resliced(
    states: tuple[Any, ...],
    old: Sequence[FragmentPlan],
    new: Sequence[FragmentPlan],
    theta: Any,
    optimizer: optax.GradientTransformation,
    *,
    lead: int,
) -> tuple[Any, ...]:
    """One state for each new fragment from those of the old ones; call it under jit.

    It is per value: what belongs to a parameter moves with it. What belongs to none, such as Adam's
    count, is that of the old fragment that held the first value of the new one. theta: one
    replica's, arrays or ShapeDtypeStructs. lead: dims (R) before those of a value. Raises
    ValueError where what belongs to no parameter is not of one shape.
    """
    leaves = jax.tree.leaves(theta)
    whole: dict[tuple[int, int], jax.Array] = {}
    others = []  # of each old fragment: leaves that belong to no parameter
    for plan, state in zip(old, states, strict=True):
        _, owners = _owners(optimizer, plan, leaves)
        pairs = list(zip(owners, jax.tree.leaves(state), strict=True))
        others.append([x for owner, x in pairs if owner is None])
        for (copy, place), x in (pair for pair in pairs if pair[0] is not None):
            s, key = plan.slices[place], (copy, plan.slices[place].leaf)
            if key not in whole:
                whole[key] = jnp.zeros((*x.shape[:lead], *leaves[s.leaf].shape), x.dtype)
            whole[key] = slices.put(whole[key], s, plan.starts[place], x, lead=lead)
    out = []
    for plan in new:
        abstract, owners = _owners(optimizer, plan, leaves)
        given = iter(others[_home(plan, old)])
        found = []
        for owner, like in zip(owners, jax.tree.leaves(abstract), strict=True):
            if owner is None:
                found.append(x := next(given))
                if x.shape[lead:] != like.shape:
                    raise ValueError(
                        f"the outer optimizer keeps an array of {like.shape} that is not shaped "
                        "like the parameters, so its fragments cannot change. Keep num_fragments "
                        "as it was."
                    )
                continue
            copy, place = owner
            s = plan.slices[place]
            found.append(slices.take(whole[copy, s.leaf], s, plan.starts[place], lead=lead))
        out.append(jax.tree.unflatten(jax.tree.structure(abstract), found))
    return tuple(out)


def mean_of_replicas(states: Any) -> Any:
    """[R, ...] -> [...]: counts are alike in all replicas."""
    return jax.tree.map(
        lambda x: reduce_mean(x) if jnp.issubdtype(x.dtype, jnp.floating) else x[0], states
    )


def _owners(optimizer, plan, leaves) -> tuple[Any, list[tuple[int, int] | None]]:
    """The abstract state of a fragment, and whom each leaf of it belongs to; None: no parameter.

    (copy, place): the copy-th value (momentum; Adam's two) of the fragment's place-th slice.
    """
    fragment = fragment_structs(plan, leaves)
    abstract = jax.eval_shape(optimizer.init, fragment)

    def place_of(leaf, place):
        return place if leaf.shape == fragment[place].shape else _OF_NO_PARAMETER

    places = of_parameters(
        optimizer, place_of, abstract, list(range(len(fragment))), other=_OF_NO_PARAMETER
    )
    owners: list[tuple[int, int] | None] = []
    for place in jax.tree.leaves(places):
        copies = sum(owner is not None and owner[1] == place for owner in owners)
        owners.append(None if place == _OF_NO_PARAMETER else (copies, place))
    return abstract, owners


def _home(plan: FragmentPlan, old: Sequence[FragmentPlan]) -> int:
    """The old fragment that held the first value of a new one."""
    leaf, entry = plan.slices[0].leaf, plan.slices[0].entries[0]
    return next(
        p
        for p, before in enumerate(old)
        if any(s.leaf == leaf and entry in s.entries for s in before.slices)
    )
