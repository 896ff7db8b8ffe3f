"""A figure as SVG text: lines, words and a frame. Coordinates are pixels from the upper left."""

from collections.abc import Sequence
from html import escape


def figure(width: float, height: float, parts: Sequence[str]) -> str:
    """The whole figure, on white, so that it reads on a dark page too."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>'
        f"{''.join(parts)}</svg>\n"
    )


def line(
    points: Sequence[tuple[float, float]], colour: str, *, dash: str = "", width: float = 1
) -> str:
    """A line through points."""
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    look = f'stroke="{colour}" stroke-width="{width:g}"{dashes}'
    return f'<polyline points="{places}" fill="none" {look}/>'


def box(x: float, y: float, width: float, height: float, fill: str, *, opacity: float = 1) -> str:
    """A rectangle with its upper left corner at x, y."""
    see_through = f' fill-opacity="{opacity:g}"' if opacity < 1 else ""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {place} fill="{fill}"{see_through}/>'


def text(
    x: float,
    y: float,
    words: str,
    *,
    anchor: str = "start",
    size: int = 11,
    bold: bool = False,
    fill: str = "#222",
) -> str:
    """Words that begin, end or have their middle at x."""
    weight = ' font-weight="bold"' if bold else ""
    where = f'x="{x:.1f}" y="{y:.1f}" fill="{fill}" text-anchor="{anchor}" font-size="{size}"'
    return f"<text {where}{weight}>{escape(words)}</text>"
