"""The content of the page: panels, tables, notes; one file without a request, below 1 MB."""

import re

import numpy as np
import pytest
from synthetic_runs import DEFAULTS, ROWS, long_run, panels, run_of

from maxdiloco.report import html, series
from maxdiloco.report import panels as panel_lib
from maxdiloco.report.run_data import NOT_FINITE


@pytest.mark.parametrize("replicas", [2, 64])
def test_a_page_of_100000_steps_is_below_1_mb(replicas):
    page = html.page([long_run(replicas)], DEFAULTS)
    assert len(page.encode()) < 1e6
    assert len(panels(page)["Loss"]["lines"]) == replicas + 2


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
    found = panel_lib.build([run], series.run_curves([run]))
    assert sorted(line.column for panel in found for line in panel.lines) == sorted(names)
    assert [panel.title for panel in found if panel.is_main] == [
        "Loss", "Loss of the outer parameters by text", "Learning rate",
        "Cosine of the outer gradients",
    ]  # fmt: skip
    folded = [panel.title for panel in found if not panel.is_main]
    assert folded == ["eval/wiki/perplexity", "new/metric", "perf/mfu"]
    assert [line.column.partition("/")[2] for line in found[0].lines] == [
        "loss_replica_0", "loss_replica_2", "loss_replica_10", "loss", "loss",
    ]  # fmt: skip
    assert [line.role for line in found[0].lines] == ["replica"] * 3 + ["mean", "outer"]
    units = {panel.title: panel.unit for panel in found}
    assert (units["Loss"], units["perf/mfu"], units["new/metric"]) == ("nats/token", "1", "value")
    assert "0.7" in found[2].note  # the outer learning rate


def test_a_metric_of_two_runs_is_one_panel_of_two_lines():
    """The outer parameters have a panel of their own then."""
    columns = {"learning/loss": np.ones(ROWS), "eval/loss": np.ones(ROWS)}
    runs = [run_of(name=name, columns=columns) for name in "ab"]
    found = panel_lib.build(runs, series.run_curves(runs))
    assert [[(line.run, line.column) for line in panel.lines] for panel in found] == [
        [(0, "learning/loss"), (1, "learning/loss")],
        [(0, "eval/loss"), (1, "eval/loss")],
    ]


def test_a_panel_of_zeros_is_folded():
    """Control: with one value that is not 0 it is a main panel."""
    for last, is_main in ((0.0, False), (1.0, True)):
        columns = {"learning/loss": np.ones(ROWS), "dcn/bytes_sent": np.zeros(ROWS)}
        columns["dcn/bytes_sent"][-1] = last
        run = run_of(columns=columns, enable_diloco=False)
        found = {p.lines[0].column: p for p in panel_lib.build([run], series.run_curves([run]))}
        assert found["dcn/bytes_sent"].is_main is is_main


def test_removed_replicas_are_marked():
    columns = {"learning/loss": np.ones(ROWS)}
    columns |= {f"learning/loss_replica_{m}": np.ones(ROWS) for m in range(3)}
    columns["learning/loss_replica_2"][60:] = np.nan
    run = run_of(columns=columns)
    assert run.num_replicas == 2
    loss = panels(html.page([run], DEFAULTS))["Loss"]
    assert {line["label"]: line["is_gone"] for line in loss["lines"]} == {
        "replica 0": False, "replica 1": False, "replica 2 (until step 60)": True,
        "mean of the replicas": False,
    }  # fmt: skip


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
    assert html.page([run_of()._replace(config=None)], DEFAULTS)
