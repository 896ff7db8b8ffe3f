"""The sentences at the top of the page: is a run healthy, is the link its bottleneck, is it behind.

    # N rows of metrics.jsonl
"""

import itertools
from collections.abc import Sequence

import numpy as np

from maxdiloco.aot.wait import FULL
from maxdiloco.page import facts, timeline
from maxdiloco.page.run import NOT_FINITE, Run
from maxdiloco.processes.output import span

RECENT = 0.1  # of the rows of a loss, whose mean stands beside that of as many before; our choice
FLAT = 0.002  # relative change of a loss that is called flat; our choice
# Shares of the time that a link may be waited for, up to "no bottleneck", which maxdiloco.plan
# calls a filled link, and "costs a little".
LITTLE, SOME = 1 - FULL, 0.1
# Keys that decide what eval/loss is a loss of.
_EVAL_KEYS = (
    "dataset_type", "dataset_path", "dataset_mixture", "eval_dataset_path", "text_column",
    "tokenizer_type", "tokenizer_path", "add_bos", "add_eos", "vocab_size", "max_target_length",
    "eval_steps",
)  # fmt: skip


def lines(runs: Sequence[Run]) -> list[str]:
    """The sentences: of each run, and how each stands beside the first one."""
    said = []
    for run in runs:
        before = f"{run.name}: " if len(runs) > 1 else ""
        said.append(before + " ".join([health(run), link(run), progress(run)]))
    if len(runs) == 1 and (runs[0].keys is None or timeline.schedule_of(runs[0].keys) is None):
        return said
    if len(runs) == 1:
        how = "maxdiloco.report RUN BASELINE, the second one with enable_diloco=false"
        return [*said, f"Whether it is behind data parallelism shows beside such a run: {how}."]
    return said + [beside(runs[0], other) for other in runs[1:]]


def health(run: Run) -> str:
    """Whether the loss is finite, and falls."""
    loss_N = run.column("learning/loss")
    loss_N = loss_N[~np.isnan(loss_N)]
    if len(loss_N) and loss_N[-1] == NOT_FINITE:
        return "Not healthy: the loss is not finite."
    n = max(1, int(RECENT * len(loss_N)))
    if len(loss_N) < 2 * n or not np.isfinite(loss_N[-2 * n :]).all():
        return "Too few rows to say whether the loss falls."
    before, now = loss_N[-2 * n : -n].mean(), loss_N[-n:].mean()
    moves = "is flat" if abs(now / before - 1) < FLAT else "falls" if now < before else "rises"
    judged = "Not healthy" if moves == "rises" else "Healthy"
    rows = "the last two rows" if n == 1 else f"means of {n} rows"
    text = f"{judged}: the loss {moves}, {before:.4f} to {now:.4f} ({rows})"
    theta_N = run.column("eval/loss")
    theta_N = theta_N[np.isfinite(theta_N)]
    if len(theta_N) and theta_N[-1] > theta_N.min() * (1 + FLAT):
        text += f"; but theta's is {theta_N[-1] - theta_N.min():.4f} above its best"
    return f"{text}."


def link(run: Run) -> str:
    """How much of the time of the last half of the rows went into waiting for exchanges."""
    if run.keys is None:
        return "Its link is unknown, without a configuration."
    if timeline.schedule_of(run.keys) is None:
        return "What its link costs is not measured: gradients cross it inside the step."
    waited_N, step_s_N = run.column("dcn/waited_s"), run.column("perf/step_time")
    steps_N = np.diff(run.steps_N, prepend=0)
    steps_N[0] = steps_N[-1]  # the first row of a file that goes on is not of all steps before it
    known = np.isfinite(waited_N) & np.isfinite(step_s_N)
    known[: len(known) // 2] = False
    if not known.any():
        if run.num_replicas == 1:
            return "One replica has no link."
        return "What its link costs is not measured: exchanges are inside compiled programs."
    share = waited_N[known].sum() / (steps_N[known] * step_s_N[known]).sum()
    verdict = (
        "The link is no bottleneck" if share < LITTLE else
        "The link costs a little" if share < SOME else
        "The link, or a slower process, is the bottleneck"
    )  # fmt: skip
    return f"{verdict}: process 0 waits for exchanges {share:.1%} of the time."


def progress(run: Run) -> str:
    """How far the run is, and what is left."""
    lives = facts.lives(run)
    step = run.steps_N[-1]
    if not lives:
        return f"It is at step {step:,}."
    until = lives[-1].start["until"]
    text = f"Step {step:,} of {until:,}, {lives[-1].how}"
    step_s_N = run.column("perf/step_time")
    finite = step_s_N[np.isfinite(step_s_N)]
    if lives[-1].end is None and step < until and len(finite):
        text += f"; {span((until - step) * np.median(finite))} left"
    return f"{text}."


def beside(first: Run, other: Run) -> str:
    """Loss of theta of two runs after as many tokens, or inner steps where a run has no count."""
    differing = _eval_keys_that_differ(first, other)
    if differing:
        return (
            f"{other.name} and {first.name} are not compared, since their losses may be of "
            f"different held-out texts: they differ in {', '.join(differing)}."
        )
    curves = [_curve(run, counted) for counted, run in itertools.product((1, 0), (first, other))]
    of, (a, b) = ("tokens", curves[:2]) if all(map(len, curves[:2])) else ("steps", curves[2:])
    if not len(a) or not len(b):
        return f"{other.name} and {first.name} are not compared: one has no loss of theta."
    x = min(a[-1, 0], b[-1, 0])
    if x < max(a[0, 0], b[0, 0]):
        return f"{other.name} and {first.name} are not compared: they have no {of} in common."
    at_a, at_b = (np.interp(x, each[:, 0], each[:, 1]) for each in (a, b))
    where = "level with" if abs(at_b / at_a - 1) < FLAT else "behind" if at_b > at_a else "ahead of"
    return (
        f"{other.name} is {where} {first.name}: theta's loss is {at_b:.4f} beside {at_a:.4f} "
        f"({at_b / at_a - 1:+.1%}) after {x:,.0f} {of}."
    )


def _eval_keys_that_differ(first: Run, other: Run) -> list[str]:
    """Keys of the held-out text. Of a run with eval_dataset_path its training text does not count;
    keys that a run does not say are taken for equal.
    """
    if first.keys is None or other.keys is None:
        return []
    pairs = ((name, first.keys.get(name), other.keys.get(name)) for name in _EVAL_KEYS)
    differing = [name for name, a, b in pairs if a != b]
    if first.keys.get("eval_dataset_path") and "eval_dataset_path" not in differing:
        differing = [name for name in differing if name not in ("dataset_path", "dataset_mixture")]
    return differing


def _curve(run: Run, counted: int) -> np.ndarray:
    """[rows, 2]: tokens (counted) or steps, and the finite losses of theta; [0, 2] where absent."""
    x_N = run.column("learning/tokens") if counted else run.steps_N.astype(float)
    points_N2 = np.stack([x_N, run.column("eval/loss")], axis=1)
    return points_N2[np.isfinite(points_N2).all(1)]
