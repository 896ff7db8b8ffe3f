"""What the page says of runs: sentences at its top, and tables below.

# N rows of metrics.jsonl
"""

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from maxdiloco.aot.wait import FULL
from maxdiloco.flags import base_yml
from maxdiloco.page import timeline
from maxdiloco.page.run import NOT_FINITE, Run
from maxdiloco.processes.output import span

UNKNOWN = "–"
# Keys that say where a run is, not what it does.
_PLACES = ("run_name", "base_output_directory")
# Of the rows of a loss, and the least where there are as many: their mean stands beside that of as
# many before. Our choice; one row is noise.
RECENT, LEAST = 0.1, 5
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


class Rows(NamedTuple):
    """A table: texts. runs: for each row the number of the run it speaks of, or None."""

    head: list[str]
    rows: list[list[str]]
    runs: list[int | None]


def summary(runs: Sequence[Run]) -> Rows:
    """One row for each run: how it ended, and its last losses."""
    head = [
        "run", "state", "step", "replicas", "mode", "loss", "loss of theta", "best of theta",
        "tokens/s", "sent a step",
    ]  # fmt: skip
    rows = []
    for run in runs:
        speed, sent = run.finite("perf/tokens_per_second"), run.finite(timeline.BYTES)
        rows.append([
            run.name,
            next((life.how for life in lives(run)[-1:]), "not recorded"),
            f"{run.steps_N[-1]:,}",
            str(run.num_replicas),
            UNKNOWN if run.keys is None else timeline.describe(run),
            _last(run, "learning/loss"),
            _last(run, "eval/loss"),
            _best(run, "eval/loss"),
            f"{np.median(speed):,.0f}" if len(speed) else UNKNOWN,
            timeline.amount(float(np.mean(sent))) if len(sent) else UNKNOWN,
        ])  # fmt: skip
    return Rows(head, rows, list(range(len(runs))))


def _last(run: Run, name: str) -> str:
    """The last value; a metric may be rarer than rows."""
    values = run.column(name)
    at = np.flatnonzero(~np.isnan(values))
    if not len(at):
        return UNKNOWN
    value, step = values[at[-1]], run.steps_N[at[-1]]
    text = "not finite" if value == NOT_FINITE else f"{value:.4f}"
    return text if step == run.steps_N[-1] else f"{text} (step {step:,})"


def _best(run: Run, name: str) -> str:
    if not len(run.finite(name)):
        return UNKNOWN
    at = np.nanargmin(run.column(name))
    return f"{run.column(name)[at]:.4f} (step {run.steps_N[at]:,})"


class Life(NamedTuple):
    """Lines of history.jsonl on a start and its end, if it has one. how: it ended, in words."""

    start: dict[str, Any]
    end: dict[str, Any] | None
    how: str


def lives(run: Run) -> list[Life]:
    """The starts of a run with their ends, oldest first."""
    begun = [k for k, event in enumerate(run.history) if event["event"] == "start"]
    out = []
    for k, following in itertools.pairwise([*begun, None]):
        start, after = run.history[k], run.history[k + 1 : following]
        end = after[0] if after else None
        # A later start says how far this one came; of the last one the rows do.
        reached = run.steps_N[-1] if following is None else run.history[following]["step"]
        if end is None:
            how = "running, or killed" if following is None else "killed"
        else:
            how = end["why"] or ("done" if reached >= start["until"] else "Ctrl-C")
        out.append(Life(start, end, how))
    return out


def starts(runs: Sequence[Run]) -> Rows:
    """One row for each start of each run: when, from where, on what, and how it ended."""
    head = ["run", "started", "after step", "processes", "devices", "ended", "how"]
    rows, numbers = [], []
    for number, run in enumerate(runs):
        for start, end, how in lives(run):
            counts = [f"{start[name]:,}" for name in ("step", "processes", "devices")]
            ended = UNKNOWN if end is None else date(end["time"])
            rows.append([run.name, date(start["time"]), *counts, ended, how])
            numbers.append(number)
    return Rows(head, rows, numbers)


def checkpoints(runs: Sequence[Run]) -> Rows:
    """One row for each checkpoint that is kept."""
    kept = [(n, run, *saved) for n, run in enumerate(runs) for saved in run.checkpoints.items()]
    rows = [[run.name, f"{step:,}", date(saved)] for _, run, step, saved in kept]
    return Rows(["run", "after step", "saved"], rows, [number for number, *_ in kept])


