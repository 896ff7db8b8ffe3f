"""Data parallelism and DiLoCo's plain step, side by side in one run.

    python benchmarks/step_time.py [file.yml] [key=value ...] [compare=key:value,value]

Needs jax, flax, optax, numpy and pyyaml; `PYTHONPATH=.` where maxdiloco is not installed. One
process. Without a yml file the keys start from DEFAULTS. Both trainers have the same mesh and model
and read the same synthetic batch at every step. They take `steps` timed steps each in turns, in an
order that is reversed every turn, so both meet the same load. The plain step has no exchange, as
H - 1 of the H steps of a period have none.
compare: the same for each value of one key, in the same turns.

Exit code 1 when FLOPs or bytes accessed of the plain step are more than TOLERANCE above data
parallelism's on one slice: the same rows a device and no gradient all-reduce between slices.

    # R replicas  B sequences per replica  L tokens
"""

import os
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from maxdiloco.command_line import guarded
from maxdiloco.config import config
from maxdiloco.config.keys import Config
from maxdiloco.data.synthetic import SyntheticWindows
from maxdiloco.diloco.schedule import INNER, Action
from maxdiloco.errors import ConfigError
from maxdiloco.metrics.speed import flops_per_token, performance
from maxdiloco.models.model import count_parameters
from maxdiloco.output import aligned
from maxdiloco.parallel import global_batch
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.run import assemble, remat_choice
from maxdiloco.run import settings as run_settings

DEFAULTS = {
    "model_name": "peer25m",
    "max_target_length": "512",
    "per_device_batch_size": "4",
    "dataset_type": "synthetic",
    "dtype": "bfloat16",
    "steps": "5",
}
FIXED = ("hardware", "num_slices", "enable_diloco")  # not compared, nor are sizes of the mesh
TOLERANCE = 0.02  # of FLOPs and of bytes; our choice
WARM_UP = 2  # steps before the timed ones: the first compiles, the second touches all memory
MIB = 2**20


class Cost(NamedTuple):
    """XLA's cost_analysis of one program, per device; the body of a loop counts once."""

    flops: float
    bytes: float


