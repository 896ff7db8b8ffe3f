"""A symptom's figure as SVG text: losses on the left, the metric that shows it on the right."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.learning.cases import Case
from maxdiloco.planning import svg

WIDTH, HEIGHT, LEFT, TOP, GAP = 330, 220, 52, 44, 76
TICKS = 4
DATA_PARALLEL = "data parallel"
BAD, GOOD, GREY = "#c0392b", "#2471a3", "#999999"
Rows = Sequence[Mapping[str, Any]]
Points = list[tuple[float, float]]


class Line(NamedTuple):
    """A line of a panel."""

    label: str
    points: Points
    colour: str
    dash: str = ""


def figure(case: Case, bad: Rows, good: Rows, found: Mapping[str, Rows]) -> str:
    """The symptom beside a healthy run. found: the rows of all cases."""
    losses = [
        Line(case.name, _series(bad, "eval/loss"), BAD),
        Line("its replicas", _replicas(bad), BAD, "3 3"),
        Line(case.beside, _series(good, "eval/loss"), GOOD),
    ]
    if case.beside == "healthy":  # the same text
        losses.append(Line(DATA_PARALLEL, _series(found[DATA_PARALLEL], "eval/loss"), GREY, "6 3"))
    told = [Line("", _series(bad, case.metric), BAD), Line("", _series(good, case.metric), GOOD)]
    parts = _panel(losses, LEFT, "loss on held-out text")
    parts += _panel(told, LEFT + WIDTH + GAP, case.metric)
    for k, line in enumerate(losses):
        x, y = LEFT + 180 * k, TOP + HEIGHT + 44
        parts.append(svg.line([(x, y), (x + 22, y)], line.colour, dash=line.dash, width=2.5))
        parts.append(svg.text(x + 28, y + 4, line.label))
    return svg.figure(LEFT + 2 * WIDTH + GAP + 20, TOP + HEIGHT + 60, parts)


def _series(rows: Rows, name: str) -> Points:
    return [(row["step"], row[name]) for row in rows if name in row]


def _replicas(rows: Rows) -> Points:
    """Mean of the replicas' losses at the evaluations."""
    found = []
    for row in rows:
        losses = [value for name, value in row.items() if name.startswith("eval/loss_replica_")]
        if losses:
            found.append((row["step"], sum(losses) / len(losses)))
    return found


def _panel(lines: Sequence[Line], left: float, title: str) -> list[str]:
    points = [point for line in lines for point in line.points]
    last = max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)

    def at(x: float, y: float) -> tuple[float, float]:
        return left + WIDTH * x / last, TOP + HEIGHT * (high - y) / ((high - low) or 1)

    parts = [svg.text(left, TOP - 14, title, size=13, bold=True)]
    for k in range(TICKS + 1):
        y = low + (high - low) * k / TICKS
        parts.append(svg.line([at(0, y), at(last, y)], "#dddddd"))
        parts.append(svg.text(left - 6, at(0, y)[1] + 4, f"{y:.3g}", anchor="end"))
        x = last * k / TICKS
        parts.append(svg.text(at(x, low)[0], TOP + HEIGHT + 18, f"{x:g}", anchor="middle"))
    for line in lines:
        parts.append(
            svg.line([at(*p) for p in line.points], line.colour, dash=line.dash, width=1.8)
        )
    return parts
