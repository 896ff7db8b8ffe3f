"""The benchmark of quality: which rows there are, what they are told, and what its table says."""

import json
import math
import types

import pytest

from benchmarks import quality
from benchmarks.learning import draw, draw_replicas, modes, plan, rows, table
from benchmarks.learning.modes import BY_NAME, DATA_PARALLEL, DELAYED, DILOCO, SCALES
from benchmarks.learning.plan import Row
from benchmarks.learning.traffic import traffic

SCALE = SCALES["cpu"]._replace(
    inner_rates={"adamw": (1.0, 2.0, 4.0), "muon": (1.0, 2.0)}, outer_rates=(0.2, 0.4, 0.8), seeds=2
)
SMALL = SCALE._replace(
    keys=SCALE.keys | {"base_emb_dim": 8, "base_mlp_dim": 16, "head_dim": 8}, steps=60
)
BOTH = [BY_NAME[DATA_PARALLEL], BY_NAME[DILOCO]]


def figures(loss):
    return {"loss": loss, "curve": [[30, 2.0], [60, loss]]}


def finished(mode, losses, inner=None, seed=0):
    """Rows of a mode that are done: of inner rates, or with one of those of outer rates."""
    rates = {rate: (rate, 0.0) if inner is None else (inner, rate) for rate in losses}
    return {Row(mode, *rates[rate], seed): figures(losses[rate]) for rate in losses}


def tuned():
    """Everything of DiLoCo's is done but the second seed; its best outer rate is 0.4."""
    done = finished(DATA_PARALLEL, {1.0: 3.0, 2.0: 2.0, 4.0: 2.5})
    return done | finished(DILOCO, {0.2: 2.4, 0.4: 2.1, 0.8: None}, inner=2.0)


def left(some, done):
    """What is decided and not done."""
    return [row for row in plan.decided(some, SCALE, done) if row not in done]


# -- rows ---------------------------------------------------------------------------------------


def test_rates_are_tuned_one_after_the_other_and_the_best_runs_with_the_other_seeds():
    """The inner rate on data parallelism, before anything else; what diverged is never best."""
    assert left(BOTH, {}) == [Row(DATA_PARALLEL, rate, 0.0, 0) for rate in (1.0, 2.0, 4.0)]
    done = finished(DATA_PARALLEL, {1.0: 3.0, 2.0: 2.0, 4.0: 2.5})
    assert left(BOTH, done) == [
        *(Row(DILOCO, 2.0, rate, 0) for rate in (0.2, 0.4, 0.8)),
        Row(DATA_PARALLEL, 2.0, 0.0, 1),
    ]
    done = tuned()
    rows_left = left(BOTH, done)
    assert rows_left == [Row(DATA_PARALLEL, 2.0, 0.0, 1), Row(DILOCO, 2.0, 0.4, 1)]
    assert not plan.is_over(BOTH, SCALE, done)
    assert plan.is_over(BOTH, SCALE, done | dict.fromkeys(rows_left, figures(2.0)))
    quarter = BY_NAME["delayed, a quarter of it"]  # of the best rate of another mode
    assert left([quarter], done) == [Row(quarter.name, 2.0, 0.1, 0)]


def test_a_mode_with_both_rates_given_waits_for_no_other():
    """It has its own first seed, then the others."""
    owners = BY_NAME["DiLoCo, M=8, 4 bits, owners"]
    scale = SCALE._replace(all_alike=True)
    (first,) = plan.decided([owners], scale, {})
    assert first == Row(owners.name, 0.008, 0.98, 0)
    assert plan.decided([owners], scale, {first: figures(2.0)}) == [first, first._replace(seed=1)]
    asked = quality.arguments(["modes=eager;data parallel", "rates=0.004:0.5"])
    assert plan.decided(asked.modes, asked.scale, {}) == [
        Row("eager", 0.004, 0.5, 0),
        Row(DATA_PARALLEL, 0.004, 0.0, 0),
    ]


def test_a_grid_whose_best_is_at_its_end_grows_there():
    done = finished(DATA_PARALLEL, {1.0: 3.0, 2.0: 2.5, 4.0: 2.0})
    assert Row(DATA_PARALLEL, 8.0, 0.0, 0) in left(BOTH[:1], done)
    done |= finished(DATA_PARALLEL, {8.0: 2.1})
    assert plan.chosen(BOTH[0], SCALE, done) == Row(DATA_PARALLEL, 4.0, 0.0, 0)
    done = finished(DATA_PARALLEL, {1.0: 2.0, 2.0: 2.5, 4.0: 3.0})
    assert Row(DATA_PARALLEL, 0.5, 0.0, 0) in left(BOTH[:1], done)


@pytest.mark.full
def test_every_row_is_accepted_by_the_trainer_and_reads_as_many_tokens_a_step():
    for mode in modes.MODES:
        keys = rows.keys_of(Row(mode.name, 1e-3, 0.5, 7), SMALL, {})
        assert traffic(keys).parameters > 0
        replicas = keys["num_diloco_replicas"] if keys["enable_diloco"] else 1
        assert replicas * keys["per_device_batch_size"] == SMALL.batch
        assert (keys["init_weights_seed"], keys["data_shuffle_seed"]) == (7, 7)


