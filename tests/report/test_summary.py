"""The tables of runs, of their sessions and of the keys that they set."""

import numpy as np
from synthetic_runs import DEFAULTS, ROWS, end, run_of, start

from maxdiloco.report import run_info, summary


def row_of(run):
    """The row of a run in the table of runs."""
    table = summary.table([run])
    return dict(zip(table.head, table.rows[0], strict=True))


def test_the_summary_has_last_and_best_losses():
    outer = np.full(ROWS, np.nan)
    outer[[9, 49, 89]] = 3.0, 1.5, 2.0
    loss = 10.0 / np.arange(1, ROWS + 1)
    shown = row_of(run_of(columns={"learning/loss": loss, "eval/loss": outer}))
    assert (shown["training loss"], shown["held-out loss"]) == ("0.1000", "2.0000 (step 90)")
    assert shown["best held-out"] == "1.5000 (step 50)"
    assert shown["step"] == "100"


def test_a_running_run_has_the_time_that_is_left():
    """100 of 400 steps are done, 300 of 2 s are left; a run without an end is running."""
    columns = {"learning/loss": np.ones(ROWS), "perf/step_time": np.full(ROWS, 2.0)}
    run = run_of(columns=columns, history=[start(0, until=400)])
    assert row_of(run)["step"] == "100 of 400, 10 min left"
    ended = run._replace(history=[*run.history, end()])
    assert row_of(ended)["step"] == "100 of 400"


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
        shown = row_of(run_of(columns=columns, history=ended))
        assert (shown["step"], shown["state"]) == (step, state)
    columns = alone | {"islands/progress": np.linspace(0, 1.02, ROWS)}
    goes_on = run_of(columns=columns, history=ended[:1])
    assert row_of(goes_on)["state"] == "running, or killed"


def test_starts_say_how_each_ended():
    history = [start(0), start(40), end("Preempted: x"), start(60), end(), start(80), end()]
    table = run_info.session_table([run_of(history=history)])
    assert [row[1] for row in table.rows] == ["0", "40", "60", "80"]
    assert [row[-1] for row in table.rows] == ["killed", "Preempted: x", "Ctrl-C", "done"]
    assert table.rows[1][0] == "2023-11-14 22:13 UTC"
    for history, how in (
        ([start(0)], "running, or killed"),
        ([start(0, until=200), end()], "Ctrl-C"),
    ):
        assert row_of(run_of(history=history))["state"] == how


def test_keys_are_compared_with_their_defaults_or_each_other():
    first = run_of(name="a", steps=5, learning_rate=0.5, run_name="a")
    second = run_of(name="b", steps=5, learning_rate=0.25, run_name="b")
    alone = run_info.config_table([first], DEFAULTS)
    assert alone.head == ["key", "a", "default"]
    assert alone.rows == [["steps", "5", "1000"], ["learning_rate", "0.5", "0.0004"]]
    both = run_info.config_table([first, second], DEFAULTS)
    assert both.rows == [["learning_rate", "0.5", "0.25", "0.0004"]]
