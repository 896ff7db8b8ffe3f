"""Group the curves of the page into panels, each with a title, a unit and a note."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from maxdiloco.diloco import outer_rate
from maxdiloco.metrics import definitions
from maxdiloco.report import series, timeline
from maxdiloco.report.run_data import REPLICA_LOSS, RunData
from maxdiloco.report.series import Curves


class Line(NamedTuple):
    """One curve of a panel, as page.js reads it.

    Attributes:
      label: in the legend.
      role: style of the curve, see metrics.definitions.
      run: index of the run.
      table, column: index and column of the table with its points.
      is_gone: whether it is a replica that the run no longer has.
    """

    label: str
    role: str
    run: int
    table: int
    column: str
    is_gone: bool


class Panel(NamedTuple):
    """A chart over inner steps. is_main: False in the folded part of the page."""

    title: str
    unit: str
    note: str
    is_main: bool
    lines: list[Line]


TOTAL_BYTES = definitions.Metric(
    series.TOTAL_BYTES, "B", "Bytes that a replica has sent since step 1."
)
_ROLES = ("replica", "line", "mean", "outer")  # drawn in this order, the last one on top


def build(runs: Sequence[RunData], tables: Sequence[Curves]) -> list[Panel]:
    """Return the panels in the order of metrics.definitions, then other metrics by name.

    Every column of the tables is in one panel. A panel whose values are all 0 is folded.
    """
    titles = list(dict.fromkeys(metric.panel for metric in definitions.METRICS if metric.panel))
    found: dict[str, list[Line]] = {title: [] for title in titles}
    for number, table in enumerate(tables):
        for name in table.columns:
            metric = definitions.find(name)
            title = metric.panel if metric and metric.panel else name
            found.setdefault(title, []).append(_line(runs, table.run, number, name, metric))
    if len(runs) == 1 and found[definitions.LOSS]:
        found[definitions.LOSS] += found.pop(definitions.OUTER_LOSS)
    main = [t for t in titles if any(_has_values(tables, line) for line in found.get(t, []))]
    folded = sorted(title for title in found if found[title] and title not in main)
    return [_panel(runs, title, found[title], is_main=title in main) for title in main + folded]


def _has_values(tables: Sequence[Curves], line: Line) -> bool:
    return bool(np.any(tables[line.table].columns[line.column]))


def _line(
    runs: Sequence[RunData], run: int, number: int, name: str, metric: definitions.Metric | None
) -> Line:
    label = (metric and metric.match(name)) or name
    last = _last_step(runs[run], name) if name.startswith(REPLICA_LOSS) else None
    if last is not None:
        label += f" (until step {last:,})"
    return Line(label, metric.role if metric else "line", run, number, name, last is not None)


def _last_step(run: RunData, name: str) -> int | None:
    """Return the last step with a replica's loss; None if the last row with losses has it."""
    rows = run.steps[~np.isnan(run.column("learning/loss"))]
    own = run.steps[~np.isnan(run.column(name))]
    return int(own[-1]) if len(rows) and own[-1] < rows[-1] else None


def _panel(runs: Sequence[RunData], title: str, lines: list[Line], *, is_main: bool) -> Panel:
    lines = sorted(lines, key=lambda x: (_ROLES.index(x.role), len(x.column), x.column, x.run))
    columns = {line.column for line in lines}
    known = [metric for metric in (*definitions.METRICS, TOTAL_BYTES) if columns & {metric.name}]
    known = known or [metric for name in columns if (metric := definitions.find(name))]
    if not known:
        return Panel(title, "value", "", is_main, lines)
    note = known[0].meaning.replace("`", "")
    if known[0].name == "learning/lr":
        note += _outer_rates(runs)
    elif known[0].name == timeline.BYTES:
        note += " Drawn as a mean over whole periods."
    return Panel(title, known[0].unit, note, is_main, lines)


def _outer_rates(runs: Sequence[RunData]) -> str:
    """Return a sentence on the outer learning rates, which are constant."""
    rates = set()
    for run in runs:
        if timeline.schedule_of(run) is not None:
            rate = run.config["diloco_outer_lr"]
            if rate == "auto":
                rate = outer_rate.rate(
                    run.num_replicas,
                    round_overlap=run.config["diloco_round_overlap"],
                    aggregation=run.config["diloco_aggregation"],
                )
            rates.add(f"{rate:g}")
    return f" The outer learning rate is constant: {', '.join(sorted(rates))}." if rates else ""
