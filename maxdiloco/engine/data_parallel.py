"""The baseline: one set of parameters, gradients averaged over all devices in every step.

The same mesh, batches and inner step as DiLoCo; the mesh axis `diloco` carries rows of the batch.

    # R replicas whose rows of the batch are put together
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiloco.engine.calls import Call
from maxdiloco.parallel.program import Program
from maxdiloco.parallel.sharding import spec_on


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """One set of parameters and optimizer state, and t as a Python int."""

    t: int = field(metadata=dict(static=True))
    params: Any
    opt_state: Any


class DataParallel:
    """Data-parallel training with the interface of DiLoCo.

    inner_step: (params, opt_state, batch) -> (params, opt_state, metrics). The batch keeps its
    leading R, which is folded into the rows; metrics get a leading dim of 1.
    """

    num_replicas = 1

    def __init__(self, inner_step: Callable, *, mesh: Mesh, on_compile: Callable):
        self.mesh = mesh
        self._inner_step = inner_step
        self._on_compile = on_compile
        self._everywhere = NamedSharding(mesh, P())
        self._paced = mesh.devices.flat[0].platform == "cpu" and mesh.size > 1

    def bind(self, params: Any, opt_state: Any) -> None:
        """Lay out the state for params and opt_state (arrays or ShapeDtypeStructs)."""

        def struct(x):
            sharding = NamedSharding(self.mesh, spec_on(x, self.mesh))
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        self.abstract_state = State(0, *jax.tree.map(struct, (params, opt_state)))

        def step(params, opt_state, batch):
            rows = jax.tree.map(lambda x_R: x_R.reshape(-1, *x_R.shape[2:]), batch)
            # The context mesh lets the model lay out its activations over every batch axis.
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                params, opt_state, metrics = self._inner_step(params, opt_state, rows)
            return params, opt_state, jax.tree.map(lambda x: x[None], metrics)

        kept = jax.tree.map(lambda x: x.sharding, self.abstract_state)
        self.inner = Program(
            "data parallel",
            step,
            donate=(0, 1),
            out_shardings=(kept.params, kept.opt_state, self._everywhere),
            on_compile=self._on_compile,
        )

    def init(self, params: Any, opt_state: Any) -> State:
        """The state before the first step."""
        self.bind(params, opt_state)
        return self.init_program(lambda *given: given)(params, opt_state)

    def init_program(self, make: Callable[..., tuple[Any, Any]], **options) -> Program:
        """A program that makes the state before the first step, see DiLoCo.init_program."""
        lies = jax.tree.map(lambda x: x.sharding, self.abstract_state)
        return Program(
            "init",
            lambda *args: State(0, *make(*args)),
            out_shardings=lies,
            on_compile=self._on_compile,
            **options,
        )

    def calls(self, batch: Any) -> list[Call]:
        """The one program, see DiLoCo.calls."""
        like = self.abstract_state
        return [Call(self.inner, (like.params, like.opt_state, batch), 1)]

    def outer_calls(self, runs: float) -> list[Call]:
        """Nothing, see DiLoCo.outer_calls."""
        return []

    @property
    def abstract_outer_params(self) -> Any:
        """ShapeDtypeStructs of `outer_params`."""
        return self.abstract_state.params

    def abstract_metrics(self, batch: Any) -> Any:
        """ShapeDtypeStructs of the metrics of a step, leaves [1]."""
        like = self.abstract_state
        shapes = self.inner.out_shapes(like.params, like.opt_state, batch)[2]
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._everywhere), shapes
        )

    def step(self, state: State, batch: Any) -> tuple[State, Any]:
        """One step; state is donated, batch leaves [R, ...], metrics leaves [1]."""
        if self._paced:  # see DiLoCo: a host that runs ahead deadlocks the rendezvous on CPU
            jax.block_until_ready(state.params)
        params, opt_state, metrics = self.inner(state.params, state.opt_state, batch)
        return State(state.t + 1, params, opt_state), metrics

    def check_finite(self, state: State) -> None:
        """Nothing is exchanged apart from the step; the loss tells."""

    def replica_params(self, state: State) -> Any:
        """The parameters, leaves [1, ...]."""
        return jax.tree.map(lambda x: x[None], state.params)

    def outer_params(self, state: State) -> Any:
        """The parameters, leaves [...]."""
        return state.params

    def bytes_sent(self, t: int) -> int:
        """Bytes that step t sends to other slices per replica: not counted, 0 (see benchmarks)."""
        return 0
