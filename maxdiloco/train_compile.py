"""Compile a run ahead of time and say what crosses slices: `python -m maxdiloco.train_compile`.

Takes the flags of maxdiloco.train. With compile_topology no accelerator is needed, only libtpu.
Exit code 1 when the programs should not be run as they are, so that it can stand before a job.
"""

import json
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from maxdiloco.command_line import HELP, end_with, guarded
from maxdiloco.errors import ConfigError
from maxdiloco.flags import base_yml, config
from maxdiloco.flags.config import Config
from maxdiloco.processes.output import one_line, say, say_error

REFUSED = 1


@guarded
def main(argv: Sequence[str]) -> int:
    """Run the program; returns its exit code."""
    if any(argument in HELP for argument in argv):
        say(base_yml.help_text("maxdiloco.train_compile"))
        return 0
    cfg = config.load(argv, os.environ)
    if cfg.steps == -1 and cfg.learning_rate_schedule_steps == -1:
        raise ConfigError(
            "steps=-1 leaves the length of the learning-rate schedule to the data, which are not "
            "read here. Set steps or learning_rate_schedule_steps."
        )
    return _compile(cfg)


def _compile(cfg: Config) -> int:
    from maxdiloco.aot import report
    from maxdiloco.metrics import tables
    from maxdiloco.parallel import mesh as mesh_lib
    from maxdiloco.trainer import compiled_file

    for key in ("compiled_trainstep_file", "report"):
        if path := cfg.as_dict()[key]:
            compiled_file.check_place(key, path)
    for line in config.describe_differences(cfg):
        _say(line)
    mesh, chip = _devices(cfg)
    _say(mesh_lib.describe(mesh, cfg))
    fresh = compiled_file.compiled_here() if cfg.compiled_trainstep_file else nullcontext()
    with fresh:
        parts, made = _one(cfg, mesh, chip)
    if cfg.enable_diloco:
        for line in tables.fragment_table(parts.trainer.layout):
            _say(line)
    reports = [made]
    if cfg.compile_data_parallel and cfg.enable_diloco:
        reports.append(_one(_data_parallel(cfg), mesh, chip)[1])
    for one in reports:
        for line in report.lines(one):
            _say(line)
        _say("")
    if cfg.report:
        content = {"reports": [report.as_json(one) for one in reports]}
        text = json.dumps(content, indent=1) + "\n"
        compiled_file.write_whole("report", cfg.report, text.encode())
    refused = report.refusals(made, max_exposed_fraction=cfg.max_exposed_fraction)
    for line in refused:
        say_error(f"refused: {line}")
    if cfg.compiled_trainstep_file and not any(one.too_big for one in made.programs):
        calls = _calls(cfg, parts)
        size = compiled_file.save(
            cfg.compiled_trainstep_file, cfg, parts, calls, total_steps=cfg.steps
        )
        _say(f"{len(calls)} programs, {size / 2**20:.1f} MiB: {cfg.compiled_trainstep_file}")
    return REFUSED if refused else 0


def _say(line: str) -> None:
    say(one_line(line))


def _devices(cfg: Config) -> tuple[Any, Any]:
    """The mesh to compile for, and what one of its TPU devices is; None for other devices."""
    import jax

    from maxdiloco.aot import topology
    from maxdiloco.parallel import mesh as mesh_lib

    if cfg.jax_cache_dir:
        jax.config.update("jax_compilation_cache_dir", cfg.jax_cache_dir)
    if cfg.compile_topology:
        jax.config.update("jax_platforms", "cpu")  # nothing here runs; other backends may be absent
        devices = topology.devices(cfg.compile_topology, cfg.compile_topology_num_slices)
        return mesh_lib.build(cfg, devices), topology.chip(cfg.compile_topology)
    mesh_lib.choose_platform(cfg)
    mesh_lib.emulate_devices(cfg, num_processes=1)
    mesh = mesh_lib.build(cfg)
    if mesh.devices.flat[0].platform == "tpu":
        raise ConfigError(
            "compile_topology is empty, but the devices of this machine are TPUs. Name them, as "
            "compile_topology=v5e-16."
        )
    return mesh, None


def _one(cfg: Config, mesh: Any, chip: Any) -> tuple[Any, Any]:
    """The parts of a run on the mesh, and the report on its programs."""
    from maxdiloco.aot import measure, report
    from maxdiloco.aot.hlo.replay import Link
    from maxdiloco.checkpoint import arrays
    from maxdiloco.parallel import mesh as mesh_lib
    from maxdiloco.trainer import assemble

    parts = assemble.assemble(cfg, mesh, total_steps=cfg.steps, on_compile=_told())
    dcn = mesh_lib.sizes_over_slices(cfg, list(mesh.devices.flat))
    state = parts.trainer.abstract_state
    restore = arrays.calls(state, axis="diloco", on_compile=_told())
    found = measure.measure(
        [*_calls(cfg, parts), *restore],
        state,
        mesh_tiers=measure.tiers(mesh, dcn),
        link=chip and Link(cfg.dcn_bandwidth_gbps, chip.clock_hz, chip.ici_gbps),
        say=_say,
    )
    slices = mesh_lib.count_slices(cfg, list(mesh.devices.flat))
    what = _mode(cfg) if cfg.enable_diloco else "data parallel"
    return parts, report.Report(
        title=f"{cfg.model_name}, {what}, {slices} x "
        f"{cfg.compile_topology or f'{mesh.size // slices} {cfg.hardware} devices'}",
        period=cfg.diloco_sync_period if cfg.enable_diloco else 1,
        devices_per_slice=mesh.size // slices,
        chip=chip,
        gbps=cfg.dcn_bandwidth_gbps,
        programs=found,
    )


def _mode(cfg: Config) -> str:
    overlap = f"tau {cfg.num_communication_overlapping_steps}"
    if cfg.diloco_outer_overlap != "none":
        overlap = cfg.diloco_outer_overlap
    return (
        f"DiLoCo of {cfg.num_diloco_fragments} fragments, {overlap}, {cfg.diloco_exchange_dtype}"
    )


def _told() -> Callable[[str, float, Any], None]:
    def tell(name, seconds, compiled):
        _say(f"compiled {name} in {seconds:.1f} s")

    return tell


def _calls(cfg: Config, parts: Any) -> Any:
    from maxdiloco.trainer import assemble

    return assemble.calls(cfg, parts)


def _data_parallel(cfg: Config) -> Config:
    return config.from_dict(cfg.as_dict() | {"enable_diloco": False})


def cli() -> None:
    """The console entry `maxdiloco-train-compile`."""
    end_with(main)


if __name__ == "__main__":
    cli()
