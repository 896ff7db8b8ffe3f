"""Transfers between slices in a compiled TPU program: pairs of host transfers of MegaScale.

XLA:TPU compiles one program for a slice. It lowers a collective over slices to a `send` and a
`recv` through the host with their `-done` ops, one pair for each rendezvous name.
"""

import re
from typing import NamedTuple

from maxdiloco.aot.hlo import groups, shapes
from maxdiloco.aot.hlo.collectives import ring_bytes
from maxdiloco.aot.hlo.executed import executed
from maxdiloco.aot.hlo.reader import Computation, Instruction, Module

RUNTIME = "xla_megascale_runtime"
RENDEZVOUS = "_xla_host_transfer_rendezvous"
HANDLER = "_xla_host_transfer_handler_name"
KIND = "_xla_megascale_transfer_type"
TARGET = "_xla_megascale_target"

# Custom calls that stay in the slice, its collectives among them. Any other target may be traffic.
LOCAL_CALLS = (
    "AllocateBuffer", "AssumeGatherIndicesInBound", "AsyncCollectiveDone", "AsyncCollectiveStart",
    "ConcatBitcast", "GatherScatterIndicesBitpacked", "HostExecute", "MoveToDevice", "MoveToHost",
    "PrepareAsyncCallDone", "PrepareAsyncCallStart",
    "Sharding", "SliceId", "SPMDFullToShardShape", "SPMDShardToFullShape", "ZeroCrop",
    "tpu_custom_call",
)  # fmt: skip


class Transfer(NamedTuple):
    """One collective over slices, as one device of a slice sees it.

    kind: ALL_GATHER, ALL_REDUCE, .. slices: groups of slices that exchange. sent, received: the
    shapes given to and taken from the runtime. computation: the one that holds its instructions.
    start, done: positions in it of the first send or recv and of the last `-done`.
    in_conditional: whether a branch of a conditional runs that computation.
    """

    rendezvous: str
    kind: str
    slices: tuple[tuple[int, ...], ...]
    sent: shapes.Shape
    received: shapes.Shape
    computation: str
    start: int
    done: int
    in_conditional: bool

    @property
    def padding(self) -> int:
        """Bytes of the payload that only fill tiles."""
        return self.sent.bytes_laid_out() - self.sent.bytes_logical()

    @property
    def collective(self) -> str:
        """The kind in the spelling of HLO: all-gather, all-reduce, .."""
        return self.kind.lower().replace("_", "-")

    def bytes_sent(self) -> int:
        """Bytes that leave one device, tile padding included."""
        payload, size = self.sent.bytes_laid_out(), len(self.slices[0])
        return ring_bytes(self.collective, payload, size, name=f"transfer {self.rendezvous}")


def transfers(module: Module) -> list[Transfer]:
    """Every transfer between slices that ENTRY reaches.

    Raises ValueError for a host transfer of another runtime, a custom call with an unknown target,
    and a send without its recv or `-done` in the same computation.
    """
    conditional = _under_conditionals(module)
    starts: dict[str, Computation] = {}
    for computation, instruction in module.reached():
        if name := rendezvous_of(instruction):
            if starts.setdefault(name, computation) is not computation:
                raise ValueError(
                    f"transfer {name} starts in {starts[name].name} and in {computation.name}: a "
                    f"rendezvous has one place"
                )
    return [
        _transfer(name, computation, computation.name in conditional)
        for name, computation in starts.items()
    ]


def runs(module: Module) -> dict[str, int]:
    """Runs of each transfer in one run of the program, by rendezvous."""
    return {
        rendezvous_of(run.instruction): run.times
        for run in executed(module)
        if run.instruction.opcode == "send"
    }


def rendezvous_of(instruction: Instruction) -> str | None:
    """The rendezvous that an instruction starts; None without traffic between slices."""
    if instruction.opcode in ("custom-call", "custom-call-start"):
        target = instruction.attribute("custom_call_target")
        if target not in LOCAL_CALLS:
            raise ValueError(
                f"%{instruction.name} calls {target!r}, which may be traffic between slices. Add "
                f"it to LOCAL_CALLS in hlo/transfers.py if it is not."
            )
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


def _transfer(name: str, computation: Computation, in_conditional: bool) -> Transfer:
    started = [
        (position, instruction)
        for position, instruction in enumerate(computation.instructions)
        if rendezvous_of(instruction) == name
    ]
    pair = {instruction.opcode: instruction for _, instruction in started}
    if len(started) != 2 or len(pair) != 2:
        raise ValueError(f"transfer {name} is not one send and one recv in {computation.name}")
    done = [
        position
        for position, instruction in enumerate(computation.instructions)
        if instruction.opcode in ("send-done", "recv-done")
        and instruction.operands[0] in {i.name for i in pair.values()}
    ]
    if len(done) != 2:
        raise ValueError(f"transfer {name} is not done where it starts, in {computation.name}")
    kind = pair["send"].attribute(KIND)
    if kind is None:
        raise ValueError(f"transfer {name} names no {KIND}: its bytes are unknown")
    slices = groups.slices_of(_target(pair["send"]))
    sent, received = (shapes.read(shapes.elements(pair[op].shape)[0]) for op in ("send", "recv"))
    start = min(position for position, _ in started)
    return Transfer(
        name, kind, slices, sent, received, computation.name, start, max(done), in_conditional
    )


def _target(send: Instruction) -> str:
    target = re.search(rf'{TARGET}=("[^"]*"|\{{\{{.*?\}}\}})', send.attributes)
    if target is None:
        raise ValueError(f"%{send.name} names no {TARGET}: which slices exchange is unknown")
    return target[1].strip('"')


def _under_conditionals(module: Module) -> set[str]:
    """Names of the computations that a branch of a conditional is or runs."""
    waiting = [
        name
        for _, instruction in module.reached()
        if instruction.opcode == "conditional"
        for name in instruction.called()
    ]
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            for instruction in module.computation(name).instructions:
                waiting.extend(instruction.called())
    return seen
