"""What the page says of runs in tables.

# N rows of metrics.jsonl
"""

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from maxdiloco.flags import base_yml
from maxdiloco.page import timeline
from maxdiloco.page.run import NOT_FINITE, Run
from maxdiloco.processes.output import amount, span

UNKNOWN = "–"
# Keys that say where a run is, not what it does.
_PLACES = ("run_name", "base_output_directory")


class Rows(NamedTuple):
    """A table: texts. runs: for each row the number of the run it speaks of, or None."""

    head: list[str]
    rows: list[list[str]]
    runs: list[int | None]


def summary(runs: Sequence[Run]) -> Rows:
    """One row for each run: how far it is, how it ended, and its last losses."""
    head = [
        "run", "state", "step", "replicas", "mode", "loss", "loss of theta", "best of theta",
        "tokens/s", "sent a step",
    ]  # fmt: skip
    rows = []
    for run in runs:
        speed, sent = run.finite("perf/tokens_per_second"), run.finite(timeline.BYTES)
        rows.append([
            run.name,
            next((life.how for life in lives(run)[-1:]), "not recorded"),
            _progress(run),
            str(run.num_replicas),
            UNKNOWN if run.keys is None else timeline.describe(run),
            _last(run, "learning/loss"),
            _last(run, "eval/loss"),
            _best(run, "eval/loss"),
            f"{np.median(speed):,.0f}" if len(speed) else UNKNOWN,
            amount(float(np.mean(sent))) if len(sent) else UNKNOWN,
        ])  # fmt: skip
    return Rows(head, rows, list(range(len(runs))))


def _progress(run: Run) -> str:
    """The last step; of a run with a start also how many there are, and the time that is left."""
    step, step_s = run.steps_N[-1], run.finite("perf/step_time")
    if not (begun := lives(run)):
        return f"{step:,}"
    if not np.isnan(part := tokens_done(run)):  # in whatever number of steps
        return f"{step:,}, {min(part, 1):.1%} of the islands' tokens"
    start, end, _ = begun[-1]
    until = start["until"]
    text = f"{step:,} of {until:,}"
    if end is None and step < until and len(step_s):
        text += f", {span((until - step) * np.median(step_s))} left"
    return text


def _last(run: Run, name: str) -> str:
    """The last value; a metric may be rarer than rows."""
    values = run.column(name)
    at = np.flatnonzero(~np.isnan(values))
    if not len(at):
        return UNKNOWN
    value, step = values[at[-1]], run.steps_N[at[-1]]
    text = "not finite" if value == NOT_FINITE else f"{value:.4f}"
    return text if step == run.steps_N[-1] else f"{text} (step {step:,})"


def _best(run: Run, name: str) -> str:
    if not len(run.finite(name)):
        return UNKNOWN
    at = np.nanargmin(run.column(name))
    return f"{run.column(name)[at]:.4f} (step {run.steps_N[at]:,})"


class Life(NamedTuple):
    """Lines of history.jsonl on a start and its end, if it has one. how: it ended, in words."""

    start: dict[str, Any]
    end: dict[str, Any] | None
    how: str


def lives(run: Run) -> list[Life]:
    """The starts of a run with their ends, oldest first."""
    begun = [k for k, event in enumerate(run.history) if event["event"] == "start"]
    out = []
    for k, following in itertools.pairwise([*begun, None]):
        start, after = run.history[k], run.history[k + 1 : following]
        end = after[0] if after else None
        # A later start says how far this one came; of the last one the rows do.
        reached = run.steps_N[-1] if following is None else run.history[following]["step"]
        if end is None:
            how = "running, or killed" if following is None else "killed"
        else:
            is_done = reached >= start["until"] or following is None and tokens_done(run) >= 1
            how = end["why"] or ("done" if is_done else "Ctrl-C")
        out.append(Life(start, end, how))
    return out


def tokens_done(run: Run) -> float:
    """The part of its islands' tokens that an island saw committed; NaN of other runs."""
    done = run.finite("islands/progress")
    return float(done[-1]) if len(done) else np.nan


def starts(runs: Sequence[Run]) -> Rows:
    """One row for each start of each run: when, from where, on what, and how it ended."""
    head = ["run", "started", "after step", "processes", "devices", "ended", "how"]
    rows, numbers = [], []
    for number, run in enumerate(runs):
        for start, end, how in lives(run):
            counts = [f"{start[name]:,}" for name in ("step", "processes", "devices")]
            ended = UNKNOWN if end is None else date(end["time"])
            rows.append([run.name, date(start["time"]), *counts, ended, how])
            numbers.append(number)
    return Rows(head, rows, numbers)


def checkpoints(runs: Sequence[Run]) -> Rows:
    """One row for each checkpoint that is kept."""
    kept = [(n, run, *saved) for n, run in enumerate(runs) for saved in run.checkpoints.items()]
    rows = [[run.name, f"{step:,}", date(saved)] for _, run, step, saved in kept]
    return Rows(["run", "after step", "saved"], rows, [number for number, *_ in kept])


def differences(runs: Sequence[Run], defaults: Mapping[str, Any]) -> Rows:
    """The keys of one run that differ from base.yml, or those in which several runs differ."""
    known = [run for run in runs if run.keys is not None]
    shown = [{name: _text(value) for name, value in run.keys.items()} for run in known]
    base = {name: _text(value) for name, value in defaults.items()}
    names = [*base, *sorted({name for keys in shown for name in keys} - set(base))]
    rows = []
    for name in names:
        values = [keys.get(name, UNKNOWN) for keys in shown]
        against = base.get(name) if len(runs) == 1 else values[0] if values else None
        if name not in _PLACES and any(value != against for value in values):
            rows.append([name, *values, base.get(name, UNKNOWN)])
    return Rows(["key", *(run.name for run in known), "base.yml"], rows, [None] * len(rows))


def _text(value: Any) -> str:
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return base_yml.show(value) or '""'


def date(moment: float, *, seconds: bool = False) -> str:
    """Seconds since 1970 -> '2026-11-22 06:01 UTC', or 06:01:59."""
    if not np.isfinite(moment):
        return UNKNOWN
    shown = "%Y-%m-%d %H:%M:%S UTC" if seconds else "%Y-%m-%d %H:%M UTC"
    return time.strftime(shown, time.gmtime(moment))
