"""The arrays of one fragment: whole leaves outside a program, the fragment's values inside it.

Outer parameters and the state of the outer optimizer may be kept in host memory. This module moves
them to the device and back, so that the functions of programs.py compute on device arrays only.

    # R replicas
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiloco.diloco import slices
from maxdiloco.engine.layout import (
    FragmentPlan,
    Layout,
    State,
    fragment_leaves,
    with_fragment,
    with_items,
)
from maxdiloco.parallel import offload


class FragmentArrays(NamedTuple):
    """The arrays that an outer step reads and replaces: whole leaves, or a fragment's values.

    Attributes:
      params: parameters of the replicas, [R, ...].
      outer_params: the outer parameters, float32, [...]; eager: [R, ...].
      outer_opt: state of the outer optimizer for the fragment; () if a program does not need it.
      residual: error-feedback residuals, float32, [R, ...]; () if a program does not need them.
    """

    params: Sequence[jax.Array]
    outer_params: Sequence[jax.Array]
    outer_opt: Any
    residual: Sequence[jax.Array] = ()


def arrays_of(state: State, plan: FragmentPlan) -> FragmentArrays:
    """Return the leaves with values of a fragment, and the state of its outer optimizer."""
    params, outer_params, residual = (
        fragment_leaves(tree, plan) for tree in (state.params, state.outer, state.residual)
    )
    return FragmentArrays(params, outer_params, state.outer_opt[plan.index], residual)


def with_arrays(state: State, plan: FragmentPlan, arrays: FragmentArrays) -> State:
    """Return the state with the arrays of `arrays_of` replaced, except the residual."""
    return replace(
        state,
        params=with_fragment(state.params, plan, arrays.params),
        outer=with_fragment(state.outer, plan, arrays.outer_params),
        outer_opt=with_items(state.outer_opt, [plan.index], [arrays.outer_opt]),
    )


def initial_outer_opt(layout: Layout, outer_params: Any) -> tuple[Any, ...]:
    """Return the initial state of the outer optimizer for each fragment.

    Args:
      layout: the run's layout.
      outer_params: outer parameters, without R and on the device.
    """
    optimizer, states = layout.settings.make_outer_optimizer(), []
    for plan in layout.plans:
        parts = zip(fragment_leaves(outer_params, plan), plan.slices, plan.starts, strict=True)
        states.append(optimizer.init([slices.gather_slice(*part) for part in parts]))
    return tuple(states)


class FragmentLeaves:
    """Reads a fragment's values of some leaves, and writes them back, inside a program."""

    def __init__(
        self, layout: Layout, plan: FragmentPlan, like: Sequence[Any], *, num_leading: int
    ):
        """Keep slices and shardings.

        Args:
          layout: the run's layout.
          plan: the fragment's plan.
          like: the leaves, as ShapeDtypeStructs; may be empty.
          num_leading: number of dims before a leaf's own: 1 if it has R.
        """
        self._plan, self._num_leading = plan, num_leading
        self._kept = [x.sharding for x in like]
        specs = [P(*("diloco",) * num_leading, *shard.spec) for shard in plan.payload.shards]
        self._on_device = [NamedSharding(layout.mesh, spec) for spec in specs]
        self._on_host = any(map(offload.on_host, like))

    def read(self, leaves: Sequence[jax.Array], starts: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Return the fragment's values in device memory. starts: plan.starts, traced."""
        values, parts = [], (leaves, self._plan.slices, starts, self._on_device)
        for x, s, start, on_device in zip(*parts, strict=bool(leaves)):
            if self._moves_data(x, s):
                x = self.load(x)
            value = slices.gather_slice(x, s, start, num_leading=self._num_leading, load=self.load)
            if self._on_host:
                value = jax.lax.with_sharding_constraint(value, on_device)
            values.append(value)
        return values if leaves else ()

    def write(
        self,
        leaves: Sequence[jax.Array],
        starts: Sequence[jax.Array],
        values: Sequence[jax.Array],
    ) -> Sequence[jax.Array]:
        """Return the leaves with the fragment's values replaced, in the memory of the leaves."""
        out, parts = [], (leaves, self._plan.slices, starts, self._kept, values)
        for x, s, start, kept, new in zip(*parts, strict=bool(leaves)):
            if self._moves_data(x, s):
                x = slices.scatter_slice(self.load(x), s, start, new, num_leading=self._num_leading)
            else:
                x = slices.scatter_slice(
                    x, s, start, new, num_leading=self._num_leading, store=self.store
                )
            out.append(jax.device_put(x, kept) if self._on_host else x)
        return out if leaves else ()

    def load(self, x: jax.Array) -> jax.Array:
        """Move x to device memory."""
        return jax.device_put(x, jax.memory.Space.Device) if self._on_host else x

    def store(self, x: jax.Array) -> jax.Array:
        """Move x to the memory of the leaves."""
        return jax.device_put(x, jax.memory.Space.Host) if self._on_host else x

    def _moves_data(self, x, leaf_slice) -> bool:
        # A TPU tiles the last two dims. To cut or gather along one of them moves data, which it can
        # do in device memory only.
        if not self._on_host or leaf_slice.pattern == "whole":
            return False
        tiled = leaf_slice.axis + self._num_leading >= x.ndim - 2
        gathers = leaf_slice.pattern == "list" and leaf_slice.count > slices.MOST_SINGLE_SLICES
        return tiled or gathers


class FragmentView:
    """Reads and writes all arrays of a fragment inside a program."""

    def __init__(self, layout: Layout, plan: FragmentPlan):
        """Keep slices and shardings."""
        like, num_leading = arrays_of(layout.state, plan), 1 if layout.settings.is_eager else 0
        self.params = FragmentLeaves(layout, plan, like.params, num_leading=1)
        self.outer_params = FragmentLeaves(layout, plan, like.outer_params, num_leading=num_leading)
        self.residual = FragmentLeaves(layout, plan, like.residual, num_leading=1)

    def read(self, leaves: FragmentArrays, starts: Sequence[jax.Array]) -> FragmentArrays:
        """Return the fragment's values in device memory. starts: plan.starts, traced."""
        return FragmentArrays(
            params=self.params.read(leaves.params, starts),
            outer_params=self.outer_params.read(leaves.outer_params, starts),
            outer_opt=jax.tree.map(self.outer_params.load, leaves.outer_opt),
            residual=self.residual.read(leaves.residual, starts),
        )

    def write(
        self, leaves: FragmentArrays, starts: Sequence[jax.Array], values: FragmentArrays
    ) -> FragmentArrays:
        """Return the leaves with the fragment's values replaced."""
        return FragmentArrays(
            params=self.params.write(leaves.params, starts, values.params),
            outer_params=self.outer_params.write(leaves.outer_params, starts, values.outer_params),
            outer_opt=jax.tree.map(self.outer_params.store, values.outer_opt),
            residual=self.residual.write(leaves.residual, starts, values.residual),
        )
