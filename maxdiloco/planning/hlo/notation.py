"""The spelling of shapes and groups of devices in HLO text.

A shape is `u8[2,3]{1,0:T(4,128)(4,1)}`: dtype, dims, minor-to-major order, tiles of a TPU.
"""

import math
import re
from typing import NamedTuple

import numpy as np

_BITS = {
    "pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32,
    "s64": 64, "u64": 64, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "f4e2m1fn": 4,
    "f8e4m3fn": 8, "f8e5m2": 8, "f8e3m4": 8,
}  # fmt: skip
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\](?:\{([\d,]*)((?::[^}]*)?)\})?$")
_ARRAY = re.compile(r"\w+\[[\d,]*\](?:\{[^}]*\})?")
_TILES = re.compile(r"T((?:\([\d,]+\))+)")
_SUFFIX = re.compile(r":(?:T(?:\([\d,]+\))+)?(?:E\(\d+\))?(?:S\(\d+\))?$")
_LISTED = re.compile(r"\{(\{[\d,]*\}(,\{[\d,]*\})*)\}$")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?$")
_MESH = re.compile(
    r"mesh\[([^\]]+)\](?:, device_ids=\((?:\[([\d,]+)\]T\(([\d,]+)\)|([\d,]+))\))? \{(.*)\}$"
)
_SUB_AXIS = re.compile(r"(.+):\((\d+)\)(\d+)$")
_ATTRIBUTE = re.compile(
    r"(?:replica_groups|source_target_pairs)="
    r"(mesh\[.*?\}|\{\{.*?\}\}|\{\}|[^\s{]*?\)(?=,|$)|[^\s{]*?\](?=,|$))"
)
Groups = tuple[tuple[int, ...], ...]


