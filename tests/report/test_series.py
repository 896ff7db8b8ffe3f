"""The points of the curves: few, and none of the extremes is lost."""

import numpy as np
import pytest

from maxdiloco.report import series
from maxdiloco.report.run_data import NOT_FINITE


@pytest.mark.parametrize(
    ("values", "limit", "steps", "kept"),
    [
        ([1.0, 2.0, NOT_FINITE, 3.0], 4, [0, 1, 2, 3], [1, 2, NOT_FINITE, 3]),  # short: whole
        ([5.0, 1, 9, 4, 2, 8, 3, 7], 4, [0, 3, 4, 7], [1, 9, 2, 8]),  # of two buckets, in order
        ([7.0, 3, 8, 2, 4, 9, 1, 5], 4, [0, 3, 4, 7], [8, 2, 9, 1]),
        (np.arange(7.0), 6, [0, 2, 3, 5, 6], [0, 2, 3, 5, 6]),  # the last one has one row
        # a gap only where nothing in a bucket is finite
        ([NOT_FINITE] * 3 + [3, NOT_FINITE, 1], 4, [0, 2, 3, 5], [NOT_FINITE, NOT_FINITE, 3, 1]),
    ],
)
def test_a_bucket_of_rows_keeps_its_least_and_its_largest_value(values, limit, steps, kept):
    found, columns = series.thin(np.arange(len(values)), {"a": np.array(values)}, limit=limit)
    assert found.tolist() == steps
    assert columns["a"].tolist() == kept


def test_a_rare_metric_has_its_own_rows():
    steps = np.arange(1, 101)
    rare = np.where(steps % 10 == 0, steps, np.nan).astype(float)
    often, seldom = series.by_rows(steps, {"a": steps * 1.0, "b": rare, "c": steps * 2.0})
    assert (list(often[1]), list(seldom[1])) == (["a", "c"], ["b"])
    assert seldom[0].tolist() == list(range(10, 101, 10))
    assert seldom[1]["b"].tolist() == list(range(10, 101, 10))
    assert len(often[0]) == 100
