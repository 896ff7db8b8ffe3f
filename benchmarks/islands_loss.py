"""Measure the effect of islands' speeds and faults on the loss: runs with equal numbers of tokens.

    PYTHONPATH=. python benchmarks/islands_loss.py [name=value ...] [key=value ...]

Three islands of maxdiloco.train over a folder train the quality table's model (learning/modes.py)
to the end, on as many tokens as a row of it. They sleep after each step, as on devices of their
own: `equal` each for so long that they are as fast together as those of `unlike`, whose speeds are
1 : 2 : 4; in `storm` those of `unlike` meet a fault each 30 s, kill -9 and a new start or 12 s of
standing still. The loss is the outer parameters' on held-out text at the end. OWN has the names and
defaults; further keys are the trainer's. What is in `out` already is not run again. Exit code 1: an
island has ended otherwise than by the run's end.
"""

import json
import math
import os
import pathlib
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.learning.modes import SCALES
from benchmarks.link.command import choices, guarded, help_text, number, numbers, split_arguments
from benchmarks.link.rows import ROOT

OWN = {
    "rows": "equal,unlike,storm",
    "seeds": "3",
    "step_ms": "400,200,100",  # of sleep after each step, of unlike islands
    "out": "runs/islands_loss",
}
BATCH, FAULT_S, FROZEN_S, DOWN_S = 4, 30.0, 12.0, 3.0  # sequences of an island; our choice
KEYS = {
    "per_device_batch_size": BATCH,
    "learning_rate": 0.008,  # the best of data parallelism
    "enable_diloco": "true",
    "num_diloco_replicas": "auto",  # an island is one
    "diloco_outer_lr": 0.98,  # the best of four replicas
    "diloco_outer_momentum": 0.6,
    "enable_islands": "true",
    "islands_period_seconds": 5,  # 30 steps of islands that are equally fast
    "islands_dead_seconds": 8,
    "log_period": 50,
    "enable_checkpointing": "true",
    "checkpoint_period": 100,
}


class Islands:
    """The islands of one row. codes: of the last start of each, once it has ended."""

    def __init__(self, folder: pathlib.Path, keys: Mapping[str, Any], sleeps: Sequence[float]):
        self._folder, self._keys, self._starts = folder, keys, 0
        self._sleeps = {f"box{i}": sleep for i, sleep in enumerate(sleeps)}
        self._running = {name: self._start(name) for name in self._sleeps}

    def _start(self, name: str) -> subprocess.Popen:
        self._starts += 1
        keys = dict(self._keys) | dict(
            islands_store=self._folder / "store", island_name=name, run_name=name,
            base_output_directory=self._folder, jax_cache_dir=self._folder.parent / "jax_cache",
        )  # fmt: skip
        trace = str(self._folder / f"{self._starts}.steps")
        traced = ["benchmarks.link.process", trace, "-1", str(self._sleeps[name])]
        with (self._folder / f"{name}.log").open("a") as log:
            return subprocess.Popen(
                [sys.executable, "-m", *traced, *(f"{key}={value}" for key, value in keys.items())],
                cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def living(self) -> list[str]:
        """Those that have not ended."""
        return [name for name, process in self._running.items() if process.poll() is None]

    def fault(self, kind: str, name: str) -> None:
        """kill or freeze, from its beginning to its end."""
        process = self._running[name]
        if kind == "kill":
            process.kill()
            process.wait()
            time.sleep(DOWN_S)
            self._running[name] = self._start(name)
        else:
            os.killpg(process.pid, signal.SIGSTOP)
            time.sleep(FROZEN_S)
            os.killpg(process.pid, signal.SIGCONT)

    def codes(self) -> dict[str, int]:
        """Return the exit codes after ending all processes."""
        for name in self.living():
            self._running[name].kill()
        return {name: process.wait() for name, process in self._running.items()}


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; returns its exit code."""
    return guarded(_main, argv, usage=help_text(__doc__, OWN))


def _main(argv: Sequence[str]) -> int:
    options, given = split_arguments(argv, OWN)
    sleeps, seeds = numbers("step_ms", options), number("seeds", options)
    rows = choices("rows", options, OWN["rows"].split(","))
    out = pathlib.Path(options["out"]).resolve()
    scale = SCALES["cpu"]
    steps = scale.steps * scale.batch // BATCH
    keys = dict(scale.keys) | KEYS | {"steps": steps, "eval_interval": steps}
    keys |= given
    losses: dict[str, list[float]] = {row: [] for row in rows}
    for seed in range(seeds):
        for row in rows:
            found = _row(out / f"{row}.{seed}", row, keys, sleeps, seed)
            losses[row].append(found["loss"])
            print(f"{row}, seed {seed}: {json.dumps(found)}", flush=True)
    base = losses[rows[0]]
    for row, found in losses.items():
        by_seed = ", ".join(f"{a:.4f} ({a / b - 1:+.1%})" for a, b in zip(found, base, strict=True))
        mean, to = statistics.mean(found), statistics.mean(base)
        print(f"{row}: {mean:.4f} ({mean / to - 1:+.2%} to {rows[0]}; {by_seed})")
    return int(not all(math.isfinite(loss) for found in losses.values() for loss in found))


def _row(
    folder: pathlib.Path, row: str, keys: Mapping[str, Any], sleeps: Sequence[float], seed: int
) -> dict[str, Any]:
    """The result of a run, of this start or an earlier one."""
    result = folder / "result.json"
    if result.exists():
        return json.loads(result.read_text(encoding="utf-8"))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if row == "equal":
        sleeps = [len(sleeps) / sum(1 / one for one in sleeps)] * len(sleeps)
    seeds = {"init_weights_seed": seed, "data_shuffle_seed": seed}
    begun, rng, faults = time.monotonic(), random.Random(seed), 0
    islands = Islands(folder, dict(keys) | seeds, sleeps)
    try:
        due = begun + 2 * FAULT_S
        while living := islands.living():
            if row == "storm" and time.monotonic() > due and len(living) == len(sleeps):
                islands.fault(rng.choice(("kill", "freeze")), rng.choice(living))
                due, faults = due + FAULT_S, faults + 1
            time.sleep(0.2)
    finally:
        codes = islands.codes()
    whole = not any(codes.values())
    found = {
        "loss": _last(folder / "box0" / "metrics.jsonl") if whole else math.nan,
        "faults": faults,
        "codes": codes,
        "seconds": round(time.monotonic() - begun),
    }
    if whole:
        result.write_text(json.dumps(found), encoding="utf-8")
    return found


def _last(path: pathlib.Path) -> float:
    """The last loss on held-out text."""
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [row["eval/loss"] for row in rows if "eval/loss" in row][-1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
