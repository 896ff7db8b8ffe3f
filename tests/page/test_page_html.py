"""What stands in the page: panels, tables, notes; one file without a request, below 5 MB."""

import json
import re

import numpy as np
import pytest
import synthetic_runs
from synthetic_runs import ROWS, long_run, run_of

from maxdiloco.page import facts, html, panels
from maxdiloco.page import run as run_lib


@pytest.fixture(scope="module")
def defaults():
    return synthetic_runs.defaults()


def data_of(page):
    """The numbers of a page, as its script reads them."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    return json.loads(text)


@pytest.mark.parametrize("replicas", [2, 64])
def test_a_page_of_100000_steps_is_below_5_mb(defaults, replicas):
    page = html.page([long_run(defaults, replicas)], defaults)
    assert len(page.encode()) < 5e6
    loss = next(panel for panel in data_of(page)["panels"] if panel["title"] == "Loss")
    assert len(loss["series"]) == replicas + 2


def test_the_page_asks_for_nothing(defaults):
    """Positive control: a style sheet of another host is found, and the policy refuses it."""
    request = r"(?i)(\bsrc|\bhref)\s*=|@import|url\(|\bfetch\(|XMLHttpRequest|WebSocket|import\("
    page = html.page([run_of(defaults)], defaults)
    assert re.findall(request, page) == []
    assert re.search(request, '<link href="https://example.org/a.css">')
    assert "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'" in page


def test_every_metric_is_in_one_panel_and_unknown_ones_are_folded(defaults):
    names = ["learning/loss", "learning/loss_replica_0", "learning/loss_replica_10", "eval/loss"]
    names += ["learning/loss_replica_2", "eval/wiki/loss", "eval/wiki/perplexity", "learning/lr"]
    names += ["diloco/outer_grad_cosine", "perf/mfu", "new/metric"]
    run = run_of(defaults, columns={name: np.ones(ROWS) for name in names})
    found = panels.panels([run], panels.tables_of([run]))
    assert sorted(s.column for panel in found for s in panel.series) == sorted(names)
    assert [panel.title for panel in found if panel.main] == [
        "Loss", "Loss of theta by text", "Learning rate", "Cosine of outer gradients",
    ]  # fmt: skip
    folded = [panel.title for panel in found if not panel.main]
    assert folded == ["eval/wiki/perplexity", "new/metric", "perf/mfu"]
    assert [s.label for s in found[0].series] == [
        "replica 0", "replica 2", "replica 10", "mean of the replicas", "theta",
    ]  # fmt: skip
    assert found[2].note.endswith("the outer one's is constant: 0.7")


def test_a_metric_of_two_runs_is_one_panel_of_two_lines(defaults):
    """Theta has a panel of its own then."""
    columns = {"learning/loss": np.ones(ROWS), "eval/loss": np.ones(ROWS)}
    runs = [run_of(defaults, name=name, columns=columns) for name in "ab"]
    loss, theta = panels.panels(runs, panels.tables_of(runs))
    assert [(s.run, s.column) for s in loss.series] == [(0, "learning/loss"), (1, "learning/loss")]
    assert [(s.run, s.column) for s in theta.series] == [(0, "eval/loss"), (1, "eval/loss")]
    assert (loss.title, theta.title) == ("Loss", "Loss of theta")


def test_the_summary_has_last_and_best_losses(defaults):
    theta = np.full(ROWS, np.nan)
    theta[[9, 49, 89]] = 3.0, 1.5, 2.0
    loss = 10.0 / np.arange(1, ROWS + 1)
    columns = {"learning/loss": loss, "eval/loss": theta}
    table = facts.summary([run_of(defaults, columns=columns)])
    shown = dict(zip(table.head, table.rows[0], strict=True))
    assert (shown["loss"], shown["loss of theta"]) == ("0.1000", "2.0000 (step 90)")
    assert shown["best of theta"] == "1.5000 (step 50)"
    assert (shown["state"], shown["step"], shown["tokens/s"]) == ("not recorded", "100", "–")
    assert shown["mode"] == "DiLoCo, H 100, P 1, tau 0, float32"


def test_replicas_that_are_gone_are_not_counted_and_have_no_last_value(defaults):
    """Four replicas up to step 60, then two."""
    columns = {"learning/loss": np.ones(ROWS)}
    columns |= {f"learning/loss_replica_{m}": np.ones(ROWS) for m in range(4)}
    for m in (2, 3):
        columns[f"learning/loss_replica_{m}"][60:] = np.nan
    run = run_of(defaults, columns=columns)
    table = facts.summary([run])
    assert dict(zip(table.head, table.rows[0], strict=True))["replicas"] == "2"
    (loss,) = [p for p in data_of(html.page([run], defaults))["panels"] if p["title"] == "Loss"]
    assert [(series[0], series[5]) for series in loss["series"]] == [
        ("replica 0", False), ("replica 1", False), ("replica 2 (until step 60)", True),
        ("replica 3 (until step 60)", True), ("mean of the replicas", False),
    ]  # fmt: skip


def test_a_page_that_is_watched_reads_itself_again(defaults):
    """A meta element, which the policy of the page allows; without it a page is still."""
    run = run_of(defaults)
    again = '<meta http-equiv="refresh" content="30">'
    assert again in html.page([run], defaults, reload_s=30)
    assert "refresh" not in html.page([run], defaults)


def test_the_words_of_the_page_are_explained_on_it(defaults):
    page = html.page([run_of(defaults)], defaults)
    explained = re.findall(r"<dt>(.*?)</dt>", page)
    assert {"theta", "H", "fragment, P", "tau", "drift"} <= set(explained)


def test_what_is_not_finite_is_said_and_no_number(defaults):
    loss = np.full(ROWS, 2.0)
    loss[[41, 99]] = run_lib.NOT_FINITE
    run = run_of(defaults, columns={"learning/loss": loss})
    page = html.page([run], defaults)
    assert "<li>learning/loss is not finite in 2 rows, first after step 42.</li>" in page
    assert '<td data-label="loss">not finite</td>' in page


def test_starts_say_how_each_ended(defaults):
    start, end = synthetic_runs.start, synthetic_runs.end
    history = [start(0), start(40), end("Preempted: x"), start(60), end(), start(80), end()]
    table = facts.starts([run_of(defaults, history=history)])
    assert [row[2] for row in table.rows] == ["0", "40", "60", "80"]
    assert [row[-1] for row in table.rows] == ["killed", "Preempted: x", "Ctrl-C", "done"]
    assert table.rows[1][1] == "2023-11-14 22:13 UTC"
    under_way = run_of(defaults, history=[start(0)])
    assert facts.state(under_way) == "running, or killed"
    assert facts.state(run_of(defaults, history=[start(0, until=200), end()])) == "Ctrl-C"


def test_keys_are_compared_with_base_yml_or_with_each_other(defaults):
    first = run_of(defaults, name="a", steps=5, learning_rate=0.5, run_name="a")
    second = run_of(defaults, name="b", steps=5, learning_rate=0.25, run_name="b")
    alone = facts.differences([first], defaults)
    assert (alone.head, alone.rows) == (
        ["key", "a", "base.yml"],
        [["steps", "5", "1000"], ["learning_rate", "0.5", "0.0004"]],
    )
    both = facts.differences([first, second], defaults)
    assert both.rows == [["learning_rate", "0.5", "0.25", "0.0004"]]


def test_texts_of_a_run_are_no_html(defaults):
    run = run_of(defaults, name="<b>&", columns={"</script><i>": np.ones(ROWS)})
    page = html.page([run], defaults)
    assert "&lt;b&gt;&amp;" in page and "<b>&" not in page and "</script><i>" not in page
    assert data_of(page)["panels"][0]["title"] == "</script><i>"


def test_runs_of_one_row_and_without_diloco_have_a_page(defaults):
    run = run_of(defaults, rows=1, columns={"learning/loss": np.ones(1)}, enable_diloco=False)
    page = html.page([run], defaults)
    assert "data parallelism: every step sends 0 B a slice" in page
    unknown = run_of(defaults)._replace(keys=None)
    assert "The configuration is unknown." in html.page([unknown], defaults)
