"""The points of the page's curves: the columns of the runs, thinned to fit a page of 1 MB."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from maxdiloco.report import timeline
from maxdiloco.report.run_data import NOT_FINITE, RunData

TOTAL_BYTES = "dcn/bytes_sent_in_all"  # of a replica since step 1; a column of the report only
# Points of all curves together. A point has 4 bytes, 5.3 in base64: 0.6 MB, below a page of 1 MB.
MAX_POINTS = 110_000
# Limits on the points of one curve. 20,000 points are two for each pixel of a wide screen that
# shows a tenth of the run. A narrow panel shows 400.
MOST, LEAST = 20_000, 400


class Curves(NamedTuple):
    """Curves over the same steps of one run.

    Attributes:
      run: index of the run.
      steps: [N], increasing.
      columns: {metric: float32 [N]}, NOT_FINITE for a gap.
    """

    run: int
    steps: np.ndarray
    columns: dict[str, np.ndarray]


def run_curves(runs: Sequence[RunData]) -> list[Curves]:
    """Return the curves of all runs, about MAX_POINTS points together."""
    count = sum(len(run.columns) for run in runs)
    limit = max(LEAST, min(MOST, MAX_POINTS // max(count, 1)))
    found = []
    for number, run in enumerate(runs):
        columns = run.columns
        if timeline.BYTES in columns:
            columns = columns | {timeline.BYTES: timeline.mean_bytes(run)}
            columns |= {TOTAL_BYTES: total_bytes(run)}
        for steps, group in by_rows(run.steps, columns):
            found.append(Curves(number, *thin(steps, group, limit=limit)))
    return found


def total_bytes(run: RunData) -> np.ndarray:
    """Return the bytes that a replica has sent since step 1, [N]; NaN if they are unknown."""
    sent = run.column(timeline.BYTES)
    rows = np.flatnonzero(np.isfinite(sent))
    if not len(rows):
        return np.full(len(sent), np.nan)
    ends = np.concatenate([[0], run.steps[rows]])
    sums = np.concatenate([[0.0], np.cumsum(sent[rows] * np.diff(ends))])
    return np.interp(run.steps, ends, sums)


def by_rows(
    steps: np.ndarray, columns: Mapping[str, np.ndarray]
) -> list[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """Group the columns that exist in the same rows, and drop the other rows.

    Few rows have an evaluation. It thus becomes a short curve that keeps every value.
    """
    groups: dict[bytes, list[str]] = {}
    for name, values in columns.items():
        groups.setdefault(np.isnan(values).tobytes(), []).append(name)
    found = []
    for names in groups.values():
        present = ~np.isnan(columns[names[0]])
        if present.any():
            found.append((steps[present], {name: columns[name][present] for name in names}))
    return found


def thin(
    steps: np.ndarray, columns: Mapping[str, np.ndarray], *, limit: int
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Keep the minimum and the maximum of each of limit / 2 buckets of rows.

    Args:
      steps: [N], increasing.
      columns: float64 [N], NOT_FINITE for a gap.
      limit: the largest number of points, even and at least 2.

    Returns:
      Steps and float32 columns of at most `limit` points. The two finite extremes of a bucket keep
      their order and stand at its first and its last step. A bucket without a finite value is a
      gap.
    """
    N = len(steps)
    if limit >= N:
        return steps, {name: _to_float32(values) for name, values in columns.items()}
    size = -(-N // (limit // 2))
    firsts = np.arange(0, N, size)
    ends = np.stack([firsts, np.minimum(firsts + size, N) - 1], axis=1).ravel()
    kept = np.append(True, np.diff(ends) > 0)  # the last bucket may have one row
    return steps[ends[kept]], {n: _extremes(values, size)[kept] for n, values in columns.items()}


def _extremes(values: np.ndarray, size: int) -> np.ndarray:
    """Return the finite minimum and maximum of every `size` values, in their order, float32."""
    padded = np.full(-(-len(values) // size) * size, NOT_FINITE)
    padded[: len(values)] = values
    buckets = padded.reshape(-1, size)
    finite = np.isfinite(buckets)
    low = np.where(finite, buckets, np.inf).argmin(1)
    high = np.where(finite, buckets, -np.inf).argmax(1)
    # In a bucket without a finite value both are its first value, which is not finite: a gap.
    at = np.sort(np.stack([low, high], axis=1), axis=1)
    return _to_float32(np.take_along_axis(buckets, at, axis=1).ravel())


def _to_float32(values: np.ndarray) -> np.ndarray:
    """Convert values; one that float32 cannot hold becomes infinite."""
    with np.errstate(over="ignore"):
        return values.astype(np.float32)
