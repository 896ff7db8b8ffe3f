"""Every instruction of a compiled program with the number of times it runs."""

from collections.abc import Iterator
from typing import NamedTuple

from maxdiloco.aot.hlo.loops import trip_count
from maxdiloco.aot.hlo.reader import Computation, Instruction, Module


class Executed(NamedTuple):
    """An instruction where it runs.

    times: runs in one run of the program; every branch of a conditional counts as taken.
    place: name of the innermost computation around it that is not a fusion.
    """

    computation: Computation
    instruction: Instruction
    times: int
    place: str


def executed(module: Module) -> Iterator[Executed]:
    """Every instruction that ENTRY runs, those in fusions and loops included.

    Left out: the functions that a reduction applies. Raises ValueError for a loop whose number of
    trips is not in the text.
    """
    yield from _run(module, module.entry, 1, module.entry.name)


def _run(module: Module, computation: Computation, times: int, place: str) -> Iterator[Executed]:
    for item in computation.instructions:
        yield Executed(computation, item, times, place)
        if item.opcode == "while":
            body = module.computation(item.attribute("body"))
            trips = trip_count(module, computation, item)
            yield from _run(module, body, times * trips, body.name)
        elif item.opcode in ("call", "call-start", "async-start", "conditional"):
            for name in item.called():
                yield from _run(module, module.computation(name), times, name)
        elif item.opcode == "fusion":
            inner = module.computation(item.attribute("calls"))
            yield from _run(module, inner, times, place)
