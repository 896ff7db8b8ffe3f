"""One or two periods of a run's schedule: sends, chunks, applies, and bytes of each inner step.

Letters as in diloco/schedule.py: H inner steps in a period, P fragments, tau, t the inner step.
"""

import itertools
import math
from typing import Any, NamedTuple

import numpy as np

from maxdiloco.diloco.schedule import INNER_EXCHANGE, SYNCHRONISE, Schedule, offsets
from maxdiloco.page.run import Run

TWO_PERIODS = 60  # longest H of which two periods are drawn [inner steps]; our choice
FEW_PERIODS = 10  # in which log_period and H should meet, for exact means; our choice
MOST_STEPS = 5000  # longest period that is drawn [inner steps]; our choice


class Exchange(NamedTuple):
    """A fragment on its way. send, apply: inner steps after which it leaves and is used.

    chunks: the inner steps that carry a part of it.
    """

    fragment: int
    send: int
    apply: int
    chunks: list[int]


class Timeline(NamedTuple):
    """What the page draws of a schedule. steps: the first and last inner step.

    bytes: of each of them, sent by a replica (without DiLoCo by a slice). told: whether they are
    those of the run, not the run's mean in equal parts. caption: in words.
    """

    fragments: int
    steps: tuple[int, int]
    exchanges: list[Exchange]
    bytes: list[float]
    told: bool
    caption: str


def of_run(run: Run) -> Timeline | str:
    """The timeline of a run, or a line that says why there is none."""
    if run.keys is None:
        return "no configuration, no timeline"
    mean = over_whole_periods(run)
    finite = mean[np.isfinite(mean)]
    mean_bytes = float(finite[-1]) if len(finite) else 0.0
    schedule = schedule_of(run.keys)
    if schedule is None:
        return f"data parallelism: every step sends {amount(mean_bytes)} a slice"
    told = _told(run, schedule.H)
    if run.num_replicas == 1 and not mean_bytes and not any(told):
        return f"one replica sends nothing; its theta moves every H = {schedule.H:,} inner steps"
    if schedule.H > MOST_STEPS:
        return f"a period of H = {schedule.H:,} steps is longer than the {MOST_STEPS:,} drawn here"
    return _drawn(schedule, told, mean_bytes)


def over_whole_periods(run: Run) -> np.ndarray:
    """dcn/bytes_sent [N], each value the mean of whole periods up to its row [bytes a step].

    A row's own mean is of the steps since the row before, which hold now more and now fewer
    exchanges: a sawtooth of log_period against H. Before a whole period it is the mean so far.
    """
    values_N = run.column("dcn/bytes_sent")
    at = np.flatnonzero(np.isfinite(values_N))
    schedule = run.keys and schedule_of(run.keys)
    if not schedule or len(at) < 2:
        return values_N
    steps = run.steps_N[at]
    each = int(np.median(np.diff(steps)))  # steps from row to row
    window = math.lcm(schedule.H, each)
    if window > FEW_PERIODS * max(schedule.H, each):
        window = schedule.H * -(-FEW_PERIODS * each // schedule.H)
    begin = max(0, steps[0] - each)  # a file may go on from another one
    ends = np.concatenate([[begin], steps])
    sums = np.concatenate([[0.0], np.cumsum(values_N[at] * np.diff(ends))])
    from_ = np.maximum(steps - window, begin)
    means_N = values_N.copy()
    means_N[at] = (sums[1:] - np.interp(from_, ends, sums)) / (steps - from_)
    return means_N


def schedule_of(config: dict[str, Any]) -> Schedule | None:
    """The schedule of a DiLoCo run; None for data parallelism."""
    if not config["enable_diloco"]:
        return None
    H = config["diloco_sync_period"]
    P = config["num_diloco_fragments"] if config["enable_streaming_diloco"] else 1
    tau = config["num_communication_overlapping_steps"]
    return Schedule(H, tau, offsets(P, H), config["diloco_outer_overlap"])


def describe(config: dict[str, Any]) -> str:
    """The mode of a run in a few words."""
    schedule = schedule_of(config)
    if schedule is None:
        return "data parallelism"
    name = "streaming, " if config["enable_streaming_diloco"] else ""
    overlap = f"tau {schedule.tau}" if schedule.overlap == "none" else schedule.overlap
    return (
        f"DiLoCo, {name}H {schedule.H}, P {schedule.P}, {overlap}, "
        f"{config['diloco_exchange_dtype']}"
    )


def amount(number: float) -> str:
    """1234567.0 -> '1.23 MB'."""
    if not number:
        return "0 B"
    power = min(max(int(math.log10(abs(number)) // 3), 0), 5)
    return f"{number / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB', 'PB')[power]}"


def _told(run: Run, H: int) -> list[float]:
    """Bytes of each step of a period as the last start wrote them; [] where none did."""
    for event in reversed(run.history):
        told = event.get("bytes_sent", [])
        if len(told) == H:
            return told
    return []


def _drawn(schedule: Schedule, told: list[float], mean: float) -> Timeline:
    H = schedule.H
    # From the third period on all exchanges are under way, also those of delayed and eager.
    first = 2 * H + 1
    steps = range(first, first + (2 * H if H <= TWO_PERIODS else H))
    sent = [told[(t - 1) % H] for t in steps] if told else _estimated(schedule, mean, steps)
    exchanges = []
    for t in range(first - schedule.lag, steps[-1] + 1):
        for send in schedule.sends(t):
            carried = range(t + 1, t + 1 + schedule.max_chunks)
            # None through host memory: there all of a fragment leaves in the step of its send.
            full = itertools.takewhile(lambda c: sent[(c - first) % len(sent)], carried)
            chunks = [c for c in full if c in steps]
            exchanges.append(Exchange(send.fragment, t, t + schedule.lag, chunks))
    return Timeline(schedule.P, (first, steps[-1]), exchanges, sent, bool(told), _caption(schedule))


def _estimated(schedule: Schedule, mean: float, steps: range) -> list[float]:
    """The mean bytes of a step in equal parts on the steps that send, as compiled programs do."""
    sends = [
        any(action.program in (INNER_EXCHANGE, SYNCHRONISE) for action in schedule.actions(t))
        for t in steps
    ]
    return [mean * len(sends) / sum(sends) if each else 0.0 for each in sends]


def _caption(schedule: Schedule) -> str:
    how = f"an exchange has {schedule.tau} inner steps"
    if schedule.overlap != "none":
        how = f"an exchange has a whole period ({schedule.overlap})"
    elif not schedule.tau:
        how = "training waits for each exchange (tau 0)"
    return f"H = {schedule.H} inner steps, P = {schedule.P} fragments; {how}"
