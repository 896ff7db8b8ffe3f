"""Compile a run ahead of time and say what crosses slices: `python -m maxdiloco.train_compile`.

Takes the flags of maxdiloco.train. With compile_topology no accelerator is needed, only libtpu or
JAX's plugin for CUDA.
Exit code 1 when the programs should not be run as they are, so that it can stand before a job.
"""

import functools
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from maxdiloco.command_line import end_with, guarded
from maxdiloco.errors import ConfigError
from maxdiloco.flags import config, help
from maxdiloco.flags.config import Config
from maxdiloco.processes.output import one_line, say, say_error

REFUSED = 1


@guarded
def main(argv: Sequence[str]) -> int:
    """Run the program; returns its exit code."""
    if words := help.asked(argv):
        say(help.help_text("maxdiloco.train_compile", words[1:]))
        return 0
    cfg = config.load(argv, os.environ)
    from maxdiloco.evaluation import run_tokenizer

    return _compile(run_tokenizer.resolved(cfg))


def _compile(cfg: Config) -> int:
    from maxdiloco.aot import figures, report, verdict
    from maxdiloco.flags.hardware import hardware_of
    from maxdiloco.parallel import mesh as mesh_lib
    from maxdiloco.trainer import assemble, compiled_file

    for key in ("compiled_trainstep_file", "report"):
        if path := cfg.as_dict()[key]:
            compiled_file.check_place(key, path)
    cfg, mesh, chip = _devices(cfg)
    cfg = config.with_replicas(cfg, assemble.batch_shape(cfg, mesh).num_replicas)
    for line in config.describe_differences(cfg):
        _say(line)
    if cfg.compiled_trainstep_file:
        compiled_file.check_order(cfg.compiled_trainstep_file, cfg, mesh)
    _say(mesh_lib.describe(mesh, hardware_of(cfg)))
    fresh = compiled_file.compiled_here() if cfg.compiled_trainstep_file else nullcontext()
    with fresh:
        chosen, parts, result = _measured(cfg, mesh, chip)
    results = [result]
    if baseline := assemble.baseline(cfg):
        results.append(_measured(baseline, mesh, chip)[-1])
    _say("")
    for each in results:
        for line in verdict.lines(each):
            _say(line)
    _say("")
    for line in parts.trainer.description().fragments:
        _say(line)
    for each in results:
        _say("")
        for line in report.lines(each):
            _say(line)
    if cfg.report:
        content = {
            "reports": [figures.as_json(r) | {"verdict": verdict.as_json(r)} for r in results]
        }
        text = json.dumps(content, indent=1) + "\n"
        compiled_file.write_whole("report", cfg.report, text.encode())
    refused = report.refusals(result, max_exposed_fraction=cfg.max_exposed_fraction)
    if room := verdict.does_not_fit(result):
        refused.insert(0, room)
    for line in refused:
        say_error(f"refused: {line}")
    if cfg.compiled_trainstep_file and not any(program.too_big for program in result.programs):
        calls = assemble.calls(cfg, parts)
        size = compiled_file.save(cfg.compiled_trainstep_file, chosen, mesh, calls)
        _say(f"{len(calls)} programs, {size / 2**20:.1f} MiB: {cfg.compiled_trainstep_file}")
    return REFUSED if refused else 0


def _say(line: str) -> None:
    say(one_line(line))


def _devices(cfg: Config) -> tuple[Config, Any, Any]:
    """The config with its slices, the mesh to compile for, and the chip of compile_topology.

    The chip is None for devices of this machine.
    """
    import jax

    from maxdiloco.aot import target, topology
    from maxdiloco.flags.hardware import hardware_of
    from maxdiloco.parallel import mesh as mesh_lib

    if cfg.jax_cache_dir:
        jax.config.update("jax_compilation_cache_dir", cfg.jax_cache_dir)
    if cfg.compile_topology:
        if not topology.is_gpu(cfg.compile_topology):
            mesh_lib.tell_libtpu(hardware_of(cfg))
        elif cfg.compiled_trainstep_file:
            raise ConfigError(
                f"compiled_trainstep_file={cfg.compiled_trainstep_file} cannot be made for "
                f"compile_topology={cfg.compile_topology}: without a GPU the compiler cannot try "
                f"which kernels are fast. Make it on the GPUs, with compile_topology empty."
            )
        return target.of(cfg)
    mesh_lib.choose_platform(hardware_of(cfg))
    mesh_lib.emulate_devices(hardware_of(cfg), num_processes=1)
    mesh = mesh_lib.build(hardware_of(cfg))
    if mesh.devices.flat[0].platform == "tpu":
        raise ConfigError(
            "compile_topology is empty, but the devices of this machine are TPUs. Name them, as "
            "compile_topology=v5e-16."
        )
    return cfg, mesh, None