@dataclass
class Case:
    """One trainer with its state and its measurements.

    compiles: seconds of tracing, lowering and compiling, and the executable, of its one program.
    device_peak: most bytes on the first device while the state was made and warmed up, less those
    before; None where the device does not count. wall, cpu: seconds of each timed step, cpu of all
    threads of the process.
    """

    name: str
    cfg: Config
    parts: assemble.Parts
    compiles: list[tuple[float, jax.stages.Compiled]]
    state: Any = None
    device_peak: int | None = None
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def step(self, batch: Any) -> None:
        """One step, waited for."""
        self.state, metrics = self.parts.trainer.step(self.state, batch)
        jax.block_until_ready((self.state, metrics))

    def timed_step(self, batch: Any) -> None:
        """One step that counts."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.step(batch)
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)

    def speed(self) -> dict[str, float]:
        """Tokens/s and FLOP/s of the median step, as the trainer logs them."""
        parts = self.parts
        return performance(
            step_time=statistics.median(self.wall),
            tokens_per_step=parts.shape.tokens,
            flops_per_token=flops_per_token(parts.model.config, parts.params, parts.shape.length),
            num_devices=parts.mesh.size,
            device_kind=parts.mesh.devices.flat[0].device_kind,
        )


@guarded
def main(argv: Sequence[str]) -> int:
    """Run the benchmark; returns its exit code."""
    variants = configs(argv)
    cfg = variants[0][1]
    mesh_lib.choose_platform(run_settings.read_mesh(cfg))
    mesh_lib.set_up_cpu(run_settings.read_mesh(cfg))
    mesh_lib.emulate_devices(run_settings.read_mesh(cfg), num_processes=1)
    mesh = mesh_lib.build(run_settings.read_mesh(cfg))
    pairs = [make_pair(label, variant, mesh) for label, variant in variants]
    cases = [case for pair in pairs for case in pair]
    parts = cases[0].parts
    print(f"jax {jax.__version__}; {mesh_lib.describe(mesh, run_settings.read_mesh(cfg))}")
    print(f"model: {cfg.model_name}, {count_parameters(parts.model):,} parameters")
    print(
        f"batch: {parts.shape.num_replicas} replicas * {parts.shape.sequences} sequences * "
        f"{parts.shape.length} tokens; {cfg.steps} timed steps of each, in turns",
        flush=True,
    )
    batch = make_batch(cfg, parts)
    for case in cases:
        warm_up(case, batch)
    for turn in range(cfg.steps):
        for case in cases[:: 1 if turn % 2 else -1]:
            case.timed_step(batch)
    for line in [*table(cases), f"peak memory of the process: {process_peak() / MIB:,.0f} MiB"]:
        print(line)
    return max([report(*pair) for pair in pairs])


def configs(argv: Sequence[str]) -> list[tuple[str, Config]]:
    """(label, config) of every variant; one without a label where nothing is compared.

    Raises ConfigError for keys that config.load refuses, and for configs without steps of both
    trainers.
    """
    compared = [arg.removeprefix("compare=") for arg in argv if arg.startswith("compare=")]
    argv = [arg for arg in argv if not arg.startswith("compare=")]
    if not argv or "=" in argv[0]:
        given = {arg.partition("=")[0] for arg in argv}
        given |= {keys.partition(":")[0] for keys in compared}
        argv = [f"{key}={value}" for key, value in DEFAULTS.items() if key not in given] + argv
    choices = [("", ())]
    if compared:
        choices = [(flag.partition("=")[2], (flag,)) for flag in values_to_compare(compared)]
    variants = [(label, config.load([*argv, *extra], os.environ)) for label, extra in choices]
    for _, cfg in variants:
        if cfg.steps < 1 or not cfg.enable_diloco:
            raise ConfigError(
                f"steps={cfg.steps}, enable_diloco={cfg.enable_diloco}: expected steps of 1 or "
                f"more, and no enable_diloco."
            )
    return variants


def values_to_compare(compared: Sequence[str]) -> list[str]:
    """["key:a,b"] -> ["key=a", "key=b"]. Raises ConfigError."""
    key, colon, values = compared[0].partition(":")
    if len(compared) > 1 or not colon or key in FIXED or key.endswith("_parallelism"):
        raise ConfigError(
            f"compare={' compare='.join(compared)} is not one key:value,value of a key other than "
            f"{', '.join(FIXED)} and *_parallelism. Write, say, compare=remat_policy:full,none."
        )
    return [f"{key}={value}" for value in values.split(",")]


def make_pair(label: str, cfg: Config, mesh: Mesh) -> tuple[Case, Case]:
    """Data parallelism and DiLoCo with one config. Raises ConfigError if steps hold an exchange.

    remat_policy=auto is what DiLoCo takes, for both.
    """
    cases, policy = [], cfg.remat_policy
    for name, enable in (("DiLoCo", True), ("data parallel", False)):
        changes = {"enable_diloco": enable, "remat_policy": policy}
        trainer_cfg = config.from_dict(cfg.as_dict() | changes)
        compiles = []

        def on_compile(name, seconds, compiled, compiles=compiles):
            if name in ("inner", "data parallel"):
                compiles.append((seconds, compiled))

        def make(settings, compiles=compiles, on_compile=on_compile):
            compiles.clear()  # of a policy that was not taken
            return assemble.assemble(settings, mesh, total_steps=cfg.steps, on_compile=on_compile)

        memory = remat_choice.device_memory(mesh)
        settings, parts = remat_choice.build(
            run_settings.read(trainer_cfg, mesh), make, mesh, memory=memory, say=print
        )
        policy = settings.model.config.remat_policy
        trainer_cfg = config.from_dict(trainer_cfg.as_dict() | {"remat_policy": policy})
        cases.append(Case(f"{name} {label}".strip(), trainer_cfg, parts, compiles))
    diloco, data_parallel = cases
    steps = [diloco.parts.trainer.schedule.actions(t + 1) for t in range(WARM_UP + cfg.steps)]
    if any(actions != (Action(INNER),) for actions in steps):
        raise ConfigError(
            f"diloco_sync_period={cfg.diloco_sync_period}: one of the {len(steps)} steps has an "
            f"exchange, and the benchmark times steps without. Leave the DiLoCo keys out, or use "
            f"fewer steps."
        )
    if diloco.parts.shape.num_replicas != mesh.shape["diloco"]:
        raise ConfigError(
            f"num_diloco_replicas={cfg.num_diloco_replicas}: several replicas in one slot of the "
            f"mesh take more rows a device than data parallelism. Leave it out."
        )
    return data_parallel, diloco


def make_batch(cfg: Config, parts: assemble.Parts) -> dict[str, jax.Array]:
    """One synthetic batch [R, B, L], on the mesh."""
    shape = tuple(parts.shape)
    windows = SyntheticWindows(0, "train", cfg.vocab_size, cfg.max_target_length)
    tokens_NL, segments_NL = windows.read(np.arange(shape[0] * shape[1]))
    rows = {"tokens": tokens_NL, "segment_ids": segments_NL}
    sharding = parts.batch["tokens"].sharding
    (batch,) = global_batch.assemble(
        [rows], global_batch.local_rows(sharding, shape), sharding, shape
    )
    return assemble.with_learning_rate(parts, batch, 1)


def warm_up(case: Case, batch: Any) -> None:
    """Make the state, compile, and take the steps that do not count."""
    device = case.parts.mesh.local_devices[0]
    before = device.memory_stats()
    case.state = case.parts.init(np.uint32(case.cfg.init_weights_seed))
    for _ in range(WARM_UP):
        case.step(batch)
    if before is not None:
        case.device_peak = device.memory_stats()["peak_bytes_in_use"] - before["bytes_in_use"]
    print(f"compiled {case.name} in {case.compiles[0][0]:.1f} s", flush=True)


def cost(compiled: jax.stages.Compiled) -> Cost:
    """XLA's cost analysis of a program."""
    analysis = compiled.cost_analysis()
    return Cost(analysis["flops"], analysis["bytes accessed"])


