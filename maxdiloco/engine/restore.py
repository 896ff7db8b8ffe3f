"""Conversion of a DiLoCo state to the items of a checkpoint and back.

The run that restores may have another M, mesh, partition or mode than the run that saved.

# R replicas
"""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiloco.engine.fragment_values import initial_outer_opt
from maxdiloco.engine.layout import BUFFERS, Layout, State
from maxdiloco.engine.settings import ExchangeSettings
from maxdiloco.engine.trainer import DIAGNOSTICS, OUTER_OF_EACH, OUTER_PARAMS, SavedLayout
from maxdiloco.parallel.replicas import broadcast, fold_in_replica, reduce_mean
from maxdiloco.parallel.sharding import shardings_of, zeros

FLIGHT, RESIDUAL, OUTER_OPT = "flight", "residual", "outer_opt"


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
        FLIGHT: {name: vars(state)[name].chunks for name in BUFFERS},
        DIAGNOSTICS: diagnostics,
        outer_item(layout): state.outer,
    }
    if jax.tree.leaves(state.residual):
        items[RESIDUAL] = state.residual
        diagnostics["residual_norm"] = state.residual_norm_R
    return items


def outer_item(layout: Layout) -> str:
    """Return the item of the outer parameters; in eager mode readers average it over replicas."""
    return OUTER_OF_EACH if layout.settings.is_eager else OUTER_PARAMS


