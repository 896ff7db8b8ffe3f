"""How much bandwidth a schedule needs: the papers' simulator, and the same for our schedules.

    PYTHONPATH=. python benchmarks/bandwidth_model.py

Pure arithmetic; nothing is measured. First the published tables next to the computed ones
(bandwidth/tables.py names the papers). Then the bandwidth that our own programs need, sustained:
this is the figure for a run without end, which eager's published one is not. Writes table.md and a
figure.
"""

import pathlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from benchmarks.bandwidth import maxdiloco_modes, simulator
from benchmarks.bandwidth import tables as published
from benchmarks.bandwidth.simulator import GRID, H
from benchmarks.bandwidth.tables import Size
from maxdiloco.planning.link_model import data_parallel
from scripts import svg

SHARE = {"streaming": 0.85, "scaling": 0.7}  # of the parameters that travel; fitted, one a paper
STEPS = 15  # of data parallelism; fitted: the last reduction is not waited for
PERIODS = 5  # of the other schedules but eager's
EAGER_PERIODS = 2  # fitted: half of its exchanges are then never waited for
BITS = {"bfloat16": 16.0, "4 bits": 4.0}
REPLICAS = 2  # of our own programs
OUT = pathlib.Path("runs/bandwidth")
COLOURS = ("#c4262e", "#e0901c", "#8a4fb0", "#2b6cb0", "#2e9155", "#555555", "#000000", "#7a5c2e")

Row = tuple[str, str, list[str], list[float]]  # its name, the size, published, computed


def rows_of_fragments() -> list[Row]:
    """The tables of 2501.18512 and 2502.12996."""
    rows = []
    for name, texts in (published.STREAMING | published.EAGER).items():
        for size, text in zip(published.SIZES, texts, strict=True):
            steps = PERIODS * H + 1
            if name == "data parallel":
                steps = STEPS
                sends = simulator.data_parallel(size.layers, steps)
            elif name == "DiLoCo":
                steps = H + 1
                sends = simulator.diloco(size.layers, steps)
            elif name.startswith("eager"):
                steps = EAGER_PERIODS * H
                sends = simulator.streaming(size.layers, steps, lag=H - 1, eager=True)
            else:
                sends = simulator.streaming(size.layers, steps, lag=int("tau=1" in name))
            bits = BITS["4 bits" if "4 bits" in name else "bfloat16"]
            found = simulator.computed(size, sends, steps, bits, SHARE["streaming"])
            rows.append((name, size.name, text.split(), found))
    return rows


def rows_of_scaling() -> list[Row]:
    """Of 2503.09799."""
    rows = []
    for period, texts in published.SCALING.items():
        for size, text in zip(published.LARGE, texts, strict=True):
            steps = STEPS if period == 1 else 5 * period + 1
            sends = simulator.diloco(size.layers, steps, period=period)
            found = simulator.computed(size, sends, steps, BITS["bfloat16"], SHARE["scaling"])
            rows.append((f"DiLoCo, H={period}", size.name, text.split(), found))
    return rows


def agreement(rows: Iterable[Row]) -> tuple[int, int, int]:
    """How many values are equal as printed, how many at most one point of GRID off, of how many."""
    points = [*GRID, np.inf]
    pairs = [pair for _, _, texts, found in rows for pair in zip(texts, found, strict=True)]
    equal = near = 0
    for text, gbps in pairs:
        k = points.index(gbps)
        equal += text == simulator.printed(gbps)
        near += text in map(simulator.printed, points[max(k - 1, 0) : k + 2])  # some print alike
    return equal, near, len(pairs)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table; the first row is its head."""
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body]) + "\n"


def figure(size: Size) -> str:
    """Utilisation against bandwidth of the modes with 4 bits and of data parallelism."""
    left, top, width, height = 60, 40, 560, 320
    at = np.logspace(-2, 3, 120)
    curves: dict[str, Callable[[float], float]] = {
        "data parallel": lambda gbps: data_parallel(*size[1:], gbps=gbps)
    }
    for mode in maxdiloco_modes.modes(size):
        if mode.wire == "float4_e3m0":
            name = mode.name + (", host" if mode.transport == "host" else "")
            curves[f"{name}, 4 bits"] = lambda g, m=mode: maxdiloco_modes.sustained_utilisation(
                size, m, replicas=REPLICAS, gbps=g
            )
    title = f"{size.name}: compute utilisation against bandwidth, sustained, {REPLICAS} replicas"
    parts = [svg.text(8, 20, title, size=14, bold=True)]
    for percent in range(0, 101, 20):
        y = top + height * (1 - percent / 100)
        parts.append(svg.line([(left, y), (left + width, y)], "#dddddd"))
        parts.append(svg.text(left - 8, y + 4, f"{percent} %", anchor="end"))
    for power in range(-2, 4):
        x = left + width * (power + 2) / 5
        parts.append(svg.text(x, top + height + 18, f"{10.0**power:g}", anchor="middle"))
    parts.append(svg.text(left + width / 2, top + height + 38, "Gbit/s", anchor="middle"))
    right = left + width + 16
    for k, (name, curve) in enumerate(curves.items()):
        xs = left + width * (np.log10(at) + 2) / 5
        points = [(x, top + height * (1 - curve(gbps))) for x, gbps in zip(xs, at, strict=True)]
        y = top + 10 + 20 * k
        parts.append(svg.line(points, COLOURS[k], width=2))
        parts.append(svg.line([(right, y), (right + 28, y)], COLOURS[k], width=2))
        parts.append(svg.text(right + 34, y + 4, name))
    return svg.figure(left + width + 260, top + height + 50, parts)


def main() -> None:
    """Print the tables, and write them and the figure into OUT."""
    rows = rows_of_fragments()
    tables = {
        "Table 4 of 2501.18512": [row for row in rows if row[0] in published.STREAMING],
        "Table 5 of 2502.12996, H=100": [row for row in rows if row[0] in published.EAGER],
        "Table 6 of 2503.09799": rows_of_scaling(),
    }
    parts = []
    for title, some in tables.items():
        equal, near, count = agreement(some)
        parts.append(f"{title}: {equal} of {count} equal, {near} within one point of the grid\n")
        body = [
            (name, size, " ".join(texts), " ".join(map(simulator.printed, found)))
            for name, size, texts, found in some
        ]
        parts.append(markdown([("row", "size", "published", "computed"), *body]))
    parts.append(f"Sustained, 99 %, {REPLICAS} replicas\n")
    parts.append(markdown(maxdiloco_modes.rows(REPLICAS)))
    text = "\n".join(parts)
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "table.md").write_text(text, encoding="utf-8")
    (OUT / "bandwidth.svg").write_text(figure(published.SIZES[1]), encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
