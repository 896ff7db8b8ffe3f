"""Runs side by side: the outer parameters at equal tokens; runs of other trainers."""

import math

import numpy as np
import pytest
import synthetic_runs
from etils import epath
from synthetic_runs import DEFAULTS, ROWS, evaluated, run_of
from tensorboardX import SummaryWriter

from maxdiloco.report import __main__ as report
from maxdiloco.report import comparison, event_files, html, run_data, series, timeline
from maxdiloco.report.comparison import Verdict


def test_runs_are_compared_at_equal_tokens():
    """a falls from 3 by 0.01 a step and b by 0.02. b reads half the tokens of a step: at its step
    100, 500 tokens, it has 1.0, and a after 500 tokens, at its step 50, has 2.5."""
    fall = 0.01 * np.arange(1, ROWS + 1)
    a = evaluated("a", 3 - fall)
    b = evaluated("b", 3 - 2 * fall, tokens=5.0)
    found = comparison.table([a, b])
    assert [row[:5] for row in found.rows] == [["b", "500", "2.5000", "1.0000", "-1.5000"]]
    assert found.rows[0][-1] == "better" and found.runs == [1]
    assert comparison.compare(b, a).verdict is Verdict.WORSE
    no_count = a._replace(columns={"eval/loss": a.column("eval/loss")})
    assert isinstance(comparison.compare(no_count, b), str)


def test_an_evaluation_between_two_rows_has_tokens_between_theirs():
    """Log rows at 10, 20, ..., each of 100 tokens; evaluations at 5, 15, ... in between. The one at
    5 is before the first count."""
    steps = np.arange(5, 105, 5)
    counts = np.where(steps % 10 == 0, 10.0 * steps, np.nan)
    losses = np.where(steps % 10 == 0, np.nan, 3.0)
    columns = {"learning/tokens": counts, "eval/loss": losses}
    run = run_of(columns=columns, rows=20, enable_diloco=False)._replace(steps=steps)
    assert list(comparison.loss_curve(run)[:, 0]) == list(range(150, 1000, 100))


def test_rows_of_evaluations_alone_take_no_bytes_from_the_others():
    """Log rows at 10, 20, ..., each of ten steps of 1 MB; evaluations at 5, 15, ... in between: 100
    MB after 100 steps."""
    steps = np.arange(5, 105, 5)
    logs = steps % 10 == 0

    columns = {"dcn/bytes_sent": np.where(logs, 1e6, np.nan)}
    columns["eval/loss"] = np.where(logs, np.nan, 3.0)
    run = run_of(columns=columns, rows=20)._replace(steps=steps)
    np.testing.assert_allclose(series.total_bytes(run), 1e6 * steps)


def test_a_difference_within_the_noise_of_evaluations_is_none():
    """Evaluations that go up and down by 0.01 lie 0.01 off the middle of their neighbours, so their
    deviation is 0.01 / sqrt(1.5), that of a difference sqrt(2) times as much: 0.0115."""
    waves = 2 + 0.01 * (np.arange(ROWS) % 2)
    assert comparison.noise_of(waves) == pytest.approx(0.01 / math.sqrt(1.5))
    assert comparison.noise_of(np.linspace(3, 2, 9)) == pytest.approx(0, abs=1e-12)
    assert math.isnan(comparison.noise_of(waves[:3]))
    for shift, verdict in ((0.02, Verdict.SAME), (0.03, Verdict.WORSE), (-0.03, Verdict.BETTER)):
        found = comparison.compare(evaluated("a", waves), evaluated("b", waves + shift))
        assert found.noise == pytest.approx(0.0115, abs=5e-5) and found.verdict is verdict


def test_islands_are_compared_at_equal_committed_tokens():
    """The outer parameters are one function of the committed tokens; c came late, and reads a tenth
    of them."""
    rows = np.arange(1.0, ROWS + 1)

    def island(name, committed, *, worse=0.0, tokens):
        run = evaluated(name, 5 - committed / 1000 + worse, tokens=tokens)
        return run._replace(columns=run.columns | {timeline.COMMITTED: committed})

    a = island("a", 20 * rows, tokens=18.0)
    c = island("c", 1000 + 20 * rows, tokens=2.0)
    found = comparison.compare(a, c)
    assert (found.tokens, found.verdict) == (2000, Verdict.SAME)
    other = island("other", 20 * rows, worse=0.5, tokens=18.0)
    assert comparison.compare(a, other).verdict is Verdict.WORSE


