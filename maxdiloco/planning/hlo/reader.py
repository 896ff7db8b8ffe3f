"""Optimised HLO text as computations of instructions, and how often each instruction runs.

A scheduled module (`is_scheduled=true`) lists every computation in its order of execution.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from maxdiloco.models.kernels.token_exchange import FURTHER_ROUNDS

_HEADER = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{$")
_LINE = re.compile(r"\s+(ROOT )?%?([\w.-]+) = (.*)$")
_END = re.compile(r"\}(, execution_thread=.*)?$")
_OPCODE = re.compile(r"\s*([\w-]+)\(")
_CALLED = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
NO_ESTIMATE = 2**63 - 1  # printed by the compiler without an estimate
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
# Opcodes that return their operand unchanged.
_SAME = ("bitcast", "copy", "copy-done", "copy-start", "convert")
CALLS = ("call", "call-start", "async-start")


class Instruction(NamedTuple):
    """One line: `name = shape opcode(operands), attributes`."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    literal: str  # the text between the parentheses
    attributes: str
    is_root: bool

    def attribute(self, key: str) -> str | None:
        """Return the value of `key="value"` or `key=value`; None without it."""
        match = re.search(rf'(?<![\w]){re.escape(key)}=(?:"([^"]*)"|%?([\w.-]+))', self.attributes)
        return None if match is None else match[1] if match[1] is not None else match[2]

    def called(self) -> tuple[str, ...]:
        """Return the names of the computations that it runs, in the order of the text."""
        branches = _BRANCHES.search(self.attributes)
        names = tuple(_CALLED.findall(self.attributes))
        return names + (tuple(re.findall(r"[\w.-]+", branches[1])) if branches else ())

    def estimated_cycles(self) -> int | None:
        """Return the compiler's estimate; None without one, as for work of a sparse core."""
        match = _CYCLES.search(self.attributes)
        return int(match[1]) if match and int(match[1]) != NO_ESTIMATE else None


class Computation(NamedTuple):
    """Instructions in the order of the text, in which they are executed."""

    name: str
    instructions: tuple[Instruction, ...]

    def __getitem__(self, name: str) -> Instruction:
        """Return the instruction of a name."""
        for instruction in self.instructions:
            if instruction.name == name:
                return instruction
        raise ValueError(f"{self.name} has no %{name}: the text was cut. Give the whole module.")

    def root(self) -> Instruction:
        """Return the instruction whose value the computation returns."""
        for instruction in self.instructions:
            if instruction.is_root:
                return instruction
        raise ValueError(f"{self.name} has no ROOT: the text was cut. Give the whole module.")


class Module(NamedTuple):
    """A compiled program of one slice."""

    computations: dict[str, Computation]
    entry: Computation

    def computation(self, name: str) -> Computation:
        """Return the computation of that name. Raises ValueError if the text does not have it."""
        if name not in self.computations:
            raise ValueError(f"%{name} is called but not in the text. Give the whole module.")
        return self.computations[name]


class Executed(NamedTuple):
    """An instruction in one of its executions; every branch counts as taken.

    Attributes:
      computation: that has it.
      instruction: the instruction.
      times: how often it runs in one run of the program.
      place: name of the innermost computation around it that is not a fusion.
      in_conditional: whether a conditional is around it.
    """

    computation: Computation
    instruction: Instruction
    times: int
    place: str
    in_conditional: bool


def read(text: str) -> Module:
    """Parse `compiled.as_text()`.

    Raises:
      ValueError: the text has no schedule or no ENTRY, or a line cannot be read.
    """
    if "is_scheduled=true" not in text.partition("\n")[0]:
        raise ValueError(
            "the first line lacks is_scheduled=true, so the order of the text means nothing. Give "
            "the text of a compiled program, not of a lowered one."
        )
    computations, entry, name, body = {}, None, None, []
    for line in text.splitlines():
        if name is None:
            if header := _HEADER.match(line):
                name, body = header[2], []
                entry = name if header[1] else entry
        elif _END.match(line):
            computations[name] = Computation(name, tuple(_instruction(line) for line in body))
            name = None
        elif line.startswith(" "):
            body.append(line)
        elif body:
            body[-1] += line  # the attributes of Pallas kernels have line breaks
    if name is not None or entry not in computations:
        raise ValueError("the text has no whole ENTRY computation. Give the whole module.")
    return Module(computations, computations[entry])


def _instruction(line: str) -> Instruction:
    match = _LINE.match(line)
    root, name, rest = match.groups() if match else (None, "", "")
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    opcode = _OPCODE.match(rest, end) if end > 0 else None
    if opcode is None:
        raise ValueError(f"cannot read this line as an HLO instruction: {line.strip()[:80]!r}")
    close = _closing(rest, opcode.end() - 1)
    literal = rest[opcode.end() : close]
    operands = tuple(re.findall(r"%([\w.-]+)", literal))
    return Instruction(
        name, rest[:end], opcode[1], operands, literal, rest[close + 1 :], root is not None
    )


def _closing(text: str, start: int) -> int:
    """Return the index of the parenthesis that closes the one at `start`."""
    depth = 0
    for token in re.finditer(r'"(?:[^"\\]|\\.)*"|[()]', text[start:]):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if depth == 0:
            return start + token.start()
    raise ValueError(f"a parenthesis is never closed: {text[:80]!r}")


def executed_instructions(module: Module) -> Iterator[Executed]:
    """Every instruction that ENTRY runs, those in fusions and loops included.

    Left out: the functions that a reduction applies, and conditions of loops. Raises ValueError for
    a loop whose number of trips is not in the text.
    """
    entry = module.entry
    yield from _run(module, entry, times=1, place=entry.name, in_conditional=False)


def _run(module: Module, computation: Computation, **where) -> Iterator[Executed]:
    """where: the other fields of Executed."""
    for item in computation.instructions:
        yield Executed(computation, item, **where)
        if item.opcode == "while":
            body = module.computation(item.attribute("body"))
            times = where["times"] * trip_count(module, computation, item)
            yield from _run(module, body, **where | {"times": times, "place": body.name})
        elif item.opcode == "fusion":
            yield from _run(module, module.computation(item.attribute("calls")), **where)
        elif item.opcode in (*CALLS, "conditional"):
            inside = where["in_conditional"] or item.opcode == "conditional"
            for name in item.called():
                there = where | {"place": name, "in_conditional": inside}
                yield from _run(module, module.computation(name), **there)


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int:
    """Trips of a counted loop: the compiler's number, or from start, step and bound of its counter.

    The loop over further rounds of an exchange of tokens has 0, as if experts were used alike.
    Raises ValueError if the text has neither.
    """
    if known := _TRIPS.search(loop.attributes):
        return int(known[1])
    if FURTHER_ROUNDS in (loop.attribute("op_name") or ""):
        return 0
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
    """Return the constant that the body adds to item `index` of its argument, or None."""
    following = _source(body, _item(body, body.root().name, index))
    if following.opcode != "add":
        return None
    for counter, step in (following.operands, reversed(following.operands)):
        source = _source(body, counter)
        if source.opcode == "get-tuple-element" and int(source.attribute("index")) == index:
            return _constant(body, step)
    return None


def _item(computation: Computation, name: str, index: int) -> str:
    """Return the name of item `index` of a tuple."""
    tuple_ = computation[name]
    if tuple_.opcode != "tuple":
        raise _unknown(tuple_, "its initial value is not a tuple in the same computation")
    return tuple_.operands[index]


def _source(computation: Computation, name: str) -> Instruction:
    """Return the instruction that makes a value, past instructions that return it unchanged."""
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
