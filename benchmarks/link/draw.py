"""Two figures as SVG text: utilisation against bandwidth, and bytes over time for one period."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.link.counters import WINDOW_S
from benchmarks.link.figures import (
    DATA_PARALLEL,
    PLAIN,
    TAU,
    UNLIMITED,
    conditions,
    label,
    mbit,
    result,
)
from scripts import svg

COLOURS = {
    DATA_PARALLEL: "#c4262e",
    "diloco": "#e0901c",
    "streaming": "#8a4fb0",
    "overlapped": "#2b6cb0",
    "reduce_scatter": "#0f8b8d",
    "eager": "#2e9155",
}
DASHES = {"": "", "float32": "", "bfloat16": "8 3", "int8": "3 3", "float4_e3m0": "10 3 2 3"}
LEFT, TOP, WIDTH, HEIGHT, LEGEND = 60, 66, 560, 320, 290
STRIP, GAP = 48, 30  # of the second figure: one row's bars, and the words above them
TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)  # of its time axis [s]
LOOKS = "circle: exchange in the step's program; square: in host threads"


def utilisation(rows: Sequence[Mapping[str, Any]], setup: Mapping[str, Any]) -> str:
    """Utilisation against bandwidth, a line for every mode, wire and carrier. rows: as a table."""
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["mode"] != PLAIN:
            lines.setdefault(label(row, int(setup["keys"][TAU])), []).append(row)
    places = _places(sorted({mbit(row) for line in lines.values() for row in line}))
    parts = _heading("Utilisation against bandwidth", conditions(rows, setup))
    for percent in range(0, 101, 20):
        y = TOP + HEIGHT * (1 - percent / 100)
        parts.append(svg.line([(LEFT, y), (LEFT + WIDTH, y)], "#dddddd"))
        parts.append(svg.text(LEFT - 8, y + 4, f"{percent} %", anchor="end"))
    for rate, x in places.items():
        words = UNLIMITED if rate == math.inf else f"{rate:g}"
        parts.append(svg.text(x, TOP + HEIGHT + 18, words, anchor="middle"))
    parts.append(svg.text(LEFT + WIDTH / 2, TOP + HEIGHT + 38, "Mbit/s", anchor="middle"))
    for k, (name, line) in enumerate(lines.items()):
        colour, dash = COLOURS[line[0]["mode"]], DASHES[line[0]["wire"]]
        points = sorted(
            (places[mbit(row)], TOP + HEIGHT * (1 - result(row, rows, setup).utilisation))
            for row in line
        )
        # Lines may cover each other: the later ones are thinner, so that both are seen.
        thin = k / max(1, len(lines) - 1)
        look = dict(colour=colour, dash=dash, width=3.5 - 2 * thin)
        mark = dict(colour=colour, square=line[0]["carrier"] == "host", size=5 - 2 * thin)
        x, y = LEFT + WIDTH + 24, TOP + 10 + 20 * k
        parts += [svg.line(points, **look), *(_mark(point, **mark) for point in points)]
        parts += [svg.line([(x, y), (x + 56, y)], **look), _mark((x + 28, y), **mark)]
        parts.append(svg.text(x + 62, y + 4, name))
    height = max(TOP + HEIGHT + 66, TOP + 30 + 20 * len(lines))
    parts.append(svg.text(8, height - 8, LOOKS, size=10))
    return svg.figure(LEFT + WIDTH + LEGEND + 40, height, parts)


def _places(rates: Sequence[float]) -> dict[float, float]:
    """Where a rate is on a logarithmic axis; the unlimited one comes after the others."""
    finite = [rate for rate in rates if rate < math.inf]
    low, high = math.log(min(finite, default=1)), math.log(max(finite, default=1))
    room = WIDTH - 40 - (80 if finite and math.inf in rates else 0)
    places = {
        rate: LEFT + 20 + room * (math.log(rate) - low) / ((high - low) or 1) for rate in finite
    }
    return places | ({math.inf: LEFT + WIDTH - 20} if math.inf in rates else {})


def period(rows: Sequence[Mapping[str, Any]], setup: Mapping[str, Any]) -> str:
    """Draw the bytes of the first host over one period, for every row of the thinnest link."""
    others = [row for row in rows if row["mode"] != PLAIN]
    thinnest = min(map(mbit, others))
    shown = [row for row in others if mbit(row) == thinnest]
    whole = [row for row in shown if row["mode"] != DATA_PARALLEL] or shown
    seconds = max(len(row["bars"]) for row in whole) * WINDOW_S
    words = "an unlimited link" if thinnest == math.inf else f"{thinnest:g} Mbit/s"
    parts = _heading(f"Bytes sent over one period, {words}", conditions(rows, setup))
    full = 1e6 / 8 * thinnest * WINDOW_S
    if full == math.inf:
        full = max(max(row["bars"], default=0) for row in shown) or 1
    y = TOP
    for row in shown:
        y += GAP
        name, bars = label(row, int(setup["keys"][TAU])), row["bars"][: round(seconds / WINDOW_S)]
        width = WIDTH * WINDOW_S / seconds
        right = LEFT + width * len(bars)
        words = f"{name}: {sum(bars) / 1000:,.0f} KB in {len(bars) * WINDOW_S:.1f} s"
        parts.append(svg.text(LEFT, y - 9, words))
        parts.append(svg.line([(LEFT, y), (right, y)], "#bbbbbb"))
        for k, sent in enumerate(bars):
            tall = STRIP * min(sent / full, 1.1)  # tbf lets a burst above its rate
            x = LEFT + k * width
            parts.append(svg.box(x, y + STRIP - tall, width * 0.9, tall, COLOURS[row["mode"]]))
        y += STRIP
        parts.append(svg.line([(LEFT, y), (right, y)], "#888888"))
    tick = next((tick for tick in TICKS if seconds <= 8 * tick), seconds)
    for k in range(int(seconds / tick) + 1):
        x = LEFT + WIDTH * k * tick / seconds
        parts.append(svg.text(x, y + 18, f"{k * tick:g} s", anchor="middle"))
    parts.append(
        svg.text(8, y + 40, f"upper line of each: {full / 1000:,.3g} KB in 100 ms", size=10)
    )
    return svg.figure(LEFT + WIDTH + 40, y + 52, parts)


def _heading(title: str, words: Sequence[str]) -> list[str]:
    lines = [svg.text(8, 34 + 13 * k, line, size=9) for k, line in enumerate(words)]
    return [svg.text(8, 18, title, size=14, bold=True), *lines]


def _mark(point: tuple[float, float], colour: str, square: bool, size: float) -> str:
    x, y = point
    if square:
        return svg.box(x - size, y - size, 2 * size, 2 * size, colour)
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size:.1f}" fill="{colour}"/>'
