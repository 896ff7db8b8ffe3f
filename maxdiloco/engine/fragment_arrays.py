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
    of the outer optimizer; () where a program does not need it.
    """

    params: list[jax.Array]
    theta: list[jax.Array]
    outer_opt: Any


def take_slices(
    leaves: Sequence[jax.Array], plan: FragmentPlan, starts: Sequence[jax.Array], *, lead: int
) -> list[jax.Array]:
    """The fragment's values of the leaves it touches; `lead` dims (R) come before a leaf's own."""
    return [
        slices.take(x, s, start, lead=lead)
        for x, s, start in zip(leaves, plan.slices, starts, strict=True)
    ]


class FragmentView:
    """Inside a program: the fragment's values in device memory, and back to where leaves are kept.

    Both ways move theta and the optimizer state from and to host memory if they are kept there.
    """

    def __init__(self, layout: Layout, plan: FragmentPlan):
        self.plan = plan
        self.lead = 1 if layout.per_replica_outer else 0
        self.kept = [x.sharding for x in fragment_leaves(layout.state.outer, plan)]
        self.on_host = self.kept[0].memory_kind == "pinned_host"
        prefix = ("diloco",) if self.lead else ()
        self.on_device = [
            NamedSharding(layout.mesh, P(*prefix, *shard.spec)) for shard in plan.payload.shards
        ]

    def take(self, leaves: FragmentArrays, starts: Sequence[jax.Array]) -> FragmentArrays:
        """The fragment's values; starts: of the plan, traced."""
        theta = []
        for x, s, start, _, on_device in self._each(leaves.theta, starts):
            if self._moves_data(x, s):
                x = self._load(x)
            values = slices.take(x, s, start, lead=self.lead, load=self._load)
            if self.on_host:
                values = jax.lax.with_sharding_constraint(values, on_device)
            theta.append(values)
        outer_opt = jax.tree.map(self._load, leaves.outer_opt)
        params = take_slices(leaves.params, self.plan, starts, lead=1)
        return FragmentArrays(params, theta, outer_opt)

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
        theta = []
        each = zip(self._each(leaves.theta, starts), values.theta, strict=True)
        for (x, s, start, kept, _), new in each:
            if self._moves_data(x, s):
                x = slices.put(self._load(x), s, start, new, lead=self.lead)
            else:
                x = slices.put(x, s, start, new, lead=self.lead, store=self._store)
            theta.append(jax.device_put(x, kept) if self.on_host else x)
        return FragmentArrays(params, theta, jax.tree.map(self._store, values.outer_opt))

    def _each(self, theta, starts):
        return zip(theta, self.plan.slices, starts, self.kept, self.on_device, strict=True)

    def _load(self, x):
        return jax.device_put(x, jax.memory.Space.Device) if self.on_host else x

    def _store(self, x):
        return jax.device_put(x, jax.memory.Space.Host) if self.on_host else x

    def _moves_data(self, x, leaf_slice) -> bool:
        # A TPU tiles the last two dims. To cut or gather along one of them moves data, which it can
        # do in device memory only.
        if not self.on_host or leaf_slice.pattern == "whole":
            return False
        tiled = leaf_slice.axis + self.lead >= x.ndim - 2
        gathers = leaf_slice.pattern == "list" and leaf_slice.count > slices.MOST_SINGLE_SLICES
        return tiled or gathers
