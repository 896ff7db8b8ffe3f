"""Optimised HLO text as computations of instructions.

A scheduled module (`is_scheduled=true`) lists every computation in its order of execution.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

_HEADER = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{$")
_LINE = re.compile(r"\s+(ROOT )?%?([\w.-]+) = (.*)$")
_END = re.compile(r"\}(, execution_thread=.*)?$")
_OPCODE = re.compile(r"\s*([\w-]+)\(")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
NO_ESTIMATE = 2**63 - 1  # what the compiler prints where it has none
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


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
        """The value of `key="value"` or `key=value`; None without it."""
        match = re.search(rf'(?<![\w]){re.escape(key)}=(?:"([^"]*)"|%?([\w.-]+))', self.attributes)
        return None if match is None else match[1] if match[1] is not None else match[2]

    def called(self) -> tuple[str, ...]:
        """Names of the computations that it runs, in the order of the text."""
        branches = _BRANCHES.search(self.attributes)
        names = tuple(_CALLED.findall(self.attributes))
        return names + (tuple(re.findall(r"[\w.-]+", branches[1])) if branches else ())

    def estimated_cycles(self) -> int | None:
        """The compiler's estimate; None without one, as of what a sparse core does."""
        match = _CYCLES.search(self.attributes)
        return int(match[1]) if match and int(match[1]) != NO_ESTIMATE else None


class Computation(NamedTuple):
    """Instructions in the order of the text, which is that of execution."""

    name: str
    instructions: tuple[Instruction, ...]

    def __getitem__(self, name: str) -> Instruction:
        for instruction in self.instructions:
            if instruction.name == name:
                return instruction
        raise ValueError(f"{self.name} has no %{name}: the text was cut. Give the whole module.")

    def root(self) -> Instruction:
        """The instruction whose value the computation returns."""
        for instruction in self.instructions:
            if instruction.is_root:
                return instruction
        raise ValueError(f"{self.name} has no ROOT: the text was cut. Give the whole module.")


@dataclass(frozen=True)
class Module:
    """A compiled program of one slice."""

    computations: dict[str, Computation]
    entry: Computation

    def computation(self, name: str) -> Computation:
        """The computation of that name. Raises ValueError when the text does not hold it."""
        if name not in self.computations:
            raise ValueError(f"%{name} is called but not in the text. Give the whole module.")
        return self.computations[name]

    def reached(self) -> Iterator[tuple[Computation, Instruction]]:
        """Every instruction that ENTRY reaches."""
        seen, waiting = {self.entry.name}, [self.entry]
        while waiting:
            computation = waiting.pop()
            for instruction in computation.instructions:
                yield computation, instruction
                for name in instruction.called():
                    if name not in seen:
                        seen.add(name)
                        waiting.append(self.computation(name))


def read(text: str) -> Module:
    """The module of `compiled.as_text()`.

    Raises ValueError for a text without a schedule or an ENTRY, and for a line it cannot read.
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
    if match is None:
        raise ValueError(f"cannot read this line as an HLO instruction: {line.strip()[:80]!r}")
    root, name, rest = match.groups()
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
    """Index of the parenthesis that closes the one at `start`."""
    depth = 0
    for token in re.finditer(r'"(?:[^"\\]|\\.)*"|[()]', text[start:]):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if depth == 0:
            return start + token.start()
    raise ValueError(f"a parenthesis is never closed: {text[:80]!r}")
