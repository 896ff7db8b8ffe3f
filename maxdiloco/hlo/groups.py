"""Replica groups of collectives, in the spellings XLA prints, and whether they cross slices."""

import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

_LISTED = re.compile(r"\{(\{[\d,]*\}(,\{[\d,]*\})*)\}$")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?$")
_MESH = re.compile(
    r"mesh\[([^\]]+)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}$"
)
_ATTRIBUTE = re.compile(
    r"(?:replica_groups|source_target_pairs)="
    r"(mesh\[.*?\} ?(?=,|$)|\{\{.*?\}\}|\{\}|[^\s{]*?\)(?=,|$)|[^\s{]*?\](?=,|$))"
)


def read(text: str) -> tuple[tuple[int, ...], ...]:
    """Groups of device numbers: `{{0,1},{2,3}}`, `[4,2]<=[2,4]T(1,0)` or `mesh['a'=4,..] {'a'}`.

    The second numbers 0, 1, .. over the dims after `<=`, transposes them by T and folds the result
    into the dims before it. The third numbers a mesh of named axes, over `device_ids` where they
    are given, and a group runs over the axes in braces. Raises ValueError for another spelling.
    """
    if listed := _LISTED.match(text):
        groups = re.findall(r"\{([\d,]*)\}", listed[1])
        return tuple(tuple(int(n) for n in group.split(",") if n) for group in groups)
    if named := _MESH.match(text):
        return _along_axes(*named.groups())
    iota = _IOTA.match(text)
    if iota is None:
        raise ValueError(
            f"replica groups {text!r} are in a spelling that this reader does not know: it reads "
            f"{{{{0,1}},{{2,3}}}}, [4,2]<=[2,4]T(1,0) and mesh['a'=2,'b'=4] {{'a'}}."
        )
    folded, counted, order = (_numbers(part) for part in iota.groups())
    if len(folded) != 2 or math.prod(folded) != math.prod(counted):
        raise ValueError(f"replica groups {text!r} do not number every device once")
    numbers = np.arange(math.prod(counted)).reshape(counted)
    numbers = numbers.transpose(order) if order else numbers
    return tuple(tuple(row) for row in numbers.reshape(folded).tolist())


def _along_axes(
    mesh: str, counted: str | None, order: str | None, over: str
) -> tuple[tuple[int, ...], ...]:
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh)}
    axes = re.findall(r"'(\w+)'", over)
    if re.sub(r"'\w+',?", "", over) or not set(axes) <= sizes.keys():
        raise ValueError(f"replica groups over {{{over}}} are not over whole axes of mesh[{mesh}]")
    shape = tuple(sizes.values())
    numbers = np.arange(math.prod(shape)).reshape(_numbers(counted) or shape)
    numbers = numbers.transpose(_numbers(order)) if order else numbers
    names = list(sizes)
    along = [names.index(axis) for axis in axes]
    others = [dim for dim in range(len(shape)) if dim not in along]
    moved = numbers.reshape(shape).transpose([*others, *along])
    rows = moved.reshape(-1, math.prod(shape[dim] for dim in along))
    return tuple(tuple(row) for row in rows.tolist())


def of(attributes: str) -> tuple[tuple[int, ...], ...]:
    """The groups (or source and target pairs) in the attributes of a collective.

    Raises ValueError where there are none: `{}` means all devices, whose number is not there.
    """
    found = _ATTRIBUTE.search(attributes)
    if found is None:
        raise ValueError(f"no replica groups that can be read in {attributes[:80]!r}")
    return read(found[1])


def slices_of(target: str) -> tuple[tuple[int, ...], ...]:
    """Groups of slices in the target of a MegaScale transfer, slices counted from 0.

    `{1,2}x{0:3}`: one group, the same for every device of a slice; `{{100000,300000},{100001,..}}`:
    one entry a member, 100000 times the slice plus the device. Every slice is in a group, so the
    lowest number is that of the first. Raises ValueError for any other spelling, and for groups of
    unequal size.
    """
    if product := re.fullmatch(r"\{([\d,]+)\}x\{\d+(?::\d+)?\}", target):
        numbered = [_numbers(product[1])]
    elif _LISTED.match(target):
        numbered = [tuple(n // 100_000 for n in group) for group in read(target)]
    else:
        raise ValueError(
            f"the slices of a transfer, {target[:80]!r}, are in a spelling that this reader does "
            f"not know: it reads {{1,2}}x{{0:3}} and {{{{100000,200000}},..}}."
        )
    if len({len(group) for group in numbered}) != 1:
        raise ValueError(f"the slices of a transfer, {target[:80]!r}, are in unequal groups")
    first = min(min(group) for group in numbered)
    return tuple(dict.fromkeys(tuple(n - first for n in group) for group in numbered))


def crosses(groups: Sequence[Sequence[int]], slice_of_device: Mapping[int, int]) -> bool:
    """Whether a group holds devices of two slices."""
    return any(len({slice_of_device[device] for device in group}) > 1 for group in groups)


def _numbers(text: str | None) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",")) if text else ()
