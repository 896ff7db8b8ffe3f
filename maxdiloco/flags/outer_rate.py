"""What diloco_outer_lr=-1 and diloco_outer_momentum=-1 stand for."""

from collections.abc import Mapping
from typing import Any

AUTO = -1.0
# The best of a grid for DiLoCo at H of 10, 30 and 100, streaming, eager and Muon alike
# (benchmarks/README.md, what a mode costs in loss), and MuLoCo's (arXiv 2505.23725).
RATE, MOMENTUM = 0.7, 0.6
ADAM_B1 = 0.9  # optax
DELAYED_RATE = 0.4  # the same table: 0.7 all but diverges; arXiv 2502.12996 Tab. 2 lowers it too
# The mean of more replicas is shorter, as their gradients differ; rda keeps the norm. The same
# table has it at 4 and 8 replicas, arXiv 2503.09799 Fig. 7 a higher rate at 8, too. Not for eager,
# which was measured with two alone, where 0.98 was 4 % of loss worse than 0.7.
MANY, RATE_OF_MANY = 4, 1.0


def momentum(values: Mapping[str, Any]) -> float:
    """The outer momentum of a run. values: of all keys."""
    given = values["diloco_outer_momentum"]
    if given != AUTO or not values["enable_diloco"]:
        return given
    return ADAM_B1 if values["diloco_outer_optimizer"] == "adam" else MOMENTUM


def rate(values: Mapping[str, Any], num_replicas: int) -> float:
    """The outer learning rate of a run of so many replicas. values: of all keys."""
    given = values["diloco_outer_lr"]
    if given != AUTO or not values["enable_diloco"]:
        return given
    overlap = values["diloco_outer_overlap"]
    if overlap == "delayed":
        return DELAYED_RATE
    of_mean = overlap == "none" and values["diloco_merge"] == "mean"
    return RATE_OF_MANY if of_mean and num_replicas >= MANY else RATE
