"""Which series stand in which panel of the page (panels.yml), and their points.

# N rows  B buckets  K rows in a bucket
"""

import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import yaml

from maxdiloco.page import timeline
from maxdiloco.page.run import NOT_FINITE, Run

# Points of all series together: 2.1 MB of a page. Our choice, for pages below 5 MB.
POINTS = 400_000
# Of one series: about two for each pixel of a wide screen in a view of a tenth of the run; and
# what a narrow panel still shows. Our choice.
MOST, LEAST = 20_000, 400
THETA = "Loss of theta"  # in the panel before it where there is one run


class Table(NamedTuple):
    """Series over the same steps, which increase. columns: float32, NOT_FINITE for a gap."""

    steps: np.ndarray
    columns: dict[str, np.ndarray]


class Series(NamedTuple):
    """A line of a panel: a column of one of the page's tables. run: its number.

    role: mean, theta, replica or line; how it is drawn. gone: a replica that the run no longer has.
    """

    label: str
    role: str
    run: int
    table: int
    column: str
    gone: bool = False


class Panel(NamedTuple):
    """A chart over inner steps. unit: of the values. main: False in the folded part."""

    title: str
    unit: str
    note: str
    main: bool
    series: list[Series]


def panels(runs: Sequence[Run], tables: Sequence[tuple[int, Table]]) -> list[Panel]:
    """The panels of the page in their order; every column of tables_of is in one of them."""
    left = {
        (run, name): index for index, (run, table) in enumerate(tables) for name in table.columns
    }

    def taken(pattern: str, role: str, label: str) -> list[Series]:
        """The columns that are left and match, by name and run."""
        found = [(re.fullmatch(pattern, name), run) for run, name in left]
        found = [(match[0], label.format(*match.groups()), run) for match, run in found if match]
        series = []
        for name, text, run in sorted(found, key=lambda each: (len(each[0]), each[0], each[2])):
            gone = _gone_after(runs[run], name) if role == "replica" else None
            text += "" if gone is None else f" (until step {gone:,})"
            series.append(Series(text, role, run, left.pop((run, name)), name, gone is not None))
        return series

    declared = pathlib.Path(__file__).with_name("panels.yml").read_text(encoding="utf-8")
    out = []
    for entry in yaml.safe_load(declared):
        series = [s for pattern, how in entry["series"].items() for s in taken(pattern, *how)]
        note = entry.get("note", "")
        if "learning/lr" in entry["series"]:
            note += _outer_rates(runs)
        if entry["title"] == THETA and len(runs) == 1 and out:
            out[-1].series.extend(series)
        elif series:
            out.append(Panel(entry["title"], entry.get("unit", ""), note, True, series))
    for name in sorted({name for _, name in left}):
        out.append(Panel(name, "", "", False, taken(f"({re.escape(name)})", "line", "{}")))
    return out


def _gone_after(run: Run, name: str) -> int | None:
    """The last step of a replica's loss; None where the last row of such losses has it."""
    of_all = run.steps_N[~np.isnan(run.column(name.partition("_replica_")[0]))]
    own = run.steps_N[~np.isnan(run.column(name))]
    return int(own[-1]) if len(of_all) and own[-1] < of_all[-1] else None


def _outer_rates(runs: Sequence[Run]) -> str:
    """The outer learning rates, which are constant."""
    rates = {
        f"{run.keys['diloco_outer_lr']:g}" for run in runs if timeline.schedule_of(run) is not None
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
        return Table(steps_N, {n: v.astype(np.float32) for n, v in columns.items()})
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
    return np.take_along_axis(values_BK, at_B2, axis=1).ravel().astype(np.float32)
