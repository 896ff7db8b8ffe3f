"""Which series stand in which panel of the page, and their points."""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from maxdiloco.page import thin, timeline
from maxdiloco.page.run import NOT_FINITE, Run
from maxdiloco.page.thin import Table

# Points of all series together: 2.1 MB of a page. Our choice, for pages below 5 MB.
POINTS = 400_000
# Of one series: about two for each pixel of a wide screen in a view of a tenth of the run; and
# what a narrow panel still shows. Our choice.
MOST, LEAST = 20_000, 400
REPLICA = re.compile(r"learning/loss_replica_(\d+)")
EVAL_REPLICA = re.compile(r"eval/loss_replica_(\d+)")
EVAL_SET = re.compile(r"eval/(.+)/loss")


class Series(NamedTuple):
    """A line of a panel: a column of one of the page's tables.

    run: its number. role: mean, theta, replica or line; how it is drawn. gone: a replica that the
    run no longer has, whose last value says nothing of the present.
    """

    label: str
    role: str
    run: int
    table: int
    column: str
    gone: bool = False


class Panel(NamedTuple):
    """A chart over inner steps. unit: of the values. main: False in the folded part."""

    title: str
    unit: str
    note: str
    main: bool
    series: list[Series]


THETA = "Loss of theta"  # beside the replicas where there is one run, so that lines stay few
# (title, unit, what a reader may ask, {metric: label}); a panel has what the runs have of it.
_PANELS = (
    ("Loss", "nats a token", "", {"learning/loss": "mean of the replicas"}),
    (
        THETA,
        "nats a token",
        "of the held-out text; theta: the parameters that the replicas share",
        {"eval/loss": "theta", "eval/loss_mean_of_replicas": "mean of the replicas' parameters"},
    ),
    ("Loss of theta by text", "nats a token", "eval_dataset_path", {}),
    ("Learning rate", "", "of the inner optimizer", {"learning/lr": "learning rate"}),
    (
        "Gradient norm",
        "",
        "mean of the replicas, before clipping",
        {"learning/grad_norm": "gradient norm"},
    ),
    (
        "Outer gradient norm",
        "",
        "of the mean, of the fragment synchronised last",
        {"diloco/outer_grad_norm": "outer gradient norm"},
    ),
    (
        "Cosine of outer gradients",
        "",
        "mean over pairs of replicas",
        {"diloco/outer_grad_cosine": "cosine"},
    ),
    (
        "Outer update",
        "",
        "norm of the change of theta over the norm of theta, of the fragment synchronised last",
        {"diloco/outer_update_ratio": "outer update"},
    ),
    (
        "Residual norm",
        "",
        "of error feedback, of the fragment sent last",
        {"diloco/residual_norm": "residual norm"},
    ),
    (
        "Drift",
        "",
        "how far replicas are from theta: mean |replica - theta| of a fragment when sent",
        {"diloco/drift": "drift"},
    ),
    ("Step time", "s", "evaluations and saves left out", {"perf/step_time": "step time"}),
    ("Tokens a second", "tokens/s", "all replicas", {"perf/tokens_per_second": "tokens/s"}),
    (
        "Bytes sent a step",
        "B",
        "by a replica to all other slices, mean of whole periods",
        {"dcn/bytes_sent": "bytes sent"},
    ),
    (
        "Waited for exchanges",
        "s",
        "by process 0 since the row before",
        {"dcn/waited_s": "waited"},
    ),
    (
        "Device memory",
        "B",
        "",
        {"device/memory_in_use_bytes": "in use", "device/memory_peak_bytes": "peak"},
    ),
)


def tables_of(runs: Sequence[Run]) -> list[tuple[int, Table]]:
    """(number of the run, table) of all runs, thinned to about POINTS values together."""
    count = sum(len(run.columns) for run in runs)
    limit = max(LEAST, min(MOST, POINTS // max(count, 1)))
    return [
        (number, table)
        for number, run in enumerate(runs)
        for table in thin.tables(run.steps_N, _drawn(run), limit=limit)
    ]


def _drawn(run: Run) -> dict[str, np.ndarray]:
    name = "dcn/bytes_sent"
    means = {name: timeline.over_whole_periods(run)} if name in run.columns else {}
    return run.columns | means


def _gone_after(run: Run, name: str) -> int | None:
    """The last step of a replica's loss; None where the last row of such losses has it."""
    kind = "learning/loss" if REPLICA.fullmatch(name) else "eval/loss"
    of_all, own = (np.flatnonzero(~np.isnan(run.column(each))) for each in (kind, name))
    if len(of_all) and len(own) and own[-1] < of_all[-1]:
        return int(run.steps_N[own[-1]])
    return None


def panels(runs: Sequence[Run], tables: Sequence[tuple[int, Table]]) -> list[Panel]:
    """The panels of the page in their order; every column of every run is in one of them."""
    left = {
        (run, name): index for index, (run, table) in enumerate(tables) for name in table.columns
    }

    def taken(name: str, label: str, role: str) -> list[Series]:
        found = [(run, left.pop((run, name))) for run in range(len(runs)) if (run, name) in left]
        series = []
        for run, table in found:
            gone = _gone_after(runs[run], name) if role == "replica" else None
            shown = label if gone is None else f"{label} (until step {gone:,})"
            series.append(Series(shown, role, run, table, name, gone is not None))
        return series

    out = []
    for title, unit, note, metrics in _PANELS:
        series = []
        if title == "Loss":
            for name in _sorted_names(left, REPLICA):
                series += taken(name, f"replica {REPLICA.fullmatch(name)[1]}", "replica")
        if title == "Loss of theta by text":
            for name in _sorted_names(left, EVAL_SET):
                series += taken(name, EVAL_SET.fullmatch(name)[1], "theta")
        if title == THETA:
            for name in _sorted_names(left, EVAL_REPLICA):
                label = f"replica {EVAL_REPLICA.fullmatch(name)[1]}, held-out text"
                series += taken(name, label, "replica")
        for name, label in metrics.items():
            role = {"learning/loss": "mean", "eval/loss": "theta"}.get(name, "line")
            series += taken(name, label, role)
        if title == "Learning rate":
            note = _outer_rates(runs) or note
        if title == THETA and len(runs) == 1 and out:
            out[-1].series.extend(series)
        elif series:
            out.append(Panel(title, unit, note, True, series))
    others = sorted({name for _, name in left})
    return out + [Panel(name, "", "", False, taken(name, name, "line")) for name in others]


def _sorted_names(left: dict[tuple[int, str], int], pattern: re.Pattern) -> list[str]:
    names = {name for _, name in left if pattern.fullmatch(name)}
    return sorted(names, key=lambda name: (len(name), name))


def _outer_rates(runs: Sequence[Run]) -> str:
    """The outer learning rates, which are constant."""
    rates = {
        f"{run.keys['diloco_outer_lr']:g}"
        for run in runs
        if run.keys is not None and timeline.schedule_of(run.keys) is not None
    }
    if not rates:
        return ""
    return f"of the inner optimizer; the outer one's is constant: {', '.join(sorted(rates))}"


def not_finite(run: Run) -> list[str]:
    """Lines on metrics that were NaN or infinite: how often, and first after which step."""
    lines = []
    for name, values_N in run.columns.items():
        if len(at := np.flatnonzero(values_N == NOT_FINITE)):
            rows = "1 row" if len(at) == 1 else f"{len(at):,} rows"
            lines.append(
                f"{name} is not finite in {rows}, first after step {run.steps_N[at[0]]:,}."
            )
    return lines
