"""One device: Compare maxdiloco's plain step with a compiled PyTorch loop, in turns in one run.

    PYTHONPATH=. python benchmarks/peer_torch.py [name=value ...] [key=value ...]

Both train the same decoder, in bfloat16 over float32 parameters, with AdamW and gradients clipped
at norm 1. torch: autocast, scaled_dot_product_attention, a fused AdamW, torch.compile; the loop is
in peer/torch_process.py. torch goes into an environment of its own below `out`, unless `python`
names one that has it. Both use all cores the process may use; while one steps, the other waits for
its turn. First each starts by itself, from scratch: seconds from the start of the process to the
end of the first step. Names: OWN; other keys are the trainer's, above DEFAULTS.

Exit code 1: the models differ in size, or torch's loop failed.
"""

import json
import math
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import step_time
from benchmarks.environment import environment
from benchmarks.link.command import choices, guarded, help_text, number, split_arguments
from benchmarks.link.rows import ROOT, RowError
from maxdiloco.config import config
from maxdiloco.config.keys import Config
from maxdiloco.errors import ConfigError
from maxdiloco.models.model import count_parameters
from maxdiloco.output import aligned
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.run import settings as run_settings

OWN = {
    "python": "",  # of an environment with torch; empty: one is made in `out`
    "compile": "true",  # torch.compile
    "torch_dtype": "",  # of torch's autocast, bfloat16 or float32; empty: the trainer's dtype
    "start": "true",  # measure the starts too
    "threads": "0",  # of torch; 0: its own choice
    "pause_s": "0.3",  # between turns, so that the threads of the one that waits are asleep
    "out": "runs/peer_torch",
}
DEFAULTS = step_time.DEFAULTS | {"hardware": "cpu"}
SPEC = (
    "base_emb_dim", "base_mlp_dim", "vocab_size", "base_num_query_heads", "base_num_kv_heads",
    "head_dim", "base_num_decoder_layers", "max_target_length",
)  # fmt: skip
PROCESS = pathlib.Path(__file__).parent / "peer" / "torch_process.py"
REQUIREMENTS = ("torch==2.13.0", "numpy==2.4.6")


