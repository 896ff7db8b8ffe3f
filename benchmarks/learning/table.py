"""The table of a run of quality.py, and the sweeps that it rests on."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from benchmarks.learning.modes import BY_NAME, DATA_PARALLEL, Mode, Scale
from benchmarks.learning.plan import Done, Row, chosen, known_rows, loss_of
from benchmarks.learning.traffic import Traffic


class Result(NamedTuple):
    """A mode at its best rates.

    by_seed: seed -> loss, of those that are done; infinite for one that diverged.
    """

    mode: Mode
    row: Row
    by_seed: Mapping[int, float]
    curves: tuple[Sequence[Sequence[float]], ...]
    traffic: Traffic

    @property
    def losses(self) -> list[float]:
        """The losses of all seeds that are done."""
        return list(self.by_seed.values())

    @property
    def mean(self) -> float:
        """Mean loss over the seeds."""
        return statistics.fmean(self.losses)

    @property
    def spread(self) -> float | None:
        """Standard deviation over the seeds; None for one."""
        if len(self.losses) < 2 or math.inf in self.losses:
            return None
        return statistics.stdev(self.losses)

    def above(self, base: "Result") -> float:
        """How far this is above base, as a share: the mean over the seeds that both have.

        A seed is an order of the text and first weights, so its losses go together.
        """
        both = self.by_seed.keys() & base.by_seed.keys()
        return statistics.fmean(self.by_seed[seed] / base.by_seed[seed] - 1 for seed in both)


def results(
    modes: Sequence[Mode], scale: Scale, done: Done, traffic: Mapping[str, Traffic]
) -> list[Result]:
    """The modes whose best rates are known, in their order."""
    found = []
    for mode in modes:
        best = chosen(mode, scale, done)
        if best is None:
            continue
        rows = [best._replace(seed=seed) for seed in range(scale.seeds)]
        there = {row.seed: done[row] for row in rows if row in done}
        by_seed = {seed: loss_of(figures) for seed, figures in there.items()}
        curves = tuple(figures["curve"] for figures in there.values())
        found.append(Result(mode, best, by_seed, curves, traffic[mode.name]))
    return found


def table(found: Sequence[Result], scale: Scale) -> str:
    """A line a mode; differences are to data parallelism with the same inner optimizer."""
    lines = [
        "| mode | outer lr | loss | +- | to data parallel | sent, MB | times fewer |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    base = {r.mode.inner: r for r in found if r.mode.outer_lr == ""}
    for result in found:
        mode, row, count = result.mode, result.row, len(result.losses)
        rate = "" if mode.outer_lr == "" else f"{row.outer_lr:g}"
        difference = ""
        if mode.name != DATA_PARALLEL and "adamw" in base:
            difference = f"{result.above(base['adamw']):+.2%}"
            if mode.inner != "adamw" and mode.outer_lr != "" and mode.inner in base:
                difference += f" ({result.above(base[mode.inner]):+.2%} to its own)"
        spread = "one seed" if result.spread is None else f"{result.spread:.4f}"
        if count < len(scale.seeds_of(mode)):
            spread += f" ({count} of {scale.seeds} seeds)"
        sent = result.traffic.sent
        fewer = f"{result.traffic.baseline / sent:,.0f}" if sent else "-"
        loss = "diverged" if math.isinf(result.mean) else f"{result.mean:.4f}"
        lines.append(
            f"| {mode.name} | {rate} | {loss} | {spread} | {difference} | "
            f"{sent / 1e6:,.2f} | {fewer} |"
        )
    return "\n".join(lines) + "\n"


def sweeps(modes: Sequence[Mode], scale: Scale, done: Done) -> str:
    """Loss at every rate that was tried, at the first seed."""
    tried: dict[str, list[str]] = {}
    for row in known_rows(modes, scale, done):
        figures = done.get(row)
        if figures is None or row.seed:
            continue
        rate = row.outer_lr or row.inner_lr
        loss = loss_of(figures)
        words = "diverged" if math.isinf(loss) else f"{loss:.4f}"
        tried.setdefault(row.mode, []).append(f"{rate:g}: {words}")
    lines = ["| mode | rate: loss |", "|---|---|"]
    for name, words in tried.items():
        which = "inner" if BY_NAME[name].outer_lr == "" else "outer"
        lines.append(f"| {name} ({which}) | {', '.join(words)} |")
    return "\n".join(lines) + "\n"


def heading(scale: Scale, scale_name: str, user_keys: Mapping[str, str], parameters: int) -> str:
    """The training setup, in one line."""
    tokens = scale.batch * int(scale.keys["max_target_length"])
    words = f"scale={scale_name}: {parameters:,} parameters, {scale.steps:,} steps of "
    words += f"{tokens:,} tokens, {scale.seeds} seeds, outer parameters' loss on held-out text"
    keys = ", ".join(f"{name}={value}" for name, value in user_keys.items())
    return words + (f"; {keys}" if keys else "")
