"""One fragment's arrays: leaves of the state outside a program, the fragment's values inside it.

    # R replicas
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiloco.diloco import slices
from maxdiloco.engine.state import FragmentPlan, Layout, fragment_leaves


class FragmentArrays(NamedTuple):
    """What an outer step reads and replaces: whole leaves, or a fragment's slices of them.

    params: [R, ...]. theta: float32, [...] ([R, ...] when eager). outer_opt: the fragment's state
    of the outer optimizer. residual: [R, ...] float32, of error feedback. The last two are () where
    a program does not need them.
    """

    params: list[jax.Array]
    theta: list[jax.Array]
    outer_opt: Any
    residual: Sequence[jax.Array] = ()


def take_slices(
    leaves: Sequence[jax.Array], plan: FragmentPlan, starts: Sequence[jax.Array], *, lead: int
) -> list[jax.Array]:
    """The fragment's values of the leaves it touches; `lead` dims (R) come before a leaf's own."""
    return [
        slices.take(x, s, start, lead=lead)
        for x, s, start in zip(leaves, plan.slices, starts, strict=True)
    ]


class _Kept:
    """A fragment's leaves that are kept in host memory where the layout says so, as theta is.

    lead: dims (R) before a leaf's own. like: the leaves, as ShapeDtypeStructs.
    """

    def __init__(self, layout: Layout, plan: FragmentPlan, like: Sequence[Any], *, lead: int):
        self.plan, self.lead = plan, lead
        self.kept = [x.sharding for x in like]
        prefix = ("diloco",) * lead
        self.on_device = [
            NamedSharding(layout.mesh, P(*prefix, *shard.spec)) for shard in plan.payload.shards
        ]
        self.on_host = bool(like) and self.kept[0].memory_kind == "pinned_host"

    def take(
        self, leaves: Sequence[jax.Array], starts: Sequence[jax.Array]
    ) -> Sequence[jax.Array]:
        values = []
        for x, s, start, _, on_device in self._each(leaves, starts):
            if self._moves_data(x, s):
                x = self.load(x)
            value = slices.take(x, s, start, lead=self.lead, load=self.load)
            if self.on_host:
                value = jax.lax.with_sharding_constraint(value, on_device)
            values.append(value)
        return values

    def put(
        self,
        leaves: Sequence[jax.Array],
        starts: Sequence[jax.Array],
        values: Sequence[jax.Array],
    ) -> list[jax.Array]:
        out = []
        for (x, s, start, kept, _), new in zip(self._each(leaves, starts), values, strict=True):
            if self._moves_data(x, s):
                x = slices.put(self.load(x), s, start, new, lead=self.lead)
            else:
                x = slices.put(x, s, start, new, lead=self.lead, store=self.store)
            out.append(jax.device_put(x, kept) if self.on_host else x)
        return out

    def load(self, x: jax.Array) -> jax.Array:
        return jax.device_put(x, jax.memory.Space.Device) if self.on_host else x

    def store(self, x: jax.Array) -> jax.Array:
        return jax.device_put(x, jax.memory.Space.Host) if self.on_host else x

    def _each(self, leaves, starts):
        return zip(leaves, self.plan.slices, starts, self.kept, self.on_device, strict=True)

    def _moves_data(self, x, leaf_slice) -> bool:
        # A TPU tiles the last two dims. To cut or gather along one of them moves data, which it can
        # do in device memory only.
        if not self.on_host or leaf_slice.pattern == "whole":
            return False
        tiled = leaf_slice.axis + self.lead >= x.ndim - 2
        gathers = leaf_slice.pattern == "list" and leaf_slice.count > slices.MOST_SINGLE_SLICES
        return tiled or gathers


class FragmentView:
    """Inside a program: the fragment's values in device memory, and back to where leaves are kept.

    Both ways move theta, the optimizer state and the residual from and to host memory if they are
    kept there.
    """

    def __init__(self, layout: Layout, plan: FragmentPlan):
        state = layout.state
        self.plan = plan
        theta, residual = (fragment_leaves(x, plan) for x in (state.outer, state.residual))
        self._theta = _Kept(layout, plan, theta, lead=1 if layout.per_replica_outer else 0)
        self._residual = _Kept(layout, plan, residual, lead=1)

    def take(self, leaves: FragmentArrays, starts: Sequence[jax.Array]) -> FragmentArrays:
        """The fragment's values; starts: of the plan, traced."""
        return FragmentArrays(
            take_slices(leaves.params, self.plan, starts, lead=1),
            self._theta.take(leaves.theta, starts),
            jax.tree.map(self._theta.load, leaves.outer_opt),
            self.take_residual(leaves.residual, starts),
        )

    def put(
        self, leaves: FragmentArrays, starts: Sequence[jax.Array], values: FragmentArrays
    ) -> FragmentArrays:
        """The leaves with the fragment's values replaced."""
        params = [
            slices.put(x, s, start, new, lead=1)
            for x, s, start, new in zip(
                leaves.params, self.plan.slices, starts, values.params, strict=True
            )
        ]
        theta = self._theta.put(leaves.theta, starts, values.theta)
        opt = jax.tree.map(self._theta.store, values.outer_opt)
        residual = self.put_residual(leaves.residual, starts, values.residual)
        return FragmentArrays(params, theta, opt, residual)

    def take_residual(
        self, leaves: Sequence[jax.Array], starts: Sequence[jax.Array]
    ) -> Sequence[jax.Array]:
        """The fragment's values of its residual leaves; () of none."""
        return self._residual.take(leaves, starts) if leaves else ()

    def put_residual(
        self,
        leaves: Sequence[jax.Array],
        starts: Sequence[jax.Array],
        values: Sequence[jax.Array],
    ) -> Sequence[jax.Array]:
        """The residual leaves with the fragment's values replaced; () of none."""
        return self._residual.put(leaves, starts, values) if leaves else ()
