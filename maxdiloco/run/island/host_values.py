"""Copy the values of a fragment of one replica to host memory and back.

On the host a fragment is one float32 array [N]: its leaves in tree order, flattened and
concatenated, whatever the mesh is. All processes call the same methods in the same order, and
process 0 has the values.
"""

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from maxdiloco.engine.calls import Call
from maxdiloco.engine.fragment_values import FragmentArrays, FragmentView, arrays_of, with_arrays
from maxdiloco.engine.host_transfer import Mailbox
from maxdiloco.engine.layout import FragmentPlan, State, fragment_leaves
from maxdiloco.engine.programs import Programs
from maxdiloco.parallel.program import Program
from maxdiloco.parallel.sharding import shardings_of
from maxdiloco.run.island.gather_to_host import HostGather


class HostValues:
    """Reads and writes the values of fragments, by one program each."""

    def __init__(self, programs: Programs, mailbox: Mailbox | None = None):
        """Keep the programs. mailbox: messages between processes; None: one process."""
        self._programs, self._layout = programs, programs.layout
        self._gather = HostGather(mailbox)

    def shapes(self, plan: FragmentPlan) -> list[tuple[int, ...]]:
        """Return the shapes of a fragment's leaves, without R."""
        leaves = fragment_leaves(self._layout.state.outer, plan)
        return [s.shape(x.shape) for s, x in zip(plan.slices, leaves, strict=True)]

    def params(self, state: State, plan: FragmentPlan) -> np.ndarray:
        """Return the replica's values [N] in process 0, [0] in others. Waits for them."""
        leaves = arrays_of(state, plan).params
        return self._joined(self._read_params(plan)(leaves, plan.starts))

    def theta(self, state: State, plan: FragmentPlan) -> np.ndarray:
        """Return the outer parameters [N], as `params`."""
        read = FragmentView(self._layout, plan).theta.read
        program = self._programs.of_fragment("theta", plan, read)
        return self._joined(program(arrays_of(state, plan).theta, plan.starts))

    def put(self, state: State, plan: FragmentPlan, values: Sequence[np.ndarray]) -> State:
        """Return the state with new values [N] of replica, outer parameters and momentum.

        Args:
          state: donated.
          plan: of the fragment.
          values: the three arrays, in process 0; other processes may pass none.
        """
        values = self._placed(plan, values)
        leaves = arrays_of(state, plan)._replace(residual=())
        return with_arrays(state, plan, self._write(plan)(leaves, plan.starts, *values))

    def calls(self, runs: float) -> Iterable[Call]:
        """Return each program once. runs: how often a period reads and writes each fragment."""
        by_program: dict[int, Call] = {}
        for plan in self._layout.plans:
            leaves = arrays_of(self._layout.state, plan)._replace(residual=())
            like = self._like(plan)
            for call in (
                Call(self._read_params(plan), (leaves.params, plan.starts), runs),
                Call(self._write(plan), (leaves, plan.starts, like, like, like), runs),
            ):
                old = by_program.get(id(call.program), call._replace(runs=0))
                by_program[id(call.program)] = old._replace(runs=old.runs + runs)
        return by_program.values()

    def _read_params(self, plan: FragmentPlan) -> Program:
        view = FragmentView(self._layout, plan)

        def read(leaves, starts):
            return [x[0].astype(jnp.float32) for x in view.params.read(leaves, starts)]

        out = self._shardings(plan)
        return self._programs.of_fragment("values", plan, read, out_shardings=out)

    def _write(self, plan: FragmentPlan) -> Program:
        view = FragmentView(self._layout, plan)

        def write(leaves, starts, x, theta, trace):
            dtypes = [leaf.dtype for leaf in leaves.params]
            x = [value[None].astype(dtype) for value, dtype in zip(x, dtypes, strict=True)]
            kept, structure = jax.tree.flatten(leaves.outer_opt)
            outer_opt = jax.tree.unflatten(structure, trace if kept else [])
            return view.write(leaves, starts, FragmentArrays(x, theta, outer_opt))

        kept = shardings_of(arrays_of(self._layout.state, plan)._replace(residual=()))
        return self._programs.of_fragment("replace", plan, write, donate=(0,), out_shardings=kept)

    def _placed(self, plan: FragmentPlan, values: Sequence[np.ndarray]) -> list[list[jax.Array]]:
        """Put the values on the devices: the leaves of replica, outer parameters, momentum."""
        like, shapes = self._like(plan), self.shapes(plan)
        ends = np.cumsum([np.prod(shape, dtype=int) for shape in shapes])[:-1]
        parts = [
            part.reshape(shape)
            for each in values
            for part, shape in zip(np.split(each, ends), shapes, strict=True)
        ]
        placed, n = self._gather.scatter(parts, 3 * like), len(like)
        return [placed[start : start + n] for start in (0, n, 2 * n)]

    def _like(self, plan: FragmentPlan) -> list[jax.ShapeDtypeStruct]:
        return [
            jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
            for shape, sharding in zip(self.shapes(plan), self._shardings(plan), strict=True)
        ]

    def _shardings(self, plan: FragmentPlan) -> list[NamedSharding]:
        return [NamedSharding(self._layout.mesh, shard.spec) for shard in plan.payload.shards]

    def _joined(self, parts: Sequence[jax.Array]) -> np.ndarray:
        flat = [part.reshape(-1) for part in self._gather.gather(parts)]
        return np.concatenate(flat or [np.zeros(0, np.float32)])
