"""Which rows there are: they depend on each other, since rates are chosen before modes compare.

First the inner rate, tuned only on data parallelism; then the outer rate of every mode, at the
first seed; then the other seeds at the rates that were best.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.learning.modes import BY_NAME, DATA_PARALLEL, Mode, Scale

FIRST_SEED = 0
INNER_OF = {"adamw": DATA_PARALLEL, "muon": "data parallel, muon"}  # runs that tune an inner rate


class Row(NamedTuple):
    """One run of the trainer. outer_lr: 0 for data parallelism."""

    mode: str
    inner_lr: float
    outer_lr: float
    seed: int

    def name(self) -> str:
        """Name of the run's folder."""
        mode = self.mode.replace(",", "").replace("'", "").replace("=", "").replace(" ", "_")
        return f"{mode}-{self.inner_lr:g}-{self.outer_lr:g}-{self.seed}"


Done = Mapping[Row, Mapping[str, Any]]  # the figures of rows; "loss" is None where one diverged


def known_rows(modes: Sequence[Mode], scale: Scale, done: Done) -> list[Row]:
    """The rows that are known by now, in their order; those that are done are among them."""
    rows: dict[Row, None] = {}
    inner_of = {mode.inner for mode in modes if not mode.inner_lr}
    for name in (name for inner, name in INNER_OF.items() if inner in inner_of):
        rows |= dict.fromkeys(_inner_rows(BY_NAME[name], scale, done))
    for mode in modes:
        rows |= dict.fromkeys(_outer_rows(mode, scale, done))
    for mode in modes:
        best = chosen(mode, scale, done)
        if best:
            rows |= dict.fromkeys(best._replace(seed=seed) for seed in scale.seeds_of(mode))
    return list(rows)


def is_over(modes: Sequence[Mode], scale: Scale, done: Done) -> bool:
    """Whether nothing is left to run."""
    known = known_rows(modes, scale, done)
    return all(row in done for row in known) and all(chosen(mode, scale, done) for mode in modes)


def chosen(mode: Mode, scale: Scale, done: Done) -> Row | None:
    """The row of a mode at its best rates, at the first seed; None before they are known."""
    rows = list(_outer_rows(mode, scale, done))
    if not rows or any(row not in done for row in rows):
        return None
    return min(rows, key=lambda row: loss_of(done[row]))


def loss_of(figures: Mapping[str, Any]) -> float:
    """The last evaluation's loss; infinite for a run that diverged."""
    return math.inf if figures["loss"] is None else figures["loss"]


def _inner_rows(mode: Mode, scale: Scale, done: Done) -> Iterator[Row]:
    rates = scale.inner_rates[mode.inner]
    yield from _with_edges(
        [Row(mode.name, rate, 0.0, FIRST_SEED) for rate in rates],
        lambda row, factor: row._replace(inner_lr=row.inner_lr * factor),
        done,
    )


def _outer_rows(mode: Mode, scale: Scale, done: Done) -> Iterator[Row]:
    """The rows among which the best is the mode's; none before the inner rate is known."""
    inner = mode.inner_lr
    if not inner:
        tuned = list(_inner_rows(BY_NAME[INNER_OF[mode.inner]], scale, done))
        if any(row not in done for row in tuned):
            return
        inner = min(tuned, key=lambda row: loss_of(done[row])).inner_lr
    if mode.outer_lr == "":
        yield Row(mode.name, inner, 0.0, FIRST_SEED)
    elif mode.outer_lr == "sweep":
        yield from _with_edges(
            [Row(mode.name, inner, rate, FIRST_SEED) for rate in scale.rates_of(mode)],
            lambda row, k: row._replace(outer_lr=round(row.outer_lr * (1.4 if k > 1 else k), 6)),
            done,
        )
    elif isinstance(mode.outer_lr, tuple):
        name, factor = mode.outer_lr
        best = chosen(BY_NAME[name], scale, done)
        if best:
            yield Row(mode.name, inner, round(best.outer_lr * factor, 6), FIRST_SEED)
    else:
        yield Row(mode.name, inner, float(mode.outer_lr), FIRST_SEED)


def _with_edges(rows: list[Row], scaled, done: Done, *, most: int = 2) -> list[Row]:
    """The rows of a grid, and further ones while its best is at an end, at most this number."""
    for _ in range(most):
        if any(row not in done for row in rows):
            break
        best = min(rows, key=lambda row: loss_of(done[row]))
        if best == rows[0]:
            rows = [scaled(best, 0.5), *rows]
        elif best == rows[-1]:
            rows = [*rows, scaled(best, 2.0)]
        else:
            break
    return rows
