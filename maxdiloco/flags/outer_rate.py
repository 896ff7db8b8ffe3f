"""What diloco_outer_lr=-1 and diloco_outer_momentum=-1 stand for."""

from collections.abc import Mapping
from typing import Any

AUTO = -1.0
# The best of a grid for DiLoCo at H of 10, 30 and 100, streaming, eager and Muon alike
# (benchmarks/README.md, what a mode costs in loss), and MuLoCo's (arXiv 2505.23725).
RATE, MOMENTUM = 0.7, 0.6
ADAM_B1 = 0.9  # optax
DELAYED_RATE = 0.4  # the same table: 0.7 all but diverges; arXiv 2502.12996 Tab. 2 lowers it too


def chosen(values: Mapping[str, Any]) -> dict[str, float]:
    """The values of the two keys where they are AUTO; none in data parallelism.

    values: of all keys.
    """
    if not values["enable_diloco"]:
        return {}
    late = values["diloco_outer_overlap"] == "delayed"
    adam = values["diloco_outer_optimizer"] == "adam"
    auto = {
        "diloco_outer_lr": DELAYED_RATE if late else RATE,
        "diloco_outer_momentum": ADAM_B1 if adam else MOMENTUM,
    }
    return {name: value for name, value in auto.items() if values[name] == AUTO}
