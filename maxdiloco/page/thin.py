"""Fewer points of a long series, so that a page stays small: the least and the largest value stay.

    # N rows  B buckets  K rows in a bucket
"""

from typing import NamedTuple

import numpy as np

from maxdiloco.page.run import NOT_FINITE


class Table(NamedTuple):
    """Series over the same steps. steps: int64, strictly increasing. columns: {name: float32}.

    A value is NaN where there is none, and NOT_FINITE for a gap.
    rows: how many rows a point stands for; 1: nothing was left out.
    """

    steps: np.ndarray
    columns: dict[str, np.ndarray]
    rows: int


def tables(steps_N: np.ndarray, columns: dict[str, np.ndarray], *, limit: int) -> list[Table]:
    """The columns of a run, those of the same rows in one table, of `limit` points at most.

    A column stands in the rows that have it, so an evaluation's is short and keeps every value.
    """
    groups: dict[bytes, list[str]] = {}
    for name, values_N in columns.items():
        groups.setdefault(np.packbits(np.isnan(values_N)).tobytes(), []).append(name)
    out = []
    for names in groups.values():
        present_N = ~np.isnan(columns[names[0]])
        if present_N.any():
            group = {name: columns[name][present_N] for name in names}
            out.append(table(steps_N[present_N], group, limit=limit))
    return out


def table(steps_N: np.ndarray, columns: dict[str, np.ndarray], *, limit: int) -> Table:
    """At most `limit` points, an even number >= 2.

    Longer columns are cut into buckets of K rows. A bucket becomes two points, at its first and
    last step: its least and its largest finite value in the order in which they came.
    """
    N = len(steps_N)
    if limit >= N:
        return Table(steps_N, {n: v.astype(np.float32) for n, v in columns.items()}, 1)
    K = -(-N // (limit // 2))
    first_B = np.arange(0, N, K)
    last_B = np.minimum(first_B + K, N) - 1
    at = np.stack([first_B, last_B], axis=1).ravel()
    kept = np.append(True, np.diff(at) > 0)  # the last bucket may have one row
    thinned = {name: _two_of_each(values_N, K)[kept] for name, values_N in columns.items()}
    return Table(steps_N[at[kept]], thinned, K)


def _two_of_each(values_N: np.ndarray, K: int) -> np.ndarray:
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
