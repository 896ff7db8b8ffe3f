"""Outer learning rate and momentum where the user gives none, for the trainer and the library."""

# The best of a grid for DiLoCo at H of 10, 30 and 100, streaming, eager and Muon alike
# (docs/reference/results.md, loss by mode), and MuLoCo's (arXiv 2505.23725).
RATE, MOMENTUM = 0.7, 0.6
# Where the mean is a round late, or most of it: delayed, eager with four and more. The same table:
# 0.7 all but diverges; a direction in which replicas reach their optimum within a round is stable
# to 0.49 delayed, and eager to 0.68 with 4 and 0.57 with 8. arXiv 2502.12996 Tab. 2 lowers it too.
LATE_RATE = 0.4
# The mean of more replicas is shorter, as their gradients differ; rda keeps the norm. The same
# table has it at 4 and 8 replicas, arXiv 2503.09799 Fig. 7 a higher rate at 8, too.
MANY, RATE_OF_MANY = 4, 1.0


ADAM_B1 = 0.9  # optax's default


def momentum(outer_optimizer: str) -> float:
    """Return the momentum of an outer optimizer, one of outer.OPTIMIZERS; of Adam its b1."""
    return ADAM_B1 if outer_optimizer == "adam" else MOMENTUM


def rate(num_replicas: int, *, round_overlap: str, aggregation: str) -> float:
    """Return the outer learning rate for so many replicas.

    Args:
      num_replicas: M.
      round_overlap: one of schedule.ROUND_OVERLAPS.
      aggregation: one of outer.AGGREGATIONS.
    """
    if num_replicas >= MANY and round_overlap == "none" and aggregation == "mean":
        return RATE_OF_MANY
    is_late = round_overlap == "delayed" or (round_overlap == "eager" and num_replicas >= MANY)
    return LATE_RATE if is_late else RATE
