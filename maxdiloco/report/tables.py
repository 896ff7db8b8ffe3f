"""Tables of texts, and their HTML."""

import time
from html import escape
from typing import NamedTuple

import numpy as np

UNKNOWN = "–"
MAX_ROWS = 200  # nobody reads more; with 100 bytes a cell the page stays below 1 MB


class Table(NamedTuple):
    """A table of texts.

    runs: for each row the index of the run that it describes, or None.
    """

    head: list[str]
    rows: list[list[str]]
    runs: list[int | None]


def to_html(table: Table, *, cards: bool = True, empty: str = "") -> str:
    """Render a table.

    Args:
      table: its first MAX_ROWS rows are shown, with a note on the rest.
      cards: whether each row becomes a card on a narrow screen.
      empty: the text instead of a table without rows.
    """
    if not table.rows:
        return f"<p>{escape(empty)}</p>"
    head = "".join(f"<th>{escape(name)}</th>" for name in table.head)
    rows = zip(table.rows[:MAX_ROWS], table.runs, strict=False)
    body = "".join(_row(table.head, cells, run) for cells, run in rows)
    hidden = len(table.rows) - MAX_ROWS
    rest = f"<p>{hidden:,} more rows are left out.</p>" if hidden > 0 else ""
    kind = ' class="cards"' if cards else ""
    return (
        f'<div class="wide"><table{kind}><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>{rest}"
    )


def _row(head: list[str], cells: list[str], run: int | None) -> str:
    marks = [swatch(run), *[""] * (len(cells) - 1)]
    return "<tr>{}</tr>".format(
        "".join(
            f'<td data-label="{escape(name)}">{mark}{escape(cell)}</td>'
            for name, cell, mark in zip(head, cells, marks, strict=True)
        )
    )


def swatch(run: int | None) -> str:
    """Return a small square in the colour of a run, which page.js paints."""
    return "" if run is None else f'<i class="swatch" data-run="{run}"></i>'


def format_date(seconds: float, *, show_seconds: bool = False) -> str:
    """Format seconds since 1970: '2026-11-22 06:01 UTC', or '2026-11-22 06:01:59 UTC'."""
    if not np.isfinite(seconds):
        return UNKNOWN
    pattern = "%Y-%m-%d %H:%M:%S UTC" if show_seconds else "%Y-%m-%d %H:%M UTC"
    return time.strftime(pattern, time.gmtime(seconds))
