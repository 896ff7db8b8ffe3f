"""The forecast of the loss: its rows, its law, its error on rows it has not seen, its edges."""

import csv
import dataclasses
import itertools
import math
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from maxdiloco.planning import forecast
from maxdiloco.planning.forecast import Case

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs/reference/loss-forecast.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks/results"
LOG = "".join(path.read_text(encoding="utf-8") for path in RESULTS.glob("*.md"))
SIZES, REPLICAS, PERIODS = (3e5, 3e6, 3e7, 3e8, 3e9), (2, 4, 8, 16), (10, 30, 100)


@pytest.fixture(scope="module")
def law():
    return forecast.fit(forecast.read_rows())


def group_of(row):
    """The paper of a row, or "ours"."""
    return row.source.split()[0]


def test_every_row_has_a_source_and_ours_are_figures_of_the_log():
    lines = forecast.LOSSES.read_text(encoding="utf-8").splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    assert len(rows) == len(forecast.read_rows()) > 100
    for row in rows:
        assert re.match(r"\d{4}\.\d{5} |ours", row["source"])
        if row["source"].startswith("ours"):
            assert row["data_parallel"] in LOG and row["loss"] in LOG, row


def test_the_error_on_rows_that_are_left_out_is_that_of_the_docs(law, capsys):
    """By row, and by paper: what the law of the others would have said of all of its rows."""

    def errors(its):
        others = forecast.fit([row for row in law.rows if row not in its])
        return [row.gap - forecast.estimate(others, row.case)[0] for row in its]

    groups = {group_of(row): None for row in law.rows}
    found = {
        name: math.sqrt(np.square(errors([x for x in law.rows if group_of(x) == name])).mean())
        for name in groups
    }
    squares = np.square([errors([row])[0] for row in law.rows])
    is_ours = np.array([group_of(row) == "ours" for row in law.rows])
    found["each row"] = math.sqrt(squares.mean())
    with capsys.disabled():
        print()
        for name, error in found.items():
            print(f"{name} left out: off by {error:.2%} of the loss")
    a, d, muon, e, eager, head_start = law.coefficients_P
    values = {
        "a": f"{a:.2f}",
        "d": f"{d:.3f}",
        "d with muon": f"{d + muon:.3f}",
        "e": f"{e:.3f}",
        "factor for eager": f"{math.exp(eager):.2f}",
        "head start": f"{head_start:.2%}",
        "each row of the papers": f"{100 * math.sqrt(squares[~is_ours].mean()):.2f}",
        "each row of ours": f"{100 * math.sqrt(squares[is_ours].mean()):.2f}",
    }
    values |= {name: f"{100 * error:.2f}" for name, error in found.items()}
    for name, value in values.items():
        (said,) = re.findall(rf"^\| {re.escape(name)} \|.* ([-\d.]+%?) \|$", PAGE, re.M)
        assert said == value, name


def in_rounds(case, rounds):
    """The batch with which a case has so many rounds."""
    return case.parameters * case.tokens / case.H / rounds


def test_nine_in_ten_of_a_source_left_out_lie_in_their_interval(law):
    """Each source counts as much as another, whatever its number of rows."""
    shares = []
    for source in {group_of(row) for row in law.rows}:
        its = [row for row in law.rows if group_of(row) == source]
        others = forecast.fit([row for row in law.rows if group_of(row) != source])
        inside = 0
        for row in its:
            gap, deviation = forecast.estimate(others, row.case)
            inside += abs(row.gap - gap) <= forecast.HALF * math.hypot(deviation, row.error)
        shares.append(inside / len(its))
    assert len(shares) == 5 and 0.89 <= np.mean(shares) <= 0.92


def test_the_cost_of_an_untuned_outer_rate_is_that_of_the_sweeps(law):
    """The table of the log: data parallelism has 1.2752 at its seed, with muon 1.2266."""
    sweeps = LOG[LOG.index("The sweeps, at seed 0:") :]
    factors = []
    for mode in (
        "DiLoCo, H=30", "DiLoCo, H=10", "DiLoCo, H=100", "streaming, tau=0", "streaming, tau=1",
        "streaming, tau=5", "streaming, tau=1, 4 bits", "streaming, tau=1, 4 bits, H=100", "eager",
        "eager, 4 bits", "DiLoCo, M=4", "DiLoCo, M=8", "DiLoCo, muon",
    ):  # fmt: skip
        cells = re.search(rf"^\| {re.escape(mode)} \|(.*)\|$", sweeps, re.M)[1].split("|")
        losses = [float(cell.strip(" *")) for cell in cells if cell.strip()]
        parallel = 1.2266 if "muon" in mode else 1.2752
        over = [loss / parallel - 1 + law.coefficients_P[-1] for loss in losses]
        best = over.index(min(over))
        factors += [each / over[best] for each in over[max(0, best - 1) : best + 2]]
        factors.remove(1.0)
    assert len(factors) == 25
    assert forecast.UNTUNED == pytest.approx(np.quantile(factors, 0.9), abs=0.01)


