"""Rows of torchft: its environment, a run of it on hosts, and the table beside maxdiloco's rows."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.link import counters, figures, rows
from benchmarks.link.hosts import Hosts, hosts
from benchmarks.link.rows import ROOT, Row, RowError, link_of, tails
from maxdiloco.errors import ConfigError

OURS, THEIRS = "maxdiloco", "torchft"
REQUIREMENTS = ("torchft==0.2.0", "torch==2.13.0", "numpy==2.4.6")
PROCESS = pathlib.Path(__file__).with_name("torchft_process.py")
SPEC = (  # of the trainer's keys, what torchft's process needs; whole numbers
    "base_emb_dim", "base_mlp_dim", "vocab_size", "base_num_query_heads", "base_num_kv_heads",
    "head_dim", "base_num_decoder_layers", "num_diloco_fragments", "diloco_sync_period",
    figures.TAU, "max_target_length", "per_device_batch_size",
)  # fmt: skip
TAIL = 12  # lines of a log
POLL_S = 0.2


def environment(out: pathlib.Path, requirements: Sequence[str] = REQUIREMENTS) -> pathlib.Path:
    """The python of an environment with the requirements below `out`, made unless it is there.

    pip's own settings hold, as PIP_EXTRA_INDEX_URL. Raises ConfigError where it fails.
    """
    folder, log = out / "venv", out / "pip.log"
    python, ready = folder / "bin" / "python", folder / "requirements.txt"
    wanted = "\n".join(requirements)
    if ready.exists() and ready.read_text(encoding="utf-8") == wanted:
        return python
    print(f"installing {', '.join(requirements)} in {folder}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    install = [str(python), "-m", "pip", "install", "--no-input", *requirements]
    with log.open("w", encoding="utf-8") as file:
        for command in ([sys.executable, "-m", "venv", str(folder)], install):
            done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT)
            if done.returncode:
                last = log.read_text(encoding="utf-8").strip().rpartition("\n")[2]
                raise ConfigError(
                    f"out={out}: the environment cannot be made there: {last} ({log}). It "
                    f"needs a package index that pip reaches and a Python that has these packages."
                )
    ready.write_text(wanted, encoding="utf-8")
    return python


def job(
    replica: int, addresses: Sequence[str], row: Row, setup: Mapping[str, Any], folder: pathlib.Path
) -> dict[str, Any]:
    """What a process of torchft is told.

    steps: those of the row's window and a period for the checks after it.
    """
    cpus = sorted(os.sched_getaffinity(0))
    spec = {name: int(setup["keys"][name]) for name in SPEC}
    return {
        "replica": replica,
        "replicas": len(addresses),
        "addresses": list(addresses),
        "cpu": cpus[replica % len(cpus)],
        "fast_ms": setup["fast_device_ms"],
        "exchange": row.mode != figures.PLAIN,
        "bucketization": setup["bucketization"],
        "spec": spec,
        "steps": rows.window(row, setup, None).last + spec["diloco_sync_period"],
        "trace": str(rows.trace_path(folder, replica)),
        "report": str(folder / f"process_{replica}.json"),
    }


def measure(
    row: Row, setup: Mapping[str, Any], python: pathlib.Path, folder: pathlib.Path
) -> dict[str, Any]:
    """Run torchft for a row and return its figures, as `rows.measure` returns those of the trainer.

    Raises RowError: it failed, or what it exchanged is not what it should.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with hosts(setup["hosts"], link_of(row, setup)) as made:
        congestion = made.congestion()
        jobs = [job(i, made.addresses, row, setup, folder) for i in range(setup["hosts"])]
        with counters.Sampler(made) as sampler:
            _run(made, jobs, python, folder, setup["row_limit_s"])
    reports = [json.loads(pathlib.Path(one["report"]).read_text()) for one in jobs]
    if row.mode != figures.PLAIN:
        check_exchanges(reports, jobs[0])
    begun = [list(map(float, pathlib.Path(one["trace"]).read_text().split())) for one in jobs]
    return row._asdict() | _figures(begun, sampler.samples, row, setup) | {
        "claimed_per_step": payload(reports[0], setup) if row.mode != figures.PLAIN else None,
        "parameters": reports[0]["parameters"],
        "fragment_bytes": reports[0]["fragment_bytes"],
        "versions": reports[0]["versions"],
        "congestion": congestion,
        "commit": rows.commit(),
        "measured": time.strftime("%Y-%m-%d %H:%M:%S"),
    }  # fmt: skip


def _run(
    made: Hosts,
    jobs: Sequence[Mapping[str, Any]],
    python: pathlib.Path,
    folder: pathlib.Path,
    limit_s: float,
) -> None:
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TORCH", "PYTHON")) and not name.lower().endswith("_proxy")
    }
    for one in jobs:
        # -I: the script's folder is not searched for modules.
        command = [str(python), "-I", str(PROCESS), json.dumps(one)]
        options = dict(cwd=ROOT, env=environ, stderr=subprocess.STDOUT)
        with rows.log_path(folder, one["replica"]).open("w") as log:
            made.start(one["replica"], command, stdout=log, **options)
    processes, limit = made.processes[-len(jobs) :], time.monotonic() + limit_s
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes) or time.monotonic() > limit:
            break  # the others would wait for the one that failed
        time.sleep(POLL_S)
    codes = [process.poll() for process in processes]
    if any(code != 0 for code in codes):
        ends = f"{codes} (None: ended here)"
        raise RowError(f"{folder}: torchft's exit codes are {ends}. {tails(folder)}")


