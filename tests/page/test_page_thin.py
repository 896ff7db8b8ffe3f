"""Fewer points: the least and the largest value of each bucket stay."""

import numpy as np

from maxdiloco.page import thin
from maxdiloco.page.run import NOT_FINITE


def test_a_short_series_is_kept_whole():
    table = thin.table(np.arange(4), {"a": np.array([1.0, 2.0, NOT_FINITE, 3.0])}, limit=4)
    assert (table.steps.tolist(), table.rows) == ([0, 1, 2, 3], 1)
    assert table.columns["a"].tolist() == [1, 2, NOT_FINITE, 3]


def test_a_bucket_keeps_its_least_and_its_largest_value_in_their_order():
    """Two buckets of four rows, at their first and last steps."""
    values = np.array([5.0, 1.0, 9.0, 4.0, 2.0, 8.0, 3.0, 7.0])
    table = thin.table(np.arange(10, 18), {"a": values}, limit=4)
    assert (table.steps.tolist(), table.rows) == ([10, 13, 14, 17], 4)
    assert table.columns["a"].tolist() == [1, 9, 2, 8]
    falling = thin.table(np.arange(8), {"a": values[::-1]}, limit=4)
    assert falling.columns["a"].tolist() == [8, 2, 9, 1]


def test_a_bucket_is_a_gap_only_where_nothing_in_it_is_finite():
    values = np.array([NOT_FINITE, NOT_FINITE, NOT_FINITE, 3.0, NOT_FINITE, 1.0])
    table = thin.table(np.arange(6), {"a": values}, limit=4)
    assert table.columns["a"].tolist() == [NOT_FINITE, NOT_FINITE, 3, 1]


def test_the_last_bucket_may_have_one_row():
    table = thin.table(np.arange(7), {"a": np.arange(7.0)}, limit=6)
    assert table.steps.tolist() == [0, 2, 3, 5, 6]
    assert table.columns["a"].tolist() == [0, 2, 3, 5, 6]


def test_extremes_of_a_long_series_stay():
    values = np.random.default_rng(0).standard_normal(100_000)
    values[12_345], values[67_890] = 50.0, -50.0
    table = thin.table(np.arange(100_000), {"a": values}, limit=1000)
    assert len(table.steps) <= 1000 and np.all(np.diff(table.steps) > 0)
    assert (table.columns["a"].max(), table.columns["a"].min()) == (50, -50)


def test_a_rare_metric_has_a_table_of_its_own_rows():
    steps = np.arange(1, 101)
    rare = np.where(steps % 10 == 0, steps, np.nan).astype(float)
    often, once = thin.tables(steps, {"a": steps * 1.0, "b": rare, "c": steps * 2.0}, limit=20)
    assert (list(often.columns), list(once.columns)) == (["a", "c"], ["b"])
    assert once.steps.tolist() == list(range(10, 101, 10)) and once.rows == 1
    assert len(often.steps) == 20
