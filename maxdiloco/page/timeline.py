"""One or two periods of a run's schedule: sends, chunks, applies, and bytes of each inner step.

Letters as in diloco/schedule.py: H inner steps in a period, P fragments, tau, t the inner step.
"""

import itertools
import math
from typing import Any

import numpy as np

from maxdiloco.diloco.schedule import REDUCE_SCATTER, Schedule, offsets
from maxdiloco.page.run import Run
from maxdiloco.processes.output import amount

# Of the schedule, beside enable_diloco and enable_streaming_diloco.
KEYS = (
    "diloco_sync_period", "num_diloco_fragments", "num_communication_overlapping_steps",
    "diloco_round_overlap",
)  # fmt: skip
BYTES = "dcn/bytes_sent"
WAITED = "dcn/waited_s"  # of exchanges through host memory alone
TWO_PERIODS = 60  # longest H of which two periods are drawn [inner steps]; our choice
FEW_PERIODS = 10  # in which log_period and H should meet, for exact means; our choice
MOST_STEPS = 5000  # longest period that is drawn [inner steps]; our choice


def of_run(run: Run) -> dict[str, Any] | str:
    """The timeline of a run, as timeline.js draws it, or a line that says why there is none.

    fragments: P. steps: first and last. bytes: of each, sent by a replica, or 0. exchanges: lists
    of the fragment, the step that sends it, the step that applies it, the steps that carry parts.
    """
    if run.keys is None:
        return "no configuration, no timeline"
    means = over_whole_periods(run)
    means = means[np.isfinite(means)]
    mean_bytes = float(means[-1]) if len(means) else 0.0
    schedule = schedule_of(run)
    if schedule is None:
        return f"data parallelism: every step sends {amount(mean_bytes)} a slice"
    H = schedule.H
    # Of a period, by the last start that had this H.
    recorded = [each for event in run.history if len(each := event.get("bytes_sent", [])) == H]
    sent = recorded[-1] if recorded else [0.0] * H
    if run.num_replicas == 1 and not mean_bytes and not any(sent):
        return f"one replica sends nothing; its theta moves every H = {H:,} inner steps"
    if H > MOST_STEPS:
        return f"a period of H = {H:,} steps is longer than the {MOST_STEPS:,} drawn here"
    return _drawn(run, schedule, sent)


def over_whole_periods(run: Run) -> np.ndarray:
    """dcn/bytes_sent [N], each value the mean of whole periods up to its row [bytes a step].

    A row's own mean is of the steps since the row before, which hold now more and now fewer
    exchanges: a sawtooth of log_period against H. Before a whole period it is the mean so far.
    """
    values_N = run.column(BYTES)
    at = np.flatnonzero(np.isfinite(values_N))
    schedule = schedule_of(run)
    if schedule is None or len(at) < 2:
        return values_N
    steps = run.steps_N[at]
    each = int(np.median(np.diff(steps)))  # steps from row to row
    window = math.lcm(schedule.H, each)
    if window > FEW_PERIODS * max(schedule.H, each):
        window = schedule.H * -(-FEW_PERIODS * each // schedule.H)
    # A file may go on from another one, and one of another trainer may begin at step 0.
    begin = min(max(0, steps[0] - each), steps[0] - 1)
    ends = np.concatenate([[begin], steps])
    sums = np.concatenate([[0.0], np.cumsum(values_N[at] * np.diff(ends))])
    from_ = np.maximum(steps - window, begin)
    means_N = values_N.copy()
    means_N[at] = (sums[1:] - np.interp(from_, ends, sums)) / (steps - from_)
    return means_N


def schedule_of(run: Run) -> Schedule | None:
    """The schedule of a DiLoCo run; None for data parallelism and where the keys are unknown."""
    keys = run.keys
    if keys is None or not keys["enable_diloco"]:
        return None
    H, tau = keys["diloco_sync_period"], keys["num_communication_overlapping_steps"]
    P = keys["num_diloco_fragments"] if keys["enable_streaming_diloco"] else 1
    return Schedule(H, tau, offsets(P, H), keys["diloco_round_overlap"])


def describe(run: Run) -> str:
    """The mode of a run of known keys, in a few words."""
    schedule = schedule_of(run)
    if schedule is None:
        return "data parallelism"
    name = "streaming, " if run.keys["enable_streaming_diloco"] else ""
    overlap = f"tau {schedule.tau}" if schedule.round_overlap == "none" else schedule.round_overlap
    wire = run.keys["diloco_exchange_dtype"]
    wire += ", reduce-scatter" if _reduce_scatters(run) else ""
    return f"DiLoCo, {name}H {schedule.H}, P {schedule.P}, {overlap}, {wire}"


def _reduce_scatters(run: Run) -> bool:
    """Read the collective from the last start, which knows what 'auto' was, or from the key."""
    starts = [event["reduce_scatter"] for event in run.history if "reduce_scatter" in event]
    return starts[-1] if starts else run.keys["diloco_collective"] == REDUCE_SCATTER


def _drawn(run: Run, schedule: Schedule, sent_H: list[float]) -> dict[str, Any]:
    H = schedule.H
    # Reduce-scatter: a step may be left out between parts and means. In a step of a send through
    # host memory it is the new fragment that leaves.
    has_gaps, by_hosts = _reduce_scatters(run), WAITED in run.columns
    # From the third period on all exchanges are under way, also those of delayed and eager.
    first = 2 * H + 1
    steps = range(first, first + (2 * H if H <= TWO_PERIODS else H))
    sent = [round(sent_H[(t - 1) % H]) for t in steps]
    exchanges = []
    for t in range(first - schedule.lag, steps[-1] + 1):
        for send in schedule.sends(t):
            carried = range(t + 1, t + 1 + schedule.max_chunks)
            # None through host memory: there all of a fragment leaves in the step of its send.
            if has_gaps:
                full = [c for c in carried if sent_H[(c - 1) % H]]
                full = [c for c in full if not (by_hosts and schedule.sends(c))]
            else:
                full = itertools.takewhile(lambda c: sent_H[(c - 1) % H], carried)
            chunks = [c for c in full if c in steps]
            exchanges.append([send.fragment, t, t + schedule.lag, chunks])
    how = f"an exchange has {schedule.tau} inner steps"
    if schedule.round_overlap != "none":
        how = f"an exchange has a whole period ({schedule.round_overlap})"
    elif not schedule.tau:
        how = "training waits for each exchange (tau 0)"
    caption = f"H = {H} inner steps, P = {schedule.P} fragments; {how}"
    if not any(sent):
        caption += "; its bytes are not recorded"
    found = {"fragments": schedule.P, "steps": [first, steps[-1]], "exchanges": exchanges}
    return found | {"bytes": sent, "caption": caption}
