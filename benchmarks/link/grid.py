"""Which rows a run measures, in which order, for how long; and the grids that have a name."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.link import figures

WARM_UP = 2  # periods before the window: in the second one the first exchanges are applied
LEAST_STEPS = 4  # of data parallelism
START_S = 12.0  # of a row around its steps, until one was measured; two cores, programs compiled
STEP_MS = 20.0  # of a step beside a fast device, until it was measured; the same machine
REAL_STEP_MS = 190.0  # of a step with real compute, likewise
WIDTH = {"": 4.0, "float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "float4_e3m0": 0.5}  # [bytes]

HIDDEN = "overlapped:float4_e3m0:host,eager:float4_e3m0:host"
EXPOSED = "data_parallel,diloco:float32:host"
# Name of a grid: {folder of a part: its arguments}. The thinnest rate is the first, so that the
# plain step is measured right before and after the rows that it says most about.
GRIDS = {
    "published": {
        "fast_device": [
            "fast_device_ms=180",
            "rates=5,10,20,100,unlimited",
            f"lines={EXPOSED},streaming:float32:host,overlapped:float32:host,{HIDDEN},"
            f"{HIDDEN.replace('host', 'program')}",
            "other_periods=2",
            "row_seconds=25",
            "congestion=reno",
        ],
        "real": [
            "rates=5,20",
            f"lines={EXPOSED},{HIDDEN}",
            "other_periods=2",
            "row_seconds=25",
            "congestion=reno",
        ],
    }
}


class Row(NamedTuple):
    """What one row measures. rate: as on the command line; wire, carrier: "" where none.

    turn: how often the same was measured before.
    """

    mode: str
    wire: str = ""
    carrier: str = ""
    rate: str = figures.UNLIMITED
    turn: int = 0

    def name(self) -> str:
        """Name of the row's folder."""
        again = f"again{self.turn}" if self.turn else ""
        return "-".join(filter(None, [self.mode, self.wire, self.carrier, self.rate, again]))


class Window(NamedTuple):
    """Which inner steps are measured: those after `first` up to `last`, of `steps` in all."""

    first: int
    last: int
    steps: int


def ordered(
    lines: Sequence[tuple[str, str, str]], rates: Sequence[str], *, periods: int, other_periods: int
) -> dict[Row, int]:
    """The rows and the periods to measure of each: other_periods where the link is not thinnest.

    lines: (mode, wire, carrier) of each. The plain step comes first, after the first rate and last:
    how far measurements of one thing differ.
    """
    thinnest = min(rates, key=lambda rate: figures.mbit({"rate": rate}))
    rows = {Row(figures.PLAIN): periods}
    for k, rate in enumerate(rates):
        for line in lines:
            rows[Row(*line, rate)] = periods if rate == thinnest else other_periods
        if k in (0, len(rates) - 1):
            rows[Row(figures.PLAIN, turn=1 + (k > 0))] = periods
    return rows


def expected_step_ms(
    row: Row, setup: Mapping[str, Any], plain: Mapping[str, Any] | None
) -> float:
    """About how long a step of a row will take, by arithmetic, with fragments of one size.

    plain: what was measured of the plain step; None before that.
    """
    keys = setup["keys"]
    fast_ms = setup["fast_device_ms"]
    guess = fast_ms + STEP_MS if fast_ms else REAL_STEP_MS
    plain_ms = plain["step_ms"] if plain else guess
    if row.mode == figures.PLAIN or figures.mbit(row._asdict()) == math.inf:
        return plain_ms
    parameters = plain["parameters"] if plain else 0
    streams = "enable_streaming_diloco" in figures.MODES[row.mode].keys
    P = int(keys["num_diloco_fragments"]) if streams else 1
    size = int(parameters * WIDTH[row.wire] / P)
    like = row._asdict() | {"parameters": parameters, "fragment_bytes": [size] * P}
    return plain_ms + figures.predicted_ms(like, setup, plain_ms)


def window(
    row: Row, setup: Mapping[str, Any], plain: Mapping[str, Any] | None, periods: int
) -> Window:
    """Whole periods after the warm-up; of data parallelism about as many seconds, in steps.

    As many as row_seconds have room for, by arithmetic, and at least one. plain: as above.
    """
    H = int(setup["keys"]["diloco_sync_period"])
    step_s = expected_step_ms(row, setup, plain) / 1000
    if row.mode == figures.DATA_PARALLEL:
        seconds = min(setup["row_seconds"], periods * H * plain["step_ms"] / 1000)
        before, count = 2, min(periods * H, max(LEAST_STEPS, round(seconds / step_s)))
    else:
        lag = figures.lag(row.mode, H=H, tau=int(setup["keys"][figures.TAU]))
        before = H * (WARM_UP if lag else 1)
        count = H * max(1, min(periods, int(setup["row_seconds"] / (H * step_s))))
    return Window(before, before + count, before + count + 1)


def expected_s(
    row: Row,
    setup: Mapping[str, Any],
    done: Sequence[Mapping[str, Any]],
    periods: int,
) -> float:
    """About how long a row takes from its start to its end. done: the rows measured before it."""
    plain = next((one for one in done if one["mode"] == figures.PLAIN), None)
    starts = sorted(one["start_s"] for one in done)
    start_s = starts[len(starts) // 2] if starts else START_S
    # Without a plain step only the row of the plain step can be laid out.
    like = plain or {"step_ms": expected_step_ms(row, setup, None), "parameters": 0}
    span = window(row, setup, like, periods)
    return start_s + span.steps * expected_step_ms(row, setup, plain) / 1000
