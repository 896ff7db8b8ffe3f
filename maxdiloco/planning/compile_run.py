"""The programs of a run, compiled for slices that need not be there, or a step that is guessed."""

import functools
import importlib.util
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from maxdiloco.checkpoint import arrays
from maxdiloco.config import config
from maxdiloco.config.keys import Config
from maxdiloco.config.values import show
from maxdiloco.engine.calls import bytes_on_device
from maxdiloco.errors import ConfigError
from maxdiloco.metrics.compiles import CompileLog
from maxdiloco.metrics.speed import flops_per_token
from maxdiloco.parallel import chips
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.parallel.chips import Chip
from maxdiloco.planning import program_costs, table, topology
from maxdiloco.planning.compile_report import Report
from maxdiloco.planning.job import EXACT, Choice, Job
from maxdiloco.planning.program_costs import Measured
from maxdiloco.planning.rating import Step
from maxdiloco.run import assemble, remat_choice
from maxdiloco.run import settings as run_settings
from maxdiloco.run.compile_cache import own_cache
from maxdiloco.run.remat_choice import make_room
from maxdiloco.run.settings import RunSettings

# Model FLOPs over the peak in a step, for GPUs whose step was not measured: Llama 3 405B trained at
# 38 to 43 % of bfloat16's on H100s (arXiv 2407.21783, Table 4).
MFU = 0.4
# Values that keep arrays in host memory, and what counts them on the device.
_ON_HOST = (
    ("diloco_outer_memory", "pinned_host", "device"),
    ("optimizer_memory_host_offload", True, False),
)


def devices(cfg: Config) -> tuple[Config, Mesh, Chip | None]:
    """The config with its slices, the mesh to compile for, and the chip of compile_topology.

    The chip is None for devices of this machine. Raises ConfigError for what cannot be compiled for
    compile_topology, and where its compiler is not installed.
    """
    if cfg.jax_cache_dir:
        folder = own_cache(cfg.jax_cache_dir, "jax_cache_dir")
        jax.config.update("jax_compilation_cache_dir", folder)
    if name := cfg.compile_topology:
        if not topology.find(name).is_gpu:
            mesh_lib.tell_libtpu(run_settings.read_mesh(cfg))
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
    """The config that makes the mesh of compile_topology, the mesh, the chip that one device is."""
    jax.config.update("jax_platforms", "cpu")  # nothing here runs; other backends may be absent
    name, num_slices = cfg.compile_topology, cfg.compile_topology_num_slices
    found = topology.find(name)
    if found.is_gpu:  # whose devices do not say in which slice they are
        for key, on_host, on_device in _ON_HOST:
            if vars(cfg)[key] == on_host:
                raise ConfigError(
                    f"{key}={show(on_host)} cannot be compiled for compile_topology={name}: "
                    f"without the GPUs the compiler has no host memory. Use "
                    f"{key}={show(on_device)}, which counts all on the device, or leave "
                    f"compile_topology empty on the GPUs."
                )
        mesh_lib.fill(cfg.sizes("dcn"), num_slices, "dcn")
        cfg = config.from_dict(cfg.as_dict() | {"num_slices": num_slices})
    topology.check_experts(name, cfg.num_experts)
    mesh = mesh_lib.build(run_settings.read_mesh(cfg), topology.devices(name, num_slices))
    return cfg, mesh, found.chip


def programs(
    cfg: Config,
    mesh: Mesh,
    chip: Chip | None,
    *,
    gbps: float,
    say: Callable[[str], None],
    only_step: bool = False,
) -> tuple[RunSettings, assemble.Parts, list[Measured]]:
    """The settings with remat_policy chosen, the parts of a run on the mesh, what was compiled.

    gbps: a device's share of the link [Gbit/s]. only_step: the plain inner step, no other program.
    """
    on_compile = CompileLog(say, show_memory=False)
    make = functools.partial(
        assemble.assemble, mesh=mesh, total_steps=cfg.steps, on_compile=on_compile
    )
    memory = chip.hbm if chip else remat_choice.device_memory(mesh)
    settings, parts = remat_choice.build(
        run_settings.read(cfg, mesh), make, mesh, memory=memory, say=say
    )
    state = parts.trainer.abstract_state
    if only_step:
        calls = parts.trainer.calls(parts.batch)[:1]
    else:
        calls = [*assemble.calls(settings, parts), *arrays.calls(state, on_compile=on_compile)]
    dcn = mesh_lib.sizes_over_slices(run_settings.read_mesh(cfg), list(mesh.devices.flat))
    in_turn = on_compile.in_turn(calls)
    found = program_costs.measure(in_turn, state, mesh=mesh, dcn=dcn, chip=chip, gbps=gbps, say=say)
    return settings, parts, found


