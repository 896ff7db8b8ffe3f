"""Runs side by side: theta's loss where they have come equally far by steps, tokens, bytes, time.

# N rows of metrics.jsonl
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np

from maxdiloco.page import timeline, verdict
from maxdiloco.page.facts import UNKNOWN, Rows
from maxdiloco.page.run import Run
from maxdiloco.processes.output import amount, span

TOTAL = "dcn/bytes_sent_in_all"  # of a replica since step 1, of this page alone
# What runs are held beside each other at: (name, metric or "" for steps, as text).
AXES = (
    ("steps", "", "{:,.0f}".format),
    ("tokens", "learning/tokens", "{:,.0f}".format),
    ("bytes", TOTAL, amount),
    ("seconds", "perf/wall_time_s", span),
)
RECENT = 8  # evaluations that tell how noisy they are; our choice
SIGMAS = 2  # of that noise, below which a difference is called none; our choice


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
    """A row for each run beside the first one and each axis that both have."""
    head = ["run", "at equal", "", f"theta of {runs[0].name}", "theta", "difference", "noise", ""]
    rows, numbers = [], []
    first = with_total(runs[0])
    for number, other in enumerate(map(with_total, runs[1:]), 1):
        if verdict.eval_keys_that_differ(first, other):
            continue  # a sentence says so
        for name, metric, text in AXES:
            a, b = (_curve(run, metric) for run in (first, other))
            if not len(a) or not len(b) or min(a[-1, 0], b[-1, 0]) < max(a[0, 0], b[0, 0]):
                continue
            x = min(a[-1, 0], b[-1, 0])
            at_a, at_b = (float(np.interp(x, *each.T)) for each in (a, b))
            noise = math.hypot(noise_of(a[:, 1]), noise_of(b[:, 1]))
            said = "no difference" if abs(at_b - at_a) <= SIGMAS * noise else (
                "worse" if at_b > at_a else "better"
            )  # fmt: skip
            shown = "not known" if math.isnan(noise) else f"{noise:.4f}"
            rows.append([
                other.name, name, text(x), f"{at_a:.4f}", f"{at_b:.4f}", f"{at_b - at_a:+.4f}",
                shown, said if not math.isnan(noise) else UNKNOWN,
            ])  # fmt: skip
            numbers.append(number)
    return Rows(head, rows, numbers)


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


def _curve(run: Run, metric: str) -> np.ndarray:
    """[rows, 2]: x, which increases, and the loss of theta where both are finite."""
    points = verdict.curve(run, run.column(metric) if metric else run.steps_N)
    kept = [True, *(b[0] > a[0] for a, b in itertools.pairwise(points))]
    return points[np.array(kept[: len(points)], bool)]
