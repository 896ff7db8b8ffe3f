"""The plain inner step of a job, compiled for slices that need not be there, or guessed."""

import functools
from collections.abc import Callable

import jax

from maxdiloco.aot import measure, target
from maxdiloco.aot.hlo.replay import Link
from maxdiloco.errors import ConfigError
from maxdiloco.flags import config
from maxdiloco.flags.config import Config
from maxdiloco.flags.hardware import hardware_of
from maxdiloco.metrics.compiles import make_room
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.planning.choices import EXACT
from maxdiloco.planning.job import Job
from maxdiloco.planning.rating import Step
from maxdiloco.trainer import assemble, remat_choice
from maxdiloco.trainer.flops import flops_per_token

# Model FLOPs over the peak in a step, for GPUs whose step was not measured: Llama 3 405B trained at
# 38 to 43 % of bfloat16's on H100s (arXiv 2407.21783, Table 4).
MFU = 0.4


def plain_step(cfg: Config, *, gbps: float, say: Callable[[str], None]) -> Step:
    """Time and memory of the step without an exchange, the same in every mode.

    Takes one compilation, and one more for each policy of remat_policy=auto that does not fit the
    chip. Raises ConfigError where libtpu is missing and for a program that the chip does not hold.
    """
    if cfg.jax_cache_dir:
        jax.config.update("jax_compilation_cache_dir", cfg.jax_cache_dir)
    cfg = config.from_dict(cfg.as_dict() | EXACT.keys())
    cfg, mesh, chip = target.of(cfg)
    make = functools.partial(
        assemble.assemble,
        mesh=mesh,
        total_steps=max(1, cfg.steps),
        on_compile=lambda name, seconds, _: say(f"compiled {name} in {seconds:.1f} s"),
    )
    cfg, parts = remat_choice.build(cfg, make, mesh, memory=chip.hbm, say=say)
    dcn = mesh_lib.sizes_over_slices(hardware_of(cfg), list(mesh.devices.flat))
    (found,) = measure.measure(
        parts.trainer.calls(parts.batch)[:1],
        parts.trainer.abstract_state,
        mesh_tiers=measure.tiers(mesh, dcn),
        link=Link.of(chip, gbps),
        say=say,
    )
    if found.too_big:
        raise ConfigError(
            f"model_name={cfg.model_name} is too big for {cfg.compile_topology}: {found.too_big} "
            f"{make_room(cfg, outer_state=False)}"  # the plan tries pinned_host itself
        )
    if found.kernels:
        say(f"the step's time leaves out {found.kernels} Pallas kernels whose products are unknown")
    return Step(found.seconds, found.memory.peak, "compiled, never run")


def estimated_step(job: Job) -> Step:
    """A guess from the peak of the job's chip, at MFU of it; nothing is compiled."""
    chip = job.chip
    flops = job.tokens * flops_per_token(job.cfg, job.params)
    seconds = flops / (MFU * chip.peak_flops * job.slices * job.per_slice)
    origin = (
        f"a guess: {MFU:.0%} of the peak of {chip.peak_flops / 1e12:g} TFLOP/s a device; a small "
        f"model or batch is slower. Measure it, and give step_time=SECONDS"
    )
    return Step(seconds, 0, origin)
