"""Figures of a storm: steps compared with median steps, and pauses of members not hit.

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
    """A fault that is over. name: the member that it hit; "": none."""

    kind: str
    name: str
    begin: float
    end: float


Times = Mapping[str, Sequence[Sequence[float]]]  # by member, of each start, of each inner step


class Outcome(NamedTuple):
    """The course of a storm.

    Attributes:
      times: when each inner step began.
      stopped_s: by member, how long it was stopped.
      faults: in their order.
      begun, end: of the storm.
      ended: members that exited by themselves, and why.
      absent: members that had not trained again at the end.
      codes: by member, the exit code of its last start after SIGTERM.
      sent: bytes that all hosts sent, the server's too; None without hosts.
    """

    times: Times
    stopped_s: Mapping[str, float]
    faults: Sequence[Fault]
    begun: float
    end: float
    ended: Sequence[str]
    absent: Sequence[str]
    codes: Mapping[str, int]
    sent: float | None


class Figures(NamedTuple):
    """The figures of a storm.

    Attributes:
      trained: tokens of all inner steps, also of those that were lost.
      committed: tokens that count for the model.
      of_live: committed, as a share of the tokens of the members' median steps while they live.
      of_wall: the same from a member's first step to the end.
      pauses: by kind of fault, the longest pause of a member that was not hit [s].
      sent: bytes for each committed token; None without hosts.
    """

    trained: int
    committed: int
    of_live: float
    of_wall: float
    pauses: Mapping[str, float]
    sent: float | None


def figures(outcome: Outcome, tokens: int, committed: int) -> Figures:
    """Summarise a storm. tokens: of a step. committed: tokens that count for the model."""
    end = max(t for all_ in outcome.times.values() for each in all_ for t in each)
    steps = zip(*steps_by_member(outcome.times, outcome.stopped_s, end), strict=True)
    trained, live, wall = (tokens * n for n in map(sum, steps))
    pauses = longest_pauses(outcome.times, outcome.faults, outcome.begun)
    sent = None if outcome.sent is None else outcome.sent / max(committed, 1)
    return Figures(trained, committed, committed / live, committed / wall, pauses, sent)


def times_of(starts: Mapping[str, Sequence[Start]]) -> Times:
    """Return when each start began its inner steps."""
    return {name: [one.times() for one in all_] for name, all_ in starts.items()}


def steps_by_member(
    times: Times, stopped_s: Mapping[str, float], end: float
) -> Iterator[tuple[float, float, float]]:
    """Yield for each member its steps, and the steps that its median step would give.

    The median step counts while the member lives, and from its first step to the end of all.
    stopped_s: by member, how long it was stopped, which is not living.
    """
    for name, all_ in times.items():
        lived = [each for each in all_ if len(each) > 1]
        step_s = statistics.median(b - a for each in lived for a, b in itertools.pairwise(each))
        living = sum(each[-1] - each[0] for each in lived) - stopped_s[name]
        yield sum(map(len, all_)), living / step_s, (end - lived[0][0]) / step_s


def longest_pauses(times: Times, faults: Sequence[Fault], begun: float) -> dict[str, float]:
    """Return the longest time between two inner steps [s] of members not hit, by kind of fault.

    A pause belongs to the fault during which it begins, else to the first fault within it, else to
    the last fault before it. It does not count if the last fault before it or a fault within it hit
    its member, or if it began before `begun`.
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
    """Return the pauses as text, for a report."""
    return ", ".join(f"{kind} {seconds:.1f} s" for kind, seconds in sorted(longest.items()))
