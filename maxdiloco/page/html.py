"""The page: tables as HTML, points as numbers in it, and uPlot, which draws them, in one file.

uPlot (MIT licence, in uplot/) is part of the package: 52 KB, against 1 MB of bokeh's script and 4.5
MB of plotly's, which would leave nothing of a page of 5 MB. It draws 100,000 points in a moment.
"""

import base64
import json
import math
import pathlib
import time
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from maxdiloco.page import facts, panels, timeline, verdict
from maxdiloco.page.facts import Rows
from maxdiloco.page.run import Run

FOLDER = pathlib.Path(__file__).parent
MOST_ROWS = 200  # of a table; our choice


def page(runs: Sequence[Run], defaults: Mapping[str, Any], *, reload_s: int = 0) -> str:
    """The whole page as HTML.

    defaults: {key: value} of base.yml. reload_s: seconds after which a browser reads the page
    again; 0: never.
    """
    names = ", ".join(run.name for run in runs)
    drawn = [timeline.of_run(run) for run in runs]
    parts = {
        "title": escape(f"{names} – maxdiloco"),
        "heading": escape(names if len(runs) == 1 else f"{len(runs)} runs"),
        "subtitle": escape(_subtitle(runs)),
        "reload": f'<meta http-equiv="refresh" content="{reload_s}">' if reload_s else "",
        "verdict": _list(verdict.lines(runs), "verdict"),
        "summary": _table(facts.summary(runs), "cards"),
        "notes": _notes(runs),
        "marks": _marks(runs),
        "timelines": _timelines(runs, drawn),
        "config": _config(runs, defaults),
        "starts": _table(facts.starts(runs), "cards", empty="No start is recorded."),
        "checkpoints": _table(facts.checkpoints(runs), "", empty="No checkpoint is kept."),
        "uplot_css": _read("uplot/uPlot.min.css"),
        "css": _read("page.css"),
        "uplot_js": _read("uplot/uPlot.iife.min.js"),
        "js": _read("timeline.js") + _read("page.js"),
        "data": json.dumps(_data(runs, drawn), allow_nan=False).replace("<", "\\u003c"),
    }
    text = _read("page.html")
    # One pass over the template: a value is never searched for names.
    pieces = text.split("{{")
    return pieces[0] + "".join(
        parts[name] + rest for name, _, rest in (piece.partition("}}") for piece in pieces[1:])
    )


def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _subtitle(runs: Sequence[Run]) -> str:
    made = f"made {facts.date(time.time(), seconds=True)}"
    return f"{runs[0].folder} · {made}" if len(runs) == 1 else made


def _notes(runs: Sequence[Run]) -> str:
    lines = []
    for run in runs:
        before = f"{run.name}: " if len(runs) > 1 else ""
        lines += [before + line for line in [*run.notes, *panels.not_finite(run)]]
    return _list(lines, "notes")


def _list(lines: Sequence[str], kind: str) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines[:MOST_ROWS])
    return f'<ul class="{kind}">{items}</ul>' if items else ""


def _marks(runs: Sequence[Run]) -> str:
    """What the marks in the charts mean."""
    restarted = any(len(facts.lives(run)) > 1 for run in runs)
    saved = any(run.checkpoints for run in runs)
    return " ".join(["Dashed: a restart."] * restarted + ["▲: a checkpoint that is kept."] * saved)


def _swatch(number: int | None) -> str:
    return "" if number is None else f'<i class="swatch" data-run="{number}"></i>'


def _table(table: Rows, kind: str, *, empty: str = "") -> str:
    """kind: cards, where each row becomes a card on a narrow screen."""
    if not table.rows:
        return f"<p>{escape(empty)}</p>"
    head = "".join(f"<th>{escape(name)}</th>" for name in table.head)
    body = []
    for cells, number in zip(table.rows[:MOST_ROWS], table.runs, strict=False):
        tds = [
            f'<td data-label="{escape(name)}">{_swatch(number) if not k else ""}{escape(cell)}</td>'
            for k, (name, cell) in enumerate(zip(table.head, cells, strict=True))
        ]
        body.append(f"<tr>{''.join(tds)}</tr>")
    more = len(table.rows) - MOST_ROWS
    rest = f"<p>{more:,} more rows are left out.</p>" if more > 0 else ""
    return (
        f'<div class="wide"><table class="{kind}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>{rest}"
    )


def _timelines(runs: Sequence[Run], drawn: Sequence[timeline.Timeline | str]) -> str:
    parts = []
    for number, (run, each) in enumerate(zip(runs, drawn, strict=True)):
        caption = each if isinstance(each, str) else each.caption
        if not isinstance(each, str) and not each.told:
            caption += "; bytes are the mean of the run in equal parts"
        drawn_here = f'<div class="lanes" data-timeline="{number}"></div>'
        chart = "" if isinstance(each, str) else drawn_here
        name = f"{_swatch(number)}{escape(run.name)}: " if len(runs) > 1 else ""
        parts.append(f'<div class="panel timeline"><p>{name}{escape(caption)}</p>{chart}</div>')
    return "".join(parts)


def _config(runs: Sequence[Run], defaults: Mapping[str, Any]) -> str:
    if all(run.keys is None for run in runs):
        return "<p>The configuration is unknown.</p>"
    same = "Every key has its default." if len(runs) == 1 else "The runs have the same keys."
    return _table(facts.differences(runs, defaults), "cards", empty=same)


def _data(runs: Sequence[Run], drawn: Sequence[timeline.Timeline | str]) -> dict[str, Any]:
    """What page.js reads: numbers, and the names that go with them."""
    tables = panels.tables_of(runs)
    places = {
        (index, name): k
        for index, (_, table) in enumerate(tables)
        for k, name in enumerate(table.columns)
    }
    shown = [
        panel._asdict()
        | {
            "series": [
                [s.label, s.role, s.run, s.table, places[s.table, s.column], s.gone]
                for s in panel.series
            ]
        }
        for panel in panels.panels(runs, tables)
    ]
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
                "y": [_packed(values, "<f4") for values in table.columns.values()],
                "rows": table.rows,
            }
            for _, table in tables
        ],
        "panels": shown,
        "timelines": [None if isinstance(each, str) else _lanes(each) for each in drawn],
    }


def _lanes(each: timeline.Timeline) -> dict[str, Any]:
    sent = [round(n) if math.isfinite(n) else 0 for n in each.bytes]
    return each._asdict() | {"exchanges": [list(e) for e in each.exchanges], "bytes": sent}


def _packed(values: np.ndarray, dtype: str) -> str:
    return base64.b64encode(values.astype(dtype).tobytes()).decode()
