"""A DiLoCo state as items of a checkpoint, and back, also with another M, mesh or exchange.

# R replicas
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiloco.diloco import slices
from maxdiloco.engine.layout import ChunkBuffer, Layout, State
from maxdiloco.engine.settings import ExchangeSettings
from maxdiloco.engine.trainer import DIAGNOSTICS, OUTER_OF_EACH, OUTER_PARAMS, SavedLayout
from maxdiloco.parallel.replicas import broadcast, reduce_mean
from maxdiloco.parallel.sharding import shardings_of, zeros

FLIGHT, RESIDUAL, OUTER_OPT = "flight", "residual", "outer_opt"
_BUFFERS = ("outgoing", "incoming", "scatter_outgoing", "scatter_incoming")


def saved_items(state: State, layout: Layout) -> dict[str, Any]:
    """Return {item: tree of leaves} of a state of arrays or of ShapeDtypeStructs."""
    diagnostics = {
        "bad": state.bad,
        "sizes": state.sizes,
        "update_ratio": state.update_ratio,
    }
    items = {
        "params": state.params,
        "opt_state": state.opt_state,
        OUTER_OPT: state.outer_opt,
        FLIGHT: {name: vars(state)[name].chunks for name in _BUFFERS},
        DIAGNOSTICS: diagnostics,
        theta_item(layout): state.outer,
    }
    if jax.tree.leaves(state.residual):
        items[RESIDUAL] = state.residual
        diagnostics["residual_norm"] = state.residual_norm_R
    return items


def theta_item(layout: Layout) -> str:
    """Return the item of the outer parameters. Eager: one copy a replica, and readers average."""
    return OUTER_OF_EACH if layout.settings.is_eager else OUTER_PARAMS


class Restorer:
    """Restores the state of a checkpoint in a run, which may have other settings.

    Replicas and outer parameters are always kept. Where fragments differ, the outer optimizer
    starts from scratch. Exchanges in flight are kept only by a run of the same layout.

    Attributes:
      layout: of this run.
      saved: of the checkpoint.
      before: the settings of the run that wrote it.
      same_schedule: whether fragments and schedule are those of this run.
      same_fragments: whether the fragments are.
      keeps_residual: whether the error-feedback residuals fit this run's wire format.
      keeps_flight: whether the chunks in flight fit this run.
      replica_items: those of `items` whose leaves begin with R of this run.
    """

    def __init__(self, layout: Layout, theta: Any, saved: SavedLayout):
        """Compare the settings.

        Args:
          layout: of this run.
          theta: the outer parameters as ShapeDtypeStructs, one copy, on the device.
          saved: layout of the checkpoint.

        Raises:
          CheckpointError: the settings of the checkpoint cannot be read.
        """
        self.layout, self.saved, self._theta = layout, saved, theta
        self.before = before = ExchangeSettings.from_json(saved.exchange)
        now = layout.settings
        self.same_fragments = _partition_of(before) == _partition_of(now)
        self.same_schedule = self.same_fragments and _schedule_of(before) == _schedule_of(now)
        same_wire = before.exchange_dtype == now.exchange_dtype
        self.keeps_residual = same_wire and before.feeds_back and now.feeds_back
        same_replicas = saved.num_replicas == now.num_replicas
        same_mesh = saved.mesh == dict(layout.mesh.shape) and saved.same_rules
        same_chunks = (
            self.same_schedule
            and same_wire
            and before.collective == now.collective
            and tuple(saved.chunk_lengths) == layout.chunk_lengths
        )
        nothing_in_flight = self.same_schedule and now.schedule.max_chunks == 0
        self.keeps_flight = (
            same_replicas
            and before.feeds_back == now.feeds_back
            and (nothing_in_flight or (same_mesh and same_chunks))
        )
        residual = (RESIDUAL,) * self.keeps_residual
        of_each = ()
        if before.is_eager and now.is_eager:
            of_each = (OUTER_OF_EACH, *((OUTER_OPT,) * self.same_fragments))
        self.replica_items = ("params", "opt_state", *residual, *of_each)
        kept = {
            RESIDUAL: self.keeps_residual,
            FLIGHT: self.keeps_flight,
            DIAGNOSTICS: self.keeps_flight,
            OUTER_OPT: self.same_fragments,
        }
        mine = saved_items(layout.state, layout)
        self._fresh = {name: mine[name] for name in kept if name in mine and not kept[name]}

    def items(self) -> dict[str, Any]:
        """Return the items to read, as ShapeDtypeStructs."""
        items, eager = saved_items(self.layout.state, self.layout), self.layout.settings.is_eager
        items = {name: tree for name, tree in items.items() if name not in self._fresh}
        if self.before.is_eager == eager:
            return items
        del items[theta_item(self.layout)]
        if eager:
            items[OUTER_PARAMS] = self._theta
            change = self._without_replicas
        else:
            items[OUTER_OF_EACH] = self._with_saved_replicas(self.layout.state.outer)
            change = self._with_saved_replicas
        if OUTER_OPT in items:
            items[OUTER_OPT] = change(items[OUTER_OPT])
        return items

    def state_of(self, items: dict[str, Any], *, t: int) -> State:
        """Return the state after inner step t from those of `items`.

        What was in flight and is not kept is never applied. In eager and delayed mode the history
        then starts again as in round 1. A residual keeps its value even where the values that were
        sent with it are dropped.
        """
        items = dict(items)
        fresh = {name: tree for name, tree in self._fresh.items() if name != OUTER_OPT}
        zeroed = jax.jit(lambda: jax.tree.map(zeros, fresh), out_shardings=shardings_of(fresh))
        items |= zeroed()
        outer = self._outer(items)
        diagnostics, like = dict(items[DIAGNOSTICS]), vars(self.layout.state)
        residual_norm_R = diagnostics.pop("residual_norm", ())
        flight = {
            name: ChunkBuffer(tuple(items[FLIGHT][name]), like[name].per_slot) for name in _BUFFERS
        }
        return State(
            t=t,
            params=items["params"],
            opt_state=items["opt_state"],
            outer=outer,
            outer_opt=self._outer_opt(items, outer),
            **flight,
            **diagnostics,
            bad_before=diagnostics["bad"],
            residual=items[RESIDUAL] if self.layout.settings.feeds_back else (),
            residual_norm_R=residual_norm_R,
            dropped_until=self.saved.dropped_until if self.keeps_flight else t,
            schedule_since=self.saved.schedule_since if self.same_schedule else t,
        )

    def _outer(self, items: dict[str, Any]) -> Any:
        """Return the outer parameters of this run."""
        was_eager, eager = self.before.is_eager, self.layout.settings.is_eager
        theta = items[OUTER_OF_EACH if was_eager else OUTER_PARAMS]
        if was_eager == eager:
            return theta
        return self._converted(theta, self.layout.state.outer)

    def _outer_opt(self, items: dict[str, Any], theta: Any) -> Any:
        """Return the state of the outer optimizer of this run."""
        like = self.layout.state.outer_opt
        if OUTER_OPT in self._fresh:
            return self._initial_outer_opt(theta)
        if self.before.is_eager == self.layout.settings.is_eager:
            return items[OUTER_OPT]
        return self._converted(items[OUTER_OPT], like)

    def _converted(self, tree: Any, like: Any) -> Any:
        """Average over the replicas, or copy to them; arrays like `like`."""
        M, eager = self.layout.num_replicas, self.layout.settings.is_eager

        def convert(tree):
            tree = jax.device_put(tree, jax.memory.Space.Device)
            change = (lambda x: broadcast(x, M)) if eager else _mean_of_replicas
            return jax.tree.map(change, tree)

        return jax.jit(convert, out_shardings=shardings_of(like))(tree)

    def _initial_outer_opt(self, theta: Any) -> Any:
        """Return the state of an outer optimizer that has taken no step."""
        layout = self.layout
        optimizer = layout.settings.make_outer_optimizer()

        def init(theta):
            theta = jax.device_put(theta, jax.memory.Space.Device)
            leaves = jax.tree.leaves(theta)
            return tuple(_initial_of_fragment(optimizer, plan, leaves, eager) for plan in plans)

        plans, eager = layout.plans, layout.settings.is_eager
        return jax.jit(init, out_shardings=shardings_of(layout.state.outer_opt))(theta)

    def _with_saved_replicas(self, tree: Any) -> Any:
        """Prepend the R of the saved run: a mean is over all of its replicas."""
        M, mesh = self.saved.num_replicas, self.layout.mesh
        front = "diloco" if M % mesh.shape["diloco"] == 0 else None

        def struct(x):
            spec, kind = P(front, *x.sharding.spec), x.sharding.memory_kind
            sharding = NamedSharding(mesh, spec, memory_kind=kind)
            return jax.ShapeDtypeStruct((M, *x.shape), x.dtype, sharding=sharding)

        return jax.tree.map(struct, tree)

    def _without_replicas(self, tree: Any) -> Any:
        """Drop R, the first dim of every leaf."""

        def struct(x):
            spec, kind = P(*x.sharding.spec[1:]), x.sharding.memory_kind
            sharding = NamedSharding(self.layout.mesh, spec, memory_kind=kind)
            return jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=sharding)

        return jax.tree.map(struct, tree)


def _initial_of_fragment(optimizer, plan, leaves, eager):
    def values(x, s, start):
        return slices.gather_slice(x, s, start, lead=int(eager))

    pairs = zip(plan.slices, plan.starts, strict=True)
    found = [values(leaves[s.leaf], s, start) for s, start in pairs]
    return jax.vmap(optimizer.init)(found) if eager else optimizer.init(found)


def _mean_of_replicas(x_R: jax.Array) -> jax.Array:
    """[R, ...] -> [...]: counts are equal in all replicas."""
    return reduce_mean(x_R) if jnp.issubdtype(x_R.dtype, jnp.floating) else x_R[0]


def _partition_of(settings: ExchangeSettings) -> tuple:
    """Return the settings that decide which values a fragment has."""
    return (
        settings.num_fragments,
        settings.num_nonlayer_fragments,
        settings.sequential_layers,
    )


def _schedule_of(settings: ExchangeSettings) -> tuple:
    """Return the settings that decide when a fragment is sent and applied."""
    return (
        settings.sync_period,
        settings.overlap_steps,
        settings.offsets,
        settings.round_overlap,
    )
