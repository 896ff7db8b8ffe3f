"""The baseline: one set of parameters, gradients averaged over all devices in every step.

It has the same mesh, batches and inner step as DiLoCo. The mesh axis `diloco` splits the rows of
the batch.

    # R leading dim of a batch, which is folded into its rows
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiloco.engine import finite, trainer
from maxdiloco.engine.calls import Call
from maxdiloco.engine.trainer import OUTER_PARAMS, Description, SavedLayout
from maxdiloco.parallel import chips, offload
from maxdiloco.parallel.program import Program, throttle_cpu
from maxdiloco.parallel.sharding import shardings_of, spec_on


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """One set of parameters and optimizer state, and t as a Python int."""

    t: int = field(metadata=dict(static=True))
    params: Any
    opt_state: Any


def gradient_bytes(params: Any, dtype: Any, *, slices: int, accumulation: int) -> float:
    """Return the bytes that one slice sends in a step for a ring all-reduce of the gradients.

    They are 2 (S - 1) / S times the bytes of the gradients for each micro-batch. A compiler may
    send some gradients in another dtype, or sum the two parts of a tied embedding separately (CPU).

    Args:
      params: the model's parameters.
      dtype: dtype in which gradients are summed.
      slices: number of slices, S.
      accumulation: number of micro-batches of a step.
    """
    values = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
    return accumulation * values * jnp.dtype(dtype).itemsize * 2 * (slices - 1) / slices


class DataParallel:
    """The trainer (engine.trainer.Trainer) of data parallelism.

    The batch has a leading R, which is folded into its rows. Metrics get a leading dim of 1.
    """

    num_replicas = 1
    period = 1
    description = Description(
        "data parallel", ("enable_diloco=false: nothing is exchanged in fragments.",)
    )

    def __init__(
        self,
        inner_step: Callable,
        params: Any,
        opt_state: Any,
        *,
        mesh: Mesh,
        accumulation: int = 1,
        gradient_dtype: Any = jnp.float32,
        on_compile: Callable,
    ):
        """Lay out the state; nothing is allocated or compiled.

        Args:
          inner_step: see DiLoCo.
          params: parameters, as ShapeDtypeStructs.
          opt_state: state of the optimizer, as ShapeDtypeStructs.
          mesh: the mesh.
          accumulation: number of micro-batches of a step.
          gradient_dtype: dtype in which the gradients of a micro-batch are summed over the devices.
          on_compile: see Program.
        """

        def struct(x):
            sharding = NamedSharding(mesh, spec_on(x, mesh), memory_kind=offload.memory_kind(x))
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        def step(params, opt_state, batch):
            rows = jax.tree.map(lambda x_R: x_R.reshape(-1, *x_R.shape[2:]), batch)
            # The context mesh lets the model lay out its activations over every batch axis.
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                params, opt_state, metrics = inner_step(params, opt_state, rows)
            return params, opt_state, jax.tree.map(lambda x: x[None], metrics)

        self.mesh = mesh
        self.abstract_state = State(0, *jax.tree.map(struct, (params, opt_state)))
        params = self.abstract_state.params
        self.exported = self.evaluated = trainer.OuterParamsView(params, lambda state: state.params)
        self._accumulation, self._gradient_dtype = accumulation, gradient_dtype
        self._on_compile = on_compile
        kept = shardings_of(self.abstract_state)
        self.inner = Program(
            "data parallel",
            offload.with_state_on_device(step, self.abstract_state.opt_state),
            donate=(0, 1),
            out_shardings=(kept.params, kept.opt_state, NamedSharding(mesh, P())),
            compiler_options=chips.step_options(mesh.devices.flat[0].device_kind),
            on_compile=on_compile,
        )

    def init_program(self, make: Callable[..., tuple[Any, Any]], **options) -> Program:
        """See Trainer."""
        return Program(
            "init",
            lambda *args: State(0, *make(*args)),
            out_shardings=shardings_of(self.abstract_state),
            on_compile=self._on_compile,
            **options,
        )

    def calls(self, batch: Any) -> list[Call]:
        """Return the one program."""
        like = self.abstract_state
        return [Call(self.inner, (like.params, like.opt_state, batch), 1)]

    def step(self, state: State, batch: Any) -> tuple[State, Any]:
        """Take one step; state is donated, batch leaves [R, ...], metrics leaves [1]."""
        throttle_cpu(self.mesh, state.params)
        params, opt_state, metrics = self.inner(state.params, state.opt_state, batch)
        return State(state.t + 1, params, opt_state), metrics

    def check_finite(self, state: State, *, exchanges_only: bool = False) -> None:
        """See Trainer. Nothing is exchanged; the loss shows gradients that are not finite."""
        if not exchanges_only:
            finite.check_params(state.params, state.t, replicas=False)

    def bytes_sent(self, t: int) -> float:
        """Return the bytes that one slice sends to the others in a step; see gradient_bytes."""
        sizes = dict(slices=self.mesh.shape["diloco"], accumulation=self._accumulation)
        return gradient_bytes(self.abstract_state.params, self._gradient_dtype, **sizes)

    def extra_metrics(self, state: State) -> dict[str, float]:
        """Return {}."""
        return {}

    def closing_line(self, state: State) -> str:
        """Return the step as text."""
        return f"done: step {state.t}"

    def checkpoint(self, state: State) -> tuple[dict[str, Any], dict[str, Any]]:
        """See Trainer: parameters and optimizer state, the same on any mesh."""
        metadata = {
            "num_replicas": 1,
            "mesh": dict(self.mesh.shape),
            "exchange": {},
            "dropped_until": 0,
            "schedule_since": 0,
        }
        return {OUTER_PARAMS: state.params, "opt_state": state.opt_state}, metadata

    def restore_plan(self, saved: SavedLayout) -> trainer.RestorePlan:
        """See Trainer. The state is the same on any mesh."""
        del saved

        def state_of(items, *, t):
            return State(t, items[OUTER_PARAMS], items["opt_state"])

        items, _ = self.checkpoint(self.abstract_state)
        return trainer.RestorePlan(items, state_of)

    def close(self) -> None:
        """Do nothing: this trainer has no threads."""
