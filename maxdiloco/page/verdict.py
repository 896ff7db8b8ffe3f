"""The sentences at the top of the page: is a run healthy, is the link its bottleneck, is it behind.

# N rows of metrics.jsonl
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from maxdiloco.aot.wait import FULL
from maxdiloco.page import compare, facts, timeline
from maxdiloco.page.compare import FLAT, Stands
from maxdiloco.page.run import NOT_FINITE, Run
from maxdiloco.processes.output import span

# Of the rows of a loss, and the least where there are as many: their mean stands beside that of as
# many before. Our choice; one row is noise.
RECENT, LEAST = 0.1, 5
# Shares of the time that a link may be waited for, up to "no bottleneck", which maxdiloco.plan
# calls a filled link, and "costs a little".
LITTLE, SOME = 1 - FULL, 0.1
_WHERE = MappingProxyType({
    Stands.LEVEL: "level with", Stands.WORSE: "behind", Stands.BETTER: "ahead of",
})  # fmt: skip
COSINE = "Cosine of outer gradients"
# Of exchanges that are not as usual: cosines, and the change of theta over its norm, are those of
# docs/worse_than_data_parallel.md; a drift that grows by half within a quarter is our choice.
ALIKE, APART, LARGE, GROWS = 0.95, 0.05, 0.4, 1.5


class Expected(NamedTuple):
    """What DiLoCo costs by a table: loss over that of data parallelism, less 1. row: in words."""

    least: float
    most: float
    row: str


def lines(
    runs: Sequence[Run], expected: Mapping[int, Expected] = MappingProxyType({})
) -> list[str]:
    """The sentences: of each run, and how each stands beside the first one."""
    return [" ".join(text for text, _ in line) for line in sentences(runs, expected)]


def sentences(
    runs: Sequence[Run], expected: Mapping[int, Expected] = MappingProxyType({})
) -> list[list[tuple[str, str]]]:
    """Lines of sentences, each with the title of the panel that shows what it says.

    expected: by the number of a run, where it or the first one is data parallelism and the other
    one DiLoCo.
    """
    said = []
    for run in runs:
        line = [
            (health(run), "Loss"),
            (replicas(run), COSINE),
            (link(run), "Waited for exchanges"),
            (progress(run), "Step time"),
        ]
        before = [(f"{run.name}:", "")] if len(runs) > 1 else []
        said.append(before + [each for each in line if each[0]])
    if len(runs) == 1 and timeline.schedule_of(runs[0]) is not None:
        how = "maxdiloco.report RUN BASELINE, the second one with enable_diloco=false"
        text = f"Whether it is behind data parallelism shows beside such a run: {how}."
        said.append([(text, "")])
    return said + [
        [(beside(runs[0], other, expected.get(number)), "Loss of theta")]
        for number, other in enumerate(runs[1:], 1)
    ]


def health(run: Run) -> str:
    """Whether the loss is finite, and falls."""
    loss_N = run.column("learning/loss")
    loss_N = loss_N[~np.isnan(loss_N)]
    if len(loss_N) and loss_N[-1] == NOT_FINITE:
        return "Not healthy: the loss is not finite."
    n = max(1, min(LEAST, len(loss_N) // 2), int(RECENT * len(loss_N)))
    if len(loss_N) < 2 * n or not np.isfinite(loss_N[-2 * n :]).all():
        return "Too few rows to say whether the loss falls."
    before, now = loss_N[-2 * n : -n].mean(), loss_N[-n:].mean()
    is_flat = abs(now - before) <= FLAT * abs(before)
    moves = "is flat" if is_flat else "falls" if now < before else "rises"
    judged = "Not healthy" if moves == "rises" else "Healthy"
    rows = "the last two rows" if n == 1 else f"means of {n} rows"
    text = f"{judged}: the loss {moves}, {before:.4f} to {now:.4f} ({rows})"
    theta = run.finite("eval/loss")
    if len(theta) and theta[-1] > theta.min() * (1 + FLAT):
        text += f"; but theta's is {theta[-1] - theta.min():.4f} above its best"
    return f"{text}."


def replicas(run: Run) -> str:
    """Whether the exchanges of the last half look as in a healthy run; "" where none has come.

    The ranges are those of docs/worse_than_data_parallel.md.
    """
    cosine, update, drift = (
        (values := run.finite(f"diloco/{name}"))[len(values) // 2 :]
        for name in ("outer_grad_cosine", "outer_update_ratio", "drift")
    )
    if not len(cosine) or not len(drift):
        return ""
    agree, n = float(np.median(cosine)), max(1, len(drift) // 2)
    grows = drift[-n:].mean() > GROWS * drift[:n].mean()
    seen = f"cosine {agree:.2f}, drift {drift[-1]:.2g} and {'rising' if grows else 'not rising'}"
    if agree > ALIKE:
        return f"All replicas pull theta back the same way ({seen}): lower diloco_outer_lr."
    if agree < APART:
        return f"The replicas have nothing in common ({seen}): do they read the same text?"
    if len(update) and (moved := float(np.median(update))) > LARGE:
        return f"Theta moves by {moved:.2f} of its norm at once ({seen}): lower diloco_outer_lr."
    if grows:
        return f"The replicas part ({seen}): a shorter diloco_sync_period keeps them together."
    return f"The replicas agree as usual ({seen})."


def link(run: Run) -> str:
    """How much of the time of the last half of the rows went into waiting for exchanges."""
    if run.keys is None:
        return "Its link is unknown, without a configuration."
    if timeline.schedule_of(run) is None:
        return "What its link costs is not measured: gradients cross it inside the step."
    waited_N, step_s_N = run.column("dcn/waited_s"), run.column("perf/step_time")
    known = np.flatnonzero(np.isfinite(waited_N) & np.isfinite(step_s_N) & (step_s_N > 0))
    steps = np.diff(run.steps_N[known], prepend=0)  # since such a row: evaluations have their own
    steps[:1] = steps[-1:]  # the first row of a file that goes on is not of all steps before it
    late = known >= len(waited_N) // 2
    known, steps = known[late], steps[late]
    if not len(known):
        if run.num_replicas == 1:
            return "One replica has no link."
        return "What its link costs is not measured: exchanges are inside compiled programs."
    share = waited_N[known].sum() / (steps * step_s_N[known]).sum()
    judged = (
        "The link is no bottleneck" if share < LITTLE else
        "The link costs a little" if share < SOME else
        "The link, or a slower process, is the bottleneck"
    )  # fmt: skip
    sends = ""
    if timeline.BYTES in run.columns:
        a_step = timeline.over_whole_periods(run)[known].mean()
        rate = a_step / step_s_N[known].mean() * 8 / 1e6
        sends = f", and a replica sends {rate:.3g} Mbit/s" if np.isfinite(rate) else ""
    return f"{judged}: process 0 waits for exchanges {share:.1%} of the time{sends}."


def progress(run: Run) -> str:
    """How far the run is, and what is left."""
    step, step_s = run.steps_N[-1], run.finite("perf/step_time")
    if not (begun := facts.lives(run)):
        return f"It is at step {step:,}."
    start, end, how = begun[-1]
    if not np.isnan(part := facts.tokens_done(run)):  # in whatever number of steps
        return f"Step {step:,}, {min(part, 1):.1%} of the islands' tokens, {how}."
    until = start["until"]
    text = f"Step {step:,} of {until:,}, {how}"
    if end is None and step < until and len(step_s):
        text += f"; {span((until - step) * np.median(step_s))} left"
    return f"{text}."


def beside(first: Run, other: Run, expected: Expected | None = None) -> str:
    """How the losses of theta of two runs stand, by the computation of the table below it."""
    not_compared = f"{other.name} and {first.name} are not compared"
    if differing := compare.eval_keys_that_differ(first, other):
        return (
            f"{not_compared}, since their losses may be of different held-out texts: they differ "
            f"in {', '.join(differing)}."
        )
    axis = compare.main_axis(first, other)
    found = compare.at_equal(first, other, axis)
    if found is None:
        if not all(len(compare.curve(run, axis.of(run))) for run in (first, other)):
            return f"{not_compared}: one has no loss of theta yet."
        return f"{not_compared}: they have no {axis.name} in common."
    where = _WHERE[found.stands]
    return (
        f"{other.name} is {where} {first.name}: theta's loss is {found.at_b:.4f} beside "
        f"{found.at_a:.4f} ({found.at_b / found.at_a - 1:+.1%}) after {found.x:,.0f} {axis.name}."
        f"{_as_expected(first, found.at_a, found.at_b, expected)}"
    )


def compared_at(first: Run, other: Run, run: Run) -> float:
    """The inner steps that one of two runs has where `beside` compares them; 0: nowhere."""
    axis = compare.main_axis(first, other)
    found = compare.at_equal(first, other, axis)
    if found is None:
        return 0.0
    x_N = axis.of(run)
    known = np.isfinite(x_N)
    return float(np.interp(found.x, x_N[known], run.steps_N[known]))


def _as_expected(first: Run, at_a: float, at_b: float, expected: Expected | None) -> str:
    """Whether DiLoCo is behind data parallelism by more than a table has."""
    if expected is None:
        return ""
    is_parallel = timeline.schedule_of(first) is None
    gap = (at_b / at_a if is_parallel else at_a / at_b) - 1
    stands = "more than" if gap > expected.most else "less than" if gap < expected.least else "as"
    return (
        f" DiLoCo is behind by {gap:+.1%}, {stands} expected: {expected.least:+.1%} to "
        f"{expected.most:+.1%} after as many rounds ({expected.row})."
    )
