"""The page: tables as HTML, points as numbers in it, and uPlot, which draws them, in one file.

uPlot (MIT licence, in uplot/) is part of the package: 52 KB, against 1 MB of bokeh's script and 4.5
MB of plotly's, for a page of 1 MB. It draws 100,000 points in a moment.

# N rows  B buckets  K rows in a bucket
"""

import base64
import json
import pathlib
import re
import string
import time
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

import numpy as np
import yaml

from maxdiloco.flags import config
from maxdiloco.page import compare, facts, timeline
from maxdiloco.page.run import NOT_FINITE, Run

MOST_ROWS = 200  # of a table; our choice
# Points of all series together: 0.8 MB of a page. Our choice, for pages below 1 MB.
POINTS = 110_000
# Of one series: about two for each pixel of a wide screen in a view of a tenth of the run; and
# what a narrow panel still shows. Our choice.
MOST, LEAST = 20_000, 400
# Units of metrics that panels.yml does not name: by the end of the name, the first that fits.
UNITS = {
    r"loss": "nats a token", r"perplexity": "tokens", r"bits_per_byte": "bits", r"bytes\w*": "B",
    r"tokens_per_second": "tokens/s", r"tflops_per_device": "TFLOP/s", r"tokens": "tokens",
    r"_(s|seconds)|\(s\)|_time": "s", r"epochs?(_\w+)?": "epochs", r"mfu|share": "of 1",
    r"entropy": "nats", r"norm": "norm", r"GiB\)": "GiB", r"%\)": "%",
}  # fmt: skip
THETA = "Loss of theta"  # in the panel before it where there is one run


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
        notes += [before + line for line in [*run.notes, *not_finite(run)]]
    data = _data(runs, drawn)
    marks = ["Dashed: a restart."] * any(len(facts.lives(run)) > 1 for run in runs)
    marks += ["▲: a checkpoint that is kept."] * any(run.checkpoints for run in runs)
    # A value is never searched for names of others.
    return string.Template(_read("page.html")).substitute(
        title=escape(f"{names} – maxdiloco"),
        heading=escape(names if len(runs) == 1 else f"{len(runs)} runs"),
        subtitle=escape(subtitle),
        reload=f'<meta http-equiv="refresh" content="{reload_s}">' if reload_s else "",
        summary=_table(facts.summary(runs), "cards"),
        notes=_notes(notes),
        marks=" ".join(marks),
        timelines=_timelines(runs, drawn),
        config="" if len(runs) > 1 else f"<section><h2>Configuration</h2>{config}</section>",
        compared=_compared(runs, config) if len(runs) > 1 else "",
        starts=_table(facts.starts(runs), "cards", empty="No start is recorded."),
        checkpoints=_table(facts.checkpoints(runs), "", empty="No checkpoint is kept."),
        uplot_css=_read("uplot/uPlot.min.css"),
        css=_read("page.css"),
        uplot_js=_read("uplot/uPlot.iife.min.js"),
        js=_read("timeline.js") + _read("page.js"),
        data=json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
    )


def _read(name: str) -> str:
    return (pathlib.Path(__file__).parent / name).read_text(encoding="utf-8")


def _notes(lines: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines[:MOST_ROWS])
    return f'<ul class="notes">{items}</ul>' if items else ""


def _compared(runs: Sequence[Run], config: str) -> str:
    """Several runs: keys that differ, and theta's loss where they have come equally far."""
    note = (
        "noise: deviation of the difference of two evaluations, by how the last ones scatter; no "
        "difference: within two of them. Between seeds runs differ by more."
    )
    return (
        f'<section aria-label="comparison"><h2>Keys that differ</h2>{config}'
        f"<h2>Differences of theta</h2>{_table(compare.table(runs), 'cards')}"
        f'<p class="note">{note}</p></section>'
    )


def _swatch(number: int | None) -> str:
    return "" if number is None else f'<i class="swatch" data-run="{number}"></i>'


