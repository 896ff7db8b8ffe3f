"""Figures of a storm: steps beside those of a median step, and pauses of the boxes not hit.

Times are of time.monotonic() [s]: on Linux one clock for all processes of a machine.
"""

import itertools
import pathlib
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

NO_FAULT = "no fault"


class Start(NamedTuple):
    """A start of a process: the process, and the files with its output and its steps."""

    process: subprocess.Popen
    log: pathlib.Path
    trace: pathlib.Path

    def times(self) -> list[float]:
        """When each inner step of this start began [s]. The file is there before the first."""
        text = self.trace.read_text() if self.trace.exists() else ""
        return [float(line) for line in text.split()]


class Fault(NamedTuple):
    """A fault that is over. name: the box that it hit; "": none."""

    kind: str
    name: str
    begin: float
    end: float


Times = Mapping[str, Sequence[Sequence[float]]]  # by box, of each start, of each inner step


def times_of(starts: Mapping[str, Sequence[Start]]) -> Times:
    """What the starts have traced."""
    return {name: [one.times() for one in all_] for name, all_ in starts.items()}


def given(
    times: Times, frozen_s: Mapping[str, float], end: float
) -> Iterator[tuple[float, float, float]]:
    """Of each box: its steps, and those of its median step while it lives, and from its first one
    to the end of all. frozen_s: so long it stood still, which is no life."""
    for name, all_ in times.items():
        lived = [each for each in all_ if len(each) > 1]
        step_s = statistics.median(b - a for each in lived for a, b in itertools.pairwise(each))
        living = sum(each[-1] - each[0] for each in lived) - frozen_s[name]
        yield sum(map(len, all_)), living / step_s, (end - lived[0][0]) / step_s


def longest_pauses(times: Times, faults: Sequence[Fault], begun: float) -> dict[str, float]:
    """The longest time between two inner steps [s], by kind of fault, of boxes that were not hit.

    A pause belongs to the fault that goes on when it begins; else to the first one within it; else
    to the last one before. If the last one before or any within hit its box, it does not count.
    begun: earlier pauses do not count.
    """
    longest: dict[str, float] = {}
    for name, all_ in times.items():
        for a, b in itertools.pairwise(sorted(itertools.chain(*all_))):
            before = [fault for fault in faults if fault.begin <= a][-1:]
            within = [fault for fault in faults if a < fault.begin <= b]
            if a < begun or any(fault.name == name for fault in before + within):
                continue
            running = [fault for fault in before if a < fault.end]
            cause = (running or within or before or [Fault(NO_FAULT, "", a, a)])[0]
            longest[cause.kind] = max(longest.get(cause.kind, 0.0), b - a)
    return longest


def pauses_text(longest: Mapping[str, float]) -> str:
    """For the report."""
    return ", ".join(f"{kind} {seconds:.1f} s" for kind, seconds in sorted(longest.items()))
