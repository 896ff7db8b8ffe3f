"""Measure the cost of each mode in loss and bytes: one model, equal tokens, the trainer's flags.

    PYTHONPATH=. python benchmarks/quality.py [scale=cpu|gpu] [name=value ...] [key=value ...]

The inner learning rate is tuned only on data parallelism; the outer one for every mode, at one
seed; the best of each then runs with the other seeds. Every row is a run of maxdiloco.train; the
loss is the outer parameters' on held-out text at the end. Names: OWN; other keys are the trainer's.

Writes rows.json, table.md and two figures into `out`. An interrupted run continues at its rows.
Exit code 1: a run failed (one that diverged is a result).
"""

import json
import os
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from benchmarks.learning import draw, table
from benchmarks.learning.modes import BY_NAME, MODES, SCALES, Mode, Scale
from benchmarks.learning.plan import FIRST_SEED, Row, is_over, known_rows
from benchmarks.learning.rows import Run, keys_of
from benchmarks.learning.traffic import Traffic, traffic
from benchmarks.link.command import choices, guarded, help_text, number, split_arguments
from benchmarks.link.rows import RowError
from maxdiloco.errors import ConfigError

OWN = {
    "scale": "cpu",  # of SCALES
    "modes": "",  # names with semicolons between; empty: the table's; all: every one
    "seeds": "",  # of every mode; empty: the scale's for modes of its table, 1 for the others
    "steps": "",  # of every mode; empty: the same choice
    "rates": "",  # inner:outer, of every mode; empty: tuned
    "jobs": "",  # rows at once; empty: one a core on a CPU, else 1
    "out": "runs/quality",
}
POLL_S = 0.5


