"""Collectives among the devices that one compiled program numbers in its replica groups.

On TPU a program numbers the devices of one slice; what crosses slices is in transfers.py. On CPU
and GPU it numbers all devices, so collectives between emulated slices are here too.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from maxdiloco.aot.hlo import groups as group_reader
from maxdiloco.aot.hlo import shapes
from maxdiloco.aot.hlo.executed import Executed, executed
from maxdiloco.aot.hlo.reader import Computation, Instruction, Module

KINDS = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute",
    "ragged-all-to-all", "collective-broadcast",
)  # fmt: skip


class Collective(NamedTuple):
    """One collective.

    axes: mesh axes that its groups span. bytes_sent: bytes that leave one device in each run, by a
    ring. times: runs in one run of the program. waits: whether the schedule waits for it, which it
    does when start and done are one instruction.
    """

    kind: str
    dtype: str
    axes: tuple[str, ...]
    bytes_sent: int
    times: int
    waits: bool


def collectives(module: Module, sizes: Mapping[str, int]) -> list[Collective]:
    """Every collective that ENTRY reaches, in order of execution.

    sizes: of the mesh axes over which the groups number the devices, major to minor. Pieces of one
    asynchronous collective (fusions of one channel in one computation) count once. Raises
    ValueError for a group with a device outside the mesh and for kinds whose bytes are not known.
    """
    out, seen = [], set()
    for run in executed(module):
        kind = kind_of(run.instruction)
        if kind is None:
            continue
        fused = run.place != run.computation.name
        channel = run.instruction.attribute("channel_id") if fused else None
        key = (run.place, channel or (run.computation.name, run.instruction.name))
        if key not in seen:
            seen.add(key)
            out.append(_collective(kind, run, sizes))
    return [collective for collective in out if collective.axes]


def kind_of(instruction: Instruction) -> str | None:
    """The kind of a collective or of its start: all-gather, all-reduce ..; None for the rest."""
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in KINDS else None


def _collective(kind: str, run: Executed, sizes: Mapping[str, int]) -> Collective:
    item = run.instruction
    dtype = shapes.read(run.computation[item.operands[0]].shape).dtype
    axes = axes_of(group_reader.of(item.attributes), sizes)
    apart = item.opcode.endswith("-start") or run.place != run.computation.name
    return Collective(kind, dtype, axes, bytes_of(run.computation, item), run.times, not apart)


def bytes_of(computation: Computation, item: Instruction) -> int:
    """Bytes that leave one device each time a collective runs."""
    size = max(map(len, group_reader.of(item.attributes)))
    payload = sum(shapes.read(computation[name].shape).bytes_laid_out() for name in item.operands)
    return ring_bytes(kind_of(item), payload, size, name=f"%{item.name}")


def ring_bytes(kind: str, payload: int, size: int, *, name: str) -> int:
    """Bytes that one member of a group sends in a collective, by a ring.

    An all-gather sends the payload to each other member; a reduction and a gather of the sum each
    send the share of every other member; one member of a pair sends the payload to the other.
    kind: one of KINDS, or one-to-one. size: members of the group. name: for messages.
    Raises ValueError for kinds whose bytes are not known.
    """
    others = size - 1
    if kind == "all-gather":
        return payload * others
    if kind == "all-reduce":
        return 2 * payload * others // size
    if kind in ("reduce-scatter", "all-to-all"):
        return payload * others // size
    if kind in ("collective-permute", "one-to-one"):
        return payload
    raise ValueError(f"{name} is a {kind}, whose bytes are not known here")


def axes_of(groups, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Mesh axes along which the members of a group differ, in mesh order.

    Raises ValueError for a device outside the mesh.
    """
    numbers = sorted({n for group in groups for n in group})
    if numbers and numbers[-1] >= math.prod(sizes.values()):
        raise ValueError(
            f"a collective reaches device {numbers[-1]}, but its mesh has "
            f"{math.prod(sizes.values())} devices: {dict(sizes)}. Give the sizes that it numbers."
        )
    reached = set()
    for group in groups:
        coordinates = np.array(np.unravel_index(list(group), tuple(sizes.values())))
        differ = (coordinates != coordinates[:, :1]).any(axis=1)
        reached |= {axis for axis, differs in zip(sizes, differ, strict=True) if differs}
    return tuple(axis for axis in sizes if axis in reached)
