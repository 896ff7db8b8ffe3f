"""The content of the page: panels, tables, notes; one file without a request, below 1 MB."""

import re

import numpy as np
import pytest
from synthetic_runs import DEFAULTS, ROWS, end, long_run, panels, run_of, start

from maxdiloco.page import facts, html
from maxdiloco.page.run import NOT_FINITE


@pytest.mark.parametrize("replicas", [2, 64])
def test_a_page_of_100000_steps_is_below_1_mb(replicas):
    page = html.page([long_run(replicas)], DEFAULTS)
    assert len(page.encode()) < 1e6
    assert len(panels(page)["Loss"]["series"]) == replicas + 2


def test_the_page_requests_nothing():
    """Positive control: a style sheet of another host is found, and the policy refuses it."""
    request = r"(?i)(\bsrc|\bhref)\s*=|@import|url\(|\bfetch\("
    request += r"|XMLHttpRequest|WebSocket|import\("
    page = html.page([run_of()], DEFAULTS)
    assert re.findall(request, page) == []
    assert re.search(request, '<link href="https://example.org/a.css">')
    assert "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'" in page


def test_every_metric_is_in_one_panel_and_unknown_ones_folded():
    names = ["learning/loss", "learning/loss_replica_0", "learning/loss_replica_10", "eval/loss"]
    names += ["learning/loss_replica_2", "eval/wiki/loss", "eval/wiki/perplexity", "learning/lr"]
    names += ["diloco/outer_grad_cosine", "perf/mfu", "new/metric"]
    run = run_of(columns={name: np.ones(ROWS) for name in names})
    found = html.panels([run], html.tables_of([run]))
    assert sorted(s[4] for panel in found for s in panel["series"]) == sorted(names)
    assert [panel["title"] for panel in found if panel["main"]] == [
        "Loss", "Loss of theta by text", "Learning rate", "Cosine of outer gradients",
    ]  # fmt: skip
    folded = [panel["title"] for panel in found if not panel["main"]]
    assert folded == ["eval/wiki/perplexity", "new/metric", "perf/mfu"]
    assert [s[0] for s in found[0]["series"]] == [
        "replica 0", "replica 2", "replica 10", "mean of the replicas", "theta",
    ]  # fmt: skip
    units = {panel["title"]: panel["unit"] for panel in found}
    assert "" not in units.values()  # no chart without a unit
    assert (units["perf/mfu"], units["new/metric"]) == ("of 1", "value")
    assert "0.7" in found[2]["note"]
    # A metric of two runs is one panel of two lines; theta has a panel of its own then.
    columns = {"learning/loss": np.ones(ROWS), "eval/loss": np.ones(ROWS)}
    runs = [run_of(name=name, columns=columns) for name in "ab"]
    found = html.panels(runs, html.tables_of(runs))
    assert [(panel["title"], [(s[2], s[4]) for s in panel["series"]]) for panel in found] == [
        ("Loss", [(0, "learning/loss"), (1, "learning/loss")]),
        ("Loss of theta", [(0, "eval/loss"), (1, "eval/loss")]),
    ]


def summary(run):
    """The row of a run in the table of runs."""
    table = facts.summary([run])
    return dict(zip(table.head, table.rows[0], strict=True))


def test_the_summary_has_last_and_best_losses():
    theta = np.full(ROWS, np.nan)
    theta[[9, 49, 89]] = 3.0, 1.5, 2.0
    loss = 10.0 / np.arange(1, ROWS + 1)
    shown = summary(run_of(columns={"learning/loss": loss, "eval/loss": theta}))
    assert (shown["loss"], shown["loss of theta"]) == ("0.1000", "2.0000 (step 90)")
    assert shown["best of theta"] == "1.5000 (step 50)"
    assert shown["step"] == "100"


def test_a_running_run_has_the_time_that_is_left():
    """100 of 400 steps are done, 300 of 2 s are left; a run without an end is running."""
    columns = {"learning/loss": np.ones(ROWS), "perf/step_time": np.full(ROWS, 2.0)}
    run = run_of(columns=columns, history=[start(0, until=400)])
    assert summary(run)["step"] == "100 of 400, 10 min left"
    ended = run._replace(history=[*run.history, end()])
    assert summary(ended)["step"] == "100 of 400"


