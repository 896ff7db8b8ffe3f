"""Bytes of an HLO shape, as numbers and as a TPU lays them out in tiles.

    u8[2,3]{1,0:T(4,128)(4,1)}    dtype, dims, minor-to-major order, tiles
"""

import math
import re
from typing import NamedTuple

_BITS = {
    "pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32,
    "s64": 64, "u64": 64, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "f4e2m1fn": 4,
    "f8e4m3fn": 8, "f8e5m2": 8, "f8e3m4": 8,
}  # fmt: skip
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\](?:\{([\d,]*)((?::[^}]*)?)\})?$")
_TILES = re.compile(r"T((?:\([\d,]+\))+)")
_SUFFIX = re.compile(r":(?:T(?:\([\d,]+\))+)?(?:E\(\d+\))?(?:S\(\d+\))?$")


class Shape(NamedTuple):
    """One array. in_memory: its dims from major to minor; tiles: outermost first."""

    dtype: str
    dims: tuple[int, ...]
    in_memory: tuple[int, ...]
    tiles: tuple[tuple[int, ...], ...]

    def bytes_logical(self) -> int:
        """Bytes of the values alone."""
        return -(-math.prod(self.dims) * _BITS[self.dtype] // 8)

    def bytes_laid_out(self) -> int:
        """Bytes of the values and of the padding that fills the tiles."""
        dims = list(self.in_memory)
        for tile in self.tiles:
            dims = [1] * (len(tile) - len(dims)) + dims
            kept, split = dims[: len(dims) - len(tile)], dims[len(dims) - len(tile) :]
            dims = [*kept, *(-(-n // t) for n, t in zip(split, tile, strict=True)), *tile]
        return -(-math.prod(dims) * _BITS[self.dtype] // 8)


def read(text: str) -> Shape:
    """The shape of one array, with or without a layout. Raises ValueError for any other text."""
    match = _SHAPE.match(text.strip())
    if match is None or match[1] not in _BITS:
        raise ValueError(f"cannot read {text!r} as the shape of one array of a known dtype")
    dtype, dims, order, suffix = match.groups()
    if suffix and not _SUFFIX.match(suffix):
        raise ValueError(f"the layout of {text!r} has tiles that this reader does not know")
    dims = _numbers(dims)
    minor_to_major = _numbers(order) if order else tuple(reversed(range(len(dims))))
    in_memory = tuple(dims[axis] for axis in reversed(minor_to_major))
    tiles = _TILES.search(suffix or "")
    tiles = tuple(_numbers(t) for t in re.findall(r"\(([\d,]+)\)", tiles[1])) if tiles else ()
    return Shape(dtype, dims, in_memory, tiles)


def elements(text: str) -> list[str]:
    """The shapes in a tuple's text; any other text is one shape."""
    if not text.startswith("("):
        return [text]
    parts, depth, start = [], 0, 1
    for i, char in enumerate(text):
        if char in "({[":
            depth += 1
        elif char in ")}]":
            depth -= 1
        if (char == "," and depth == 1) or (depth == 0 and i > 0):
            parts.append(re.sub(r"/\*.*?\*/", "", text[start:i]).strip())
            start = i + 1
    return [part for part in parts if part]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)
