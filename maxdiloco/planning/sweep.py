"""The time to one loss against what varies: the bandwidth, the latency, or the number of sites."""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from maxdiloco.flags import config
from maxdiloco.planning import answer, job, svg, table
from maxdiloco.planning.job import Choice, Job
from maxdiloco.planning.table import Plan
from maxdiloco.processes.output import aligned, span

# What is looked at: our choice. The bandwidth as factors of the one that is given.
FACTORS = (1 / 64, 1 / 16, 1 / 4, 1, 4, 16, 64)
LATENCIES_MS = (0, 1, 10, 30, 100, 300, 1000)
SITES = (2, 3, 4, 8, 16)
NAMES = ("over the link", "data parallel", "one site", "all as one")
LOOKS = (("#0072b2", ""), ("#d55e00", ""), ("#44484f", "6 4"), ("#009e73", "2 3"))
LEFT, TOP, WIDTH, HEIGHT, LEGEND = 90, 40, 480, 280, 190  # pixels
# Lines across the figure [s]: from a minute, by factors that read well.
LINES = tuple(x * 86400 for x in (1 / 1440, 1 / 144, 1 / 24, 1 / 4, 1, 7, 30, 365.25))
Families = Callable[[Job], list[list[Choice]]]


class Point(NamedTuple):
    """One value. label: in words. best: the mode. seconds: of each of NAMES to the same loss.

    outside: what of best's loss is beyond what was measured; its time is then the law's.
    """

    label: str
    best: str
    seconds: tuple[float, ...]
    outside: str = ""


def points(plan: Plan, kind: str, families: Families) -> list[Point]:
    """The answers of a plan for each value of bandwidth, latency or sites; the tokens stay."""
    found = []
    for label, changed in _KINDS[kind](plan):
        ways = answer.ways(table.proposed(changed, families(changed.job)))
        seconds = tuple(way.to_same_loss(plan.tokens) for way in ways)
        found.append(Point(label, ways[0].name, seconds, ways[0].gap.outside))
    return found


def _bandwidths(plan: Plan) -> Iterator[tuple[str, Plan]]:
    share, of = plan.share
    for factor in FACTORS:
        gbps = plan.gbps * factor
        yield f"{gbps * share:.3g} Gbit/s a {of}", plan._replace(gbps=gbps)


def _latencies(plan: Plan) -> Iterator[tuple[str, Plan]]:
    for ms in LATENCIES_MS:
        yield f"{span(ms / 1e3)} one way", plan._replace(latency_s=ms / 1e3)


def _sites(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """As many replicas and the same batch on each; a step takes as long."""
    values, each = plan.job.cfg.as_dict(), plan.job.num_replicas // plan.job.slices
    for sites in SITES:
        replicas = {"num_slices": sites, "num_diloco_replicas": sites * each}
        changed = {name: new for name, new in replicas.items() if values[name] != -1}
        changed["dcn_diloco_parallelism"] = sites
        changed["compile_topology_num_slices"] = sites
        planned = job.of(config.from_dict(values | changed))
        yield f"{sites} sites", plan._replace(job=planned)


_KINDS = {"bandwidth": _bandwidths, "latency": _latencies, "sites": _sites}


def lines(found: list[Point]) -> list[str]:
    """A row for each value."""
    rows = [("to the same loss in", *NAMES, "by")]
    for x in found:
        best, *others = map(span, x.seconds)
        rows.append((x.label, f"{best}{'?' * bool(x.outside)}", *others, x.best))
    note = "?: the loss is outside of what was measured, and taken by the law all the same"
    return aligned(rows) + [note] * any(x.outside for x in found)


def figure(title: str, found: list[Point]) -> str:
    """The same as SVG: values from left to right, evenly, and the logarithm of the time."""
    times = [s for point in found for s in point.seconds]
    low, high = math.log(min(times)), math.log(max(times))
    room = max(0.1, (high - low) * 0.05)

    def x_of(index: int) -> float:
        return LEFT + WIDTH * (index + 0.5) / len(found)

    def y_of(seconds: float) -> float:
        share = (math.log(seconds) - low + room) / (high - low + 2 * room)
        return TOP + HEIGHT * (1 - share)

    parts = [svg.text(8, 20, title, size=14, bold=True)]
    across = [s for s in LINES if low - room <= math.log(s) <= high + room]
    for seconds in across or [min(times), max(times)]:
        y = y_of(seconds)
        parts.append(svg.line([(LEFT, y), (LEFT + WIDTH, y)], "#dddddd"))
        parts.append(svg.text(LEFT - 8, y + 4, span(seconds), anchor="end"))
    for index, point in enumerate(found):
        value, _, unit = point.label.partition(" ")
        x = x_of(index)
        parts.append(svg.text(x, TOP + HEIGHT + 18, value, anchor="middle"))
        parts.append(svg.text(x, TOP + HEIGHT + 32, unit, anchor="middle", size=8))
    for k, (name, (colour, dash)) in enumerate(zip(NAMES, LOOKS, strict=True)):
        curve = [(x_of(i), y_of(point.seconds[k])) for i, point in enumerate(found)]
        y, right = TOP + 12 + 20 * k, LEFT + WIDTH + 12
        parts.append(svg.line(curve, colour, dash=dash, width=2))
        parts.append(svg.line([(right, y), (right + 28, y)], colour, dash=dash, width=2))
        parts.append(svg.text(right + 34, y + 4, name))
    return svg.figure(LEFT + WIDTH + LEGEND, TOP + HEIGHT + 48, parts)