def differences(runs: Sequence[Run], defaults: Mapping[str, Any]) -> Rows:
    """The keys of one run that differ from base.yml, or those in which several runs differ."""
    known = [run for run in runs if run.keys is not None]
    shown = [{name: _text(value) for name, value in run.keys.items()} for run in known]
    base = {name: _text(value) for name, value in defaults.items()}
    names = [*base, *sorted({name for keys in shown for name in keys} - set(base))]
    rows = []
    for name in names:
        values = [keys.get(name, UNKNOWN) for keys in shown]
        against = base.get(name) if len(runs) == 1 else values[0] if values else None
        if name not in _PLACES and any(value != against for value in values):
            rows.append([name, *values, base.get(name, UNKNOWN)])
    return Rows(["key", *(run.name for run in known), "base.yml"], rows, [None] * len(rows))


def _text(value: Any) -> str:
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return base_yml.show(value) or '""'


def date(moment: float, *, seconds: bool = False) -> str:
    """Seconds since 1970 -> '2026-11-22 06:01 UTC', or 06:01:59."""
    if not np.isfinite(moment):
        return UNKNOWN
    shown = "%Y-%m-%d %H:%M:%S UTC" if seconds else "%Y-%m-%d %H:%M UTC"
    return time.strftime(shown, time.gmtime(moment))


# -- the verdict: is a run healthy, is the link its bottleneck, is it behind ----------------------


def verdict(runs: Sequence[Run]) -> list[str]:
    """The sentences: of each run, and how each stands beside the first one."""
    said = []
    for run in runs:
        before = f"{run.name}: " if len(runs) > 1 else ""
        said.append(before + " ".join([health(run), link(run), progress(run)]))
    if len(runs) == 1 and timeline.schedule_of(runs[0]) is not None:
        how = "maxdiloco.report RUN BASELINE, the second one with enable_diloco=false"
        said.append(f"Whether it is behind data parallelism shows beside such a run: {how}.")
    return said + [beside(runs[0], other) for other in runs[1:]]


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
    moves = "is flat" if abs(now / before - 1) < FLAT else "falls" if now < before else "rises"
    judged = "Not healthy" if moves == "rises" else "Healthy"
    rows = "the last two rows" if n == 1 else f"means of {n} rows"
    text = f"{judged}: the loss {moves}, {before:.4f} to {now:.4f} ({rows})"
    theta = run.finite("eval/loss")
    if len(theta) and theta[-1] > theta.min() * (1 + FLAT):
        text += f"; but theta's is {theta[-1] - theta.min():.4f} above its best"
    return f"{text}."


def link(run: Run) -> str:
    """How much of the time of the last half of the rows went into waiting for exchanges."""
    if run.keys is None:
        return "Its link is unknown, without a configuration."
    if timeline.schedule_of(run) is None:
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
    judged = (
        "The link is no bottleneck" if share < LITTLE else
        "The link costs a little" if share < SOME else
        "The link, or a slower process, is the bottleneck"
    )  # fmt: skip
    return f"{judged}: process 0 waits for exchanges {share:.1%} of the time."


def progress(run: Run) -> str:
    """How far the run is, and what is left."""
    step, step_s = run.steps_N[-1], run.finite("perf/step_time")
    if not (begun := lives(run)):
        return f"It is at step {step:,}."
    start, end, how = begun[-1]
    until = start["until"]
    text = f"Step {step:,} of {until:,}, {how}"
    if end is None and step < until and len(step_s):
        text += f"; {span((until - step) * np.median(step_s))} left"
    return f"{text}."


def beside(first: Run, other: Run) -> str:
    """Loss of theta of two runs after as many tokens, or inner steps where a run has no count."""
    not_compared = f"{other.name} and {first.name} are not compared"
    if differing := _eval_keys_that_differ(first, other):
        return (
            f"{not_compared}, since their losses may be of different held-out texts: they differ "
            f"in {', '.join(differing)}."
        )
    of, (a, b) = "tokens", [_curve(run, run.column("learning/tokens")) for run in (first, other)]
    if not len(a) or not len(b):
        of, (a, b) = "steps", [_curve(run, run.steps_N) for run in (first, other)]
    if not len(a) or not len(b):
        return f"{not_compared}: one has no loss of theta."
    x = min(a[-1, 0], b[-1, 0])
    if x < max(a[0, 0], b[0, 0]):
        return f"{not_compared}: they have no {of} in common."
    at_a, at_b = (np.interp(x, each[:, 0], each[:, 1]) for each in (a, b))
    where = "level with" if abs(at_b / at_a - 1) < FLAT else "behind" if at_b > at_a else "ahead of"
    return (
        f"{other.name} is {where} {first.name}: theta's loss is {at_b:.4f} beside {at_a:.4f} "
        f"({at_b / at_a - 1:+.1%}) after {x:,.0f} {of}."
    )


def _eval_keys_that_differ(first: Run, other: Run) -> list[str]:
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


def _curve(run: Run, x_N: np.ndarray) -> np.ndarray:
    """[rows, 2]: x and the loss of theta where both are finite."""
    points_N2 = np.stack([x_N, run.column("eval/loss")], axis=1)
    return points_N2[np.isfinite(points_N2).all(1)]