class Restorer:
    """Restores the state of a checkpoint in a run, which may have other settings.

    Replicas and outer parameters are always kept. If the fragments differ, the outer optimizer
    starts from scratch. Exchanges in flight are kept only if M, mesh, schedule and wire format are
    the same.

    Attributes:
      layout: this run's layout.
      saved: layout of the checkpoint.
      before: settings of the run that wrote the checkpoint.
      same_fragments: whether both runs have the same fragments.
      same_schedule: whether both runs have the same fragments and the same schedule.
      keeps_residual: whether the error-feedback residuals fit this run's wire format.
      keeps_flight: whether the chunks in flight fit this run.
      replica_items: names of the items whose leaves begin with R of this run.
    """

    def __init__(self, layout: Layout, saved: SavedLayout):
        """Compare the settings.

        Args:
          layout: this run's layout.
          saved: layout of the checkpoint.

        Raises:
          CheckpointError: the settings of the checkpoint cannot be read.
        """
        self.layout, self.saved = layout, saved
        self.before = before = ExchangeSettings.from_json(saved.exchange)
        now = layout.settings
        self.same_fragments = _partition_of(before) == _partition_of(now)
        self.same_schedule = self.same_fragments and _schedule_of(before) == _schedule_of(now)
        same_wire = before.exchange_dtype == now.exchange_dtype
        self.keeps_residual = same_wire and before.feeds_back and now.feeds_back
        same_mesh = saved.mesh == dict(layout.mesh.shape) and saved.same_rules
        same_chunks = (
            same_mesh
            and same_wire
            and before.collective == now.collective
            and tuple(saved.chunk_lengths) == layout.chunk_lengths
        )
        self.keeps_flight = (
            self.same_schedule
            and saved.num_replicas == now.num_replicas
            and before.feeds_back == now.feeds_back
            and (same_chunks or now.schedule.max_chunks == 0)
        )
        self.replica_items = ("params", "opt_state")
        if self.keeps_residual:
            self.replica_items += (RESIDUAL,)
        if before.is_eager and now.is_eager:
            self.replica_items += (OUTER_OF_EACH,)
            if self.same_fragments:
                self.replica_items += (OUTER_OPT,)
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
        items = saved_items(self.layout.state, self.layout)
        items = {name: tree for name, tree in items.items() if name not in self._fresh}
        if self.before.is_eager != self.layout.settings.is_eager:
            change = self._with_saved_replicas if self.before.is_eager else _without_replicas
            items[self._saved_outer] = jax.tree.map(change, items.pop(outer_item(self.layout)))
            if OUTER_OPT in items:
                items[OUTER_OPT] = jax.tree.map(change, items[OUTER_OPT])
        return items

    def state_of(self, items: dict[str, Any], *, t: int) -> State:
        """Return the state after inner step t.

        An exchange in flight that is not kept is never applied. Eager and delayed mode then
        continue as in round 1. A residual keeps its value even if the exchange is dropped.

        Args:
          items: the arrays of `items`.
          t: number of inner steps done.
        """
        like = self.layout.state
        fresh = {name: tree for name, tree in self._fresh.items() if name != OUTER_OPT}
        zeroed = jax.jit(lambda: jax.tree.map(zeros, fresh), out_shardings=shardings_of(fresh))
        items = items | zeroed()
        outer = self._converted(items[self._saved_outer], like.outer)
        if OUTER_OPT in self._fresh:
            outer_opt = self._initial_outer_opt(outer)
        else:
            outer_opt = self._converted(items[OUTER_OPT], like.outer_opt)
        diagnostics = dict(items[DIAGNOSTICS])
        residual_norm_R = diagnostics.pop("residual_norm", ())
        flight = {
            name: replace(vars(like)[name], chunks=tuple(items[FLIGHT][name])) for name in BUFFERS
        }
        return State(
            t=t,
            params=items["params"],
            opt_state=self._with_own_keys(items["opt_state"]),
            outer=outer,
            outer_opt=outer_opt,
            **flight,
            **diagnostics,
            bad_before=diagnostics["bad"],
            residual=items[RESIDUAL] if self.layout.settings.feeds_back else (),
            residual_norm_R=residual_norm_R,
            dropped_until=self.saved.dropped_until if self.keeps_flight else t,
            schedule_since=self.saved.schedule_since if self.same_schedule else t,
        )

    @property
    def _saved_outer(self) -> str:
        """Name of the checkpoint's item with the outer parameters."""
        return OUTER_OF_EACH if self.before.is_eager else OUTER_PARAMS

    def _converted(self, tree: Any, like: Any) -> Any:
        """If only one of the runs is eager, average over the replicas or copy to them."""
        M, eager = self.layout.num_replicas, self.layout.settings.is_eager
        if self.before.is_eager == eager:
            return tree

        def convert(tree):
            tree = jax.device_put(tree, jax.memory.Space.Device)
            change = (lambda x: broadcast(x, M)) if eager else _mean_of_replicas
            return jax.tree.map(change, tree)

        return jax.jit(convert, out_shardings=shardings_of(like))(tree)

    def _initial_outer_opt(self, outer_params: Any) -> Any:
        """Return the initial state of the outer optimizer."""
        init = functools.partial(initial_outer_opt, self.layout)
        if self.layout.settings.is_eager:
            init = jax.vmap(init)

        def on_device(outer_params):
            return init(jax.device_put(outer_params, jax.memory.Space.Device))

        shardings = shardings_of(self.layout.state.outer_opt)
        return jax.jit(on_device, out_shardings=shardings)(outer_params)

    def _with_own_keys(self, opt_state: Any) -> Any:
        """Give replica r >= M_old other typed PRNG keys than replica r mod M_old."""
        M, old = self.layout.num_replicas, self.saved.num_replicas
        leaves, structure = jax.tree.flatten(opt_state)
        keys = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
        if M <= old or not keys:
            return opt_state

        def own(keys_R):
            keys_R = jax.device_put(keys_R, jax.memory.Space.Device)
            is_new = (jnp.arange(M) >= old).reshape(-1, *[1] * (keys_R.ndim - 1))
            return jnp.where(is_new, fold_in_replica(keys_R, jnp.arange(M)), keys_R)

        for i in keys:
            leaves[i] = jax.jit(own, out_shardings=leaves[i].sharding)(leaves[i])
        return jax.tree.unflatten(structure, leaves)

    def _with_saved_replicas(self, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """Prepend the saved run's R, over which the mean is taken."""
        M = self.saved.num_replicas
        front = "diloco" if M % self.layout.mesh.shape["diloco"] == 0 else None
        return _resized(x, (M, *x.shape), P(front, *x.sharding.spec))


def _without_replicas(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Drop R, the first dim."""
    return _resized(x, x.shape[1:], P(*x.sharding.spec[1:]))


def _resized(x: jax.ShapeDtypeStruct, shape: tuple[int, ...], spec: P) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(x.sharding.mesh, spec, memory_kind=x.sharding.memory_kind)
    return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)


def _mean_of_replicas(x_R: jax.Array) -> jax.Array:
    """Average over R; integers, such as counts of steps, are equal in all replicas."""
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
