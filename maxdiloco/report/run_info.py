"""Tables of a run's sessions, its checkpoints and its keys."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from maxdiloco.config.values import show
from maxdiloco.report.run_data import RunData
from maxdiloco.report.tables import UNKNOWN, Table, format_date

# Keys that locate a run and do not change it.
_LOCATION_KEYS = ("run_name", "base_output_directory")


class Session(NamedTuple):
    """One start of a run and its end.

    Attributes:
      start, end: the lines of history.jsonl. `end` is None if the session was killed or still runs.
      outcome: a few words on how it ended.
    """

    start: dict[str, Any]
    end: dict[str, Any] | None
    outcome: str


def sessions(run: RunData) -> list[Session]:
    """Return the sessions of a run, oldest first."""
    begins = [k for k, event in enumerate(run.history) if event["event"] == "start"]
    found = []
    for k, following in itertools.pairwise([*begins, None]):
        start, events = run.history[k], run.history[k + 1 : following]
        end = events[0] if events else None
        # The next session begins at the step at which this one ended. The last session ends at the
        # last row.
        reached = run.steps[-1] if following is None else run.history[following]["step"]
        if end is None:
            outcome = "running, or killed" if following is None else "killed"
        else:
            is_done = reached >= start["until"] or (following is None and progress(run) >= 1)
            outcome = end["why"] or ("done" if is_done else "Ctrl-C")
        found.append(Session(start, end, outcome))
    return found


def progress(run: RunData) -> float:
    """Return the fraction of an elastic run's tokens that are committed; NaN for other runs."""
    values = run.finite("islands/progress")
    return float(values[-1]) if len(values) else np.nan


def session_table(runs: Sequence[RunData]) -> Table:
    """Return one row for each session of each run: time, start, devices and outcome."""
    head = ["started", "after step", "processes", "devices", "ended", "outcome"]
    rows, numbers = [], []
    for number, run in enumerate(runs):
        for start, end, outcome in sessions(run):
            counts = [f"{start[name]:,}" for name in ("step", "processes", "devices")]
            ended = UNKNOWN if end is None else format_date(end["time"])
            rows.append([format_date(start["time"]), *counts, ended, outcome])
            numbers.append(number)
    return _with_names(runs, Table(head, rows, numbers))


def checkpoint_table(runs: Sequence[RunData]) -> Table:
    """Return one row for each checkpoint that is kept."""
    kept = [(n, *saved) for n, run in enumerate(runs) for saved in run.checkpoints.items()]
    rows = [[f"{step:,}", format_date(saved)] for _, step, saved in kept]
    return _with_names(runs, Table(["after step", "saved"], rows, [number for number, *_ in kept]))


def _with_names(runs: Sequence[RunData], table: Table) -> Table:
    """Add a first column with the name of the run, if there are several runs."""
    if len(runs) == 1:
        return table
    named = zip(table.rows, table.runs, strict=True)
    rows = [[runs[number].name, *cells] for cells, number in named]
    return Table(["run", *table.head], rows, table.runs)


def config_table(runs: Sequence[RunData], defaults: Mapping[str, Any]) -> Table:
    """Return the keys that differ from their defaults for one run, or between several runs."""
    known = [run for run in runs if run.config is not None]
    configs = [{name: _text(value) for name, value in run.config.items()} for run in known]
    base = {name: _text(value) for name, value in defaults.items()}
    names = [*base, *sorted({name for config in configs for name in config} - set(base))]
    rows = []
    for name in names:
        values = [config.get(name, UNKNOWN) for config in configs]
        reference = base.get(name) if len(runs) == 1 else values[0] if values else None
        if name not in _LOCATION_KEYS and any(value != reference for value in values):
            rows.append([name, *values, base.get(name, UNKNOWN)])
    return Table(["key", *(run.name for run in known), "default"], rows, [None] * len(rows))


def _text(value: Any) -> str:
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return show(value) or '""'
