"""Traffic of a compiled program: collectives among devices, and transfers between slices.

On CPU and GPU a program numbers all devices. On TPU it numbers the devices of one slice. A
collective over slices is then a `send` and a `recv` through the host (MegaScale), each with its
`-done`: one pair for each rendezvous name.
"""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from maxdiloco.planning.hlo import notation
from maxdiloco.planning.hlo.reader import (
    Computation,
    Executed,
    Instruction,
    Module,
    executed_instructions,
)

KINDS = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute",
    "ragged-all-to-all", "collective-broadcast",
)  # fmt: skip
RUNTIME = "xla_megascale_runtime"
RENDEZVOUS = "_xla_host_transfer_rendezvous"
HANDLER = "_xla_host_transfer_handler_name"
KIND = "_xla_megascale_transfer_type"
TARGET = "_xla_megascale_target"
_TARGET = re.compile(rf'{TARGET}=("[^"]*"|\{{\{{.*?\}}\}})')


class Timing(NamedTuple):
    """One transfer between slices, in all its runs.

    Attributes:
      start: of its first run [seconds from the start of the program].
      done: end of its last run, on the same clock.
      busy: seconds on the link.
      waited: seconds that the device waits for it.
    """

    start: float
    done: float
    busy: float = 0.0
    waited: float = 0.0


class Collective(NamedTuple):
    """One collective.

    Attributes:
      kind: its opcode.
      dtype: of its payload.
      axes: mesh axes that its groups span.
      bytes_sent: bytes that leave one device in each run, by a ring.
      times: runs in one run of the program.
      waits: whether the schedule waits for it: its start and its done are one instruction.
      padding: bytes that only pad tiles; this and the rest are for a collective over slices.
      in_conditional: whether it is inside a conditional.
      timing: with a send-done that waits for the whole transfer; None off TPU.
      waited_least: seconds that the device waits if a send-done waits for nothing, see replay.
      rendezvous: name of the transfer.
    """

    kind: str
    dtype: str
    axes: tuple[str, ...]
    bytes_sent: int
    times: int
    waits: bool = False
    padding: int = 0
    in_conditional: bool = False
    timing: Timing | None = None
    waited_least: float = 0.0
    rendezvous: str = ""


def collectives(module: Module, sizes: Mapping[str, int]) -> list[Collective]:
    """Every collective that ENTRY reaches, in order of execution.

    sizes: of the mesh axes over which the groups number the devices, major to minor. Pieces of one
    asynchronous collective (fusions of one channel in one computation) count once. Raises
    ValueError for a group with a device outside the mesh and for kinds whose bytes are not known.
    """
    out, seen = [], set()
    for run in executed_instructions(module):
        item, where = run.instruction, run.computation
        if (kind := item.opcode.removesuffix("-start")) not in KINDS:
            continue
        fused = run.place != where.name
        channel = item.attribute("channel_id") if fused else None
        key = (run.place, channel or (where.name, item.name))
        if key not in seen:
            seen.add(key)
            dtype = notation.shape(where[item.operands[0]].shape).dtype
            axes = axes_of(notation.groups_of(item.attributes), sizes)
            waits = not fused and not item.opcode.endswith("-start")
            out.append(Collective(kind, dtype, axes, bytes_of(where, item), run.times, waits))
    return [collective for collective in out if collective.axes]


def bytes_of(computation: Computation, item: Instruction) -> int:
    """Return the bytes that leave one device each time a collective runs."""
    size, kind = max(map(len, notation.groups_of(item.attributes))), item.opcode
    operands = (notation.shape(computation[name].shape) for name in item.operands)
    sizes = [shape.bytes_laid_out() for shape in operands]
    # A ragged one has rows, a buffer for them, and offsets. The number of rows is known at run time
    # only; if all devices get alike, the smaller array is full.
    payload = min(sizes[:2]) if kind.startswith("ragged") else sum(sizes)
    return _ring_bytes(kind.removesuffix("-start"), payload, size, name=f"%{item.name}")


def _ring_bytes(kind: str, payload: int, size: int, *, name: str) -> int:
    """Return the bytes that one member of a group sends in a collective, by a ring."""
    others = size - 1
    if kind == "all-gather":
        return payload * others
    if kind == "all-reduce":
        return 2 * payload * others // size
    if kind in ("reduce-scatter", "all-to-all", "ragged-all-to-all"):
        return payload * others // size
    if kind in ("collective-permute", "one-to-one"):
        return payload
    raise ValueError(f"{name} is a {kind}, whose bytes are not known here")


