"""How often a `while` of compiled HLO runs its body."""

import re

from maxdiloco.aot.hlo.reader import Computation, Instruction, Module

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
# What hands a value on unchanged.
_SAME = ("bitcast", "copy", "copy-done", "copy-start", "convert")


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int:
    """Trips of a counted loop: the compiler's own number, or counter < bound, from start by step.

    Raises ValueError where neither is in the text.
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
    """What the body adds to item `index` of its argument."""
    following = _source(body, _item(body, body.root().name, index))
    if following.opcode != "add":
        return None
    for own, other in (following.operands, reversed(following.operands)):
        source = _source(body, own)
        if source.opcode == "get-tuple-element" and int(source.attribute("index")) == index:
            return _constant(body, other)
    return None


def _item(computation: Computation, name: str, index: int) -> str:
    """Name of item `index` of a tuple."""
    made = computation[name]
    if made.opcode != "tuple":
        raise _unknown(made, "what it starts from is not a tuple in the same computation")
    return made.operands[index]


def _source(computation: Computation, name: str) -> Instruction:
    """Where a value comes from, past what hands it on unchanged."""
    found = computation[name]
    while found.opcode in _SAME:
        found = computation[found.operands[0]]
    return found


def _constant(computation: Computation, name: str) -> int | None:
    found = _source(computation, name)
    if found.opcode != "constant" or not re.fullmatch(r"-?\d+", found.literal):
        return None
    return int(found.literal)


def _unknown(loop: Instruction, why: str) -> ValueError:
    return ValueError(f"trips of %{loop.name} are unknown: {why}. Only counted loops are known.")
