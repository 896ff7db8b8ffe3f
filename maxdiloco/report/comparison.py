"""Compare the outer parameters of two runs by loss at equal tokens, steps, bytes and seconds."""

import enum
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from maxdiloco.processes.output import amount, span
from maxdiloco.report import timeline
from maxdiloco.report.run_data import RunData
from maxdiloco.report.tables import UNKNOWN, Table

TOTAL_BYTES = "dcn/bytes_sent_in_all"  # of a replica since step 1; a column of the report only
RECENT = 8  # evaluations that the noise is estimated from; few, as it falls with the learning rate
SIGMAS = 2  # of the noise; a smaller difference is called none, as in a 95% interval
FLAT = 0.002  # relative difference that is called none: two modes vary by 0.005 between seeds
# The keys that decide which text and tokens eval/loss is a loss of.
_EVAL_KEYS = (
    "dataset_type", "dataset_path", "dataset_mixture", "eval_dataset_path", "text_column",
    "tokenizer_type", "tokenizer_path", "add_bos", "add_eos", "vocab_size", "max_target_length",
    "eval_steps",
)  # fmt: skip


class Verdict(enum.Enum):
    """How the loss of a run compares with that of the first run."""

    SAME = "no difference"
    WORSE = "worse"
    BETTER = "better"


class Axis(NamedTuple):
    """A quantity at equal values of which runs are compared.

    values: from a run to the quantity of each row, [N]. text: formats a value.
    """

    name: str
    values: Callable[[RunData], np.ndarray]
    text: Callable[[float], str]


class Comparison(NamedTuple):
    """The losses of two runs where they have come equally far.

    x: how far. first, other: the losses [nats/token]. noise: standard deviation of the difference
    of two evaluations, or NaN where it is unknown.
    """

    x: float
    first: float
    other: float
    noise: float

    @property
    def verdict(self) -> Verdict:
        """Compare the difference with the noise."""
        least = FLAT * abs(self.first)
        if not math.isnan(self.noise):
            least = max(least, SIGMAS * self.noise)
        if abs(self.other - self.first) <= least:
            return Verdict.SAME
        return Verdict.WORSE if self.other > self.first else Verdict.BETTER


def tokens(run: RunData) -> np.ndarray:
    """Return the tokens that the outer parameters of each row were trained on, [N].

    Of an island these are the committed tokens. A row that has an evaluation only gets a value
    between those of the rows around it.
    """
    if not timeline.is_island(run):
        return run.column("learning/tokens")
    committed = run.column(timeline.COMMITTED)
    known = np.isfinite(committed)
    return np.interp(run.steps, run.steps[known], committed[known])


def total_bytes(run: RunData) -> np.ndarray:
    """Return the bytes that a replica has sent since step 1, [N]; NaN where they are unknown."""
    sent = run.column(timeline.BYTES)
    rows = np.flatnonzero(np.isfinite(sent))
    if not len(rows):
        return sent
    ends = np.concatenate([[0], run.steps[rows]])
    sums = np.concatenate([[0.0], np.cumsum(sent[rows] * np.diff(ends))])
    return np.interp(run.steps, ends, sums)


_TOKENS = Axis("tokens", tokens, "{:,.0f}".format)
_AXES = [
    _TOKENS,
    Axis("steps", lambda run: run.steps.astype(float), "{:,.0f}".format),
    Axis("bytes", total_bytes, amount),
    Axis("seconds", lambda run: run.column("perf/wall_time_s"), span),
]


def axes(first: RunData, other: RunData) -> list[Axis]:
    """Return the quantities at which two runs can be compared.

    Steps, bytes and seconds of an island are its own. They do not describe the shared outer
    parameters, so islands are compared at committed tokens only.
    """
    if timeline.is_island(first) or timeline.is_island(other):
        return [_TOKENS._replace(name="committed tokens")]
    return _AXES


