"""Compare the outer parameters of two runs by their loss at equal tokens.

There is one comparison and one verdict for each run. Equal steps are not equal work if batches
differ. For comparisons by traffic or time, the charts have these as x axes.
"""

import enum
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from maxdiloco.report import timeline
from maxdiloco.report.run_data import RunData
from maxdiloco.report.tables import UNKNOWN, Table

RECENT = 8  # last evaluations, for the noise; few, because the noise falls with the learning rate
SIGMAS = 2  # of the noise; smaller differences count as equal, as in a 95% interval
FLAT = 0.002  # relative difference that counts as equal: two modes vary by 0.005 between seeds
# The keys that decide the text and the tokens of eval/loss.
_EVAL_KEYS = (
    "dataset_type", "dataset_path", "dataset_mixture", "eval_dataset_path", "text_column",
    "tokenizer_type", "tokenizer_path", "add_bos", "add_eos", "vocab_size", "max_target_length",
    "eval_steps",
)  # fmt: skip


class Verdict(enum.Enum):
    """The result of comparing the loss of a run with the loss of the first run."""

    SAME = "no difference"
    WORSE = "worse"
    BETTER = "better"


class Comparison(NamedTuple):
    """The losses of two runs after equally many tokens.

    Attributes:
      tokens: number of tokens of both runs.
      first, other: the losses [nats/token].
      noise: standard deviation of the difference of two evaluations; NaN if unknown.
    """

    tokens: float
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


def compare(first: RunData, other: RunData) -> Comparison | str:
    """Compare two runs at the most tokens that both have reached.

    Returns:
      The comparison, or a few words on the reason why there is none.
    """
    if names := differing_eval_keys(first, other):
        return f"the held-out texts may differ: {', '.join(names)}"
    a, b = loss_curve(first), loss_curve(other)
    if not len(a) or not len(b) or min(a[-1, 0], b[-1, 0]) < max(a[0, 0], b[0, 0]):
        return "no evaluations after equally many tokens"
    x = float(min(a[-1, 0], b[-1, 0]))
    losses = [float(np.interp(x, *points.T)) for points in (a, b)]
    return Comparison(x, *losses, math.hypot(noise_of(a[:, 1]), noise_of(b[:, 1])))


def tokens(run: RunData) -> np.ndarray:
    """Return the tokens that the outer parameters of each row were trained on, [N].

    For an island these are the committed tokens, because all islands share the outer parameters. A
    row with only an evaluation gets a value interpolated between adjacent rows, or NaN before the
    first row with tokens.
    """
    counts = run.column(timeline.COMMITTED if timeline.is_island(run) else "learning/tokens")
    known = np.isfinite(counts)
    if not known.any():
        return counts
    return np.interp(run.steps, run.steps[known], counts[known], left=np.nan)


def loss_curve(run: RunData) -> np.ndarray:
    """Return [rows, 2]: tokens, which increase, and the loss if both are finite.

    Evaluations of the initial parameters, before any outer update, are left out.
    """
    points = np.stack([tokens(run), run.column("eval/loss")], axis=1)
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

    If three points have equal noise, the middle one has a distance from the line through its
    neighbours. This distance has sqrt(3 / 2) times the deviation of a point.

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

    The training text counts only if a part of it is held out. Unknown keys count as equal.
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
    """Return a row for each other run: its comparison with the first run, or why it is missing."""
    first = runs[0]
    head = ["run", "tokens", f"loss of {first.name}", "loss", "difference", "noise", "verdict"]
    rows = [[other.name, *_cells(compare(first, other))] for other in runs[1:]]
    return Table(head, rows, list(range(1, len(runs))))


def _cells(result: Comparison | str) -> list[str]:
    if isinstance(result, str):
        return [*[UNKNOWN] * 5, f"not compared ({result})"]
    noise = "unknown" if math.isnan(result.noise) else f"{result.noise:.4f}"
    losses = [f"{result.first:.4f}", f"{result.other:.4f}", f"{result.other - result.first:+.4f}"]
    return [f"{result.tokens:,.0f}", *losses, noise, result.verdict.value]