def _measured(cfg: Config, mesh: Any, chip: Any) -> tuple[Config, Any, Any]:
    """The config with remat_policy chosen, the parts of a run on the mesh, and the report."""
    from maxdiloco.aot import measure, topology
    from maxdiloco.aot.figures import Report
    from maxdiloco.aot.hlo.replay import Link
    from maxdiloco.checkpoint import arrays
    from maxdiloco.flags.hardware import hardware_of
    from maxdiloco.parallel import chips
    from maxdiloco.parallel import mesh as mesh_lib
    from maxdiloco.trainer import assemble, remat_choice

    def on_compile(name, seconds, compiled):
        _say(f"compiled {name} in {seconds:.1f} s")

    make = functools.partial(
        assemble.assemble, mesh=mesh, total_steps=cfg.steps, on_compile=on_compile
    )
    memory = chip.hbm if chip else remat_choice.device_memory(mesh)
    cfg, parts = remat_choice.build(cfg, make, mesh, memory=memory, say=_say)
    dcn = mesh_lib.sizes_over_slices(hardware_of(cfg), list(mesh.devices.flat))
    state = parts.trainer.abstract_state
    restore = arrays.calls(state, on_compile=on_compile)
    tiers = measure.tiers(mesh, dcn)
    programs = measure.measure(
        [*assemble.calls(cfg, parts), *restore],
        state,
        mesh_tiers=tiers,
        link=Link.of(chip, cfg.dcn_bandwidth_gbps) if chip and chip.timed else None,
        say=_say,
    )
    slices = mesh_lib.count_slices(hardware_of(cfg), list(mesh.devices.flat))
    return cfg, parts, Report(
        title=f"{cfg.model_name}, {parts.trainer.description().title}, {slices} x "
        f"{cfg.compile_topology or f'{mesh.size // slices} {cfg.hardware} devices'}",
        period=parts.trainer.period,
        devices_per_slice=mesh.size // slices,
        chip=chip,
        gbps=cfg.dcn_bandwidth_gbps,
        programs=programs,
        flags=chips.compiler_flags(),
        job=_job(cfg, parts, mesh, tiers.ici),
        devices_per_host=topology.devices_per_host(cfg.compile_topology) if chip else 0,
        by_hosts=_by_hosts(cfg, parts, mesh),
    )


def _by_hosts(cfg: Config, parts: Any, mesh: Any) -> float:
    """Bytes that a slice sends in a period through its hosts."""
    from maxdiloco.trainer import assemble

    if not assemble.needs_bulk(cfg, mesh):
        return 0.0
    period = parts.trainer.period
    steps = range(2 * period + 1, 3 * period + 1)  # not the first, in which little has arrived
    replicas = parts.shape.num_replicas // mesh.shape["diloco"]
    return float(replicas * sum(map(parts.trainer.bytes_sent, steps)))


def _job(cfg: Config, parts: Any, mesh: Any, ici: Mapping[str, int]) -> Any:
    from maxdiloco.aot import topology
    from maxdiloco.aot.figures import Job
    from maxdiloco.metrics.compiles import make_room
    from maxdiloco.trainer import flops

    exchanges = bool(parts.trainer.description().resident)  # "" of data parallelism
    return Job(
        tokens_per_step=parts.shape.tokens,
        flops_per_token=flops.flops_per_token(cfg, parts.params),
        num_devices=mesh.size,
        tau=cfg.num_communication_overlapping_steps,
        overlap=cfg.diloco_outer_overlap if exchanges else "",
        topology=cfg.compile_topology,
        room=make_room(
            cfg, outer_state=exchanges, there=not topology.is_gpu(cfg.compile_topology)
        ),
        ici=ici,
    )


def cli() -> None:
    """The console entry `maxdiloco-train-compile`."""
    end_with(main)


if __name__ == "__main__":
    cli()
