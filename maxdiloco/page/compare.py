"""Runs side by side: theta's loss where they have come equally far by steps, tokens, bytes, time.

# N rows of metrics.jsonl
"""

import enum
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from maxdiloco.page import timeline
from maxdiloco.page.facts import UNKNOWN, Rows
from maxdiloco.page.run import Run
from maxdiloco.processes.output import amount, span

TOTAL = "dcn/bytes_sent_in_all"  # of a replica since step 1, of this page alone
COMMITTED = "islands/committed_tokens"
RECENT = 8  # evaluations that tell how noisy they are; our choice
SIGMAS = 2  # of that noise, below which a difference is called none; our choice
FLAT = 0.002  # relative difference of losses that is called none; our choice
# Keys that decide what eval/loss is a loss of.
_EVAL_KEYS = (
    "dataset_type", "dataset_path", "dataset_mixture", "eval_dataset_path", "text_column",
    "tokenizer_type", "tokenizer_path", "add_bos", "add_eos", "vocab_size", "max_target_length",
    "eval_steps",
)  # fmt: skip


class Stands(enum.Enum):
    """The outcome of comparing two losses."""

    LEVEL = "no difference"
    WORSE = "worse"
    BETTER = "better"


class Axis(NamedTuple):
    """A quantity at equal values of which runs are compared. of: its values [N] of a run."""

    name: str
    of: Callable[[Run], np.ndarray]
    text: Callable[[float], str]


class Compared(NamedTuple):
    """Losses of theta of two runs at an equal x. noise: deviation of their difference, or NaN."""

    x: float
    at_a: float
    at_b: float
    noise: float
    stands: Stands


def is_island(run: Run) -> bool:
    """Whether a run is an island, whose theta is that of all islands of its log."""
    return bool(np.isfinite(run.column(COMMITTED)).any())


def tokens(run: Run) -> np.ndarray:
    """Tokens that the theta of each row has been trained on [N]: of an island, the committed ones.

    Rows of an evaluation alone have no count; theirs is between those of the rows around them.
    """
    if not is_island(run):
        return run.column("learning/tokens")
    committed_N = run.column(COMMITTED)
    known = np.isfinite(committed_N)
    return np.interp(run.steps_N, run.steps_N[known], committed_N[known])


_STEPS = Axis("steps", lambda run: run.steps_N.astype(float), "{:,.0f}".format)
_TOKENS = Axis("tokens", tokens, "{:,.0f}".format)
_COMMITTED = _TOKENS._replace(name="committed tokens")
_BYTES = Axis("bytes", lambda run: with_total(run).column(TOTAL), amount)
_SECONDS = Axis("seconds", lambda run: run.column("perf/wall_time_s"), span)


def axes(first: Run, other: Run) -> list[Axis]:
    """Return the quantities at which two runs can be compared.

    Steps, bytes and seconds of an island are its own. They do not describe the shared outer
    parameters, so islands are compared at committed tokens only.
    """
    if is_island(first) or is_island(other):
        return [_COMMITTED]
    return [_STEPS, _TOKENS, _BYTES, _SECONDS]


def at_equal(first: Run, other: Run, axis: Axis) -> Compared | None:
    """Two runs where they have come equally far, or None where they never have."""
    a, b = (curve(run, axis.of(run)) for run in (first, other))
    if not len(a) or not len(b) or min(a[-1, 0], b[-1, 0]) < max(a[0, 0], b[0, 0]):
        return None
    x = float(min(a[-1, 0], b[-1, 0]))
    at_a, at_b = (float(np.interp(x, *each.T)) for each in (a, b))
    noise = math.hypot(noise_of(a[:, 1]), noise_of(b[:, 1]))
    least = FLAT * abs(at_a) if math.isnan(noise) else max(FLAT * abs(at_a), SIGMAS * noise)
    stands = Stands.WORSE if at_b > at_a else Stands.BETTER
    return Compared(x, at_a, at_b, noise, Stands.LEVEL if abs(at_b - at_a) <= least else stands)


