"""remat_policy=auto: the policy that computes least twice and whose inner step fits the device."""

import math
from collections.abc import Callable
from concurrent.futures import as_completed
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from maxdiloco.engine.calls import memory_of
from maxdiloco.flags import config
from maxdiloco.flags.config import Config
from maxdiloco.metrics.compiles import side_by_side, too_big
from maxdiloco.models.remat import AUTO, POLICIES
from maxdiloco.parallel import chips
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.processes.agree import in_any_process
from maxdiloco.trainer.assemble import Parts

MIB = 2**20
# Not `none`: what it keeps beyond `minimal`, 34 GiB a device of 1b, takes longer to write and to
# read than to compute again, by arithmetic for v5e and by measurement on a CPU
# (benchmarks/log).
TRIED = tuple(policy for policy in POLICIES if policy != "none")
LAST = TRIED[-1]
# Of what JAX takes of a GPU's memory. XLA:GPU wants all temporaries of a program in one piece, and
# memory in pieces may have none; it shows when the program runs, not before. Our choice.
SHARE_ON_GPU = 0.9
ON_CPU = "save_context"  # the fastest by measurement (benchmarks/log), for little memory


def device_memory(mesh: Mesh) -> int | None:
    """What a program may use on a device [bytes]; None where nothing says it, as on a CPU."""
    device = mesh.local_devices[0] if mesh.local_devices else mesh.devices.flat[0]
    known = chips.memory(device.device_kind)
    if known is not None or device.platform == "cpu":
        return known
    return (device.memory_stats() or {}).get("bytes_limit")


def build(
    cfg: Config,
    make: Callable[[Config], Parts],
    mesh: Mesh,
    *,
    memory: int | None,
    say: Callable[[str], None],
    stored: str = "",
) -> tuple[Config, Parts]:
    """The config with a policy in place of auto, and its parts; all processes call it.

    make: config -> parts. memory: of device_memory. stored: the policy of the file of compiled
    programs that the run starts from. The inner steps of the result are compiled where memory was
    compared. Nothing is refused: `full` is taken unseen.
    """
    if cfg.remat_policy != AUTO:
        return cfg, make(cfg)

    def made(policy: str) -> tuple[Config, Parts]:
        chosen = config.from_dict(cfg.as_dict() | {"remat_policy": policy})
        return chosen, make(chosen)

    if stored:
        say(f"remat_policy=auto: {stored}, as in {cfg.compiled_trainstep_file}")
        return made(stored)
    if memory is None and mesh.devices.flat[0].platform == "cpu":
        say(f"remat_policy=auto: {ON_CPU}, which is the fastest on a CPU")
        return made(ON_CPU)
    if memory is None:
        say(f"remat_policy=auto: {LAST}, since nothing says how much memory a device has")
        return made(LAST)
    of = ""
    if mesh_lib.on_gpus(mesh):
        memory, of = int(memory * SHARE_ON_GPU), f", {SHARE_ON_GPU:g} of the GPU's,"
    for policy in TRIED[:-1]:
        chosen, parts = made(policy)
        needed = _needed(chosen, parts, memory)
        if not in_any_process(needed > memory):
            say(
                f"remat_policy=auto: {policy}; the inner step needs {needed / MIB:,.0f} of "
                f"{memory / MIB:,.0f} MiB{of} with the rest of the run's state"
            )
            return chosen, parts
        parts.trainer.close()
    say(f"remat_policy=auto: {LAST}, since no other policy fits {memory / MIB:,.0f} MiB")
    return made(LAST)


def _needed(cfg: Config, parts: Parts, memory: int) -> float:
    """Bytes on a device with the largest inner step; inf where it is known not to fit."""
    if kept_bytes(parts, cfg.gradient_accumulation_steps) > memory:
        return math.inf  # without a compile, which takes longest where the most does not fit
    needed = 0
    tokens = parts.batch["tokens"]
    calls = parts.trainer.calls(parts.batch)
    steps = [call for call in calls if any(x is tokens for x in jax.tree.leaves(call.args))]
    # All are waited for: they take about as long, and nothing else compiles beside them.
    with side_by_side(steps) as futures:
        for future in as_completed(futures):
            try:
                compiled = future.result()
            except jax.errors.JaxRuntimeError as error:
                if too_big(error) is None:
                    raise
                needed = math.inf
            else:
                step = memory_of(compiled, futures[future], parts.trainer.abstract_state)
                needed = max(needed, step.needed)
    return needed


def kept_bytes(parts: Parts, accumulation: int) -> int:
    """Bytes a device keeps from the forward for the backward pass of a step, at least."""
    devices = parts.mesh.size // parts.mesh.shape["diloco"]
    rows = parts.shape.sequences // accumulation
    struct = jax.ShapeDtypeStruct((rows, parts.shape.length), jnp.int32)
    batch = {"tokens": struct, "segment_ids": struct}

    def backward(params: Any, batch: Any) -> Any:
        return jax.vjp(lambda params: parts.model.loss(params, batch)[0], params)[1]

    kept = jax.tree.leaves(jax.eval_shape(backward, parts.params, batch))
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in kept) // devices
