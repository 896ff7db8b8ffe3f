"""Draw one period of each schedule as docs/figures/schedules.svg.

    PYTHONPATH=. python scripts/draw_schedules.py

It draws schedule.actions of maxdiloco.diloco, which a run carries out.
"""

import pathlib
import sys

from maxdiloco.diloco.schedule import (
    EAGER_STEP,
    INNER_EXCHANGE,
    INNER_SCATTER,
    MERGE,
    PACK,
    REDUCE,
    SYNCHRONISE,
    Schedule,
    offsets,
)
from scripts import svg

H = 12
FIRST, LAST = H + 1, 2 * H  # the second period, in which all exchanges are under way
CELL, ROW, LEFT, TOP = 46, 22, 270, 34
COLOURS = ("#3b6ea5", "#c2703d", "#5a8f53")
# send, reduce, apply
MARKS = {PACK: "S", REDUCE: "R", MERGE: "A", SYNCHRONISE: "SA", EAGER_STEP: "SA"}
REDUCE_SCATTER = "streaming, tau=3, reduce-scatter"
MODES = (
    ("DiLoCo", 1, 0, "none", "training waits for the exchange of everything"),
    ("streaming, P=3", 3, 0, "none", "three shorter waits"),
    ("streaming, P=3, tau=3", 3, 3, "none", "one chunk during each of three steps"),
    ("eager or delayed, P=3", 3, 0, "eager", "an exchange has until the next one"),
    (REDUCE_SCATTER, 3, 3, "none", "parts to be averaged (p), means to all (m)"),
)
SCATTER_STEPS = {REDUCE_SCATTER: 1}


def draw() -> str:
    """The figure as SVG: for each mode a row of inner steps and a row for the link."""
    parts = []
    for k in range(H):
        x = LEFT + k * CELL + CELL / 2
        parts.append(svg.text(x, TOP - 12, f"t={FIRST + k}", anchor="middle", size=11))
    y = TOP
    for name, P, tau, overlap, note in MODES:
        schedule = Schedule(
            H, tau, offsets(P, H), overlap, scatter_steps=SCATTER_STEPS.get(name, 0)
        )
        parts += [svg.text(8, y + 16, name, size=12, bold=True), svg.text(8, y + 36, note, size=9)]
        parts += _mode(schedule, y)
        y += 4 * ROW
    legend = "grey: inner step;  coloured: fragment on the link;  S send, R reduce, A apply;  "
    legend += "red: training waits"
    parts.append(svg.text(8, y + 4, legend, size=11))
    width, height = LEFT + H * CELL + 12, y + 16
    return svg.figure(width, height, parts)


def _mode(schedule: Schedule, y: float) -> list[str]:
    parts = []
    for k, t in enumerate(range(FIRST, LAST + 1)):
        x = LEFT + k * CELL
        parts.append(svg.box(x, y, CELL - 8, ROW - 4, "#e4e4e4"))
        marks = []
        for action in schedule.actions(t):
            if action.name in (INNER_EXCHANGE, INNER_SCATTER):
                carried = "m" if schedule.scatter_steps else "f"
                carried = "p" if action.name == INNER_SCATTER else carried
                parts.append(svg.box(x, y + ROW, CELL - 8, ROW - 4, COLOURS[action.fragment]))
                label = f"{carried}{action.fragment}.{action.chunk}"
                parts.append(svg.text(x + 5, y + ROW + 14, label, fill="white", size=10))
            if action.name == SYNCHRONISE:
                parts.append(svg.box(x + CELL - 8, y, 8, ROW - 4, "#cc2222"))
                parts.append(svg.box(x + CELL - 8, y + ROW, 8, ROW - 4, COLOURS[action.fragment]))
            marks += [f"{letter}{action.fragment}" for letter in MARKS.get(action.name, "")]
        if marks:
            below = y + 2 * ROW + 12
            parts.append(svg.text(x + CELL - 4, below, " ".join(marks), anchor="end", size=9))
    return parts


if __name__ == "__main__":
    default = pathlib.Path(__file__).parents[1] / "docs" / "figures" / "schedules.svg"
    target = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else default
    target.write_text(draw(), encoding="utf-8")
    print(target)
