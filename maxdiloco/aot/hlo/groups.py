"""Replica groups of collectives, in the spellings XLA prints."""

import math
import re
from itertools import pairwise

import numpy as np

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


def read(text: str) -> tuple[tuple[int, ...], ...]:
    """`{{0,1},{2,3}}`, `[4,2]<=[2,4]T(1,0)` or `mesh['a'=2,'b'=4] {'b'}` as groups of devices.

    The second is an iota over the dims after `<=`, transposed by T if there is one, and reshaped to
    the dims before `<=`. See _over_mesh for the third. Raises ValueError for any other spelling.
    """
    if listed := _LISTED.match(text):
        groups = re.findall(r"\{([\d,]*)\}", listed[1])
        return tuple(tuple(int(n) for n in group.split(",") if n) for group in groups)
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
    numbers = np.arange(math.prod(counted)).reshape(counted)
    numbers = numbers.transpose(order) if order else numbers
    return tuple(tuple(row) for row in numbers.reshape(folded).tolist())


def _over_mesh(
    axes: str, counted: str | None, order: str | None, listed: str | None, grouped: str
) -> tuple[tuple[int, ...], ...]:
    """Groups of devices that differ only along the grouped axes of a mesh (XLA's mesh_and_axis.cc).

    axes: `'a'=2,'b'=4`, the dims of the array of devices. Its entries are 0, 1, .., or the iota of
    counted and order (see read), or listed. grouped: names of axes; `'b':(2)2` is the sub-axis of
    `'b'` of size 2 after sub-axes of product 2.
    """
    sizes = {name: int(size) for name, _, size in (a.rpartition("=") for a in axes.split(","))}
    if counted:
        numbers = np.arange(math.prod(_numbers(counted))).reshape(_numbers(counted))
        numbers = numbers.transpose(_numbers(order))
    else:
        numbers = np.array(_numbers(listed) or range(math.prod(sizes.values())))
    sub_axes = []  # (axis, product of the sub-axes before it, size)
    for name in filter(None, grouped.split(",")):
        sub = _SUB_AXIS.match(name)
        sub_axes.append((sub[1], int(sub[2]), int(sub[3])) if sub else (name, 1, sizes[name]))
    dims, dim_of = [], {}
    for axis, size in sizes.items():
        ends = {n for name, before, s in sub_axes if name == axis for n in (before, before * s)}
        for low, high in pairwise(sorted(ends | {1, size})):
            dim_of[axis, low] = len(dims)
            dims.append(high // low)
    last = [dim_of[axis, before] for axis, before, size in sub_axes if size > 1]
    moved = np.moveaxis(numbers.reshape(dims), last, range(-len(last), 0))
    rows = moved.reshape(-1, math.prod(dims[dim] for dim in last))
    return tuple(tuple(row) for row in rows.tolist())


def of(attributes: str) -> tuple[tuple[int, ...], ...]:
    """The groups (or source and target pairs) in the attributes of a collective.

    Raises ValueError where there are none: `{}` means all devices, and does not say how many.
    """
    attribute = _ATTRIBUTE.search(attributes)
    if attribute is None:
        raise ValueError(f"no replica groups that can be read in {attributes[:80]!r}")
    return read(attribute[1])


def slices_of(target: str) -> tuple[tuple[int, ...], ...]:
    """Groups of slices in the target of a MegaScale transfer, slices counted from 0.

    `{1,2}x{0:3}`: one group of slices for every device of a slice. `{{100000,300000},{100001,..}}`:
    groups of devices; a device is 100000 times its slice plus its number in it.
    `{{200000->100000},..}`: sender and receiver, groups of two. Every slice is in a group, so the
    lowest number is that of the first slice. Raises ValueError for any other spelling and for
    groups of unequal size.
    """
    if product := re.fullmatch(r"\{([\d,]+)\}x\{\d+(?::\d+)?\}", target):
        numbered = [_numbers(product[1])]
    elif re.fullmatch(r"\{(\{\d+->\d+\},?)+\}", target):
        pairs = re.findall(r"(\d+)->(\d+)", target)
        numbered = [tuple(sorted(int(n) // 100_000 for n in pair)) for pair in pairs]
    elif _LISTED.match(target):
        numbered = [tuple(n // 100_000 for n in group) for group in read(target)]
    else:
        raise ValueError(
            f"the slices of a transfer, {target[:80]!r}, are in a spelling that this reader does "
            f"not know: it reads {{1,2}}x{{0:3}}, {{{{100000,200000}},..}} and {{{{1->2}},..}}."
        )
    if len({len(group) for group in numbered}) != 1:
        raise ValueError(f"the slices of a transfer, {target[:80]!r}, are in unequal groups")
    first = min(min(group) for group in numbered)
    return tuple(dict.fromkeys(tuple(n - first for n in group) for group in numbered))


def _numbers(text: str | None) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",")) if text else ()
