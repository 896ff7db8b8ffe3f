"""One fragment's arrays: leaves of the state outside a program, the fragment's values inside it.

    # R replicas
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiloco.diloco import slices
from maxdiloco.engine.plans import FragmentPlan
from maxdiloco.engine.state import Layout, State, fragment_leaves
from maxdiloco.parallel import offload


class FragmentArrays(NamedTuple):
    """What an outer step reads and replaces: whole leaves, or a fragment's slices of them.

    params: [R, ...]. theta: float32, [...] ([R, ...] when eager). outer_opt: of the fragment.
    residual: [R, ...] float32, of error feedback. The last two are () where a program does not need
    them.
    """

    params: Sequence[jax.Array]
    theta: Sequence[jax.Array]
    outer_opt: Any
    residual: Sequence[jax.Array] = ()


def arrays_of(state: State, plan: FragmentPlan) -> FragmentArrays:
    """The leaves that a fragment touches, and its state of the outer optimizer."""
    params, theta, residual = (
        fragment_leaves(tree, plan) for tree in (state.params, state.outer, state.residual)
    )
    return FragmentArrays(params, theta, state.outer_opt[plan.index], residual)


class KeptLeaves:
    """A fragment's leaves, which may be kept in host memory; () of none. starts: traced.

    like: the leaves, as ShapeDtypeStructs. lead: dims (R) before a leaf's own.
    """

    def __init__(self, layout: Layout, plan: FragmentPlan, like: Sequence[Any], *, lead: int):
        self._plan, self._lead = plan, lead
        self._kept = [x.sharding for x in like]
        specs = [P(*("diloco",) * lead, *shard.spec) for shard in plan.payload.shards]
        self._on_device = [NamedSharding(layout.mesh, spec) for spec in specs]
        self._on_host = any(map(offload.on_host, like))

    def take(self, leaves: Sequence[jax.Array], starts: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """The fragment's values, in device memory."""
        values, parts = [], (leaves, self._plan.slices, starts, self._on_device)
        for x, s, start, on_device in zip(*parts, strict=bool(leaves)):
            if self._moves_data(x, s):
                x = self.load(x)
            value = slices.take(x, s, start, lead=self._lead, load=self.load)
            if self._on_host:
                value = jax.lax.with_sharding_constraint(value, on_device)
            values.append(value)
        return values if leaves else ()

    def put(
        self,
        leaves: Sequence[jax.Array],
        starts: Sequence[jax.Array],
        values: Sequence[jax.Array],
    ) -> Sequence[jax.Array]:
        """The leaves with the fragment's values replaced, where they were."""
        out, parts = [], (leaves, self._plan.slices, starts, self._kept, values)
        for x, s, start, kept, new in zip(*parts, strict=bool(leaves)):
            if self._moves_data(x, s):
                x = slices.put(self.load(x), s, start, new, lead=self._lead)
            else:
                x = slices.put(x, s, start, new, lead=self._lead, store=self.store)
            out.append(jax.device_put(x, kept) if self._on_host else x)
        return out if leaves else ()

    def load(self, x: jax.Array) -> jax.Array:
        """x in device memory."""
        return jax.device_put(x, jax.memory.Space.Device) if self._on_host else x

    def store(self, x: jax.Array) -> jax.Array:
        """x where the leaves are kept."""
        return jax.device_put(x, jax.memory.Space.Host) if self._on_host else x

    def _moves_data(self, x, leaf_slice) -> bool:
        # A TPU tiles the last two dims. To cut or gather along one of them moves data, which it can
        # do in device memory only.
        if not self._on_host or leaf_slice.pattern == "whole":
            return False
        tiled = leaf_slice.axis + self._lead >= x.ndim - 2
        gathers = leaf_slice.pattern == "list" and leaf_slice.count > slices.MOST_SINGLE_SLICES
        return tiled or gathers


class FragmentView:
    """Inside a program: the fragment's values in device memory, and back to where they are kept."""

    def __init__(self, layout: Layout, plan: FragmentPlan):
        like, lead = arrays_of(layout.state, plan), 1 if layout.per_replica_outer else 0
        self.params = KeptLeaves(layout, plan, like.params, lead=1)
        self.theta = KeptLeaves(layout, plan, like.theta, lead=lead)
        self.residual = KeptLeaves(layout, plan, like.residual, lead=1)

    def take(self, leaves: FragmentArrays, starts: Sequence[jax.Array]) -> FragmentArrays:
        """The fragment's values; starts: of the plan, traced."""
        return FragmentArrays(
            self.params.take(leaves.params, starts),
            self.theta.take(leaves.theta, starts),
            jax.tree.map(self.theta.load, leaves.outer_opt),
            self.residual.take(leaves.residual, starts),
        )

    def put(
        self, leaves: FragmentArrays, starts: Sequence[jax.Array], values: FragmentArrays
    ) -> FragmentArrays:
        """The leaves with the fragment's values replaced."""
        return FragmentArrays(
            self.params.put(leaves.params, starts, values.params),
            self.theta.put(leaves.theta, starts, values.theta),
            jax.tree.map(self.theta.store, values.outer_opt),
            self.residual.put(leaves.residual, starts, values.residual),
        )
