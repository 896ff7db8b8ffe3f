"""Forecast the loss of DiLoCo relative to data parallelism, by a law fitted to losses.csv.

docs/reference/loss-forecast.md documents the law, its error and its limits. The law knows only the
size of a model and its batch. Needs NumPy, not JAX.
"""

import csv
import math
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

# K rows  P coefficients of `features`, and the head start
LOSSES = pathlib.Path(__file__).parent / "losses.csv"
# Sequences of 2,048 tokens a step that are best for data parallelism: A N^b, 2503.09799 Tab. 10.
SEQUENCES, SEQUENCES_EXPONENT, LENGTH = 0.00709, 0.4695, 2048
# Wire formats that lose nothing in any table. Each other format is a separate class.
FREE_WIRES = ("float32", "bfloat16", "int8", "float4_e3m0")
# Mean and deviation of each coefficient in the prior. It is wide if the rows determine the value.
PRIOR = ((-4.5, 3), (0, 1), (0, 0.5), (0, 1), (0, 1), (0.003, 0.003))
# Deviation of a row from the law, relative to gap and head start: the most likely value when whole
# sources are left out (benchmarks/results/loss_by_mode.md, "Another text").
SPREAD = 0.2
# Half the width of the interval, in deviations. It contains nine in ten rows of a source that the
# law has not seen.
HALF = 1.43
# Factor on gap and head start at an outer rate one grid step away from the best rate. Nine in ten
# of 25 rows are below it ("A rate that was not tuned" in the same page).
UNTUNED = 2.17
MOST_ROUNDS = 11_491  # of a row; larger numbers of rounds count as this one
SLACK = 1.5  # factor beyond the range of its rows up to which the law is used
# Loss of data parallelism with tokens in proportion to the size: A N^-EXPONENT (2503.09799 Tab. 7).
# Compute grows with N^2. At the best split, more tokens lower the loss as much as more compute.
EXPONENT = 0.0953
# Fields of a case that a row has to share, and fields that have to be in the range of the rows.
CLASSES = ("overlap", "inner", "wire_class", "layers")
RANGES = ("parameters", "replicas", "H", "tau", "tokens", "rounds")


@dataclass(frozen=True)
class Case:
    """The settings that a loss depends on."""

    parameters: float
    replicas: int
    H: int
    tau: int = 0
    wire: str = "float32"
    overlap: str = "none"  # round overlap
    inner: str = "adamw"  # inner optimizer
    tokens: float = 20.0  # for each parameter
    batch: float = 0.0  # tokens a step; 0: the best batch for the size
    layers: str = "dense"

    @property
    def rounds(self) -> float:
        """Outer steps of each fragment."""
        batch = self.batch or LENGTH * SEQUENCES * self.parameters**SEQUENCES_EXPONENT
        return self.parameters * self.tokens / batch / self.H

    @property
    def wire_class(self) -> str:
        """The wire format, or float32 for those that lose nothing."""
        return "float32" if self.wire in FREE_WIRES else self.wire


@dataclass(frozen=True)
class Row:
    """A loss that was measured."""

    case: Case
    gap: float  # loss relative to data parallelism, minus 1
    error: float  # of the gap
    source: str


@dataclass(frozen=True)
class Law:
    """A fitted law and its rows."""

    rows: Sequence[Row]
    coefficients_P: np.ndarray
    covariance_PP: np.ndarray


@dataclass(frozen=True)
class Forecast:
    """The loss relative to data parallelism on equally many tokens, minus 1, with its interval."""

    share: float
    least: float  # nine in ten losses lie between `least` and `most`
    most: float
    times_tokens: float  # factor of tokens that makes up for the gap, at least 1
    nearest: Row
    outside: Sequence[str]  # settings beyond the rows; the figures then only give an order


def show_size(parameters: float) -> str:
    """Show a number of parameters as 1.3B."""
    size, unit = next((x for x in ((1e9, "B"), (1e6, "M")) if parameters >= x[0]), (1e3, "k"))
    return f"{parameters / size:.3g}{unit}"


def read_rows(path: pathlib.Path = LOSSES) -> list[Row]:
    """Read the rows of losses.csv, or of a file like it."""
    rows = []
    text = [line for line in path.read_text(encoding="utf-8").splitlines() if line[0] != "#"]
    for cells in csv.DictReader(text):
        given = {field.name: field.type(cells[field.name]) for field in fields(Case)[:-1]}
        parallel, loss = float(cells["data_parallel"]), float(cells["loss"])
        error = math.sqrt(2) * float(cells["error"]) / parallel  # of two losses
        rows.append(Row(Case(**given), loss / parallel - 1, error, cells["source"]))
    return rows


