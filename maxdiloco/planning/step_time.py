"""The time of a plain inner step on absent devices: compiled, or guessed from the chip."""

import importlib.util
from collections.abc import Callable

import jax

from maxdiloco.config import config
from maxdiloco.config.keys import Config
from maxdiloco.engine.calls import bytes_on_device
from maxdiloco.errors import ConfigError
from maxdiloco.metrics.speed import flops_per_token
from maxdiloco.planning import compile_run, topology
from maxdiloco.planning.job import EXACT, Job
from maxdiloco.planning.rating import Step
from maxdiloco.run.remat_choice import memory_remedies

# Model FLOPs relative to the peak, for steps that were not compiled: Llama 3 405B trained at 38 to
# 43% of the peak of bfloat16 on H100s (arXiv 2407.21783, Table 4).
MFU = 0.4


def compile_plain_step(cfg: Config, *, gbps: float, say: Callable[[str], None]) -> Step:
    """Compile the step without an exchange, which is the same in every mode.

    Args:
      cfg: config of the run, with compile_topology.
      gbps: a device's share of the link [Gbit/s].
      say: prints a line of progress.

    Returns:
      The time and the memory of the step.

    Raises:
      ConfigError: libtpu is missing, or the step does not fit the chip.
    """
    cfg, mesh, chip = compile_run.open_devices(config.from_dict(cfg.as_dict() | EXACT.keys()))
    settings, _, (found,) = compile_run.compile_programs(
        cfg, mesh, chip, gbps=gbps, say=say, only_step=True
    )
    if found.too_big:
        raise ConfigError(
            f"model_name={cfg.model_name} does not fit {cfg.compile_topology}: {found.too_big} "
            # The plan tries pinned_host itself.
            + memory_remedies(
                cfg, outer_state=False, remat_policy=settings.model.config.remat_policy
            )
        )
    if found.unknown_calls:
        say(f"the time of the step leaves out unknown kernels: {', '.join(found.unknown_calls)}")
    return Step(found.seconds, found.memory.peak, "compiled, never run")


def can_compile(name: str) -> bool:
    """Tell whether a compiler that estimates times for a compile_topology is installed."""
    return topology.find(name).chip.timed and importlib.util.find_spec("libtpu") is not None


def estimate(cfg: Config, job: Job) -> Step:
    """Guess the time of a step: products at MFU of the chip's peak, and its traffic to memory.

    Nothing is compiled. Each micro-batch reads the gathered weights twice, in the type of the
    products. The update reads and writes weights and optimizer state. Gradients are written and
    read once.
    """
    chip, mesh, model = job.chip, job.mesh.shape, job.model.config
    flops = job.tokens * flops_per_token(model, job.params, cfg.max_target_length)
    products_s = flops / (MFU * chip.peak_flops * job.slices * job.per_slice)
    weights, state = (
        sum(map(bytes_on_device, jax.tree.leaves(x))) for x in (job.params, job.opt_state)
    )
    gathered = job.num_parameters / (mesh["tensor"] * mesh["expert"]) * model.dtype.itemsize
    of_replica = 4 * weights + 2 * state + 2 * gathered * cfg.gradient_accumulation_steps
    moved = of_replica * job.num_replicas / job.slices
    origin = (
        f"a guess: {MFU:.0%} of the peak of {chip.peak_flops / 1e12:g} TFLOP/s a device, and "
        f"{moved / 1e9:.3g} GB of its memory at {chip.bandwidth / 1e9:,.0f} GB/s; a small model or "
        f"batch is slower. Measure it, and give step_time=SECONDS"
    )
    return Step(products_s + moved / chip.bandwidth, 0, origin, is_guess=True)