def with_total(run: Run) -> Run:
    """The run with the bytes that a replica has sent since step 1, where it tells."""
    sent_N = run.column(timeline.BYTES)
    at = np.flatnonzero(np.isfinite(sent_N))  # rows of an evaluation alone have none
    if not len(at):
        return run
    ends = np.concatenate([[0], run.steps_N[at]])
    sums = np.concatenate([[0.0], np.cumsum(sent_N[at] * np.diff(ends))])
    total_N = np.interp(run.steps_N, ends, sums)
    return run._replace(columns=run.columns | {TOTAL: total_N})


def table(runs: Sequence[Run]) -> Rows:
    """Return a row for each other run and each axis that it shares with the first run.

    Where a run has no such axis, its row says why it is not compared.
    """
    head = ["run", "at equal", "", f"theta of {runs[0].name}", "theta", "difference", "noise", ""]
    rows, numbers = [], []
    for number, other in enumerate(runs[1:], 1):
        why, found = "no loss of theta at an equal point", []
        if differing := eval_keys_that_differ(runs[0], other):
            why = f"the held-out texts may differ: {', '.join(differing)}"
        else:
            found = [(axis, at_equal(runs[0], other, axis)) for axis in axes(runs[0], other)]
        compared = [_cells(axis, at) for axis, at in found if at is not None]
        compared = compared or [[*[UNKNOWN] * 6, f"not compared ({why})"]]
        rows += [[other.name, *cells] for cells in compared]
        numbers += [number] * len(compared)
    return Rows(head, rows, numbers)


def _cells(axis: Axis, at: Compared) -> list[str]:
    noise = "not known" if math.isnan(at.noise) else f"{at.noise:.4f}"
    losses = [f"{at.at_a:.4f}", f"{at.at_b:.4f}", f"{at.at_b - at.at_a:+.4f}"]
    return [axis.name, axis.text(at.x), *losses, noise, at.stands.value]


def noise_of(losses: np.ndarray) -> float:
    """Deviation of one evaluation, by how the last ones lie off the line through their neighbours.

    The middle of three equally noisy points is off by the deviation times sqrt(3 / 2). NaN for
    fewer than four.
    """
    last = losses[-RECENT:]
    if len(last) < 4:
        return math.nan
    off = [b - (a + c) / 2 for a, b, c in zip(last, last[1:], last[2:], strict=False)]
    return math.sqrt(float(np.mean(np.square(off))) / 1.5)


def curve(run: Run, x_N: np.ndarray) -> np.ndarray:
    """[rows, 2]: x, which increases, and the loss of theta where both are finite.

    Without evaluations of the initial parameters, which no training has moved.
    """
    points = np.stack([x_N, run.column("eval/loss")], axis=1)
    points = points[np.isfinite(points).all(1) & _has_moved(run)]
    kept = [True, *(b[0] > a[0] for a, b in itertools.pairwise(points))]
    return points[np.array(kept[: len(points)], bool)]


def _has_moved(run: Run) -> np.ndarray:
    """[N]: whether theta is no longer the initial one."""
    if is_island(run):
        return tokens(run) > 0
    schedule = timeline.schedule_of(run)
    if schedule is None:
        return run.steps_N > 0
    # In delayed and eager rounds the first outer step is of zeros.
    moves = (t for t in itertools.count(1 + schedule.lag) if schedule.applies(t))
    return run.steps_N >= next(moves)


def eval_keys_that_differ(first: Run, other: Run) -> list[str]:
    """Keys of the held-out text; of runs with one eval_dataset_path the training text is none.

    Keys that a run does not say are taken for equal.
    """
    if first.keys is None or other.keys is None:
        return []
    differing = [name for name in _EVAL_KEYS if first.keys.get(name) != other.keys.get(name)]
    path = first.keys.get("eval_dataset_path")
    holds_out = not path or (isinstance(path, dict) and "" in path.values())
    if not holds_out and "eval_dataset_path" not in differing:
        differing = [name for name in differing if name not in ("dataset_path", "dataset_mixture")]
    return differing
