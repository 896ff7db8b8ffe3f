"""Draw a reduce-scatter exchange as docs/figures/reduce_scatter.svg.

    PYTHONPATH=. python scripts/draw_reduce_scatter.py

Four slices. The bytes below the columns are for one parameter in each wire format.
"""

import pathlib
import sys

from maxdiloco.diloco import quantize
from maxdiloco.engine.reduce_scatter import MEAN_DTYPE
from scripts import svg

SLICES, WIRE = 4, "float4_e3m0"
COLOURS = ("#3b6ea5", "#c2703d", "#5a8f53", "#8a4fb0")
CELL, LEFT, TOP, ROW, GAP = 26, 70, 58, 58, 84
WIDE = SLICES * CELL
HEADS = (
    ("each has", "its outer gradients"),
    ("scatter", "part j of all to slice j"),
    ("reduce", "the mean of part j"),
    ("share", "all means to all"),
)


def bytes_of(wire: str) -> float:
    """Bytes of a parameter, scales left out."""
    many = 1 << 20
    elements = quantize.encoded_size(wire, many) - many // 256 * quantize.wire_format(wire).scale
    return elements * quantize.wire_format(wire).dtype.itemsize / many


def draw() -> str:
    """The figure as SVG: a row for each slice, a column for its content after each action."""
    parts, starts = [], [LEFT + k * (WIDE + GAP) for k in range(len(HEADS))]
    for x, (name, note) in zip(starts, HEADS, strict=True):
        parts += [svg.text(x, 20, name, size=13, bold=True), svg.text(x, 38, note, size=11)]
    for j in range(SLICES):
        parts += _slice(j, *starts)
    share, y = (SLICES - 1) / SLICES, TOP + SLICES * ROW + 12
    there, back = bytes_of(WIRE), bytes_of(quantize.finer(WIRE, MEAN_DTYPE))
    sent = ["", f"{there * share:.3g} in {8 * there:.0f} bits", "none"]
    sent.append(f"{back * share:.3g} in {8 * back:.0f} bits")
    parts.append(svg.text(8, y, "bytes a parameter that leave a slice:", size=11))
    parts += [svg.text(x, y, words, size=11) for x, words in zip(starts, sent, strict=True)]
    gathered = f"all-gather: each slice sends all it has to all: {there * (SLICES - 1):.3g}"
    parts.append(svg.text(8, y + 18, gathered, size=11))
    width, height = starts[-1] + WIDE + 60, y + 30
    return svg.figure(width, height, parts)


def _slice(j: int, has: float, scattered: float, reduced: float, shared: float) -> list[str]:
    """Draw the row of slice j and the parts that it sends. The others: where its columns begin."""
    y = TOP + j * ROW
    parts = [svg.text(8, y + 26, f"slice {j}", size=12)]
    for k in range(SLICES):
        parts.append(svg.box(has + k * CELL, y + 10, CELL - 1, 20, COLOURS[k], opacity=0.55))
        parts.append(svg.box(scattered, y + k * 10, CELL, 9, COLOURS[j], opacity=0.55))
        parts.append(svg.box(shared + k * CELL, y + 10, CELL - 1, 20, COLOURS[k]))
        if k != j:
            of_k = TOP + k * ROW + 20
            parts.append(_line(has + WIDE + 6, y + 20, scattered - 8, of_k, COLOURS[k]))
            parts.append(_line(reduced + CELL + 6, y + 20, shared - 8, of_k, COLOURS[j]))
    parts.append(svg.box(reduced, y + 10, CELL, 20, COLOURS[j]))
    parts.append(_line(scattered + CELL + 6, y + 20, reduced - 8, y + 20, "#222"))
    return parts


def _line(x: float, y: float, to_x: float, to_y: float, colour: str) -> str:
    dot = f'<circle cx="{to_x}" cy="{to_y}" r="2.5" fill="{colour}"/>'
    return svg.line([(x, y), (to_x, to_y)], colour, width=1.5) + dot


if __name__ == "__main__":
    default = pathlib.Path(__file__).parents[1] / "docs" / "figures" / "reduce_scatter.svg"
    target = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else default
    target.write_text(draw(), encoding="utf-8")
    print(target)