class Torch:
    """The loop in its process. ready: its report after its first steps."""

    def __init__(self, python: pathlib.Path, job: dict[str, Any], log: pathlib.Path):
        self._log = log
        environ = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("TORCH", "PYTHON"))
        }
        began = time.time()
        self._process = subprocess.Popen(
            [str(python), "-I", str(PROCESS), json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            env=environ | {"TORCHINDUCTOR_CACHE_DIR": str(log.parent / "inductor")},
        )
        try:
            self.ready = self._read()
        except BaseException:
            self.close()
            raise
        self.start_s = time.time() - began

    def step(self) -> dict[str, float]:
        """Take a step and return its seconds: wall, cpu. Raises RowError."""
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            tail = " | ".join(self._log.read_text(errors="replace").splitlines()[-4:])
            raise RowError(f"torch's loop ended with {self._process.wait()}: {tail} ({self._log})")
        return json.loads(line)


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; returns its exit code."""
    return guarded(_main, argv, usage=help_text(__doc__, OWN))


def _main(argv: Sequence[str]) -> int:
    options, keys, cfg = arguments(argv)
    out = pathlib.Path(options["out"]).resolve()
    out.mkdir(parents=True, exist_ok=True)
    python = (
        pathlib.Path(options["python"]) if options["python"] else environment(out, REQUIREMENTS)
    )
    job = torch_job(cfg, options)
    starts = {}
    if options["start"] == "true":
        starts["maxdiloco"] = our_start(keys, out)
    torch = Torch(python, job, out / "torch.log")
    try:
        if options["start"] == "true":
            starts["torch"] = torch.ready["first_step_s"]
        ours = our_case(cfg)
        size, theirs = count_parameters(ours.parts.model), torch.ready["parameters"]
        if size != theirs:
            raise RowError(f"the models differ: {size:,} parameters here, {theirs:,} in torch.")
        walls, cpus = in_turns(ours, torch, cfg, float(options["pause_s"]))
    finally:
        torch.close()
    print(report(cfg, ours, torch.ready, walls, cpus, starts))
    return 0


def arguments(argv: Sequence[str]) -> tuple[dict[str, str], list[str], Config]:
    """Own arguments, the trainer's, and the trainer's config. Raises ConfigError."""
    options, given = split_arguments(argv, OWN)
    keys = DEFAULTS | given
    for name in ("compile", "start"):
        choices(name, options, ("true", "false"))
    choices("torch_dtype", options, ("", "bfloat16", "float32"))
    pairs = [f"{name}={value}" for name, value in keys.items()]
    cfg = config.load(pairs, os.environ)
    if cfg.steps < 1 or list(cfg.mlp_activations) not in (["silu", "linear"], ["gelu"]):
        raise ConfigError(
            f"steps={cfg.steps}, mlp_activations={','.join(cfg.mlp_activations)}: expected steps "
            f"of 1 or more, and [silu, linear] or [gelu], which torch's loop has."
        )
    return options, pairs, cfg


def torch_job(cfg: Config, options: dict[str, str]) -> dict[str, Any]:
    """The job of torch's loop."""
    return {
        "spec": {name: getattr(cfg, name) for name in SPEC},
        "tied": cfg.logits_via_embedding,
        "qk_norm": cfg.use_qk_norm != "false",
        "gated": len(cfg.mlp_activations) == 2,
        "dtype": options["torch_dtype"] or cfg.dtype,
        "batch": cfg.per_device_batch_size,
        "device": "cuda" if cfg.hardware == "gpu" else "cpu",
        "compile": options["compile"] == "true",
        "threads": number("threads", options, least=0),
    }


def our_start(keys: Sequence[str], out: pathlib.Path) -> float:
    """Seconds from the start of maxdiloco.train, with no compile cache, to its first step's line.

    Raises RowError.
    """
    run = ["steps=1", "log_period=1", "enable_checkpointing=false", "enable_tensorboard=false"]
    run += [f"base_output_directory={out}", f"run_name=start-{time.time_ns()}", "jax_cache_dir="]
    keys = [key for key in keys if not key.startswith("steps=")]
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", "maxdiloco.train", *keys, *run],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if re.match(r"step 1/1 ", line):
                return time.monotonic() - began
    raise RowError(f"maxdiloco.train ended with {process.returncode}: {''.join(lines[-4:])}")


def our_case(cfg: Config) -> step_time.Case:
    """DiLoCo's plain step on one device, warmed up."""
    mesh_lib.choose_platform(run_settings.read_mesh(cfg))
    mesh_lib.set_up_cpu(run_settings.read_mesh(cfg))
    mesh = mesh_lib.build(run_settings.read_mesh(cfg))
    if mesh.size != 1:
        raise ConfigError(
            f"{mesh.size} devices are visible, but torch's loop has one. Set CUDA_VISIBLE_DEVICES, "
            f"or leave num_slices and the mesh's keys out."
        )
    _, ours = step_time.make_pair("", cfg, mesh)
    step_time.warm_up(ours, step_time.make_batch(cfg, ours.parts))
    return ours


def in_turns(
    ours: step_time.Case, torch: Torch, cfg: Config, pause_s: float
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of each timed step, wall and CPU. The order is reversed every turn."""
    batch = step_time.make_batch(cfg, ours.parts)
    walls, cpus = [], []
    for turn in range(cfg.steps):
        for trainer in ("maxdiloco", "torch")[:: 1 if turn % 2 else -1]:
            time.sleep(pause_s)
            if trainer == "torch":
                figures = torch.step()
                walls.append(figures["wall"])
                cpus.append(figures["cpu"])
            else:
                ours.timed_step(batch)
    return {"maxdiloco": ours.wall, "torch": walls}, {"maxdiloco": ours.cpu, "torch": cpus}


def report(
    cfg: Config,
    ours: step_time.Case,
    ready: dict[str, Any],
    walls: dict[str, list[float]],
    cpus: dict[str, list[float]],
    starts: dict[str, float],
) -> str:
    """The table and the ratio."""
    tokens, median = ours.parts.shape.tokens, statistics.median
    rows: list[tuple[str, ...]] = [("", "maxdiloco", "torch")]
    names = ("maxdiloco", "torch")

    def add(title: str, figure) -> None:
        rows.append((title, *(figure(name) for name in names)))

    add("step, median [s]", lambda name: f"{median(walls[name]):.4f}")
    add("step, least to most [s]", lambda n: f"{min(walls[n]):.4f}..{max(walls[n]):.4f}")
    add("CPU time of a step, median [s]", lambda name: f"{median(cpus[name]):.3f}")
    add("tokens/s", lambda name: f"{tokens / median(walls[name]):,.0f}")
    add("start to end of first step [s]", lambda name: f"{starts.get(name, math.nan):.1f}")
    speed = ours.speed()
    if "perf/mfu" in speed:
        rows.append(("part of the device's peak", f"{speed['perf/mfu']:.3f}", ""))
    lines = [
        f"{cfg.model_name}, {ready['parameters']:,} parameters, {tokens:,} tokens a step, "
        f"{cfg.dtype}, {cfg.hardware}; torch {ready['torch']}, {ready['dtype']}, "
        f"{ready['threads']} threads",
        *aligned(rows),
        f"maxdiloco / torch: tokens/s {median(walls['torch']) / median(walls['maxdiloco']):.3f} "
        f"(turn by turn {', '.join(f'{x:.2f}' for x in quartiles(walls))} quartiles), CPU time "
        f"{median(cpus['maxdiloco']) / median(cpus['torch']):.3f}",
    ]
    return "\n".join(lines)


def quartiles(walls: dict[str, list[float]]) -> list[float]:
    """Of the ratio of tokens/s, turn by turn; one turn's is all three."""
    ratios = [theirs / our for our, theirs in zip(walls["maxdiloco"], walls["torch"], strict=True)]
    return statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
