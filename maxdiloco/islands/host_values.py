"""Copy the values of a fragment between the devices and host memory (needs JAX).

On the host a fragment is one float32 array [N] with any mesh: its leaves in tree order, flattened
and concatenated. If there are several processes, all call the same methods in the same order. Only
process 0 uses the values. A leaf is replicated on the devices during its transfer.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from maxdiloco.diloco import fragments
from maxdiloco.engine.calls import Call
from maxdiloco.engine.fragment_values import FragmentArrays, FragmentView, arrays_of, with_arrays
from maxdiloco.engine.layout import FragmentPlan, Layout, State, fragment_leaves
from maxdiloco.engine.programs import Programs
from maxdiloco.islands.records import Leaf
from maxdiloco.parallel.program import Program
from maxdiloco.parallel.sharding import shardings_of


class HostValues:
    """Reads and writes the values of fragments, with one program each."""

    def __init__(self, programs: Programs):
        """Keep the programs of a DiLoCo of one replica."""
        self._programs, self._layout = programs, programs.layout

    def params(self, state: State, plan: FragmentPlan) -> np.ndarray:
        """Wait for the replica's values [N], and return them."""
        return _gathered(self._read_params(plan)(arrays_of(state, plan).params, plan.starts))

    def outer(self, state: State, plan: FragmentPlan) -> np.ndarray:
        """Wait for the outer parameters [N], and return them."""
        read = FragmentView(self._layout, plan).outer_params.read
        program = self._programs.of_fragment("outer_params", plan, read)
        return _gathered(program(arrays_of(state, plan).outer_params, plan.starts))

    def put(self, state: State, plan: FragmentPlan, values: Sequence[np.ndarray] | None) -> State:
        """Return the state with new values of a fragment.

        Args:
          state: donated.
          plan: plan of the fragment.
          values: the replica's values, outer parameters and momentum, [N] each; None in processes
            other than 0.
        """
        like = self._like(plan)
        ends = np.cumsum([np.prod(x.shape, dtype=int) for x in like])
        if values is None:
            values = 3 * [np.zeros(ends[-1], np.float32)]
        placed = [
            [_placed(part, x) for part, x in zip(np.split(each, ends[:-1]), like, strict=True)]
            for each in values
        ]
        leaves = arrays_of(state, plan)._replace(residual=())
        return with_arrays(state, plan, self._write(plan)(leaves, plan.starts, *placed))

    def without_moments(self, state: State, init_opt_state: Callable[[Any], Any]) -> State:
        """Return the state with a fresh inner optimizer. state: donated."""
        shardings = jax.tree.map(lambda x: x.sharding, state.opt_state)
        for old in jax.tree.leaves(state.opt_state):
            old.delete()  # before the new one is allocated
        make = jax.jit(jax.vmap(init_opt_state), out_shardings=shardings)
        return replace(state, opt_state=make(state.params))

    def calls(self) -> Iterable[Call]:
        """Return each program once; a period reads and replaces each fragment once."""
        found: dict[int, Call] = {}
        for plan in self._layout.plans:
            leaves = arrays_of(self._layout.state, plan)._replace(residual=())
            like = self._like(plan)
            for program, *args in (
                (self._read_params(plan), leaves.params, plan.starts),
                (self._write(plan), leaves, plan.starts, like, like, like),
            ):
                call = found.setdefault(id(program), Call(program, tuple(args), 0))
                found[id(program)] = call._replace(runs=call.runs + 1)
        return found.values()

    def _read_params(self, plan: FragmentPlan) -> Program:
        view = FragmentView(self._layout, plan)

        def read(leaves, starts):
            return [x[0].astype(jnp.float32) for x in view.params.read(leaves, starts)]

        out = self._shardings(plan)
        return self._programs.of_fragment("values", plan, read, out_shardings=out)

    def _write(self, plan: FragmentPlan) -> Program:
        view = FragmentView(self._layout, plan)

        def write(leaves, starts, x, outer_params, trace):
            dtypes = [leaf.dtype for leaf in leaves.params]
            x = [value[None].astype(dtype) for value, dtype in zip(x, dtypes, strict=True)]
            kept, structure = jax.tree.flatten(leaves.outer_opt)
            outer_opt = jax.tree.unflatten(structure, trace if kept else [])
            return view.write(leaves, starts, FragmentArrays(x, outer_params, outer_opt))

        kept = shardings_of(arrays_of(self._layout.state, plan)._replace(residual=()))
        return self._programs.of_fragment("replace", plan, write, donate=(0,), out_shardings=kept)

    def _like(self, plan: FragmentPlan) -> list[jax.ShapeDtypeStruct]:
        leaves = fragment_leaves(self._layout.state.outer, plan)
        shapes = [s.shape(x.shape) for s, x in zip(plan.slices, leaves, strict=True)]
        return [
            jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
            for shape, sharding in zip(shapes, self._shardings(plan), strict=True)
        ]

    def _shardings(self, plan: FragmentPlan) -> list[NamedSharding]:
        return [NamedSharding(self._layout.mesh, shard.spec) for shard in plan.payload.shards]


def _gathered(parts: Sequence[jax.Array]) -> np.ndarray:
    if jax.process_count() > 1:
        parts = [multihost_utils.process_allgather(part, tiled=True) for part in parts]
    return np.concatenate([np.asarray(part).reshape(-1) for part in jax.device_get(parts)])


def _placed(part: np.ndarray, like: jax.ShapeDtypeStruct) -> jax.Array:
    # As integers: a broadcast is a sum, and the sum of -0 and 0 is 0. One process returns them.
    bits = multihost_utils.broadcast_one_to_all(part.reshape(like.shape).view(np.int32))
    part = np.asarray(bits).view(np.float32)
    return jax.make_array_from_callback(like.shape, like.sharding, part.__getitem__)


def leaves_of(layout: Layout, layer_axis: Any) -> tuple[tuple[Leaf, ...], ...]:
    """Return the leaves of each fragment for run.json."""
    like = layout.state.outer
    kinds, leaves = fragments.leaf_axes_of(like, layer_axis), jax.tree.leaves(like)
    return tuple(
        tuple(_leaf(kinds[s.leaf], s.shape(leaves[s.leaf].shape)) for s in plan.slices)
        for plan in layout.plans
    )


def _leaf(kind: Any, shape: tuple[int, ...]) -> Leaf:
    size = int(np.prod(shape))
    if isinstance(kind, fragments.Vocabulary):
        return Leaf(size, 0)
    if isinstance(kind, fragments.Stacked) and kind.axis == 0:
        return Leaf(size, shape[0])
    return Leaf(size, 1)