def report(
    cfg: Config, mesh: Mesh, chip: Chip | None, *, gbps: float, say: Callable[[str], None]
) -> tuple[assemble.Parts, Report]:
    """Compile the programs of a run on the mesh; returns the run's parts and the report."""
    settings, parts, found = programs(cfg, mesh, chip, gbps=gbps, say=say)
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
        room=make_room(
            cfg,
            outer_state=exchanges,
            remat_policy=settings.model.config.remat_policy,
            there=not (named and named.is_gpu),
        ),
        ici={axis: size // dcn[axis] for axis, size in mesh.shape.items()},
        by_hosts=_by_hosts(settings, parts, mesh),
    )
    return parts, made


def _by_hosts(settings: RunSettings, parts: assemble.Parts, mesh: Mesh) -> float:
    """Bytes that a slice sends in a period through its hosts."""
    if not assemble.needs_bulk(settings, mesh):
        return 0.0
    period = parts.trainer.period
    steps = range(2 * period + 1, 3 * period + 1)  # not the first, in which little has arrived
    replicas = parts.shape.num_replicas // mesh.shape["diloco"]
    return float(replicas * sum(map(parts.trainer.bytes_sent, steps)))


def plain_step(cfg: Config, *, gbps: float, say: Callable[[str], None]) -> Step:
    """Time and memory of the step without an exchange, the same in every mode.

    Raises ConfigError where libtpu is missing and for a program that the chip does not hold.
    """
    if cfg.jax_cache_dir:
        folder = own_cache(cfg.jax_cache_dir, "jax_cache_dir")
        jax.config.update("jax_compilation_cache_dir", folder)
    cfg, mesh, chip = _absent(config.from_dict(cfg.as_dict() | EXACT.keys()))
    settings, _, (found,) = programs(cfg, mesh, chip, gbps=gbps, say=say, only_step=True)
    if found.too_big:
        raise ConfigError(
            f"model_name={cfg.model_name} is too big for {cfg.compile_topology}: {found.too_big} "
            # The plan tries pinned_host itself.
            + make_room(cfg, outer_state=False, remat_policy=settings.model.config.remat_policy)
        )
    if found.kernels:
        say(f"the step's time leaves out {found.kernels} Pallas kernels whose products are unknown")
    return Step(found.seconds, found.memory.peak, "compiled, never run")


def proposed(
    unrated: table.Plan,
    families: list[list[Choice]],
    *,
    has_time: bool,
    say: Callable[[str], None],
) -> table.Plan:
    """The plan with the choices of its link, and with the time of a step unless it has one.

    Raises ConfigError for a model that no choice fits on the chip.
    """
    planned, cfg = unrated.job, unrated.job.cfg

    def rated(plan: table.Plan) -> table.Plan:
        plan = table.proposed(plan, families)
        if not any(row.fits for row in plan.rows):
            least, hbm = (
                n / table.MIB for n in (min(r.memory_bytes for r in plan.rows), planned.chip.hbm)
            )
            raise ConfigError(
                f"model_name={cfg.model_name} is too big for {cfg.compile_topology}: every choice "
                f"needs at least {least:,.0f} MiB a device, which has {hbm:,.0f}. "
                f"{make_room(cfg, outer_state=False)}"  # the plan has tried pinned_host
            )
        return plan

    if has_time:
        step = unrated.step
    elif not can_compile(cfg.compile_topology):
        step = estimated_step(cfg, planned)
    else:
        rated(unrated)  # refuse a model whose state alone is too big before compiling
        step = plain_step(cfg, gbps=unrated.gbps, say=say)
    return rated(unrated._replace(step=step))


def can_compile(name: str) -> bool:
    """Whether a compiler that estimates times for a compile_topology is here."""
    return topology.find(name).chip.timed and importlib.util.find_spec("libtpu") is not None


def estimated_step(cfg: Config, job: Job) -> Step:
    """A guess: products at MFU of the chip's peak, then the weights and the state through memory.

    Nothing is compiled. Each micro-batch reads the gathered weights twice, in the type of the
    products; the update reads and writes weights and optimizer state; gradients pass once each way.
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
