"""Runs side by side: theta at equal steps, tokens, bytes and seconds; runs of other trainers."""

import math

import numpy as np
import pytest
import synthetic_runs
from etils import epath
from synthetic_runs import DEFAULTS, ROWS, evaluated, run_of
from tensorboardX import SummaryWriter

from maxdiloco.report import __main__ as report
from maxdiloco.report import comparison, event_files, html, run_data, timeline


def test_runs_are_compared_at_equal_steps_tokens_bytes_and_time():
    """a falls from 3 by 0.01 a step and b by 0.02. b reads half the tokens of a step, sends a tenth
    of the bytes and takes half the seconds: at a's step 50, b's step 100; at a's 10, b's 100."""
    fall = 0.01 * np.arange(1, ROWS + 1)
    a = evaluated("a", 3 - fall)
    b = evaluated("b", 3 - 2 * fall, tokens=5.0, sent=1e5, step_s=1.0)
    found = comparison.table([a, b])
    assert [row[1:6] for row in found.rows] == [
        ["tokens", "500", "2.5000", "1.0000", "-1.5000"],
        ["steps", "100", "2.0000", "1.0000", "-1.0000"],
        ["bytes", "10 MB", "2.9000", "1.0000", "-1.9000"],
        ["seconds", "1.67 min", "2.5000", "1.0000", "-1.5000"],
    ]
    assert {row[-1] for row in found.rows} == {"better"} and found.runs == [1] * 4
    assert comparison.table([b, a]).rows[0][-1] == "worse"


def test_rows_of_evaluations_alone_take_no_bytes_from_the_others():
    """Log rows at 10, 20, ..., each of ten steps of 1 MB; evaluations at 5, 15, ... in between: 100
    MB after 100 steps."""
    steps = np.arange(5, 105, 5)
    logs = steps % 10 == 0

    columns = {"dcn/bytes_sent": np.where(logs, 1e6, np.nan)}
    columns["eval/loss"] = np.where(logs, np.nan, 3.0)
    run = run_of(columns=columns, rows=20)._replace(steps=steps)
    np.testing.assert_allclose(comparison.total_bytes(run), 1e6 * steps)


def test_a_difference_within_the_noise_of_evaluations_is_none():
    """Evaluations that go up and down by 0.01 lie 0.01 off the middle of their neighbours, so their
    deviation is 0.01 / sqrt(1.5), that of a difference sqrt(2) times as much: 0.0115."""
    waves = 2 + 0.01 * (np.arange(ROWS) % 2)
    assert comparison.noise_of(waves) == pytest.approx(0.01 / math.sqrt(1.5))
    assert comparison.noise_of(np.linspace(3, 2, 9)) == pytest.approx(0, abs=1e-12)
    assert math.isnan(comparison.noise_of(waves[:3]))
    for shift, words in ((0.02, "no difference"), (0.03, "worse"), (-0.03, "better")):
        found = comparison.table([evaluated("a", waves), evaluated("b", waves + shift)])
        assert {(row[6], row[7]) for row in found.rows} == {("0.0115", words)}


def test_islands_are_compared_at_equal_committed_tokens():
    """Theta is one function of the committed tokens; c came late, and reads a tenth of them."""
    rows = np.arange(1.0, ROWS + 1)

    def island(name, committed, *, worse=0.0, tokens):
        run = evaluated(name, 5 - committed / 1000 + worse, tokens=tokens)
        return run._replace(columns=run.columns | {timeline.COMMITTED: committed})

    a = island("a", 20 * rows, tokens=18.0)
    c = island("c", 1000 + 20 * rows, tokens=2.0)
    found = comparison.table([a, c])
    assert [(row[1], row[2], row[-1]) for row in found.rows] == [
        ("committed tokens", "2,000", "no difference")
    ]
    other = island("other", 20 * rows, worse=0.5, tokens=18.0)
    assert comparison.table([a, other]).rows[0][-1] == "worse"


def test_evaluations_of_initial_parameters_are_left_out():
    """Theta is applied at step 80 for the first time: those before it are of no training."""
    theta = np.where(np.arange(1, ROWS + 1) < 80, 10.0, 2.0)
    a, b = (evaluated(name, theta, diloco_sync_period=H) for name, H in (("a", 1), ("b", 80)))
    (of_a, of_b) = (comparison.curve(run, run.steps.astype(float)) for run in (a, b))
    assert len(of_a) == ROWS and list(of_b[:, 0]) == list(range(80, ROWS + 1))
    start = b._replace(columns=b.columns | {timeline.COMMITTED: np.repeat([0.0, 9.0], ROWS // 2)})
    assert len(comparison.curve(start, start.steps.astype(float))) == ROWS // 2
    early = {name: values[:79] for name, values in b.columns.items()}
    early = b._replace(steps=b.steps[:79], columns=early)
    (row,) = comparison.table([a, early]).rows
    assert row[0] == "b" and "not compared" in row[-1]


def test_runs_of_other_held_out_texts_have_a_row_with_the_keys():
    """A training text of its own is no other held-out text where eval_dataset_path names one."""
    theta = np.full(ROWS, 2.0)
    a = evaluated("a", theta, dataset_path="/data/x")
    b = evaluated("b", theta, dataset_path="/data/y", eval_steps=3)
    found = comparison.table([a, b, a._replace(name="c")])
    assert found.runs == [1, 2, 2, 2, 2]
    assert found.rows[0][0] == "b" and "dataset_path, eval_steps" in found.rows[0][-1]
    assert {(row[0], row[-1]) for row in found.rows[1:]} == {("c", "no difference")}
    assert found.rows[0][-1] in html.page([a, b], DEFAULTS)
    same = dict(eval_dataset_path="/data/held_out")
    a, b = (
        a._replace(config=a.config | same),
        b._replace(config=b.config | same | {"eval_steps": 10}),
    )
    assert {row[-1] for row in comparison.table([a, b]).rows} == {"no difference"}


def test_keys_and_losses_that_differ_are_above_the_charts():
    runs = [evaluated(name, np.full(ROWS, 2.0), learning_rate=k) for k, name in enumerate("ab")]
    page = html.page(runs, DEFAULTS)
    at = [page.index(words) for words in (">learning_rate<", "no difference", 'id="panels"')]
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
    path.write_bytes(path.read_bytes()[:-5])  # the writer goes on
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