def _table(table: facts.Rows, kind: str, *, empty: str = "") -> str:
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


def _timelines(runs: Sequence[Run], drawn: Sequence[dict[str, Any] | str]) -> str:
    parts = []
    for number, (run, each) in enumerate(zip(runs, drawn, strict=True)):
        caption, chart = each, ""
        if not isinstance(each, str):
            caption, chart = each["caption"], f'<div class="lanes" data-timeline="{number}"></div>'
        name = f"{_swatch(number)}{escape(run.name)}: " if len(runs) > 1 else ""
        parts.append(f'<div class="panel timeline"><p>{name}{escape(caption)}</p>{chart}</div>')
    return "".join(parts)


def _data(runs: Sequence[Run], drawn: Sequence[dict[str, Any] | str]) -> dict[str, Any]:
    """What page.js reads: numbers, and the names that go with them."""
    tables = tables_of(runs)
    return {
        "runs": [
            {
                "name": run.name,
                "restarts": [life.start["step"] for life in facts.lives(run)[1:]],
                "checkpoints": list(run.checkpoints),
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
        "panels": panels(runs, tables),
        "timelines": [None if isinstance(each, str) else each for each in drawn],
    }


def _packed(values: np.ndarray, dtype: str) -> str:
    return base64.b64encode(values.astype(dtype).tobytes()).decode()


# -- panels, and the points of their series ------------------------------------------------------


class Table(NamedTuple):
    """Series over the same steps, which increase. columns: float32, NOT_FINITE for a gap."""

    steps: np.ndarray
    columns: dict[str, np.ndarray]


def panels(runs: Sequence[Run], tables: Sequence[tuple[int, Table]]) -> list[dict[str, Any]]:
    """The panels of the page in their order; every column of tables_of is in one of them.

    A panel is a chart over inner steps, as page.js draws it. unit: of the values. main: False in
    the folded part. series: its lines: label; role: mean, theta, replica or line, how it is drawn;
    the number of the run; that of the page's table, and its column; whether it is gone: a replica
    that the run no longer has.
    """
    left = {
        (run, name): index for index, (run, table) in enumerate(tables) for name in table.columns
    }

    def taken(pattern: str, role: str, label: str) -> list[list[Any]]:
        """The columns that are left and match, by name and run."""
        found = [(re.fullmatch(pattern, name), run) for run, name in left]
        found = [(match[0], label.format(*match.groups()), run) for match, run in found if match]
        series = []
        for name, text, run in sorted(found, key=lambda each: (len(each[0]), each[0], each[2])):
            gone = _gone_after(runs[run], name) if role == "replica" else None
            text += "" if gone is None else f" (until step {gone:,})"
            series.append([text, role, run, left.pop((run, name)), name, gone is not None])
        return series

    out = []
    for entry in yaml.safe_load(_read("panels.yml")):
        series = [s for pattern, how in entry["series"].items() for s in taken(pattern, *how)]
        note = entry.get("note", "")
        if "learning/lr" in entry["series"]:
            note += _outer_rates(runs)
        if entry["title"] == THETA and len(runs) == 1 and out:
            out[-1]["series"] += series
        elif series:
            shown = {"title": entry["title"], "unit": entry.get("unit", ""), "note": note}
            out.append(shown | {"main": True, "series": series})
    for name in sorted({name for _, name in left}):
        series = taken(f"({re.escape(name)})", "line", "{}")
        unit = next((unit for end, unit in UNITS.items() if re.search(f"({end})$", name)), "value")
        out.append({"title": name, "unit": unit, "note": "", "main": False, "series": series})
    return out


def _gone_after(run: Run, name: str) -> int | None:
    """The last step of a replica's loss; None where the last row of such losses has it."""
    of_all = run.steps_N[~np.isnan(run.column(name.partition("_replica_")[0]))]
    own = run.steps_N[~np.isnan(run.column(name))]
    return int(own[-1]) if len(of_all) and own[-1] < of_all[-1] else None


def _outer_rates(runs: Sequence[Run]) -> str:
    """The outer learning rates, which are constant."""
    rates = {
        f"{config.outer_lr(run.keys, run.num_replicas):g}"
        for run in runs
        if timeline.schedule_of(run) is not None
    }
    return f"; the outer one's is constant: {', '.join(sorted(rates))}" if rates else ""


def not_finite(run: Run) -> list[str]:
    """Lines on metrics that were NaN or infinite: how often, and first after which step."""
    found = {name: np.flatnonzero(each == NOT_FINITE) for name, each in run.columns.items()}
    return [
        f"{name} is not finite in {len(at):,} row{'s' * (len(at) > 1)}, first after step "
        f"{run.steps_N[at[0]]:,}."
        for name, at in found.items()
        if len(at)
    ]


def tables_of(runs: Sequence[Run]) -> list[tuple[int, Table]]:
    """(number of the run, table) of all runs, thinned to about POINTS values together."""
    count = sum(len(run.columns) for run in runs)
    limit = max(LEAST, min(MOST, POINTS // max(count, 1)))
    out = []
    for number, run in enumerate(runs):
        columns = run.columns
        if timeline.BYTES in columns:
            columns = compare.with_total(run).columns
            columns = columns | {timeline.BYTES: timeline.over_whole_periods(run)}
        out += [(number, table) for table in by_rows(run.steps_N, columns, limit=limit)]
    return out


def by_rows(steps_N: np.ndarray, columns: Mapping[str, np.ndarray], *, limit: int) -> list[Table]:
    """The columns of a run, those of the same rows in one table, of `limit` points at most.

    A column stands in the rows that have it, so an evaluation's is short and keeps every value.
    """
    groups: dict[bytes, list[str]] = {}
    for name, values_N in columns.items():
        groups.setdefault(np.isnan(values_N).tobytes(), []).append(name)
    out = []
    for names in groups.values():
        present_N = ~np.isnan(columns[names[0]])
        if present_N.any():
            group = {name: columns[name][present_N] for name in names}
            out.append(thinned(steps_N[present_N], group, limit=limit))
    return out


def thinned(steps_N: np.ndarray, columns: Mapping[str, np.ndarray], *, limit: int) -> Table:
    """At most `limit` points, an even number >= 2: of K rows the least and the largest value.

    They are finite, in the order in which they came, and stand at the first and the last step.
    """
    N = len(steps_N)
    if limit >= N:
        return Table(steps_N, {n: _as_float32(v) for n, v in columns.items()})
    K = -(-N // (limit // 2))
    first_B = np.arange(0, N, K)
    at = np.stack([first_B, np.minimum(first_B + K, N) - 1], axis=1).ravel()
    kept = np.append(True, np.diff(at) > 0)  # the last bucket may have one row
    values = {name: _extremes(values_N, K)[kept] for name, values_N in columns.items()}
    return Table(steps_N[at[kept]], values)


def _extremes(values_N: np.ndarray, K: int) -> np.ndarray:
    """[2 B] float32: of every K values the least and the largest finite one, in their order."""
    padded = np.full(-(-len(values_N) // K) * K, NOT_FINITE)
    padded[: len(values_N)] = values_N
    values_BK = padded.reshape(-1, K)
    finite_BK = np.isfinite(values_BK)
    low_B = np.where(finite_BK, values_BK, np.inf).argmin(1)
    high_B = np.where(finite_BK, values_BK, -np.inf).argmax(1)
    at_B2 = np.sort(np.stack([low_B, high_B], axis=1), axis=1)
    # In a bucket without a finite value both are its first one, a gap.
    return _as_float32(np.take_along_axis(values_BK, at_B2, axis=1).ravel())


def _as_float32(values: np.ndarray) -> np.ndarray:
    """The values; what a float32 cannot hold is not finite."""
    with np.errstate(over="ignore"):
        return values.astype(np.float32)
