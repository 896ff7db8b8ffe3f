"""The first table of the page: the progress of each run, its outcome, and its losses."""

from collections.abc import Sequence

import numpy as np

from maxdiloco.output import amount, span
from maxdiloco.report import run_info, timeline
from maxdiloco.report.run_data import NOT_FINITE, RunData
from maxdiloco.report.tables import UNKNOWN, Table

HEAD = [
    "run", "state", "step", "replicas", "mode", "training loss", "held-out loss", "best held-out",
    "tokens/s", "sent/step",
]  # fmt: skip


def table(runs: Sequence[RunData]) -> Table:
    """Return one row for each run. The held-out loss uses the outer parameters."""
    rows = [
        [
            run.name,
            next((session.outcome for session in run_info.sessions(run)[-1:]), "not recorded"),
            _progress(run),
            str(run.num_replicas),
            UNKNOWN if run.config is None else timeline.describe(run),
            _last(run, "learning/loss"),
            _last(run, "eval/loss"),
            _best(run, "eval/loss"),
            _summarised(run, "perf/tokens_per_second", np.median, "{:,.0f}".format),
            _summarised(run, timeline.BYTES, np.mean, amount),
        ]
        for run in runs
    ]
    return Table(HEAD, rows, list(range(len(runs))))


def _progress(run: RunData) -> str:
    """Return the last step, and the number of steps and the remaining time if known."""
    step, step_s = run.steps[-1], run.finite("perf/step_time")
    found = run_info.sessions(run)
    if not found:
        return f"{step:,}"
    if not np.isnan(part := run_info.progress(run)):  # the number of steps is not fixed
        return f"{step:,}, {min(part, 1):.1%} of the islands' tokens"
    start, end, _ = found[-1]
    left = start["until"] - step
    text = f"{step:,} of {start['until']:,}"
    if end is None and left > 0 and len(step_s):
        text += f", {span(left * np.median(step_s))} left"
    return text


def _last(run: RunData, name: str) -> str:
    """Return the last value, with its step if later rows lack the metric."""
    values = run.column(name)
    rows = np.flatnonzero(~np.isnan(values))
    if not len(rows):
        return UNKNOWN
    value, step = values[rows[-1]], run.steps[rows[-1]]
    text = "not finite" if value == NOT_FINITE else f"{value:.4f}"
    return text if step == run.steps[-1] else f"{text} (step {step:,})"


def _best(run: RunData, name: str) -> str:
    """Return the lowest value with its step."""
    if not len(run.finite(name)):
        return UNKNOWN
    row = np.nanargmin(run.column(name))
    return f"{run.column(name)[row]:.4f} (step {run.steps[row]:,})"


def _summarised(run: RunData, name: str, summarise, text) -> str:
    values = run.finite(name)
    return text(float(summarise(values))) if len(values) else UNKNOWN