# -- bytes --------------------------------------------------------------------------------------


def test_bytes_are_those_of_the_schedule():
    """60 steps. H=30 sends the model twice, in float32; 4 bits an eighth; data parallel 2 N T."""

    def of(name):
        return traffic(rows.keys_of(Row(name, 1e-3, 0.5, 0), SMALL, {}))

    plain, N = of(DATA_PARALLEL), of(DATA_PARALLEL).parameters
    assert plain.sent == plain.baseline == 2 * N * 60
    assert of(DILOCO).sent == pytest.approx(2 * 4 * N, rel=0.02)
    assert of("DiLoCo, H=10").sent == pytest.approx(6 * 4 * N, rel=0.02)
    assert of("eager, 4 bits").sent == pytest.approx(2 * 4 * N / 8, rel=0.1)  # and block scales
    assert of("DiLoCo, M=1").sent == 0


# -- table --------------------------------------------------------------------------------------


def found_of(done, names=(DATA_PARALLEL, DILOCO)):
    some = [BY_NAME[name] for name in names]
    sent = {m.name: traffic(rows.keys_of(Row(m.name, 1e-3, 0.5, 0), SMALL, {})) for m in some}
    return table.results(some, SCALE, done, sent)


def test_the_table_has_mean_spread_difference_and_bytes_and_figures_a_line_for_every_mode():
    """DiLoCo: (2.1 + 2.3) / 2 = 2.2, 10 % above 2.0; deviation 0.2 / sqrt(2); 2 N 60 / (8 N). A
    seed is compared with the same seed, and those that are missing are said: 2.1 at seed 0, where
    data parallelism has 2.0, and 1.5 at seed 1. A mode without a best rate is left out."""

    def cells(done):
        line = table.table(found_of(done), SCALE).splitlines()[3]
        return [cell.strip() for cell in line.split("|")[1:-1]]

    done = tuned() | finished(DATA_PARALLEL, {2.0: 2.0}, seed=1)
    whole = done | finished(DILOCO, {0.4: 2.3}, inner=2.0, seed=1)
    assert cells(whole)[:5] == [DILOCO, "0.4", "2.2000", "0.1414", "+10.00%"]
    assert cells(whole)[-1] == "15"
    assert "0.2: 2.4000, 0.4: 2.1000, 0.8: diverged" in table.sweeps(BOTH, SCALE, whole)
    done |= finished(DATA_PARALLEL, {2.0: 1.5}, seed=1)
    assert cells(done)[2:5] == ["2.1000", "one seed (1 of 2 seeds)", "+5.00%"]
    assert DELAYED not in table.table(found_of(done, (DATA_PARALLEL, DILOCO, DELAYED)), SCALE)
    found = found_of(tuned())
    assert draw.curves(found, "a", 1024).count('stroke-width="1.6"') == 2
    assert "times fewer" in draw.tradeoff(found, "b")


# -- command line -------------------------------------------------------------------------------


def test_a_run_that_diverged_is_a_result_and_one_that_failed_is_not(tmp_path):
    run = object.__new__(rows.Run)
    run.row, run._folder, run._scale, run._began = Row(DILOCO, 2.0, 0.4, 0), tmp_path, SMALL, 0.0
    (tmp_path / "log").write_text("line\n" * 20 + "last words")
    (tmp_path / "run").mkdir()

    def result(code, evaluated):
        run._process = types.SimpleNamespace(returncode=code)
        lines = [{"step": step, "learning/loss": 1.5, "eval/loss": x} for step, x in evaluated]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / "run" / "metrics.jsonl").write_text(text)
        return run.result()

    assert result(0, [(30, 2.0), (60, 1.9)])["loss"] == 1.9
    assert result(4, [(30, 2.0)])["loss"] is None
    assert result(0, [(30, 2.0), (60, math.inf)])["loss"] is None
    with pytest.raises(rows.RowError, match="exit code 3. End of its log:(.|\n)*last words"):
        result(3, [(60, 1.9)])


def test_the_figure_of_many_replicas_has_a_line_for_each_and_the_rows_as_marks(tmp_path):
    assert draw_replicas.main([str(tmp_path / "figure.svg")]) == 0
    text = (tmp_path / "figure.svg").read_text()
    lines = [line for line in text.split("<polyline")[1:] if 'stroke-width="1.8"' in line]
    assert len(lines) == 6 and all(line.split('"')[1].count(" ") >= 3 for line in lines)
    rows = [r for r in draw_replicas.forecast.rows() if r.case.tokens == draw_replicas.TOKENS]
    ours = [row for row in rows if row.words.startswith("279k") and row.words.endswith(", ours")]
    marks = [box for box in text.split("<rect")[1:] if 'width="6.0"' in box]
    assert len(marks) == sum(row.case.overlap == "none" for row in ours) > 12
    # Four bits at each thirtieth step, as the table has it: 119 times fewer.
    case = draw_replicas.Case(279e3, 8, 30, wire="float4_e3m0")
    assert draw_replicas._times(case) == pytest.approx(119.4, abs=0.5)
