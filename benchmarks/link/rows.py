"""One row: a run of the trainer on hosts of its own, and the counters during the run."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.link import counters, figures
from benchmarks.link.grid import Row, Window, window
from benchmarks.link.hosts import Hosts, Link, hosts

ROOT = pathlib.Path(__file__).parents[2]
PORT = 7000  # of process 0, in a namespace of its own
POLL_S = 0.2
TAIL = 12  # lines of a log


class RowError(RuntimeError):
    """A run of the trainer failed."""


def measure(
    row: Row, setup: Mapping[str, Any], folder: pathlib.Path, plain: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Run a row and return its figures. folder: for its logs; plain: as for `window`.

    Raises RowError, ConfigError.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    span = window(row, setup, plain)
    began = time.monotonic()
    with hosts(setup["hosts"], link_of(row, setup)) as network:
        congestion = network.congestion()
        with counters.Sampler(network) as sampler:
            _train(network, row, setup, folder, span.steps)
    figure = _figures(row, setup, folder, span, sampler.samples)
    return figure | {
        "start_s": time.monotonic() - began - figure["ran_s"],
        "congestion": congestion,
        "commit": commit(),
        "measured": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def link_of(row: Row, setup: Mapping[str, Any]) -> Link:
    """The link of a row; the plain step has none of its delay."""
    return Link(
        mbit=None if row.rate == figures.UNLIMITED else float(row.rate),
        delay_ms=0.0 if row.mode == figures.PLAIN else setup["delay_ms"],
        loss_pct=setup["loss_pct"],
        queue_ms=setup["queue_ms"],
        congestion=setup["congestion"],
    )


def environment(network: Hosts) -> dict[str, str]:
    """Variables of processes on hosts, the trainer's and torchft's; `start` adds JAX_PROCESS_ID."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("M_", "JAX_", "TORCH")) and not name.lower().endswith("_proxy")
    }
    return kept | {
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "JAX_COORDINATOR_ADDRESS": f"{network.addresses[0]}:{PORT}",
        "JAX_NUM_PROCESSES": str(len(network.names)),
    }


def _train(
    network: Hosts, row: Row, setup: Mapping[str, Any], folder: pathlib.Path, steps: int
) -> None:
    keys = trainer_keys(row, setup, folder, steps)
    cpus = sorted(os.sched_getaffinity(0))
    module, fast_ms = "benchmarks.link.process", f"{setup['fast_device_ms']:g}"
    commands = []
    for i in range(setup["hosts"]):
        where = [str(trace_path(folder, i)), str(cpus[i % len(cpus)]), fast_ms]
        commands.append([sys.executable, "-m", module, *where, *keys])
    wait(start(network, commands, folder, environment(network)), folder, setup["row_limit_s"])


