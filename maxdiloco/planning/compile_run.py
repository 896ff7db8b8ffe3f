"""Compile the programs of a run, also for slices that are absent."""

import functools
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from maxdiloco.checkpoint import arrays
from maxdiloco.config import config
from maxdiloco.config.keys import Config
from maxdiloco.config.values import show
from maxdiloco.errors import ConfigError
from maxdiloco.metrics.compile_log import CompileLog
from maxdiloco.metrics.speed import flops_per_token
from maxdiloco.parallel import chips
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.parallel.chips import Chip
from maxdiloco.planning import compile_time, program_costs, topology
from maxdiloco.planning.compile_report import Report
from maxdiloco.planning.program_costs import ProgramCost
from maxdiloco.run import assemble, remat_choice
from maxdiloco.run import settings as run_settings
from maxdiloco.run.compile_cache import own_cache
from maxdiloco.run.remat_choice import memory_remedies
from maxdiloco.run.settings import RunSettings

# Values that keep arrays in host memory, and the values that keep them on the device.
_ON_HOST = (
    ("diloco_outer_memory", "pinned_host", "device"),
    ("optimizer_memory_host_offload", True, False),
)


def open_devices(cfg: Config) -> tuple[Config, Mesh, Chip | None]:
    """Open the devices to compile for: compile_topology's, or this machine's.

    Returns:
      The config with its slices, the mesh, and the chip; None for devices of this machine.

    Raises:
      ConfigError: a key cannot be compiled for compile_topology, or its compiler is missing.
    """
    if cfg.jax_cache_dir:
        folder = own_cache(cfg.jax_cache_dir, "jax_cache_dir")
        jax.config.update("jax_compilation_cache_dir", folder)
    if name := cfg.compile_topology:
        if not topology.find(name).is_gpu:
            mesh_lib.configure_libtpu(run_settings.read_mesh(cfg))
        return _absent(cfg)
    of_mesh = run_settings.read_mesh(cfg)
    mesh_lib.choose_platform(of_mesh)
    mesh_lib.emulate_devices(of_mesh, num_processes=1)
    mesh = mesh_lib.build(of_mesh)
    if mesh.devices.flat[0].platform == "tpu":
        raise ConfigError(
            "compile_topology is empty, but the devices of this machine are TPUs. Name them, as "
            "compile_topology=v5e-16."
        )
    return cfg, mesh, None


def _absent(cfg: Config) -> tuple[Config, Mesh, Chip]:
    """Return the config, the mesh and the chip of compile_topology."""
    jax.config.update("jax_platforms", "cpu")  # nothing here runs; other backends may be absent
    name, num_slices = cfg.compile_topology, cfg.compile_topology_num_slices
    found = topology.find(name)
    if found.is_gpu:  # the devices do not have the number of their slice
        for key, on_host, on_device in _ON_HOST:
            if vars(cfg)[key] == on_host:
                raise ConfigError(
                    f"{key}={show(on_host)} cannot be compiled for compile_topology={name}: "
                    f"without the GPUs the compiler has no host memory. Use "
                    f"{key}={show(on_device)}, which counts all on the device, or leave "
                    f"compile_topology empty on the GPUs."
                )
        mesh_lib.resolve_sizes(cfg.sizes("dcn"), num_slices, "dcn")
        cfg = config.from_dict(cfg.as_dict() | {"num_slices": num_slices})
    topology.check_experts(name, cfg.num_experts)
    mesh = mesh_lib.build(run_settings.read_mesh(cfg), topology.devices(name, num_slices))
    return cfg, mesh, found.chip


def compile_programs(
    cfg: Config,
    mesh: Mesh,
    chip: Chip | None,
    *,
    gbps: float,
    say: Callable[[str], None],
    only_step: bool = False,
) -> tuple[RunSettings, assemble.Parts, list[ProgramCost]]:
    """Compile the programs of a run on the mesh.

    Args:
      cfg: config of the run.
      mesh: to compile for.
      chip: type of a device; None for this machine.
      gbps: a device's share of the link [Gbit/s].
      say: prints a line of progress.
      only_step: compile the plain inner step and no other program.

    Returns:
      The settings with remat_policy chosen, the parts of the run, and the programs.
    """
    on_compile = CompileLog(say, show_memory=False)
    make = functools.partial(
        assemble.assemble, mesh=mesh, total_steps=cfg.steps, on_compile=on_compile
    )
    memory = chip.hbm if chip else remat_choice.device_memory(mesh)
    settings, parts = remat_choice.build(
        run_settings.read(cfg, mesh),
        make,
        mesh,
        memory=memory,
        say=say,
        expected_s=compile_time.step_seconds(cfg),
    )
    state = parts.trainer.abstract_state
    if only_step:
        calls = parts.trainer.calls(parts.batch)[:1]
    else:
        calls = [*assemble.calls(settings, parts), *arrays.calls(state, on_compile=on_compile)]
    dcn = mesh_lib.sizes_over_slices(run_settings.read_mesh(cfg), list(mesh.devices.flat))
    in_turn = on_compile.announce_each(calls, expected_s=compile_time.step_seconds(cfg))
    found = program_costs.measure(in_turn, state, mesh=mesh, dcn=dcn, chip=chip, gbps=gbps, say=say)
    return settings, parts, found


def report_run(
    cfg: Config, mesh: Mesh, chip: Chip | None, *, gbps: float, say: Callable[[str], None]
) -> tuple[assemble.Parts, Report]:
    """Compile the programs of a run on the mesh; return the parts of the run and the report."""
    settings, parts, found = compile_programs(cfg, mesh, chip, gbps=gbps, say=say)
    dcn = mesh_lib.sizes_over_slices(run_settings.read_mesh(cfg), list(mesh.devices.flat))
    slices = mesh_lib.count_slices(run_settings.read_mesh(cfg), list(mesh.devices.flat))
    description, name = parts.trainer.description, cfg.compile_topology
    exchanges = bool(description.resident)  # "" of data parallelism
    named = topology.find(name) if name else None
    made = Report(
        title=f"{cfg.model_name}, {description.title}, {slices} x "
        f"{name or f'{mesh.size // slices} {cfg.hardware} devices'}",
        period=parts.trainer.period,
        programs=found,
        chip=chip,
        topology=name,
        devices_per_slice=mesh.size // slices,
        devices_per_host=named.on_host if named else 0,
        num_devices=mesh.size,
        gbps=gbps,
        flags=chips.compiler_flags(),
        tokens_per_step=parts.shape.tokens,
        flops_per_token=flops_per_token(parts.model.config, parts.params, parts.shape.length),
        tau=cfg.num_communication_overlapping_steps,
        overlap=cfg.diloco_round_overlap if exchanges else "",
        remedy=memory_remedies(
            cfg,
            outer_state=exchanges,
            remat_policy=settings.model.config.remat_policy,
            has_devices=not (named and named.is_gpu),
        ),
        ici={axis: size // dcn[axis] for axis, size in mesh.shape.items()},
        by_hosts=_by_hosts(settings, parts, mesh),
    )
    return parts, made


def _by_hosts(settings: RunSettings, parts: assemble.Parts, mesh: Mesh) -> float:
    """Return the bytes that a slice sends in a period through its hosts."""
    if not assemble.needs_bulk(settings, mesh):
        return 0.0
    period = parts.trainer.period
    steps = range(2 * period + 1, 3 * period + 1)  # little has arrived in the first period
    replicas = parts.shape.num_replicas // mesh.shape["diloco"]
    return float(replicas * sum(map(parts.trainer.bytes_sent, steps)))
