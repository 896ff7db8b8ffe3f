"""Run islands in a storm of faults, and report how much of their work is in the log.

    PYTHONPATH=. python benchmarks/islands_storm.py [name=value ...] [key=value ...]

Islands of maxdiloco.train over a real S3 server in a process of its own (moto). There is one fault
every 3600 / faults_per_hour seconds. An island is killed (kill -9) and starts again. An island is
stopped until the others consider it dead. A link is cut. The store does not answer, or its link is
slow. With mbit=0 all processes share this machine's network, no link is cut or slow, and no root is
needed. Otherwise every island and the store has a network namespace and a link (link/hosts.py:
Linux, root, iproute2). step_ms=50,100,200 makes the islands sleep after each step, as if each had a
device of its own. The tokens in the log are compared with the tokens of the islands' median
steps. OWN has the names and their defaults; further keys are the trainer's.

Exit code 1: the audit of the log finds an error, an island exited by itself, or did not come back.
"""

import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.link import hosts, storm_figures
from benchmarks.link.command import guarded, help_text, number, numbers, split_arguments
from benchmarks.link.rows import ROOT
from benchmarks.link.storm import (
    BUCKET,
    KINDS,
    ON_ONE_NETWORK,
    Storm,
    System,
    draw,
    s3_environ,
    s3_server,
)
from benchmarks.link.storm_figures import Outcome

OWN = {
    "seconds": "300",
    "faults_per_hour": "120",
    "mbit": "20",  # of every link, each direction; 0: no links of their own
    "boxes": "3",  # islands
    "step_ms": "0",  # of sleep after each step, by island, with commas between
    "seed": "0",
    "out": "runs/islands_storm",
}
KEYS = {
    "hardware": "cpu",
    "model_name": "tiny",
    "override_model_config": "true",
    "base_emb_dim": 64,
    "base_num_decoder_layers": 2,
    "max_target_length": 64,
    "per_device_batch_size": 4,
    "dataset_type": "synthetic",
    "steps": 10**6,  # far beyond the end, so the learning rate is constant
    "warmup_steps_fraction": 0.0,
    "learning_rate": 1e-3,
    "enable_streaming_diloco": "true",
    "num_diloco_fragments": 2,
    "diloco_sync_period": 20,
    "diloco_exchange_dtype": "float4_e3m0",
    "diloco_aggregation": "radial_directional_mean",
    "islands_period_seconds": 5,
    "islands_dead_seconds": 11,  # between the lengths of a cut and of a stop
    "log_period": 10,
    "checkpoint_period": 200,
    "enable_tensorboard": "false",
}
STORE = f"s3://{BUCKET}/run"
AUTO_S = 8.0  # a usual period with islands_period_seconds=auto


def system(
    keys: Mapping[str, Any],
    sleeps: Mapping[str, float],
    out: pathlib.Path,
    network: hosts.Hosts | None,
) -> System:
    """Return the commands of islands. keys: the trainer's. sleeps: by island, after a step [ms]."""

    def island(name: str, trace: pathlib.Path) -> list[str]:
        words = [f"{key}={value}" for key, value in (dict(keys) | island_keys(name, out)).items()]
        traced = ["benchmarks.link.process", str(trace), "-1", str(sleeps[name])]
        return [sys.executable, "-m", *traced, *words]

    return System(s3_server(), "ready", island, s3_environ(network) | {"PYTHONPATH": str(ROOT)})


def island_keys(name: str, out: pathlib.Path) -> dict[str, Any]:
    """Return the trainer's keys that an island has in addition."""
    return {
        "enable_islands": "true",
        "islands_store": STORE,
        "island_name": name,
        "run_name": name,
        "base_output_directory": out / "runs",
        "jax_cache_dir": out / "jax_cache",
    }


def audit(storm: Storm) -> tuple[bool, int, int]:
    """Replay the log and print the result.

    Returns:
      Whether it is without errors; the records of fragment 0 and their tokens.
    """
    inside = ["ip", "netns", "exec", storm.network.names[0]] if storm.network else []
    command = [*inside, sys.executable, "-m", "maxdiloco.islands", "audit", STORE]
    done = subprocess.run(
        command, env=storm.system.environ, cwd=ROOT, capture_output=True, text=True
    )
    print(done.stdout, done.stderr, sep="")
    found = re.search(r"fragment 0: (\d+) records.*; ([\d,]+) tokens;", done.stdout)
    records, tokens = (int(word.replace(",", "")) for word in found.groups()) if found else (0, 0)
    return done.returncode == 0, records, tokens


def failures(outcome: Outcome) -> list[str]:
    """Return the islands that exited by themselves, did not come back, or failed at the end."""
    wrong = [f"{name} is not back" for name in outcome.absent]
    for name, code in outcome.codes.items():
        if code != 128 + signal.SIGTERM:
            wrong.append(f"{name} with exit code {code} at the end")
    return [*outcome.ended, *wrong]


def tokens_of(keys: Mapping[str, Any]) -> int:
    """Return the tokens of a step."""
    return int(keys["per_device_batch_size"]) * int(keys["max_target_length"])


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; returns its exit code."""
    return guarded(_main, argv, usage=help_text(__doc__, OWN))


def _main(argv: Sequence[str]) -> int:
    options, given = split_arguments(argv, OWN)
    keys = KEYS | given
    mbit, count = number("mbit", options, float, least=0), number("boxes", options)
    if mbit == 0:
        return run(options, keys, None)
    with hosts.hosts(count + 1, hosts.Link(mbit)) as network:  # the store has a host of its own
        return run(options, keys, network)


def run(options: dict[str, str], keys: dict[str, Any], network: hosts.Hosts | None) -> int:
    """Run the storm and report; return the exit code."""
    names = [f"box{i}" for i in range(int(options["boxes"]))]
    sleeps, out = numbers("step_ms", options), pathlib.Path(options["out"]).resolve()
    by_name = {name: sleeps[i % len(sleeps)] for i, name in enumerate(names)}
    seconds, kinds = float(options["seconds"]), KINDS if network else ON_ONE_NETWORK
    planned = draw(seconds, float(options["faults_per_hour"]), kinds, names, int(options["seed"]))
    period = keys["islands_period_seconds"]
    first_messages = 3 * (AUTO_S if period == "auto" else float(period))
    with Storm(
        system(keys, by_name, out, network), names, out, network, float(options["mbit"])
    ) as storm:
        outcome = storm.run(planned, seconds, first_messages)
        clean, records, committed = audit(storm)
        starts = sum(map(len, storm.starts.values()))
    found = storm_figures.figures(outcome, tokens_of(keys), committed)
    print(
        f"{len(outcome.faults)} faults in {outcome.end - outcome.begun:.0f} s "
        f"({', '.join(fault.kind for fault in outcome.faults)}), {starts} starts: of "
        f"{found.trained:,} tokens trained {committed:,} are in the log, "
        f"{committed / found.trained:.1%}; {records} records of fragment 0"
    )
    print(
        f"{found.of_live:.1%} of the islands' median steps while they live, "
        f"{found.of_wall:.1%} from their first steps to the end"
    )
    print(f"longest pause of an island not hit: {storm_figures.pauses_text(found.pauses)}")
    wrong = failures(outcome)
    print(f"islands that exited by themselves or are not back: {'; '.join(wrong) or 'none'}")
    return int(not clean or bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
