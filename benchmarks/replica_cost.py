"""Compare M replicas on one device with data parallelism: equal tokens a step, in turns.

    PYTHONPATH=. python benchmarks/replica_cost.py [replicas=4] [turns=2] [key=value ...]

Runs of maxdiloco.train, one after the other: data parallelism, and streaming DiLoCo of M replicas
whose batches together are as large. Tokens a second are measured over whole periods after the
first, with exchanges and logs. Other keys are the trainer's; steps counts periods of H.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence

from benchmarks.link.command import guarded, help_text, number, split_arguments
from benchmarks.link.rows import ROOT, RowError
from maxdiloco.config import config
from maxdiloco.errors import ConfigError

OWN = {"replicas": "4", "turns": "2", "out": "runs/replica_cost"}
DEFAULTS = {
    "hardware": "gpu",
    "model_name": "180m",
    "max_target_length": "2048",
    # Sum over all replicas. Each has an optimizer of its own, which a larger batch makes cheaper.
    "per_device_batch_size": "32",
    "dtype": "bfloat16",
    "dataset_type": "synthetic",
    "diloco_sync_period": "30",
    "steps": "3",  # periods
}
FIXED = {"enable_checkpointing": "false", "enable_tensorboard": "false"}
STREAMING = {
    "enable_streaming_diloco": "true",
    "num_diloco_fragments": "5",
    "num_communication_overlapping_steps": "1",
}


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; returns its exit code."""
    return guarded(_main, argv, usage=help_text(__doc__, OWN | DEFAULTS))


def _main(argv: Sequence[str]) -> int:
    options, cases = arguments(argv)
    out = pathlib.Path(options["out"]).resolve()
    speeds: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(number("turns", options)):
        for name in list(cases)[:: 1 if turn % 2 else -1]:
            speeds[name].append(measure(cases[name], out, f"{name}-{turn}-{os.getpid()}"))
            print(f"{name}: {speeds[name][-1]:,.0f} tokens/s", flush=True)
    print(report(speeds))
    return 0


def arguments(argv: Sequence[str]) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Own arguments, and the trainer's keys of both cases. Raises ConfigError."""
    options, given = split_arguments(argv, OWN)
    count = number("replicas", options)
    keys = DEFAULTS | given | FIXED
    # Keys of the exchange on the command line apply only to the replicas.
    streaming = STREAMING | {name: keys.pop(name) for name in STREAMING if name in keys}
    cfg = config.load([f"{name}={value}" for name, value in keys.items()], {})
    each, rest = divmod(cfg.per_device_batch_size, count)
    if rest:
        raise ConfigError(
            f"per_device_batch_size={cfg.per_device_batch_size}: expected a multiple of "
            f"replicas={count}, which share the batch."
        )
    H = cfg.diloco_sync_period
    keys |= {"steps": str(cfg.steps * H), "log_period": str(H)}
    replicas = {"num_diloco_replicas": options["replicas"], "per_device_batch_size": str(each)}
    cases = {
        "data parallel": keys | {"enable_diloco": "false"},
        f"streaming, {options['replicas']} replicas": keys | streaming | replicas,
    }
    return options, cases


def measure(keys: Mapping[str, str], out: pathlib.Path, name: str) -> float:
    """Tokens a second of a run, over its periods after the first. Raises RowError."""
    run = name.replace(" ", "_").replace(",", "")
    arguments = [f"{key}={value}" for key, value in keys.items()]
    done = subprocess.run(
        [sys.executable, "-m", "maxdiloco.train", *arguments, f"run_name={run}",
         f"base_output_directory={out}", f"jax_cache_dir={out}/jax_cache"],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        tail = "\n  ".join((done.stdout + done.stderr).splitlines()[-6:])
        raise RowError(f"{name}: exit code {done.returncode}. End of its output:\n  {tail}")
    lines = (out / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return tokens_per_second([json.loads(line) for line in lines])


def tokens_per_second(rows: Sequence[Mapping[str, float]]) -> float:
    """The harmonic mean over the rows, of equal tokens, after the first. Raises RowError."""
    if len(rows) < 2:
        raise RowError("one period was logged, and the first does not count. Use steps=2 or more.")
    return statistics.harmonic_mean([row["perf/tokens_per_second"] for row in rows[1:]])


def report(speeds: Mapping[str, Sequence[float]]) -> str:
    """The ratio of the medians."""
    base, replicas = (statistics.median(found) for found in speeds.values())
    return f"{list(speeds)[1]} / data parallel: tokens/s {replicas / base:.3f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
