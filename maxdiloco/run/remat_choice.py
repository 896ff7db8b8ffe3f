"""remat_policy=auto: choose the policy with the least recomputation that fits the device."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from maxdiloco.cluster.agree import in_any_process
from maxdiloco.config.keys import Config
from maxdiloco.engine.calls import memory_of
from maxdiloco.metrics.compile_log import compile_in_threads, log_progress
from maxdiloco.metrics.out_of_memory import out_of_memory_message
from maxdiloco.models.kernels.choice import MOST_UNROLLED
from maxdiloco.models.remat import AUTO, POLICIES
from maxdiloco.parallel import chips
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.run.assemble import Parts, micro_batches
from maxdiloco.run.settings import RunSettings

MIB = 2**20
# `none` is tried only if the layers are not a loop. The values that it keeps beyond `minimal`, 34
# GiB a device for the 1b model, take longer to write and read than to compute again. This holds by
# arithmetic for v5e and by measurement on a CPU (benchmarks/results/step_time.md).
TRIED = tuple(policy for policy in POLICIES if policy != "none")
LAST = TRIED[-1]
# Fraction of the memory that JAX allocates on a GPU. XLA:GPU needs all temporaries of a program in
# one contiguous piece. Fragmented memory may lack one, which shows only when the program runs.
SHARE_ON_GPU = 0.9
ON_CPU = "save_context"  # the fastest (benchmarks/results/step_time.md), for little memory


def device_memory(mesh: Mesh) -> int | None:
    """Return the memory that a program may use on a device [bytes]; None if unknown or on a CPU."""
    device = mesh.local_devices[0] if mesh.local_devices else mesh.devices.flat[0]
    chip = chips.find_chip(device.device_kind)
    if chip and chip.hbm_gib:
        return chip.hbm
    return None if device.platform == "cpu" else (device.memory_stats() or {}).get("bytes_limit")


def build(
    settings: RunSettings,
    make: Callable[[RunSettings], Parts],
    mesh: Mesh,
    *,
    memory: int | None,
    say: Callable[[str], None],
    expected_s: float | None = None,
) -> tuple[RunSettings, Parts]:
    """Replace remat_policy=auto by a policy, and build the parts. All processes call it.

    Compiles the inner steps to compare their memory. The last resort, `full`, is not compiled.

    Args:
      settings: settings of the run.
      make: builds the parts from settings.
      mesh: the devices.
      memory: see device_memory.
      say: logs a line.
      expected_s: compile time of an inner step [s], for an estimate in the log.

    Returns:
      The settings with a policy, and their parts.
    """
    if settings.model.config.remat_policy != AUTO:
        return settings, make(settings)

    def made(policy: str) -> tuple[RunSettings, Parts]:
        chosen = settings.with_model(remat_policy=policy)
        return chosen, make(chosen)

    if memory is None:
        policy, why = LAST, "because the memory of a device is unknown"
        if mesh.devices.flat[0].platform == "cpu":
            policy, why = ON_CPU, "which is the fastest on a CPU"
        say(f"remat_policy=auto: {policy}, {why}")
        return made(policy)
    of, tried = "", TRIED
    if mesh_lib.on_gpus(mesh):
        memory, of = int(memory * SHARE_ON_GPU), f", {SHARE_ON_GPU:g} of the GPU's,"
        tried = tuple(POLICIES) if _has_no_loop(settings, mesh) else TRIED
    for policy in tried[:-1]:
        chosen, parts = made(policy)
        needed = _needed(chosen, parts, memory, say, expected_s)
        if not in_any_process(needed > memory):
            say(
                f"remat_policy=auto: {policy}; the inner step needs {needed / MIB:,.0f} of "
                f"{memory / MIB:,.0f} MiB{of} with the rest of the run's state"
            )
            return chosen, parts
        parts.trainer.close()
    say(f"remat_policy=auto: {LAST}, because no other policy fits {memory / MIB:,.0f} MiB")
    return made(LAST)


def _has_no_loop(settings, mesh):
    """Whether the layers are unrolled on a GPU, since its weights are whole: models/decoder.py."""
    split = math.prod(n for axis, n in mesh.shape.items() if axis not in ("diloco", "data"))
    return split == 1 and settings.model.config.num_layers <= MOST_UNROLLED


def _needed(
    settings: RunSettings,
    parts: Parts,
    memory: int,
    say: Callable[[str], None],
    expected_s: float | None,
) -> float:
    """Return the bytes on a device with the largest inner step; inf if it cannot fit."""
    if kept_bytes(parts, micro_batches(settings, parts.mesh)) > memory:
        return math.inf  # not compiled: programs that are far too large compile longest
    needed = 0
    tokens = parts.batch["tokens"]
    calls = parts.trainer.calls(parts.batch)
    steps = [call for call in calls if any(x is tokens for x in jax.tree.leaves(call.args))]
    # Wait for all of them. They take about equally long, and nothing else compiles concurrently.
    policy = settings.model.config.remat_policy
    say(f"remat_policy=auto: compiling the step with {policy}, programs: {len(steps)}")
    progress = log_progress(say, len(steps), expected_s=expected_s)
    with progress as ended, compile_in_threads(steps, ended) as futures:
        for future, call in futures.items():
            try:
                step = memory_of(future.result(), call, parts.trainer.abstract_state)
                needed = max(needed, step.needed)
            except jax.errors.JaxRuntimeError as error:
                if out_of_memory_message(error) is None:
                    raise
                needed = math.inf
    return needed


def kept_bytes(parts: Parts, accumulation: int) -> int:
    """Return a lower bound on the bytes that a device keeps for the backward pass of a step.

    Without a loop over layers the bound does not hold for `none`: the compiler recomputes up to
    half of these bytes. `none` is then left out on some GPUs that it would fit.
    """
    devices = parts.mesh.size // parts.mesh.shape["diloco"]
    rows = parts.batch["tokens"].shape[1] // accumulation
    struct = jax.ShapeDtypeStruct((rows, parts.shape.length), jnp.int32)
    batch = {"tokens": struct, "segment_ids": struct}

    def backward(params: Any, batch: Any) -> Any:
        return jax.vjp(lambda params: parts.model.loss(params, batch)[0], params)[1]

    kept = jax.tree.leaves(jax.eval_shape(backward, parts.params, batch))
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in kept) // devices


def memory_remedies(
    cfg: Config, *, outer_state: bool, remat_policy: str = "", has_devices: bool = True
) -> str:
    """Return the remedies that are not yet active, for a program that does not fit the memory.

    Args:
      cfg: config of the run.
      outer_state: whether the run has outer state.
      remat_policy: the policy that was chosen; empty: the policy of the config.
      has_devices: False for absent GPUs, because programs with host memory cannot be compiled for
        them.
    """
    where = "" if has_devices else " on the GPUs themselves"
    remedies = ["more devices in a slice"]
    if cfg.per_device_batch_size > 1:
        remedies.append("a smaller per_device_batch_size")
    # AUTO means `full` for a model that is not trained.
    if (remat_policy or cfg.remat_policy) not in ("full", AUTO):
        remedies.append("remat_policy=full")
    if outer_state and cfg.diloco_outer_memory == "device":
        remedies.append(f"diloco_outer_memory=pinned_host{where}")
    if not cfg.optimizer_memory_host_offload:
        remedies.append(f"optimizer_memory_host_offload=true{where}")
    *most, last = remedies
    return f"Use {', '.join(most)} or {last}." if most else f"Use {last}."
