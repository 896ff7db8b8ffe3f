"""Two figures as SVG text: loss against tokens, and the last loss against the bytes sent."""

import colorsys
import math
import statistics
from collections.abc import Sequence

from benchmarks.learning.table import Result
from scripts import svg

LEFT, TOP, WIDTH, HEIGHT, LEGEND = 60, 50, 560, 360, 300
TICKS = 5


def curves(found: Sequence[Result], title: str, tokens_a_step: int) -> str:
    """Mean loss over seeds against tokens, a line a mode, from the second evaluation on."""
    lines = [(result, _mean(result)) for result in found]
    points = [point for _, line in lines for point in line[1:]]
    if not points:
        return svg.figure(LEFT + WIDTH, TOP, [svg.text(8, 20, title)])
    xs = (0.0, max(x for x, _ in points))
    ys = (min(y for _, y in points), max(y for _, y in points))
    parts = _frame(title, xs, ys, "million tokens", lambda x: f"{x * tokens_a_step / 1e6:.2g}")
    for k, (result, line) in enumerate(lines):
        colour, dash = _line_style(k, len(lines))
        at = [(_x(x, xs), _y(y, ys)) for x, y in line[1:]]
        parts.append(svg.line(at, colour, dash=dash, width=1.6))
        parts += _legend(k, f"{result.mode.name}: {result.mean:.4f}", colour, dash)
    return svg.figure(LEFT + WIDTH + LEGEND, max(TOP + HEIGHT + 50, TOP + 18 * len(lines)), parts)


def tradeoff(found: Sequence[Result], title: str) -> str:
    """Last loss against bytes a replica sends, as a share of data parallelism's; log scale."""
    shown = [r for r in found if r.traffic.sent and math.isfinite(r.mean)]
    if not shown:
        return svg.figure(LEFT + WIDTH, TOP, [svg.text(8, 20, title)])
    logs = [math.log10(r.traffic.baseline / r.traffic.sent) for r in shown]
    xs = (0.0, max(1.0, math.ceil(max(logs) * 2) / 2))
    ys = (min(r.mean for r in shown), max(r.mean for r in shown))
    words = "times fewer bytes than data parallelism"
    parts = _frame(title, xs, ys, words, lambda x: f"{10**x:,.0f}")
    for k, (result, log) in enumerate(zip(shown, logs, strict=True)):
        colour, _ = _line_style(k, len(shown))
        x, y = _x(log, xs), _y(result.mean, ys)
        bar = result.spread or 0.0
        parts.append(
            svg.line([(x, _y(result.mean - bar, ys)), (x, _y(result.mean + bar, ys))], colour)
        )
        parts.append(svg.line([(x - 4, y), (x + 4, y)], colour, width=8))
        parts += _legend(k, f"{result.mode.name}: {result.mean:.4f}", colour, "")
    return svg.figure(LEFT + WIDTH + LEGEND, max(TOP + HEIGHT + 50, TOP + 18 * len(shown)), parts)


def _mean(result: Result) -> list[tuple[float, float]]:
    steps = zip(*result.curves, strict=False)
    return [(at[0][0], statistics.fmean(loss for _, loss in at)) for at in steps]


def _x(x: float, xs: tuple[float, float]) -> float:
    return LEFT + WIDTH * (x - xs[0]) / ((xs[1] - xs[0]) or 1)


def _y(y: float, ys: tuple[float, float]) -> float:
    return TOP + HEIGHT * (1 - (y - ys[0]) / ((ys[1] - ys[0]) or 1))


def _frame(title, xs, ys, words, tick) -> list[str]:
    parts = [svg.text(8, 20, title, size=14, bold=True)]
    for k in range(TICKS + 1):
        y = ys[0] + (ys[1] - ys[0]) * k / TICKS
        x = xs[0] + (xs[1] - xs[0]) * k / TICKS
        parts.append(svg.line([(LEFT, _y(y, ys)), (LEFT + WIDTH, _y(y, ys))], "#dddddd"))
        parts.append(svg.text(LEFT - 6, _y(y, ys) + 4, f"{y:.3f}", anchor="end"))
        parts.append(svg.text(_x(x, xs), TOP + HEIGHT + 18, tick(x), anchor="middle"))
    return [*parts, svg.text(LEFT + WIDTH / 2, TOP + HEIGHT + 38, words, anchor="middle")]


def _line_style(k: int, count: int) -> tuple[str, str]:
    red, green, blue = colorsys.hls_to_rgb(k / max(1, count), 0.42, 0.65)
    colour = f"#{int(255 * red):02x}{int(255 * green):02x}{int(255 * blue):02x}"
    return colour, ("", "6 3", "2 2")[k % 3]


def _legend(k: int, words: str, colour: str, dash: str) -> list[str]:
    x, y = LEFT + WIDTH + 16, TOP + 6 + 18 * k
    return [
        svg.line([(x, y), (x + 24, y)], colour, dash=dash, width=2.5),
        svg.text(x + 30, y + 4, words),
    ]
