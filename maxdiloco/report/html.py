"""Write the page, one file with tables as HTML, points as numbers, and uPlot, which draws them.

uPlot (MIT licence, in static/uplot/) is part of the package. It has 52 KB. The scripts of bokeh and
plotly have 1 MB and 4.5 MB, while the page has at most 1 MB.
"""

import base64
import json
import pathlib
import string
import time
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from maxdiloco.report import comparison, panels, run_info, series, summary, timeline
from maxdiloco.report.run_data import NOT_FINITE, RunData
from maxdiloco.report.tables import MAX_ROWS, format_date, swatch, to_html


def page(runs: Sequence[RunData], defaults: Mapping[str, Any]) -> str:
    """Return the page of one run or several.

    Args:
      runs: all runs; the others are compared with the first one.
      defaults: the default of every key.
    """
    is_single = len(runs) == 1
    names = ", ".join(run.name for run in runs)
    made = f"made {format_date(time.time(), show_seconds=True)}"
    timelines = [timeline.build(run) for run in runs]
    config = _config(runs, defaults)
    # Template.substitute does not replace placeholders in inserted text.
    return string.Template(_static("page.html")).substitute(
        title=escape(f"{names} – maxdiloco"),
        heading=escape(names if is_single else f"{len(runs)} runs"),
        subtitle=escape(f"{runs[0].folder} · {made}" if is_single else made),
        summary=to_html(summary.table(runs)),
        notes=_notes(runs),
        marks=_marks(runs),
        timelines=_timelines(runs, timelines),
        config=config if is_single else "",
        comparison="" if is_single else _comparison(runs) + config,
        sessions=to_html(run_info.session_table(runs), empty="No start is recorded."),
        checkpoints=to_html(
            run_info.checkpoint_table(runs), cards=False, empty="No checkpoint is kept."
        ),
        uplot_css=_static("uplot/uPlot.min.css"),
        css=_static("page.css"),
        uplot_js=_static("uplot/uPlot.iife.min.js"),
        js=_static("timeline.js") + _static("page.js"),
        data=json.dumps(_data(runs, timelines), allow_nan=False).replace("<", "\\u003c"),
    )


def _static(name: str) -> str:
    return (pathlib.Path(__file__).parent / "static" / name).read_text(encoding="utf-8")


def _notes(runs: Sequence[RunData]) -> str:
    """Return a list of missing data and of metrics that were not finite."""
    lines = [
        f"{run.name}: {line}" if len(runs) > 1 else line
        for run in runs
        for line in [*run.notes, *not_finite(run)]
    ]
    items = "".join(f"<li>{escape(line)}</li>" for line in lines[:MAX_ROWS])
    return f'<ul class="notes">{items}</ul>' if items else ""


def not_finite(run: RunData) -> list[str]:
    """Return lines on metrics that were NaN or infinite: how often, and the first step."""
    found = {name: np.flatnonzero(each == NOT_FINITE) for name, each in run.columns.items()}
    return [
        f"{name} is not finite in {len(rows):,} row{'s' * (len(rows) > 1)}, first after step "
        f"{run.steps[rows[0]]:,}."
        for name, rows in found.items()
        if len(rows)
    ]


def _marks(runs: Sequence[RunData]) -> str:
    """Explain the marks in the charts."""
    marks = ["Dashed: a restart."] * any(len(run_info.sessions(run)) > 1 for run in runs)
    marks += ["▲: a checkpoint that is kept."] * any(run.checkpoints for run in runs)
    return " ".join(marks)


def _config(runs: Sequence[RunData], defaults: Mapping[str, Any]) -> str:
    title = "Configuration" if len(runs) == 1 else "Keys that differ"
    if all(run.config is None for run in runs):
        body = "<p>The configuration is unknown.</p>"
    else:
        same = "Every key has its default." if len(runs) == 1 else "The runs have the same keys."
        body = to_html(run_info.config_table(runs, defaults), cards=len(runs) > 1, empty=same)
    return f"<section><h2>{title}</h2>{body}</section>"


def _comparison(runs: Sequence[RunData]) -> str:
    note = (
        "Losses of the outer parameters on held-out text after equally many tokens. Noise "
        "is the standard deviation of the difference of two evaluations, from the scatter of the "
        f"last ones. A difference within {comparison.SIGMAS} of them, or below "
        f"{comparison.FLAT:.1%}, is called none. Runs with another seed differ by more."
    )
    return (
        f"<section><h2>Comparison</h2>{to_html(comparison.table(runs))}"
        f'<p class="note">{note}</p></section>'
    )


def _timelines(runs: Sequence[RunData], timelines: Sequence[dict[str, Any] | str]) -> str:
    parts = []
    for number, (run, drawn) in enumerate(zip(runs, timelines, strict=True)):
        caption, chart = drawn, ""
        if not isinstance(drawn, str):
            caption, chart = drawn["caption"], f'<div class="lanes" data-timeline="{number}"></div>'
        name = f"{swatch(number)}{escape(run.name)}: " if len(runs) > 1 else ""
        parts.append(f'<div class="panel timeline"><p>{name}{escape(caption)}</p>{chart}</div>')
    return "".join(parts)


def _data(runs: Sequence[RunData], timelines: Sequence[dict[str, Any] | str]) -> dict[str, Any]:
    """Return the input of page.js: numbers and their names."""
    tables = series.run_curves(runs)
    return {
        "runs": [
            {
                "name": run.name,
                "restarts": [session.start["step"] for session in run_info.sessions(run)[1:]],
                "checkpoints": list(run.checkpoints),
            }
            for run in runs
        ],
        "tables": [
            {
                "run": table.run,
                "x": _base64(table.steps, "<f8"),
                "y": {name: _base64(values, "<f4") for name, values in table.columns.items()},
            }
            for table in tables
        ],
        "panels": [
            panel._asdict() | {"lines": [line._asdict() for line in panel.lines]}
            for panel in panels.build(runs, tables)
        ],
        "timelines": [None if isinstance(each, str) else each for each in timelines],
    }


def _base64(values: np.ndarray, dtype: str) -> str:
    return base64.b64encode(values.astype(dtype).tobytes()).decode()
