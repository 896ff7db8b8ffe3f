"""The page: tables as HTML, points as numbers in it, and uPlot, which draws them, in one file.

uPlot (MIT licence, in uplot/) is part of the package: 52 KB, against 1 MB of bokeh's script and 4.5
MB of plotly's, which would leave nothing of a page of 5 MB. It draws 100,000 points in a moment.
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

from maxdiloco.page import facts, panels, timeline
from maxdiloco.page.facts import Rows
from maxdiloco.page.run import Run
from maxdiloco.page.timeline import Timeline

MOST_ROWS = 200  # of a table; our choice


def page(runs: Sequence[Run], defaults: Mapping[str, Any], *, reload_s: int = 0) -> str:
    """The page; after reload_s seconds, if any, a browser reads it again. defaults: of base.yml."""
    names = ", ".join(run.name for run in runs)
    drawn = [timeline.of_run(run) for run in runs]
    subtitle = f"made {facts.date(time.time(), seconds=True)}"
    if len(runs) == 1:
        subtitle = f"{runs[0].folder} · {subtitle}"
    config = "<p>The configuration is unknown.</p>"
    if any(run.keys is not None for run in runs):
        same = "Every key has its default." if len(runs) == 1 else "The runs have the same keys."
        config = _table(facts.differences(runs, defaults), "cards", empty=same)
    notes = []
    for run in runs:
        before = f"{run.name}: " if len(runs) > 1 else ""
        notes += [before + line for line in [*run.notes, *panels.not_finite(run)]]
    marks = ["Dashed: a restart."] * any(len(facts.lives(run)) > 1 for run in runs)
    marks += ["▲: a checkpoint that is kept."] * any(run.checkpoints for run in runs)
    # A value is never searched for names of others.
    return string.Template(_read("page.html")).substitute(
        title=escape(f"{names} – maxdiloco"),
        heading=escape(names if len(runs) == 1 else f"{len(runs)} runs"),
        subtitle=escape(subtitle),
        reload=f'<meta http-equiv="refresh" content="{reload_s}">' if reload_s else "",
        verdict=_list(facts.verdict(runs), "verdict"),
        summary=_table(facts.summary(runs), "cards"),
        notes=_list(notes, "notes"),
        marks=" ".join(marks),
        timelines=_timelines(runs, drawn),
        config=config,
        starts=_table(facts.starts(runs), "cards", empty="No start is recorded."),
        checkpoints=_table(facts.checkpoints(runs), "", empty="No checkpoint is kept."),
        uplot_css=_read("uplot/uPlot.min.css"),
        css=_read("page.css"),
        uplot_js=_read("uplot/uPlot.iife.min.js"),
        js=_read("timeline.js") + _read("page.js"),
        data=json.dumps(_data(runs, drawn), allow_nan=False).replace("<", "\\u003c"),
    )


def _read(name: str) -> str:
    return (pathlib.Path(__file__).parent / name).read_text(encoding="utf-8")


def _list(lines: Sequence[str], kind: str) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines[:MOST_ROWS])
    return f'<ul class="{kind}">{items}</ul>' if items else ""


def _swatch(number: int | None) -> str:
    return "" if number is None else f'<i class="swatch" data-run="{number}"></i>'


def _table(table: Rows, kind: str, *, empty: str = "") -> str:
    """kind: cards, where each row becomes a card on a narrow screen."""
    if not table.rows:
        return f"<p>{escape(empty)}</p>"
    head = "".join(f"<th>{escape(name)}</th>" for name in table.head)
    body = ""
    for cells, number in zip(table.rows[:MOST_ROWS], table.runs, strict=False):
        body += "<tr>"
        for k, (name, cell) in enumerate(zip(table.head, cells, strict=True)):
            mark = "" if k else _swatch(number)
            body += f'<td data-label="{escape(name)}">{mark}{escape(cell)}</td>'
        body += "</tr>"
    more = len(table.rows) - MOST_ROWS
    rest = f"<p>{more:,} more rows are left out.</p>" if more > 0 else ""
    return (
        f'<div class="wide"><table class="{kind}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>{rest}"
    )


def _timelines(runs: Sequence[Run], drawn: Sequence[Timeline | str]) -> str:
    parts = []
    for number, (run, each) in enumerate(zip(runs, drawn, strict=True)):
        caption, chart = each, ""
        if isinstance(each, Timeline):
            caption, chart = each.caption, f'<div class="lanes" data-timeline="{number}"></div>'
        name = f"{_swatch(number)}{escape(run.name)}: " if len(runs) > 1 else ""
        parts.append(f'<div class="panel timeline"><p>{name}{escape(caption)}</p>{chart}</div>')
    return "".join(parts)


def _data(runs: Sequence[Run], drawn: Sequence[Timeline | str]) -> dict[str, Any]:
    """What page.js reads: numbers, and the names that go with them."""
    tables = panels.tables_of(runs)
    return {
        "runs": [
            {
                "name": run.name,
                "restarts": [life.start["step"] for life in facts.lives(run)[1:]],
                "checkpoints": [saved.step for saved in run.checkpoints],
            }
            for run in runs
        ],
        "tables": [
            {
                "x": _packed(table.steps, "<f8"),
                "y": {name: _packed(values, "<f4") for name, values in table.columns.items()},
            }
            for _, table in tables
        ],
        "panels": [panel._asdict() for panel in panels.panels(runs, tables)],
        "timelines": [None if isinstance(each, str) else each._asdict() for each in drawn],
    }


def _packed(values: np.ndarray, dtype: str) -> str:
    return base64.b64encode(values.astype(dtype).tobytes()).decode()