def features(case: Case) -> list[float]:
    """Return the factors of the coefficients.

    The gap is the exponential of their weighted sum, minus a head start. It has powers of the
    number of other replicas (another power for muon) and of the rounds, and a factor for eager
    updates. Given these, the rows show no effect of the size, H and the tokens. The head start is
    the gain of outer steps: one replica is ahead of data parallelism (2503.09799 Tab. 4).
    """
    others = math.log(max(0.5, case.replicas - 1))
    rounds = math.log(min(case.rounds, MOST_ROUNDS) / 500)
    return [1.0, others, others * (case.inner == "muon"), rounds, float(case.overlap == "eager")]


def fit(rows: Sequence[Row], steps: int = 30) -> Law:
    """Fit by least squares (Gauss-Newton), weighted by error and SPREAD, with PRIOR as rows."""
    x_KP = np.array([features(row.case) for row in rows])
    gap_K, error_K = np.array([(row.gap, row.error) for row in rows]).T
    mean_P, deviation_P = np.array(PRIOR).T
    at_P = mean_P
    for _ in range(steps):
        over_K = np.exp(x_KP @ at_P[:-1])
        weight_K = 1 / np.hypot(error_K, SPREAD * over_K)
        slope_KP = np.column_stack([x_KP * over_K[:, None], -np.ones(len(rows))])
        a = np.vstack([slope_KP * weight_K[:, None], np.diag(1 / deviation_P)])
        b = [(gap_K - over_K + at_P[-1]) * weight_K, (mean_P - at_P) / deviation_P]
        at_P = at_P + np.linalg.lstsq(a, np.concatenate(b), rcond=None)[0]
    return Law(rows, at_P, np.linalg.inv(a.T @ a))


def estimate(law: Law, case: Case) -> tuple[float, float]:
    """Return the gap of a case and its deviation, from the coefficients and the spread of rows."""
    x_P = np.array(features(case))
    over = math.exp(x_P @ law.coefficients_P[:-1])
    slope_P = np.append(x_P * over, -1)
    deviation = math.hypot(SPREAD * over, math.sqrt(slope_P @ law.covariance_PP @ slope_P))
    return over - float(law.coefficients_P[-1]), deviation


def predict(law: Law, case: Case) -> Forecast:
    """Forecast a case.

    The interval holds for a text that no row has and for rates that were not tuned.
    """
    share, deviation = estimate(law, case)
    untuned = (UNTUNED - 1) * (share + float(law.coefficients_P[-1]))
    return Forecast(
        share,
        share - HALF * deviation,
        share + math.hypot(HALF * deviation, untuned),
        times_tokens=math.exp(min(max(0.0, share), 1.0) / (EXPONENT / 2)),
        nearest=min(law.rows, key=lambda row: _distance(row.case, case)),
        outside=_outside(law.rows, case),
    )


def _distance(a: Case, b: Case) -> float:
    """Measure the difference of two cases: log ratios of numbers, plus differing settings."""
    numbers = ("parameters", "rounds", "H", "replicas")
    far = sum(abs(math.log(getattr(a, name) / getattr(b, name))) for name in numbers)
    return far + (a.inner != b.inner) + (a.overlap != b.overlap) + (a.wire != b.wire) / 9


def _outside(rows: Sequence[Row], case: Case) -> list[str]:
    """Name the settings that no row has, and those beyond SLACK times the range of the rows.

    The range is taken over the rows of each class of the case. For tau, which has no effect in any
    class, it is taken over the rows of the overlap. No number of rounds is too large.
    """
    cases = [row.case for row in rows]
    alike = {k: [x for x in cases if getattr(x, k) == getattr(case, k)] for k in CLASSES}
    found = [f"{getattr(case, name)} (no row)" for name in CLASSES if not alike[name]]
    for name in RANGES:
        groups = [alike["overlap"]] if name == "tau" else alike.values()
        values = [[getattr(other, name) for other in group] for group in groups if group]
        least, most = max(map(min, values), default=0), min(map(max, values), default=math.inf)
        most, value = math.inf if name == "rounds" else most, getattr(case, name)
        if not least / SLACK <= value <= most * SLACK:
            show = show_size if name == "parameters" else "{:.3g}".format
            upto = f"to {show(most)}" if most < math.inf else "or more"
            found.append(f"{name}={show(value)} ({show(least)} {upto} measured)")
    return found
