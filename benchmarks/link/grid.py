"""Define the measurement and the duration of a row, and the named grids of rows."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.link import figures

WARM_UP = 2  # periods before the window: in the second one the first exchanges are applied
LEAST_STEPS = 4  # of data parallelism
START_S = 12.0  # of a row around its steps, until one was measured; two cores, programs compiled
STEP_MS = 20.0  # of a step with a fast device, until it was measured; the same machine
REAL_STEP_MS = 190.0  # of a step with real compute, also until it was measured
WIDTH = {"": 4.0, "float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "float4_e3m0": 0.5}  # [bytes]

HIDDEN = "overlapped:float4_e3m0:host,eager:float4_e3m0:host"
EXPOSED = "data_parallel,diloco:float32:host"
# Name of a grid: {folder of a part: its arguments}. The thinnest rate is the first: right after the
# plain step that its rows are compared with.
GRIDS = {
    "published": {
        "fast_device": [
            "fast_device_ms=180",
            "rates=5,20,unlimited",
            f"lines={EXPOSED},streaming:float32:host,overlapped:float32:host,{HIDDEN},"
            f"{HIDDEN.replace('host', 'program')}",
            "other_periods=2",
            "row_seconds=25",
            "congestion=reno",
        ],
        "real": [
            "rates=5",
            f"lines={EXPOSED},{HIDDEN}",
            "diloco_sync_period=100",
            "periods=2",
            "row_seconds=45",
            "congestion=reno",
        ],
    },
    # All-gather sends four times reduce-scatter's bytes: more than the link has in a period.
    "reduce_scatter": {
        "reduce_scatter": [
            "hosts=8",
            "rates=20,unlimited",
            "lines=overlapped:int8:host,reduce_scatter:int8:host",
            "fast_device_ms=400",
            "override_model_config=true",
            "base_num_decoder_layers=12",
            "max_target_length=16",
            "diloco_sync_period=8",
            "num_diloco_fragments=4",
            "num_communication_overlapping_steps=2",
            "log_period=8",
            "periods=4",
            "other_periods=2",
            "row_seconds=40",
            "congestion=reno",
        ],
    },
}


class Row(NamedTuple):
    """The measurement of one row. rate: as on the command line; wire, carrier: "" where none.

    turn: 1 for the second measurement of the same, else 0.
    """

    mode: str
    wire: str = ""
    carrier: str = ""
    rate: str = figures.UNLIMITED
    turn: int = 0

    def name(self) -> str:
        """Name of the row's folder."""
        again = "again" if self.turn else ""
        return "-".join(filter(None, [self.mode, self.wire, self.carrier, self.rate, again]))


class Window(NamedTuple):
    """Which inner steps are measured: those after `first` up to `last`, of `steps` in all."""

    first: int
    last: int
    steps: int


def expected_step_ms(row: Row, setup: Mapping[str, Any], plain: Mapping[str, Any] | None) -> float:
    """About how long a step of a row will take, by arithmetic, with fragments of one size.

    plain: the measurement of the plain step; None before that.
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
    width = WIDTH[row.wire]
    if row.mode == "reduce_scatter":  # a part each way
        width = (width + max(width, WIDTH["int8"])) / setup["hosts"]
    size = int(parameters * width / P)
    like = row._asdict() | {"parameters": parameters, "fragment_bytes": [size] * P}
    return plain_ms + figures.predicted_ms(like, setup, plain_ms)


def window(row: Row, setup: Mapping[str, Any], plain: Mapping[str, Any] | None) -> Window:
    """Whole periods after the warm-up; of data parallelism about as many seconds, in steps.

    At the lowest rate and for the plain step `periods`, else `other_periods`; as many of them as
    row_seconds have room for, by arithmetic, and at least one. plain: as above.
    """
    H = int(setup["keys"]["diloco_sync_period"])
    step_s = expected_step_ms(row, setup, plain) / 1000
    whole = row.mode == figures.PLAIN or row.rate == setup["thinnest"]
    periods = setup["periods" if whole else "other_periods"]
    if row.mode == figures.DATA_PARALLEL:
        plain_s = expected_step_ms(Row(figures.PLAIN), setup, plain) / 1000
        seconds = min(setup["row_seconds"], periods * H * plain_s)
        before, count = 2, min(periods * H, max(LEAST_STEPS, round(seconds / step_s)))
    else:
        at_once = row.mode in ("diloco", "streaming")
        before = H * (1 if at_once else WARM_UP)
        count = H * max(1, min(periods, int(setup["row_seconds"] / (H * step_s))))
    return Window(before, before + count, before + count + 1)


def expected_s(row: Row, setup: Mapping[str, Any], done: Sequence[Mapping[str, Any]]) -> float:
    """About how long a row takes from its start to its end. done: the rows measured before it."""
    plain = next((one for one in done if one["mode"] == figures.PLAIN), None)
    starts = sorted(one["start_s"] for one in done)
    start_s = starts[len(starts) // 2] if starts else START_S
    steps = window(row, setup, plain).steps
    return start_s + steps * expected_step_ms(row, setup, plain) / 1000