def compare(first: RunData, other: RunData, axis: Axis) -> Comparison | None:
    """Compare two runs at the largest value that both have reached; None if there is none."""
    a, b = (curve(run, axis.values(run)) for run in (first, other))
    if not len(a) or not len(b) or min(a[-1, 0], b[-1, 0]) < max(a[0, 0], b[0, 0]):
        return None
    x = float(min(a[-1, 0], b[-1, 0]))
    losses = [float(np.interp(x, *points.T)) for points in (a, b)]
    return Comparison(x, *losses, math.hypot(noise_of(a[:, 1]), noise_of(b[:, 1])))


def curve(run: RunData, x: np.ndarray) -> np.ndarray:
    """Return [rows, 2]: x, which increases, and the loss where both are finite.

    Evaluations of the initial parameters, before any outer update, are left out.
    """
    points = np.stack([x, run.column("eval/loss")], axis=1)
    points = points[np.isfinite(points).all(1) & _is_trained(run)]
    increases = [True, *(b[0] > a[0] for a, b in itertools.pairwise(points))]
    return points[np.array(increases[: len(points)], bool)]


def _is_trained(run: RunData) -> np.ndarray:
    """Whether the outer parameters of each row have been updated, [N]."""
    if timeline.is_island(run):
        return tokens(run) > 0
    schedule = timeline.schedule_of(run)
    if schedule is None:
        return run.steps > 0
    # In delayed and eager rounds the first outer step has an outer gradient of zeros.
    updates = (t for t in itertools.count(1 + schedule.lag) if schedule.applies(t))
    return run.steps >= next(updates)


def noise_of(losses: np.ndarray) -> float:
    """Estimate the standard deviation of one evaluation.

    The middle of three points with equal noise lies off the line through its neighbours by
    sqrt(3 / 2) times the deviation.

    Returns:
      The estimate from the last RECENT losses; NaN for fewer than four.
    """
    last = losses[-RECENT:]
    if len(last) < 4:
        return math.nan
    off = last[1:-1] - (last[:-2] + last[2:]) / 2
    return math.sqrt(float(np.mean(np.square(off))) / 1.5)


def differing_eval_keys(first: RunData, other: RunData) -> list[str]:
    """Return the keys in which the held-out texts of two runs may differ.

    The training text counts only if a part of it is held out. Unknown keys are taken for equal.
    """
    if first.config is None or other.config is None:
        return []
    names = [name for name in _EVAL_KEYS if first.config.get(name) != other.config.get(name)]
    path = first.config.get("eval_dataset_path")
    holds_out = not path or (isinstance(path, dict) and "" in path.values())
    if not holds_out and "eval_dataset_path" not in names:
        names = [name for name in names if name not in ("dataset_path", "dataset_mixture")]
    return names


def table(runs: Sequence[RunData]) -> Table:
    """Return a row for each other run and each axis that it shares with the first run.

    A run that cannot be compared has one row, which says why.
    """
    first = runs[0]
    head = ["run", "at equal", "value", f"loss of {first.name}", "loss", "difference", "noise",
            "verdict"]  # fmt: skip
    rows, numbers = [], []
    for number, other in enumerate(runs[1:], 1):
        if names := differing_eval_keys(first, other):
            cells, why = [], f"the held-out texts may differ: {', '.join(names)}"
        else:
            found = [(axis, compare(first, other, axis)) for axis in axes(first, other)]
            cells = [_cells(axis, result) for axis, result in found if result is not None]
            why = "no evaluations at an equal point"
        cells = cells or [[*[UNKNOWN] * 6, f"not compared ({why})"]]
        rows += [[other.name, *each] for each in cells]
        numbers += [number] * len(cells)
    return Table(head, rows, numbers)


def _cells(axis: Axis, result: Comparison) -> list[str]:
    noise = "unknown" if math.isnan(result.noise) else f"{result.noise:.4f}"
    difference = f"{result.other - result.first:+.4f}"
    losses = [f"{result.first:.4f}", f"{result.other:.4f}", difference]
    return [axis.name, axis.text(result.x), *losses, noise, result.verdict.value]