class Options(NamedTuple):
    """The options of a command line. keys: of the trainer, for every row."""

    name: str
    scale: Scale
    modes: list[Mode]
    keys: dict[str, str]
    jobs: int
    out: pathlib.Path

    def setup(self) -> dict[str, Any]:
        """The values that compared rows must share."""
        scale = self.scale
        sizes = {"steps": scale.steps, "batch": scale.batch, "evaluations": scale.evaluations}
        return sizes | {"keys": {**scale.keys, **self.keys}}


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; returns its exit code."""
    usage = help_text(__doc__, OWN, "Modes:", *(f"  {mode.name}" for mode in MODES))
    again = "Interrupted. The same command continues at its rows."
    return guarded(_main, argv, usage=usage, interrupted=again)


def _main(argv: Sequence[str]) -> int:
    options = arguments(argv)
    done = stored(options)
    jax.config.update("jax_platforms", "cpu")  # of this process, which trains nothing
    # Rows that the trainer refuses are refused before the first row.
    sent = {mode.name: _traffic(mode, options) for mode in options.modes}
    failed: set[Row] = set()
    running: list[tuple[Run, int]] = []
    try:
        while not is_over(options.modes, options.scale, done):
            waiting = [
                row for row in known_rows(options.modes, options.scale, done) if row not in done
            ]
            waiting = [row for row in waiting if row not in failed]
            waiting = [row for row in waiting if all(run.row != row for run, _ in running)]
            while waiting and len(running) < options.jobs:
                job = min(set(range(options.jobs)) - {job for _, job in running})
                running.append((_start(waiting.pop(0), job, options), job))
            if not running:
                break  # what is left waits for rows that failed
            time.sleep(POLL_S)
            for run, job in [item for item in running if item[0].is_over()]:
                running.remove((run, job))
                _finish(run, options, done, failed)
                report(options, done, sent)
    finally:
        for run, _ in running:
            run.end()
    print(report(options, done, sent))
    if failed:
        names = ", ".join(row.name() for row in sorted(failed))
        print(f"failed: {names}. The same command tries again.", file=sys.stderr)
    return int(bool(failed))


def arguments(argv: Sequence[str]) -> Options:
    """The request of a command line. Raises ConfigError."""
    options, keys = split_arguments(argv, OWN)
    (name,) = choices("scale", options, list(SCALES))
    scale = SCALES[name]
    if options["steps"]:
        scale = scale._replace(steps=number("steps", options))
    if options["seeds"]:
        scale = scale._replace(seeds=number("seeds", options), all_alike=True)
    names = [mode.name for mode in MODES if not mode.extra]
    if options["modes"]:
        names = choices("modes", options, list(BY_NAME), separator=";")
    on_cpu = scale.keys["hardware"] == "cpu"
    default = len(os.sched_getaffinity(0)) if on_cpu else 1
    jobs = number("jobs", options) if options["jobs"] else default
    modes = [_at_rates(BY_NAME[name], options["rates"]) for name in names]
    return Options(
        options["scale"], scale, modes, keys, jobs, pathlib.Path(options["out"]).resolve()
    )


def _at_rates(mode: Mode, text: str) -> Mode:
    if not text:
        return mode
    try:
        inner, outer = map(float, text.split(":"))
    except ValueError as error:
        raise ConfigError(f"rates={text} is not inner:outer. Use rates=0.008:0.7.") from error
    return mode._replace(inner_lr=inner, outer_lr=mode.outer_lr and outer)


def _traffic(mode: Mode, options: Options) -> Traffic:
    keys = keys_of(Row(mode.name, 1e-3, 0.5, FIRST_SEED), options.scale, options.keys)
    return traffic(keys | {"hardware": "cpu"})


def stored(options: Options) -> dict[Row, dict[str, Any]]:
    """The rows that are there already. Raises ConfigError for rows of another setup."""
    path = options.out / "rows.json"
    if not path.exists():
        options.out.mkdir(parents=True, exist_ok=True)
        return {}
    saved = json.loads(path.read_text(encoding="utf-8"))
    if saved["setup"] != options.setup():
        raise ConfigError(
            f"out={options.out} has rows of another model, text or number of steps: they do not "
            f"compare. Name another folder, or remove this one."
        )
    return {Row(*row): figures for row, figures in saved["rows"]}


def _start(row: Row, job: int, options: Options) -> Run:
    cpus = sorted(os.sched_getaffinity(0))
    share = [cpu for k, cpu in enumerate(cpus) if k % options.jobs == job % len(cpus)]
    print(f"{time.strftime('%H:%M:%S')} {row.name()}", flush=True)
    return Run(
        row,
        options.scale,
        options.keys,
        options.out / "runs" / row.name(),
        cpus=share or cpus,
        cache=options.out / "jax_cache",
    )


def _finish(run: Run, options: Options, done: dict[Row, dict[str, Any]], failed: set[Row]) -> None:
    try:
        figures = run.result()
    except RowError as error:
        print(f"RowError: {error}", file=sys.stderr, flush=True)
        failed.add(run.row)
        return
    done[run.row] = figures
    rows = [[list(row), figures] for row, figures in done.items()]
    draft = options.out / "rows.json.new"
    draft.write_text(json.dumps({"setup": options.setup(), "rows": rows}), encoding="utf-8")
    os.replace(draft, options.out / "rows.json")
    loss = "diverged" if figures["loss"] is None else f"loss {figures['loss']:.4f}"
    print(f"{run.row.name()}: {loss} in {figures['seconds']:.0f} s", flush=True)


def report(
    options: Options, done: Mapping[Row, Mapping[str, Any]], sent: Mapping[str, Traffic]
) -> str:
    """Write the table and the figures of the finished rows; returns the table."""
    found = table.results(options.modes, options.scale, done, sent)
    first = next(iter(sent.values()))
    title = table.heading(options.scale, options.name, options.keys, first.parameters)
    sweeps = table.sweeps(options.modes, options.scale, done)
    text = "\n".join([title + "\n", table.table(found, options.scale), sweeps])
    tokens = options.scale.batch * int(options.scale.keys["max_target_length"])
    (options.out / "table.md").write_text(text, encoding="utf-8")
    curves = draw.curves(found, "Loss of theta on held-out text against tokens", tokens)
    (options.out / "curves.svg").write_text(curves, encoding="utf-8")
    bytes_ = draw.tradeoff(found, "Last loss against the bytes that a replica sends")
    (options.out / "bytes.svg").write_text(bytes_, encoding="utf-8")
    return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