def start(
    network: Hosts,
    commands: Sequence[Sequence[str]],
    folder: pathlib.Path,
    environ: Mapping[str, str],
) -> list[subprocess.Popen]:
    """Start a command on each host, with a log in the folder."""
    for i, command in enumerate(commands):
        with log_path(folder, i).open("w") as log:
            network.start(
                i,
                command,
                cwd=ROOT,
                env={**environ, "JAX_PROCESS_ID": str(i)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
    return network.processes[-len(commands) :]


def wait(processes: Sequence[subprocess.Popen], folder: pathlib.Path, limit_s: float) -> None:
    """Wait until all processes have ended with 0. Raises RowError, at once when one has failed."""
    limit = time.monotonic() + limit_s
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes) or time.monotonic() > limit:
            break  # the others would wait for the one that failed
        time.sleep(POLL_S)
    codes = [process.poll() for process in processes]
    if any(code != 0 for code in codes):
        words = f"exit codes {codes} (None: not over after {limit_s:g} s, or ended here)"
        raise RowError(f"{folder}: {words}. {tails(folder)}")


def tails(folder: pathlib.Path) -> str:
    """The last lines of every process's log."""
    tails = []
    for path in sorted(folder.glob("process_*.log")):
        lines = path.read_text(errors="replace").splitlines()[-TAIL:]
        tails.append("\n  ".join([f"End of {path.name}:", *lines]))
    return "\n".join(tails)


def trainer_keys(row: Row, setup: Mapping[str, Any], folder: pathlib.Path, steps: int) -> list[str]:
    """The command line of the trainer for a row."""
    keys = figures.mode_keys(row.mode, setup["keys"]) | {
        "steps": steps,
        "run_name": "run",
        "base_output_directory": folder,
        "num_slices": setup["hosts"],
    }
    if row.wire:
        keys["diloco_exchange_dtype"] = row.wire
    if row.carrier:
        keys["diloco_transport"] = row.carrier
    return [f"{key}={value}" for key, value in keys.items()]


def trace_path(folder: pathlib.Path, process: int) -> pathlib.Path:
    """File with the times of a process's inner steps."""
    return folder / f"process_{process}.steps"


def log_path(folder: pathlib.Path, process: int) -> pathlib.Path:
    """File with the output of a process."""
    return folder / f"process_{process}.log"


def _figures(
    row: Row,
    setup: Mapping[str, Any],
    folder: pathlib.Path,
    span: Window,
    samples: Sequence[counters.Sample],
) -> dict[str, Any]:
    begun = []
    for i in range(setup["hosts"]):
        times = [float(line) for line in trace_path(folder, i).read_text().split()]
        if len(times) != span.steps:
            raise RowError(
                f"{trace_path(folder, i)} has {len(times)} inner steps of {span.steps}: are the "
                f"trainer's programs still called as benchmarks.link.process.INNER says?"
            )
        begun.append(times)
    job = together(begun)
    H = min(int(setup["keys"]["diloco_sync_period"]), span.last - span.first)
    parameters, fragment_bytes = parse_log(log_path(folder, 0))
    if row.mode != figures.DATA_PARALLEL and not fragment_bytes:
        raise RowError(f"{log_path(folder, 0)} has no table of fragments, as parse_log reads it.")
    return row._asdict() | {
        **measured(job, samples, span, H),
        "ran_s": job[-1] - job[0],
        "claimed_per_step": claimed(folder / "run" / "metrics.jsonl", span),
        "bars": counters.bars(samples, job[span.last - H], job[span.last]),
        "parameters": parameters,
        "fragment_bytes": fragment_bytes,
    }


def measured(
    job: Sequence[float], samples: Sequence[counters.Sample], span: Window, H: int
) -> dict[str, Any]:
    """Times and bytes of the steps of a window. job: of `together`; H: steps of a period."""
    start, end, count = job[span.first], job[span.last], span.last - span.first
    marks = job[span.first : span.last + 1 : H]
    sent, received = counters.between(samples, start, end)
    return {
        "step_ms": 1000 * (end - start) / count,
        "period_ms": [1000 * (b - a) / H for a, b in zip(marks, marks[1:], strict=False)],
        "steps": count,
        "sent_per_step": [value / count for value in sent],
        "received_per_step": [value / count for value in received],
        "peak_mbit": 8e-6 * counters.peak(samples, start, end),
    }


def together(begun: Sequence[Sequence[float]]) -> list[float]:
    """When the last process began each step [s]. begun: the times of every process.

    Between two of these times the exchanges of the steps between are whole: a process that comes
    first to an exchange waits longest there, and the other one may wait longest at the next.
    """
    return [max(times) for times in zip(*begun, strict=True)]


def parse_log(path: pathlib.Path) -> tuple[int, list[int]]:
    """Parameters of the model and bytes sent of every fragment, as the trainer prints them.

    No fragments for data parallelism. Raises RowError for a log without the line of the model.
    """
    text = path.read_text(encoding="utf-8")
    model = re.search(r"(?m)^model: .*, ([\d,]+) parameters$", text)
    if model is None:
        raise RowError(f"{path} has no line of the model, as parse_log reads it.")
    sizes = []
    head = re.search(r"(?m)^fragment .*bytes sent .*\n", text)
    for line in text[head.end() :].splitlines() if head else ():
        cells = re.fullmatch(r"\d+ .* ([\d,]+) +[\d.]+%", line)
        if cells is None:
            break
        sizes.append(int(cells[1].replace(",", "")))
    return int(model[1].replace(",", "")), sizes


def claimed(path: pathlib.Path, span: Window) -> float | None:
    """dcn/bytes_sent over the window [bytes a step and replica]; None where it is not claimed.

    Where no log's steps lie inside the window, as with few steps, those that meet it count.
    """
    logs, begin = [], 0
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "dcn/bytes_sent" not in row:
            return None
        logs.append((begin, row["step"], row["dcn/bytes_sent"]))
        begin = row["step"]
    inside = [log for log in logs if span.first <= log[0] and log[1] <= span.last]
    counted = inside or [log for log in logs if log[0] < span.last and log[1] > span.first]
    return sum(sent * (b - a) for a, b, sent in counted) / sum(b - a for a, b, _ in counted)


def commit() -> str:
    """The commit of the checkout, with a + where files differ from it."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        return "unknown"

    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain") else "")