@pytest.mark.parametrize(
    ("case", "measured", "exceeded"),
    [
        (Case(279296, 2, 30, 1, "float4_e3m0", tokens=3.7), 1.7647 / 1.7221 - 1, 0.034),
        (Case(279296, 4, 30, tokens=3.7), 1.8223 / 1.7221 - 1, 0.079),
    ],
)
def test_the_interval_holds_for_another_text_and_untuned_rates(law, case, measured, exceeded):
    """results/loss_by_mode.md: losses that no row has, and ends that two others exceeded."""
    found = forecast.predict(law, dataclasses.replace(case, batch=in_rounds(case, 1000 / 30)))
    assert found.least < measured < found.most and found.most > 1.5 * exceeded
    assert found.share - found.least < found.most - found.share


def test_the_law_of_rows_that_follow_one_is_that_one():
    """Rows without misfit: the coefficients come back."""
    true_P = np.array([-4.4, 0.7, -0.2, -0.4, 1.1, 0.004])
    made = []
    for size, M, H, tokens, overlap, wire, inner in itertools.product(
        SIZES, REPLICAS, PERIODS, (5, 20), ("none", "eager"), ("int8", "int2"), ("adamw", "muon")
    ):
        case = Case(size, M, H, 0, wire, overlap, inner, tokens)
        gap = math.exp(np.dot(forecast.features(case), true_P[:-1])) - true_P[-1]
        made.append(forecast.Row(case, gap, 1e-4, ""))
    assert forecast.fit(made).coefficients_P == pytest.approx(true_P, abs=0.02)


def test_more_replicas_and_longer_periods_are_no_better_and_larger_models_no_worse(law):
    for inner, overlap in (("adamw", "none"), ("muon", "none"), ("adamw", "eager")):
        gap = np.array([
            [
                [forecast.estimate(law, Case(*at, inner=inner, overlap=overlap))[0] for at in row]
                for row in [[(N, M, H) for H in PERIODS] for M in REPLICAS]
            ]
            for N in SIZES
        ])  # fmt: skip
        assert (np.diff(gap, axis=0) < 0).all()
        assert (np.diff(gap, axis=1) > 0).all() and (np.diff(gap, axis=2) > 0).all()
    few, many = (forecast.estimate(law, Case(1e9, 4, 30, tokens=t))[0] for t in (10, 100))
    assert few > many
    four = Case(1e9, 4, 30)

    def share(rounds):
        at = dataclasses.replace(four, batch=in_rounds(four, rounds))
        return forecast.predict(law, at).share

    assert share(40) > 2 * share(400)
    many = [share(10**5), share(10**6)]
    assert many[0] == many[1] > -0.005  # as at the most rounds of a row
    plain, eager = Case(1e9, 2, 30), Case(1e9, 2, 30, overlap="eager")
    assert forecast.estimate(law, eager)[0] > forecast.estimate(law, plain)[0] + 0.003


@pytest.mark.parametrize(
    ("case", "names"),
    [
        (Case(1.3e9, 2, 500), ["H=500"]),
        (Case(70e9, 64, 30), ["parameters=70B", "replicas=64"]),
        (Case(1e9, 8, 30, overlap="eager"), ["replicas=8"]),
        (Case(1e9, 2, 30, overlap="delayed"), ["delayed"]),
        (Case(1e9, 2, 30, wire="topk"), ["topk"]),
        (Case(1e9, 2, 30, wire="int2", tokens=5), ["parameters=1B"]),
        (Case(1e9, 2, 30, inner="sgd"), ["sgd"]),
        (Case(1e9, 2, 30, layers="mixture of experts"), ["mixture of experts"]),
        (Case(1e9, 2, 30, tokens=2000), ["tokens=2e+03"]),
        (Case(1e9, 2, 100, batch=40e6), ["rounds=5"]),
        (Case(1e9, 2, 30, tau=20), ["tau=20"]),
    ],
)
def test_what_lies_outside_of_the_rows_is_named_and_the_nearest_row_too(law, case, names):
    found = forecast.predict(law, case)
    assert [words.partition(" (")[0] for words in found.outside] == names
    assert found.nearest in law.rows
    # Control: within; tau too where no row of muon has one, since it has no term.
    assert not forecast.predict(law, Case(9e9, 16, 30, tau=1, inner="muon")).outside
    found = forecast.predict(law, Case(1e9, 2, 30))
    assert not found.outside
    assert (found.nearest.case.parameters, found.nearest.case.replicas) == (1e9, 2)


def test_the_interval_is_wider_where_no_row_is_near(law):
    """In deviations of the misfit, which is a part of the gap and the head start."""

    def widened(case):
        gap, deviation = forecast.estimate(law, case)
        return deviation / (gap + law.coefficients_P[-1])

    assert widened(Case(1e9, 4, 30)) < widened(Case(3e6, 16, 100)) < widened(Case(3e6, 64, 1000))


def test_more_tokens_make_up_for_the_gap_as_compute_does(law):
    """2503.09799 Tab. 7: compute lowers the loss by 0.0953 / 2 of it for each factor e."""
    found = forecast.predict(law, Case(3e8, 8, 30))
    assert found.times_tokens == pytest.approx(math.exp(found.share / (0.0953 / 2)))
    assert found.least < found.share < found.most
    # Far outside there is still an order, and no overflow.
    cases = [Case(1e5, M, 10**5, tokens=0.01) for M in (1, 10**4)]
    far = [forecast.predict(law, case).times_tokens for case in cases]
    assert 1 < far[0] <= far[1] < math.inf


def test_the_forecast_needs_no_jax():
    code = "import sys; from maxdiloco.planning import forecast; assert 'numpy' in sys.modules; "
    code += "sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