def test_an_elastic_island_is_done_when_the_log_has_the_tokens():
    """At 100 of 300 steps. Control: with less than all tokens, and a run without islands."""
    ended = [start(0, until=300), end()]
    alone = {"learning/loss": np.ones(ROWS)}
    for part, step, state in (
        (1.02, "100, 100.0% of the islands' tokens", "done"),
        (0.625, "100, 62.5% of the islands' tokens", "Ctrl-C"),
        (None, "100 of 300", "Ctrl-C"),
    ):
        columns = alone | ({"islands/progress": np.linspace(0, part, ROWS)} if part else {})
        shown = summary(run_of(columns=columns, history=ended))
        assert (shown["step"], shown["state"]) == (step, state)
    columns = alone | {"islands/progress": np.linspace(0, 1.02, ROWS)}
    goes_on = run_of(columns=columns, history=ended[:1])
    assert summary(goes_on)["state"] == "running, or killed"


def test_removed_replicas_are_not_counted():
    columns = {"learning/loss": np.ones(ROWS)}
    columns |= {f"learning/loss_replica_{m}": np.ones(ROWS) for m in range(3)}
    columns["learning/loss_replica_2"][60:] = np.nan
    run = run_of(columns=columns)
    assert summary(run)["replicas"] == "2"
    loss = panels(html.page([run], DEFAULTS))["Loss"]
    assert {series[0]: series[5] for series in loss["series"]} == {
        "replica 0": False, "replica 1": False, "replica 2 (until step 60)": True,
        "mean of the replicas": False,
    }  # fmt: skip


def test_starts_say_how_each_ended():
    history = [start(0), start(40), end("Preempted: x"), start(60), end(), start(80), end()]
    table = facts.starts([run_of(history=history)])
    assert [row[2] for row in table.rows] == ["0", "40", "60", "80"]
    assert [row[-1] for row in table.rows] == ["killed", "Preempted: x", "Ctrl-C", "done"]
    assert table.rows[1][1] == "2023-11-14 22:13 UTC"
    for history, how in (
        ([start(0)], "running, or killed"),
        ([start(0, until=200), end()], "Ctrl-C"),
    ):
        assert summary(run_of(history=history))["state"] == how


def test_keys_are_compared_with_base_yml_or_with_each_other():
    first = run_of(name="a", steps=5, learning_rate=0.5, run_name="a")
    second = run_of(name="b", steps=5, learning_rate=0.25, run_name="b")
    alone = facts.differences([first], DEFAULTS)
    assert alone.head == ["key", "a", "base.yml"]
    assert alone.rows == [["steps", "5", "1000"], ["learning_rate", "0.5", "0.0004"]]
    both = facts.differences([first, second], DEFAULTS)
    assert both.rows == [["learning_rate", "0.5", "0.25", "0.0004"]]


def test_steps_that_are_not_finite_are_named_and_texts_escaped():
    """Also in a run of one row, and with data parallelism."""
    loss = np.full(ROWS, 2.0)
    loss[[41, 99]] = NOT_FINITE
    page = html.page([run_of(columns={"learning/loss": loss})], DEFAULTS)
    assert re.search("learning/loss .* 2 rows.* step 42", page)
    page = html.page([run_of(name="<b>&", columns={"</script><i>": np.ones(ROWS)})], DEFAULTS)
    assert "&lt;b&gt;&amp;" in page and "<b>&" not in page and "</script><i>" not in page
    assert next(iter(panels(page))) == "</script><i>"
    run = run_of(rows=1, columns={"learning/loss": np.ones(1)}, enable_diloco=False)
    assert " 0 B " in html.page([run], DEFAULTS)
    assert html.page([run_of()._replace(keys=None)], DEFAULTS)


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
    table = html.thinned(np.arange(len(values)), {"a": np.array(values)}, limit=limit)
    assert table.steps.tolist() == steps
    assert table.columns["a"].tolist() == kept


def test_a_rare_metric_has_its_own_rows():
    steps = np.arange(1, 101)
    rare = np.where(steps % 10 == 0, steps, np.nan).astype(float)
    often, once = html.by_rows(steps, {"a": steps * 1.0, "b": rare, "c": steps * 2.0}, limit=20)
    assert (list(often.columns), list(once.columns)) == (["a", "c"], ["b"])
    assert once.steps.tolist() == list(range(10, 101, 10))
    assert len(often.steps) == 20
