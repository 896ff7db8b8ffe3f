"""The number of trips of a `while` in compiled HLO."""

import re

from maxdiloco.aot.hlo.reader import Computation, Instruction, Module

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
# Opcodes that return their operand unchanged.
_SAME = ("bitcast", "copy", "copy-done", "copy-start", "convert")


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int:
    """Trips of a counted loop: the compiler's number, or from start, step and bound of its counter.

    Raises ValueError where the text has neither.
    """
    if known := _KNOWN.search(loop.attributes):
        return int(known[1])
    condition = module.computation(loop.attribute("condition"))
    body = module.computation(loop.attribute("body"))
    compared = condition.root()
    if compared.opcode != "compare" or compared.attribute("direction") != "LT":
        raise _unknown(loop, "its condition is not `counter < bound`")
    counter = _source(condition, compared.operands[0])
    bound = _constant(condition, compared.operands[1])
    if counter.opcode != "get-tuple-element" or bound is None:
        raise _unknown(loop, "its condition is not `counter < bound`")
    index = int(counter.attribute("index"))
    start = _constant(computation, _item(computation, loop.operands[0], index))
    step = _step(body, index)
    if start is None or step is None or step < 1:
        raise _unknown(loop, "the counter's start or step is not in the text")
    return max(0, -(-(bound - start) // step))


def _step(body: Computation, index: int) -> int | None:
    """The constant that the body adds to item `index` of its argument; None for anything else."""
    following = _source(body, _item(body, body.root().name, index))
    if following.opcode != "add":
        return None
    for counter, step in (following.operands, reversed(following.operands)):
        source = _source(body, counter)
        if source.opcode == "get-tuple-element" and int(source.attribute("index")) == index:
            return _constant(body, step)
    return None


def _item(computation: Computation, name: str, index: int) -> str:
    """Name of item `index` of a tuple."""
    tuple_ = computation[name]
    if tuple_.opcode != "tuple":
        raise _unknown(tuple_, "its initial value is not a tuple in the same computation")
    return tuple_.operands[index]


def _source(computation: Computation, name: str) -> Instruction:
    """The instruction that makes a value, past those that return it unchanged."""
    item = computation[name]
    while item.opcode in _SAME:
        item = computation[item.operands[0]]
    return item


def _constant(computation: Computation, name: str) -> int | None:
    item = _source(computation, name)
    if item.opcode != "constant" or not re.fullmatch(r"-?\d+", item.literal):
        return None
    return int(item.literal)


def _unknown(loop: Instruction, why: str) -> ValueError:
    return ValueError(f"trips of %{loop.name} are unknown: {why}. Only counted loops are known.")