def check_exchanges(reports: Sequence[Mapping[str, Any]], one: Mapping[str, Any]) -> None:
    """Raise RowError unless the replicas exchanged what they should.

    In the last period every fragment changed once by torchft's own work: its checksum differs
    from replica to replica before and is the same after. one: the job of any of them.
    """
    spec = one["spec"]
    P, H = spec["num_diloco_fragments"], spec["diloco_sync_period"]
    for report in reports:
        commits = one["steps"] // (H // P)
        found = report["commits"], report["participants"], [p for p, *_ in report["exchanged"]]
        if found != (commits, one["replicas"], list(range(P))):
            raise RowError(
                f"torchft made {found[0]} exchanges of {commits} among {found[1]} replicas of "
                f"{one['replicas']}, in the last period of fragments {found[2]} of {P}."
            )
    for p in range(P):
        befores, afters = ({report["exchanged"][p][k] for report in reports} for k in (1, 2))
        if len(befores) != len(reports) or len(afters) != 1:
            raise RowError(
                f"torchft's fragment {p} has {len(befores)} values on {len(reports)} replicas "
                f"before an exchange and {len(afters)} after it: not as many as replicas, and one."
            )


def payload(report: Mapping[str, Any], setup: Mapping[str, Any]) -> float:
    """Bytes a step and host of gloo's ring over float32: 2 (M - 1) / M of the model a period."""
    M, H = setup["hosts"], int(setup["keys"]["diloco_sync_period"])
    return 4 * report["parameters"] * 2 * (M - 1) / M / H


def _figures(
    begun: Sequence[Sequence[float]],
    samples: Sequence[counters.Sample],
    row: Row,
    setup: Mapping[str, Any],
) -> dict[str, Any]:
    """begun: when each replica's inner steps began [s]; as for our rows, the last one counts."""
    span, H = rows.window(row, setup, None), int(setup["keys"]["diloco_sync_period"])
    job = rows.together(begun)
    start, end = job[span.first], job[span.last]
    count = span.last - span.first
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


COLUMNS = (
    "trainer", "wire", "Mbit/s", "step, ms", "utilisation", "above plain, ms", "sent a step, KB",
    "of the payload", "peak, Mbit/s",
)  # fmt: skip


def table(measured: Sequence[Mapping[str, Any]], setup: Mapping[str, Any]) -> str:
    """The figures as Markdown. measured: rows with a `trainer`, both plain steps too."""
    lines = [conditions(measured, setup), ""]
    lines += [f"| {' | '.join(COLUMNS)} |", f"|---|---|{'--:|' * (len(COLUMNS) - 2)}"]
    for row in measured:
        if row["mode"] == figures.PLAIN:
            continue
        one = figures.result(row, of(row["trainer"], measured), setup)
        cells = (
            row["trainer"],
            row["wire"],
            row["rate"],
            f"{row['step_ms']:,.1f}",
            f"{one.utilisation:.1%}",
            f"{one.exposed_ms:,.1f}",
            f"{sum(row['sent_per_step']) / len(row['sent_per_step']) / 1000:,.1f}",
            f"{one.claimed_ratio:.3f}",
            f"{row['peak_mbit']:,.1f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    chatter = {who: figures.chatter(of(who, measured)) for who in (OURS, THEIRS)}
    lines += [
        "",
        f"Above plain: beside the trainer's own plain step; at {figures.UNLIMITED} it is the step "
        f"overhead. Of the payload: bytes on the link less the chatter / those of the payload, of "
        f"{OURS} by `dcn/bytes_sent`, of {THEIRS} by float32 x parameters. Chatter when nothing is "
        f"exchanged: {' and '.join(f'{who} {x:,.0f}' for who, x in chatter.items())} bytes a step "
        f"and host.",
    ]
    return "\n".join(lines) + "\n"


def of(trainer: str, measured: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows of a trainer."""
    return [row for row in measured if row["trainer"] == trainer]


def conditions(measured: Sequence[Mapping[str, Any]], setup: Mapping[str, Any]) -> str:
    """What the figures have to say about how they were measured."""
    device = "real compute"
    if setup["fast_device_ms"]:
        device = f"fast device ({setup['fast_device_ms']:g} ms of sleep in place of compute)"
    plain = []
    for who in (OURS, THEIRS):
        steps = [row["step_ms"] for row in of(who, measured) if row["mode"] == figures.PLAIN]
        plain.append(f"{who} {' and '.join(f'{step:.1f}' for step in steps)} ms")
    keys, theirs = setup["keys"], of(THEIRS, measured)[0]
    sizes = " + ".join(f"{size / 1e6:.2f}" for size in theirs["fragment_bytes"])
    return (
        f"{device}; {setup['hosts']} hosts, {theirs['parameters']:,} parameters in fragments of "
        f"{sizes} MB in float32, H={keys['diloco_sync_period']}, tau={keys[figures.TAU]}; "
        f"plain step {', '.join(plain)}; "
        f"{', '.join(f'{name} {version}' for name, version in theirs['versions'].items())}, "
        f"bucketization {'on' if setup['bucketization'] else 'off'}; TCP "
        f"{', '.join(sorted({row['congestion'] for row in measured}))}; delay "
        f"{setup['delay_ms']:g} ms one way; commit "
        f"{', '.join(sorted({row['commit'] for row in measured}))}."
    )