def axes_of(groups: notation.Groups, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the mesh axes along which members of a group differ.

    Raises:
      ValueError: a device is outside the mesh.
    """
    last, count = max((n for group in groups for n in group), default=0), math.prod(sizes.values())
    if last >= count:
        raise ValueError(
            f"a collective reaches device {last}, but its mesh has {count} devices: {dict(sizes)}. "
            f"Give the sizes that it numbers."
        )
    reached = set()
    for group in groups:
        coordinates = np.array(np.unravel_index(list(group), tuple(sizes.values())))
        differ = (coordinates != coordinates[:, :1]).any(axis=1)
        reached |= {axis for axis, differs in zip(sizes, differ, strict=True) if differs}
    return tuple(axis for axis in sizes if axis in reached)


def transfers(module: Module, sizes: Mapping[str, int]) -> list[Collective]:
    """Every transfer between slices that ENTRY reaches, without its timing.

    sizes: of the mesh axes over slices. Raises ValueError for a host transfer of another runtime,
    and for a send without its recv or `-done` in the same computation.
    """
    starts: dict[str, list[Executed]] = {}
    for run in executed_instructions(module):
        if name := rendezvous_of(run.instruction):
            runs = starts.setdefault(name, [])
            runs.append(run)
            if run.computation is not runs[0].computation:
                raise ValueError(
                    f"transfer {name} starts in {runs[0].computation.name} and in "
                    f"{run.computation.name}: a rendezvous has one place"
                )
    return [_transfer(name, runs, sizes) for name, runs in starts.items()]


def rendezvous_of(instruction: Instruction) -> str | None:
    """Return the rendezvous that an instruction starts; None without cross-slice traffic."""
    if instruction.opcode not in ("send", "recv"):
        return None
    if instruction.attribute(HANDLER) != RUNTIME:
        raise ValueError(
            f"%{instruction.name} is a {instruction.opcode} of "
            f"{instruction.attribute(HANDLER)!r}, not of {RUNTIME!r}: this reader knows no other."
        )
    name = instruction.attribute(RENDEZVOUS)
    if name is None:
        raise ValueError(f"%{instruction.name} names no {RENDEZVOUS}: it cannot be paired")
    return name


def _transfer(name: str, runs: list[Executed], sizes: Mapping[str, int]) -> Collective:
    """Build the transfer of a send and a recv."""
    where = runs[0].computation
    pair = {run.instruction.opcode: run.instruction for run in runs}
    if len({run.instruction.name for run in runs}) != 2 or len(pair) != 2:
        raise ValueError(f"transfer {name} is not one send and one recv in {where.name}")
    started = {item.name for item in pair.values()}
    dones = [item for item in where.instructions if item.opcode in ("send-done", "recv-done")]
    if sum(item.operands[0] in started for item in dones) != 2:
        raise ValueError(f"transfer {name} is not done where it starts, in {where.name}")
    send = pair["send"]
    kind, slices, sent = _exchange(send)
    return Collective(
        kind,
        sent.dtype,
        axes_of(slices, sizes),
        bytes_of_send(send),
        times=sum(run.times for run in runs if run.instruction is send),
        padding=sent.bytes_laid_out() - sent.bytes_logical(),
        in_conditional=any(run.in_conditional for run in runs),
        rendezvous=name,
    )


def bytes_of_send(send: Instruction) -> int:
    """Return the bytes that leave one device each time a send runs, tile padding included."""
    kind, slices, sent = _exchange(send)
    return _ring_bytes(kind, sent.bytes_laid_out(), len(slices[0]), name=f"%{send.name}")


def _exchange(send: Instruction) -> tuple[str, notation.Groups, notation.Shape]:
    """Return the kind, the groups of slices that exchange, and the payload of a send."""
    if (kind := send.attribute(KIND)) is None:
        raise ValueError(f"%{send.name} names no {KIND}: its bytes are unknown")
    if (target := _TARGET.search(send.attributes)) is None:
        raise ValueError(f"%{send.name} names no {TARGET}: which slices exchange is unknown")
    slices = notation.slices_of(target[1].strip('"'))
    sent = notation.shape(notation.arrays(send.shape)[0])
    return kind.lower().replace("_", "-"), slices, sent
