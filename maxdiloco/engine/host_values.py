"""A fragment's values to host memory and back, for what is computed there.

On the host a fragment is one float32 array [N]: its leaves in tree order, whole, flattened and put
end to end, whatever the mesh is. Of one replica. Several processes call the same in the same order,
and process 0 has the values.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from maxdiloco.engine.calls import Call
from maxdiloco.engine.fragment_arrays import FragmentArrays, FragmentView, arrays_of
from maxdiloco.engine.plans import FragmentPlan
from maxdiloco.engine.programs import Definition, Programs
from maxdiloco.engine.state import State, fragment_leaves, with_fragment, with_items
from maxdiloco.exchange.host import Mailbox
from maxdiloco.exchange.whole import Whole
from maxdiloco.parallel.sharding import shardings_of


class HostValues:
    """Takes and puts the values of fragments, by two programs each.

    mailbox: of several processes, with its bulk.
    """

    def __init__(self, programs: Programs, mailbox: Mailbox | None = None):
        self._programs, self._layout = programs, programs.layout
        self._whole = Whole(mailbox)

    def shapes(self, plan: FragmentPlan) -> list[tuple[int, ...]]:
        """Of the leaves' parts, without R."""
        leaves = fragment_leaves(self._layout.state.outer, plan)
        return [s.shape(x.shape) for s, x in zip(plan.slices, leaves, strict=True)]

    def params(self, state: State, plan: FragmentPlan) -> np.ndarray:
        """The replica's values [N], in process 0; elsewhere [0]. Waits for them."""
        leaves = arrays_of(state, plan).params
        program = self._programs.defined("values", plan, self._take)
        return self._joined(program(leaves, plan.starts))

    def theta(self, state: State, plan: FragmentPlan) -> np.ndarray:
        """Those of theta [N], as `params`."""
        program = self._programs.defined("theta", plan, self._take_theta)
        return self._joined(program(arrays_of(state, plan).theta, plan.starts))

    def put(self, state: State, plan: FragmentPlan, values: Sequence[np.ndarray]) -> State:
        """The state with these values [N] of replica, theta and outer optimizer; it is donated.

        Those of process 0 count: other processes may give none.
        """
        values = self._placed(plan, values)
        leaves = arrays_of(state, plan)._replace(residual=())
        program = self._programs.defined("replace", plan, self._put)
        leaves = program(leaves, plan.starts, *values)
        return replace(
            state,
            params=with_fragment(state.params, plan, leaves.params),
            outer=with_fragment(state.outer, plan, leaves.theta),
            outer_opt=with_items(state.outer_opt, [plan.index], [leaves.outer_opt]),
        )

    def calls(self, runs: float) -> Iterable[Call]:
        """The programs, with runs of each fragment's in a period; once for each program."""
        by_program: dict[int, Call] = {}
        for plan in self._layout.plans:
            leaves = arrays_of(self._layout.state, plan)._replace(residual=())
            like = self._like(plan)
            take = self._programs.defined("values", plan, self._take)
            put = self._programs.defined("replace", plan, self._put)
            for call in (
                Call(take, (leaves.params, plan.starts), runs),
                Call(put, (leaves, plan.starts, like, like, like), runs),
            ):
                old = by_program.get(id(call.program), call._replace(runs=0))
                by_program[id(call.program)] = old._replace(runs=old.runs + runs)
        return by_program.values()

    def _take(self, plan: FragmentPlan) -> Definition:
        view = FragmentView(self._layout, plan)

        def take(leaves, starts):
            return [x[0].astype(jnp.float32) for x in view.params.take(leaves, starts)]

        return dict(fn=take, out_shardings=self._shardings(plan))

    def _take_theta(self, plan: FragmentPlan) -> Definition:
        return dict(fn=FragmentView(self._layout, plan).theta.take)

    def _put(self, plan: FragmentPlan) -> Definition:
        view = FragmentView(self._layout, plan)

        def put(leaves, starts, x, theta, trace):
            dtypes = [leaf.dtype for leaf in leaves.params]
            x = [value[None].astype(dtype) for value, dtype in zip(x, dtypes, strict=True)]
            kept, structure = jax.tree.flatten(leaves.outer_opt)
            outer_opt = jax.tree.unflatten(structure, trace if kept else [])
            return view.put(leaves, starts, FragmentArrays(x, theta, outer_opt))

        kept = arrays_of(self._layout.state, plan)._replace(residual=())
        return dict(fn=put, donate=(0,), out_shardings=shardings_of(kept))

    def _placed(self, plan: FragmentPlan, values: Sequence[np.ndarray]) -> list[list[jax.Array]]:
        """Replica, theta and outer optimizer: the leaves of each."""
        like, shapes = self._like(plan), self.shapes(plan)
        ends = np.cumsum([np.prod(shape, dtype=int) for shape in shapes])[:-1]
        parts = [
            part.reshape(shape)
            for each in values
            for part, shape in zip(np.split(each, ends), shapes, strict=True)
        ]
        placed, n = self._whole.placed(parts, 3 * like), len(like)
        return [placed[start : start + n] for start in (0, n, 2 * n)]

    def _like(self, plan: FragmentPlan) -> list[jax.ShapeDtypeStruct]:
        return [
            jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
            for shape, sharding in zip(self.shapes(plan), self._shardings(plan), strict=True)
        ]

    def _shardings(self, plan: FragmentPlan) -> list[NamedSharding]:
        return [NamedSharding(self._layout.mesh, shard.spec) for shard in plan.payload.shards]

    def _joined(self, parts: Sequence[jax.Array]) -> np.ndarray:
        whole = [part.reshape(-1) for part in self._whole.fetched(parts)]
        return np.concatenate(whole or [np.zeros(0, np.float32)])
