"""The sentences at the top of the page. Expected numbers by hand."""

import numpy as np
import pytest
import synthetic_runs
from synthetic_runs import ROWS, run_of

from maxdiloco.page import html, verdict
from maxdiloco.page.run import NOT_FINITE

FALLING = np.linspace(4, 2, ROWS)


@pytest.fixture(scope="module")
def defaults():
    return synthetic_runs.defaults()


def with_columns(defaults, **columns):
    """Two replicas; names of metrics with _ for /."""
    columns = {"learning_loss": FALLING} | columns
    named = {name.replace("_", "/", 1): np.array(each) for name, each in columns.items()}
    named |= {f"learning/loss_replica_{m}": named["learning/loss"] for m in (0, 1)}
    return run_of(defaults, columns=named)


def test_a_loss_that_falls_is_healthy_and_one_that_rises_or_is_not_finite_is_not(defaults):
    """Means of rows 81 to 90 and 91 to 100 of 4 to 2 in 99 equal steps."""
    said = verdict.health(with_columns(defaults))
    assert said == "Healthy: the loss falls, 2.2929 to 2.0909 (means of 10 rows)."
    said = verdict.health(with_columns(defaults, learning_loss=FALLING[[0, -1]]))
    assert said.endswith("4.0000 to 2.0000 (the last two rows).")
    said = verdict.health(with_columns(defaults, learning_loss=FALLING[::-1]))
    assert said.startswith("Not healthy: the loss rises, 3.7071 to 3.9091")
    assert verdict.health(with_columns(defaults, learning_loss=np.ones(ROWS))).startswith(
        "Healthy: the loss is flat"
    )
    broken = np.append(FALLING[1:], NOT_FINITE)
    said = verdict.health(with_columns(defaults, learning_loss=broken))
    assert said == "Not healthy: the loss is not finite."
    theta = np.where(np.arange(ROWS) < 50, 2.5, 2.75)
    said = verdict.health(with_columns(defaults, eval_loss=theta))
    assert said.endswith("; but theta's is 0.2500 above its best.")


@pytest.mark.parametrize(
    ("waited", "words"),
    [
        (0.004, "The link is no bottleneck: process 0 waits for exchanges 0.4% of the time."),
        (0.05, "The link costs a little: process 0 waits for exchanges 5.0% of the time."),
        (0.3, "The link, or a slower process, is the bottleneck: process 0 waits for exchanges 30"),
    ],
)
def test_the_link_is_judged_by_what_the_last_half_of_the_run_waited(defaults, waited, words):
    """Steps of 1 s; what the first half waited does not count."""
    waits = np.where(np.arange(ROWS) < ROWS // 2, 0.9, waited)
    run = with_columns(defaults, dcn_waited_s=waits, perf_step_time=np.ones(ROWS))
    assert verdict.link(run).startswith(words)


def test_what_no_metric_tells_is_not_judged(defaults):
    assert "not measured: exchanges are inside" in verdict.link(with_columns(defaults))
    plain = run_of(defaults, enable_diloco=False)
    assert "not measured: gradients cross it" in verdict.link(plain)
    assert verdict.link(run_of(defaults)) == "One replica has no link."


def test_the_rest_of_a_run_takes_its_step_time(defaults):
    """100 of 400 steps are done, 300 of 2 s are left; without an end the run goes on."""
    columns = {"learning/loss": FALLING, "perf/step_time": np.full(ROWS, 2.0)}
    run = run_of(defaults, columns=columns, history=[synthetic_runs.start(0, until=400)])
    assert verdict.progress(run) == "Step 100 of 400, running, or killed; 10 min left."
    ended = run._replace(history=[*run.history, synthetic_runs.end()])
    assert verdict.progress(ended) == "Step 100 of 400, Ctrl-C."


def evaluated(defaults, name, theta, *, tokens=10.0, **keys):
    """A row each step, of `tokens` tokens."""
    columns = {"learning/loss": FALLING, "eval/loss": np.array(theta)}
    columns["learning/tokens"] = tokens * np.arange(1, ROWS + 1)
    return run_of(defaults, name=name, columns=columns, **keys)


def test_a_run_is_behind_another_at_as_many_tokens(defaults):
    """b reads twice as many tokens a step: a's last row, 1,000 tokens, is b's step 50."""
    falling = np.linspace(3, 2.01, ROWS)
    a = evaluated(defaults, "a", falling)
    b = evaluated(defaults, "b", falling, tokens=20.0)
    said = verdict.beside(a, b)
    assert said == (
        "b is behind a: theta's loss is 2.5100 beside 2.0100 (+24.9%) after 1,000 tokens."
    )
    assert verdict.beside(b, a).startswith("a is ahead of b: theta's loss is 2.0100 beside 2.5100")
    assert verdict.beside(a, a._replace(name="c")).startswith("c is level with a: ")


def test_runs_with_other_held_out_texts_are_not_compared_and_it_is_said(defaults):
    """A training text of its own is no other held-out text where eval_dataset_path names one."""
    theta = np.full(ROWS, 2.0)
    a = evaluated(defaults, "a", theta, dataset_path="/data/x")
    b = evaluated(defaults, "b", theta, dataset_path="/data/y", eval_steps=3)
    said = verdict.beside(a, b)
    assert said == (
        "b and a are not compared, since their losses may be of different held-out texts: they "
        "differ in dataset_path, eval_steps."
    )
    assert said in verdict.lines([a, b]) and "not compared" in html.page([a, b], defaults)
    same = dict(eval_dataset_path="/data/held_out")
    a, b = a._replace(keys=a.keys | same), b._replace(keys=b.keys | same | {"eval_steps": 10})
    assert verdict.beside(a, b).startswith("b is level with a")


def test_one_run_is_told_how_it_could_be_compared(defaults):
    own, how = verdict.lines([with_columns(defaults)])
    assert own.startswith("Healthy: ") and "with enable_diloco=false" in how
    plain = with_columns(defaults)
    assert len(verdict.lines([plain._replace(keys=plain.keys | {"enable_diloco": False})])) == 1