class Shape(NamedTuple):
    """One array.

    Attributes:
      dtype: its name.
      dims: in logical order.
      in_memory: dims from major to minor.
      tiles: of the layout, outermost first.
    """

    dtype: str
    dims: tuple[int, ...]
    in_memory: tuple[int, ...]
    tiles: tuple[tuple[int, ...], ...]

    def bytes_logical(self) -> int:
        """Return the bytes of the values without padding."""
        return -(-math.prod(self.dims) * _BITS[self.dtype] // 8)

    def bytes_laid_out(self) -> int:
        """Return the bytes of the values and of the padding of tiles."""
        dims = list(self.in_memory)
        for tile in self.tiles:
            dims = [1] * (len(tile) - len(dims)) + dims
            kept, split = dims[: len(dims) - len(tile)], dims[len(dims) - len(tile) :]
            dims = [*kept, *(-(-n // t) for n, t in zip(split, tile, strict=True)), *tile]
        return -(-math.prod(dims) * _BITS[self.dtype] // 8)


def shape(text: str) -> Shape:
    """Parse the shape of one array, with or without a layout. Raises ValueError otherwise."""
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


def arrays(text: str) -> list[str]:
    """Return the texts of the arrays in the shape of an array or a tuple."""
    return _ARRAY.findall(text)


def groups_of(attributes: str) -> Groups:
    """Return the groups, or source and target pairs, in the attributes of a collective.

    Raises:
      ValueError: there are none. `{}` means all devices, but not how many.
    """
    attribute = _ATTRIBUTE.search(attributes)
    if attribute is None:
        raise ValueError(f"no replica groups that can be read in {attributes[:80]!r}")
    return groups(attribute[1])


def groups(text: str) -> Groups:
    """Parse `{{0,1},{2,3}}`, `[4,2]<=[2,4]T(1,0)` or `mesh['a'=2,'b'=4] {'b'}`.

    The second is an iota over the dims after `<=`, transposed by T if it is given, and reshaped to
    the dims before `<=`. See _over_mesh for the third.

    Raises:
      ValueError: the spelling is another one.
    """
    if listed := _LISTED.match(text):
        return tuple(map(_numbers, re.findall(r"\{([\d,]*)\}", listed[1])))
    if mesh := _MESH.match(text):
        return _over_mesh(*mesh.groups())
    iota = _IOTA.match(text)
    if iota is None:
        raise ValueError(
            f"replica groups {text!r} are in a spelling that this reader does not know: it reads "
            f"{{{{0,1}},{{2,3}}}}, [2,4]<=[8], [4,2]<=[2,4]T(1,0) and mesh['a'=2,'b'=4] {{'b'}}."
        )
    folded, counted, order = (_numbers(part) for part in iota.groups())
    if len(folded) != 2 or math.prod(folded) != math.prod(counted):
        raise ValueError(f"replica groups {text!r} do not number every device once")
    return _rows(_iota(counted, order).reshape(folded))


def _over_mesh(
    axes: str, counted: str | None, order: str | None, listed: str | None, grouped: str
) -> Groups:
    """Return groups of devices that differ only along some axes of a mesh (mesh_and_axis.cc).

    Args:
      axes: `'a'=2,'b'=4`, the dims of the array of devices.
      counted: dims of an iota, which is the array of devices.
      order: transposition of the iota.
      listed: the devices, if they are not an iota; without both they are 0, 1, ...
      grouped: the axes; `'b':(2)2` is the sub-axis of size 2 after a product of 2.
    """
    sizes = {name: int(size) for name, _, size in (a.rpartition("=") for a in axes.split(","))}
    if counted:
        numbers = _iota(_numbers(counted), _numbers(order))
    else:
        numbers = np.array(_numbers(listed) or range(math.prod(sizes.values())))
    places = np.indices(tuple(sizes.values())).reshape(len(sizes), -1)
    rest, digits, members = dict(zip(sizes, places, strict=True)), [], 1
    for name in filter(None, grouped.split(",")):
        sub = _SUB_AXIS.match(name)
        axis, before, size = (sub[1], int(sub[2]), int(sub[3])) if sub else (name, 1, sizes[name])
        step = sizes[axis] // (before * size)
        digits.append(rest[axis] // step % size)
        rest[axis] = rest[axis] - digits[-1] * step
        members *= size
    order = np.lexsort([*reversed(digits), *reversed(rest.values())])  # by rest, then by digits
    return _rows(numbers.reshape(-1)[order].reshape(-1, members))


def _iota(dims: tuple[int, ...], order: tuple[int, ...]) -> np.ndarray:
    numbers = np.arange(math.prod(dims)).reshape(dims)
    return numbers.transpose(order) if order else numbers


def _rows(numbers: np.ndarray) -> Groups:
    return tuple(map(tuple, numbers.tolist()))


def slices_of(target: str) -> Groups:
    """Return groups of slices, counted from 0, in the target of a MegaScale transfer.

    `{1,2}x{0:3}` is one group of slices for every device of a slice. `{{100000,300000},..}` has
    groups of devices; a device is 100000 times its slice plus its number in the slice.
    `{{200000->100000},..}` has senders and receivers, groups of two. Every slice is in a group, so
    the lowest number is the first slice.

    Raises:
      ValueError: the spelling is another one, or groups have unequal sizes.
    """
    if product := re.fullmatch(r"\{([\d,]+)\}x\{\d+(?::\d+)?\}", target):
        numbered = [_numbers(product[1])]
    elif re.fullmatch(r"\{(\{\d+->\d+\},?)+\}", target):
        pairs = re.findall(r"(\d+)->(\d+)", target)
        numbered = [tuple(sorted(int(n) // 100_000 for n in pair)) for pair in pairs]
    elif _LISTED.match(target):
        numbered = [tuple(n // 100_000 for n in group) for group in groups(target)]
    else:
        raise ValueError(
            f"the slices of a transfer, {target[:80]!r}, are in a spelling that this reader does "
            f"not know: it reads {{1,2}}x{{0:3}}, {{{{100000,200000}},..}} and {{{{1->2}},..}}."
        )
    if len(set(map(len, numbered))) != 1:
        raise ValueError(f"the slices of a transfer, {target[:80]!r}, are in unequal groups")
    first = min(map(min, numbered))
    return tuple(dict.fromkeys(tuple(n - first for n in group) for group in numbered))


def _numbers(text: str | None) -> tuple[int, ...]:
    return tuple(int(n) for n in (text or "").split(",") if n)
