"""Show one or two periods of a run's schedule: sends, chunks, applies, and bytes of inner steps.

Letters are as in diloco/schedule.py: H inner steps in a period, P fragments, overlap tau, inner
step t.
"""

import itertools
import math
from typing import Any

import numpy as np

from maxdiloco.diloco.schedule import REDUCE_SCATTER, Schedule, offsets
from maxdiloco.output import amount
from maxdiloco.report.run_data import RunData

# The keys of the schedule, besides enable_diloco and enable_streaming_diloco.
KEYS = (
    "diloco_sync_period", "num_diloco_fragments", "num_communication_overlapping_steps",
    "diloco_round_overlap",
)  # fmt: skip
BYTES = "dcn/bytes_sent"
COMMITTED = "islands/committed_tokens"
WAITED = "dcn/waited_s"  # only of the host transport
TWO_PERIODS = 60  # longest H of which two periods are legible on a phone [inner steps]
MAX_STEPS = 5000  # longest period that is drawn; a screen has fewer pixels [inner steps]
# A mean over whole periods that log_period divides is exact. A panel would show no change with a
# longer window, so beyond this many periods the mean is approximate.
MAX_PERIODS = 10


def is_island(run: RunData) -> bool:
    """Tell whether a run is an island; all islands of a log share the outer parameters."""
    return bool(np.isfinite(run.column(COMMITTED)).any())


def schedule_of(run: RunData) -> Schedule | None:
    """Return the schedule of a DiLoCo run; None for data parallelism or an unknown configuration.

    Raises:
      TypeError, ValueError: the configuration is not valid for a schedule.
    """
    config = run.config
    if config is None or not config["enable_diloco"]:
        return None
    H, tau = config["diloco_sync_period"], config["num_communication_overlapping_steps"]
    P = config["num_diloco_fragments"] if config["enable_streaming_diloco"] else 1
    return Schedule(H, tau, offsets(P, H), config["diloco_round_overlap"])


def describe(run: RunData) -> str:
    """Describe the mode of a run with a known configuration in a few words."""
    schedule = schedule_of(run)
    if schedule is None:
        return "data parallelism"
    if is_island(run):
        return f"islands, P {schedule.P}, {run.config['diloco_exchange_dtype']}"
    name = "streaming, " if run.config["enable_streaming_diloco"] else ""
    overlap = f"tau {schedule.tau}" if schedule.round_overlap == "none" else schedule.round_overlap
    wire = run.config["diloco_exchange_dtype"]
    collective = ", reduce-scatter" if _reduce_scatters(run) else ""
    return f"DiLoCo, {name}H {schedule.H}, P {schedule.P}, {overlap}, {wire}{collective}"


def build(run: RunData) -> dict[str, Any] | str:
    """Build the timeline that timeline.js draws, or a sentence on why there is none.

    Returns:
      fragments: P. steps: the first and the last one. bytes: sent by a replica in each step.
      exchanges: [fragment, step that sends it, step that applies it, steps that carry chunks].
      caption: a sentence on the schedule.
    """
    if run.config is None:
        return "no configuration, no timeline"
    means = mean_bytes(run)
    means = means[np.isfinite(means)]
    mean = float(means[-1]) if len(means) else 0.0
    schedule = schedule_of(run)
    if schedule is None:
        return f"data parallelism: every step sends {amount(mean)} per slice"
    if is_island(run):
        return "an island sends by the clock, not by the step: see the panels of the islands"
    H = schedule.H
    # From the last session with this period.
    recorded = [sent for event in run.history if len(sent := event.get("bytes_sent", [])) == H]
    sent = recorded[-1] if recorded else [0.0] * H
    if run.num_replicas == 1 and not mean and not any(sent):
        return f"one replica sends nothing; its outer parameters move every H = {H:,} inner steps"
    if H > MAX_STEPS:
        return f"a period of H = {H:,} inner steps is longer than the {MAX_STEPS:,} drawn here"
    return _build(run, schedule, sent)


def _build(run: RunData, schedule: Schedule, sent_in_period: list[float]) -> dict[str, Any]:
    H = schedule.H
    # From the third period on all exchanges are under way, including delayed and eager ones.
    first = 2 * H + 1
    steps = range(first, first + (2 * H if H <= TWO_PERIODS else H))

    def sends(t: int) -> float:
        return sent_in_period[(t - 1) % H]

    exchanges = []
    for t in range(first - schedule.lag, steps[-1] + 1):
        for send in schedule.sends(t):
            possible = range(t + 1, t + 1 + schedule.max_chunks)
            if _reduce_scatters(run):
                # A step may be left out between the parts and their means. With the host transport
                # a step with a send carries the new fragment, not a chunk of this one.
                chunks = [c for c in possible if sends(c)]
                if WAITED in run.columns:
                    chunks = [c for c in chunks if not schedule.sends(c)]
            else:
                # None with the host transport, which sends a fragment in the step of its send.
                chunks = list(itertools.takewhile(sends, possible))
            drawn = [c for c in chunks if c in steps]
            exchanges.append([send.fragment, t, t + schedule.lag, drawn])
    return {
        "fragments": schedule.P,
        "steps": [first, steps[-1]],
        "exchanges": exchanges,
        "bytes": [round(sends(t)) for t in steps],
        "caption": _caption(schedule, any(sent_in_period)),
    }


def _caption(schedule: Schedule, has_bytes: bool) -> str:
    if schedule.round_overlap != "none":
        overlap = f"an exchange has a whole period ({schedule.round_overlap})"
    elif schedule.tau:
        overlap = f"an exchange has {schedule.tau} inner steps"
    else:
        overlap = "training waits for each exchange (tau 0)"
    rest = "" if has_bytes else "; no bytes are recorded"
    fragments = f"P = {schedule.P} fragment{'s' * (schedule.P > 1)}"
    return f"H = {schedule.H} inner steps, {fragments}; {overlap}{rest}"


def _reduce_scatters(run: RunData) -> bool:
    """Read the collective from the last session, which has the value of 'auto', or from the key."""
    chosen = [event["reduce_scatter"] for event in run.history if "reduce_scatter" in event]
    return chosen[-1] if chosen else run.config["diloco_collective"] == REDUCE_SCATTER


def mean_bytes(run: RunData) -> np.ndarray:
    """Average dcn/bytes_sent over whole periods.

    The value of a row is a mean since the previous row. The number of exchanges in it varies, as
    log_period and H differ, which would draw a sawtooth.

    Returns:
      [N] bytes per step. Each value is the mean of the whole periods up to its row. Before the
      first whole period it is the mean so far.
    """
    values = run.column(BYTES)
    rows = np.flatnonzero(np.isfinite(values))
    schedule = schedule_of(run)
    if schedule is None or len(rows) < 2:
        return values
    steps = run.steps[rows]
    interval = int(np.median(np.diff(steps)))
    window = math.lcm(schedule.H, interval)
    if window > MAX_PERIODS * max(schedule.H, interval):
        window = schedule.H * -(-MAX_PERIODS * interval // schedule.H)
    # The rows may continue the rows of another file, and another trainer may begin at step 0.
    begin = min(max(0, steps[0] - interval), steps[0] - 1)
    ends = np.concatenate([[begin], steps])
    sums = np.concatenate([[0.0], np.cumsum(values[rows] * np.diff(ends))])
    window_begins = np.maximum(steps - window, begin)
    means = values.copy()
    means[rows] = (sums[1:] - np.interp(window_begins, ends, sums)) / (steps - window_begins)
    return means
