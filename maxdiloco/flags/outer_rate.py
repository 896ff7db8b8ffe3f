"""What diloco_outer_lr=-1 and diloco_outer_momentum=-1 stand for."""

from collections.abc import Mapping
from typing import Any

from maxdiloco.diloco import outer_rate

AUTO = -1.0
ADAM_B1 = 0.9  # optax


def momentum(values: Mapping[str, Any]) -> float:
    """The outer momentum of a run. values: of all keys."""
    given = values["diloco_outer_momentum"]
    if given != AUTO or not values["enable_diloco"]:
        return given
    return ADAM_B1 if values["diloco_outer_optimizer"] == "adam" else outer_rate.MOMENTUM


def rate(values: Mapping[str, Any], num_replicas: int) -> float:
    """The outer learning rate of a run of so many replicas. values: of all keys."""
    given = values["diloco_outer_lr"]
    if given != AUTO or not values["enable_diloco"]:
        return given
    overlap, merge = values["diloco_outer_overlap"], values["diloco_merge"]
    return outer_rate.rate(num_replicas, overlap=overlap, merge=merge)