def program_memory(compiled: jax.stages.Compiled) -> int:
    """Bytes a device needs to run a program: arguments, results and temporary values."""
    memory = compiled.memory_analysis()
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return kept - memory.alias_size_in_bytes + memory.temp_size_in_bytes


def process_peak() -> int:
    """Most bytes this process has had in main memory."""
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2) of macOS and of Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def table(cases: Sequence[Case]) -> list[str]:
    """A column for each case."""
    columns = [column(case) for case in cases]
    rows = [("", *(case.name for case in cases))]
    rows += [(name, *(figures[name] for figures in columns)) for name in columns[0]]
    return aligned(rows)


def column(case: Case) -> dict[str, str]:
    """The figures of a case by name."""
    speed, median = case.speed(), statistics.median
    [(seconds, compiled)] = case.compiles
    figures = {
        "step, median [s]": f"{median(case.wall):.4f}",
        "step, least to most [s]": f"{min(case.wall):.4f}..{max(case.wall):.4f}",
        "CPU time of a step, median [s]": f"{median(case.cpu):.3f}",
        "tokens/s": f"{speed['perf/tokens_per_second']:,.0f}",
        "TFLOP/s a device": f"{speed['perf/tflops_per_device']:.4f}",
        "compile [s]": f"{seconds:.1f}",
        "memory of the program [MiB a device]": f"{program_memory(compiled) / MIB:,.1f}",
        "FLOPs of the program [a device]": f"{cost(compiled).flops:.4e}",
        "bytes accessed by the program [a device]": f"{cost(compiled).bytes:.4e}",
    }
    if "perf/mfu" in speed:
        figures["part of the device's peak"] = f"{speed['perf/mfu']:.3f}"
    if case.device_peak is not None:
        figures["peak on the device, making the state included [MiB]"] = (
            f"{case.device_peak / MIB:,.1f}"
        )
    return figures


def report(data_parallel: Case, diloco: Case) -> int:
    """Print the ratios and the check of a pair; 1 if the check fails."""
    median = statistics.median
    walls = zip(data_parallel.wall, diloco.wall, strict=True)
    ratios = [base / wall for base, wall in walls]
    print(
        f"{diloco.name} / {data_parallel.name}: tokens/s "
        f"{median(data_parallel.wall) / median(diloco.wall):.3f} (turn by turn {min(ratios):.3f} "
        f"to {max(ratios):.3f}), CPU time {median(diloco.cpu) / median(data_parallel.cpu):.3f}"
    )
    plain, alone = cost(diloco.compiles[0][1]), without_all_reduce(data_parallel)
    fine = is_no_more(plain, alone)
    print(
        f"{diloco.name} / {data_parallel.name} on one slice: FLOPs {plain.flops:.4e} / "
        f"{alone.flops:.4e} = {plain.flops / alone.flops:.4f}, bytes {plain.bytes:.4e} / "
        f"{alone.bytes:.4e} = {plain.bytes / alone.bytes:.4f}: "
        f"{'no more than' if fine else 'MORE than'} {TOLERANCE:.0%} above"
    )
    return 0 if fine else 1


def is_no_more(cost: Cost, reference: Cost) -> bool:
    """Whether FLOPs and bytes both are at most TOLERANCE above the reference."""
    pairs = zip(cost, reference, strict=True)
    return all(figure <= (1 + TOLERANCE) * base for figure, base in pairs)


def without_all_reduce(data_parallel: Case) -> Cost:
    """Cost of data parallelism on one slice of the mesh, with the same number of rows a device."""
    mesh = data_parallel.parts.mesh
    if mesh.shape["diloco"] == 1:
        return cost(data_parallel.compiles[0][1])
    cfg, alone = data_parallel.cfg, Mesh(mesh.devices[:1], mesh.axis_names)
    keys = run_settings.read(cfg, alone)
    parts = assemble.assemble(keys, alone, total_steps=cfg.steps, on_compile=lambda *_: None)
    state = parts.trainer.abstract_state
    return cost(parts.trainer.inner.compile(state.params, state.opt_state, parts.batch))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
