"""Short runs: symptoms made on purpose, one thing changed in each, and a first comparison."""

import pathlib
import sysconfig
from collections.abc import Mapping
from typing import Any, NamedTuple

from benchmarks.learning.modes import ALPHA, FOUR_BITS, OVERLAP, SCALES, STREAMING, TAU

STEPS, H = 200, 20
INNER_RATE = 8e-3  # the best of quality.py's table on data parallelism
LIBRARY = pathlib.Path(sysconfig.get_path("stdlib"))
# Code beside tables of codes: two texts that have little in common, in every Python.
TWO_TEXTS = [{"path": str(LIBRARY / name), "name": name} for name in ("asyncio", "encodings")]
RATE, MOMENTUM, PERIOD = "diloco_outer_lr", "diloco_outer_momentum", "diloco_sync_period"
SCALE = SCALES["cpu"]
BASE: dict[str, Any] = dict(SCALE.keys) | {
    "learning_rate": INNER_RATE,
    "per_device_batch_size": SCALE.batch // 2,
    "eval_steps": 16,
    "log_period": H,
    "steps": STEPS,
    PERIOD: H,
    RATE: 0.4,
    MOMENTUM: 0.9,
}
DATA_PARALLEL: dict[str, Any] = {
    "enable_diloco": False,
    "num_diloco_replicas": -1,
    "per_device_batch_size": SCALE.batch,
}


class Case(NamedTuple):
    """A run. keys: of the trainer, above BASE. beside: the case that it is drawn with."""

    name: str
    keys: Mapping[str, Any]
    beside: str = "healthy"
    metric: str = ""


# 25 is no multiple of H: most evaluations fall between two exchanges, where replicas differ.
OFTEN = {"eval_interval": 25, "eval_steps": 8}
WATCHED = OFTEN | {"eval_replicas": "each"}
RATIO, COSINE, DRIFT = (
    "diloco/outer_update_ratio",
    "diloco/outer_grad_cosine",
    "diloco/drift",
)
SYMPTOMS = (
    Case("data parallel", DATA_PARALLEL | OFTEN),
    Case("healthy", WATCHED),
    Case("outer rate too high", WATCHED | {RATE: 2.0}, metric=RATIO),
    Case("period too long", WATCHED | {PERIOD: 100, RATE: 0.7}, metric=DRIFT),
    Case("one text for all replicas", WATCHED | {"dataset_mixture": TWO_TEXTS}),
    Case(
        "another text for each replica",
        WATCHED | {"dataset_mixture": TWO_TEXTS, "dataset_per_replica": True},
        beside="one text for all replicas",
        metric=COSINE,
    ),
    Case("delayed, with momentum", WATCHED | {OVERLAP: "delayed"}, metric=COSINE),
)


def _short(name: str, rate: float, momentum: float, steps: int = STEPS, **keys: Any) -> Case:
    return Case(
        f"{name}, {steps} steps, outer rate {rate:g}, momentum {momentum:g}",
        {RATE: rate, MOMENTUM: momentum, "steps": steps, "eval_interval": steps // 4} | keys,
    )


_STREAMING = STREAMING | {"num_diloco_fragments": 5, TAU: 1} | FOUR_BITS
_RATES = ((0.7, 0.9), (0.4, 0.9), (0.7, 0.6), (1.0, 0.0))  # outer rate, momentum
_EAGER = {OVERLAP: "eager"} | FOUR_BITS
FIRST_HOUR = (
    Case("data parallel, 200 steps", DATA_PARALLEL | {"eval_interval": 50}),
    *(_short("DiLoCo", *each) for each in _RATES),
    *(_short("DiLoCo, H=10", *each, **{PERIOD: 10}) for each in ((0.7, 0.9), (0.7, 0.6))),
    _short("streaming, 4 bits", 0.7, 0.9, **_STREAMING),
    _short("streaming, 4 bits, alpha=0.5", 0.4, 0.9, **_STREAMING, **{ALPHA: 0.5}),
    *(_short("eager, 4 bits", *each, **_EAGER) for each in _RATES),
    Case("data parallel, 800 steps", DATA_PARALLEL | {"eval_interval": 200, "steps": 800}),
    _short("DiLoCo", 0.4, 0.9, 800),
    _short("eager, 4 bits", 0.4, 0.9, 800, **_EAGER),
)
GROUPS: dict[str, tuple[Case, ...]] = {"symptoms": SYMPTOMS, "first_hour": FIRST_HOUR}