def test_evaluations_of_initial_parameters_are_left_out():
    """The first outer update is at step 80; evaluations before it are of no training."""
    theta = np.where(np.arange(1, ROWS + 1) < 80, 10.0, 2.0)
    a, b = (evaluated(name, theta, diloco_sync_period=H) for name, H in (("a", 1), ("b", 80)))
    (of_a, of_b) = (comparison.loss_curve(run) for run in (a, b))
    assert len(of_a) == ROWS and list(of_b[:, 0]) == list(range(800, 10 * ROWS + 1, 10))
    committed = np.maximum(np.arange(ROWS) - 50.0, 0)  # of an island: the first 51 rows have none
    start = b._replace(columns=b.columns | {timeline.COMMITTED: committed})
    assert len(comparison.loss_curve(start)) == 49
    early = {name: values[:79] for name, values in b.columns.items()}
    early = b._replace(steps=b.steps[:79], columns=early)
    assert isinstance(comparison.compare(a, early), str)


def test_runs_of_other_held_out_texts_have_a_row_with_the_keys():
    """A training text of its own is no other held-out text where eval_dataset_path names one."""
    theta = np.full(ROWS, 2.0)
    a = evaluated("a", theta, dataset_path="/data/x")
    b = evaluated("b", theta, dataset_path="/data/y", eval_steps=3)
    found = comparison.table([a, b, a._replace(name="c")])
    assert [row[0] for row in found.rows] == ["b", "c"] and found.runs == [1, 2]
    assert "dataset_path, eval_steps" in found.rows[0][-1]
    assert comparison.compare(a, a._replace(name="c")).verdict is Verdict.SAME
    assert found.rows[0][-1] in html.page([a, b], DEFAULTS)
    same = dict(eval_dataset_path="/data/held_out")
    a = a._replace(config=a.config | same)
    b = b._replace(config=b.config | same | {"eval_steps": 10})
    assert comparison.compare(a, b).verdict is Verdict.SAME


def test_keys_and_losses_that_differ_are_above_the_charts():
    runs = [evaluated(name, np.full(ROWS, 2.0), learning_rate=k) for k, name in enumerate("ab")]
    page = html.page(runs, DEFAULTS)
    at = [page.index(words) for words in ("no difference", ">learning_rate<", 'id="panels"')]
    assert at == sorted(at)
    assert '"dcn/bytes_sent_in_all"' in page  # for the x axis
    assert "no difference" not in html.page(runs[:1], DEFAULTS)


def written(folder, tags, *, steps=5):
    """TensorBoard's file of another trainer: {tag: value}, the step added to the first one."""
    with SummaryWriter(logdir=str(folder)) as writer:
        for step in range(steps):
            for k, (tag, value) in enumerate(tags.items()):
                writer.add_scalar(tag, value + (0 if k else step), step, walltime=1.7e9 + 2 * step)
    return folder


@pytest.mark.parametrize(
    ("tags", "columns"),
    [
        ({"learning/loss": 2.0, "perf/step_time_seconds": 0.5, "learning/total_weights": 64.0,
          "learning/current_learning_rate": 0.25},
         {"perf/step_time": [0.5] * 5, "learning/tokens": [64, 128, 192, 256, 320],
          "learning/lr": [0.25] * 5}),
        ({"loss_metrics/global_avg_loss": 2.0, "grad_norm": 1.5, "validation_metrics/loss": 4.0},
         {"learning/grad_norm": [1.5] * 5, "eval/loss": [4.0] * 5}),
    ],
)  # fmt: skip
def test_a_run_of_maxtext_or_torchtitan_is_read(tmp_path, tags, columns):
    folder = written(tmp_path / "other" / "tb", tags)
    (found,) = run_data.load([str(tmp_path / "other")], base_output_directory="", defaults=DEFAULTS)
    assert list(found.steps) == [0, 1, 2, 3, 4] and found.config is None
    columns = columns | {"learning/loss": [2, 3, 4, 5, 6], "perf/wall_time_s": [0, 2, 4, 6, 8]}
    for name, values in columns.items():
        assert list(found.column(name)) == values, name
    (path,) = event_files.find(epath.Path(folder))
    path.write_bytes(path.read_bytes()[:-5])  # the writer continues
    assert len(event_files.rows([path])) == 5


def test_a_run_of_another_trainer_stands_beside_one_of_ours(tmp_path, capsys):
    ours = synthetic_runs.write(tmp_path / "ours")
    other = written(tmp_path / "maxtext", {"learning/loss": 2.0, "eval/avg_loss": 3.0}, steps=30)
    out = tmp_path / "page.html"
    assert report.main([str(ours), str(other), f"out={out}"]) == 0
    page = out.read_text()
    assert "maxtext" in page and ">29<" in page
    loss = synthetic_runs.panels(page)["Loss"]
    assert {line["run"] for line in loss["lines"] if line["role"] == "mean"} == {0, 1}
