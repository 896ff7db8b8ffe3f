"""Default outer learning rate and momentum, for the trainer and the library."""

# The best of a grid for DiLoCo at H = 10, 30 and 100, and also for streaming, eager and Muon
# (docs/reference/results.md, loss by mode). MuLoCo (arXiv 2505.23725) uses the same values.
RATE, MOMENTUM = 0.7, 0.6
# For a mean that is mostly a round late: delayed, and eager with four or more replicas. In the same
# table 0.7 nearly diverges. Consider a direction along which replicas reach their optimum within a
# round. It is stable up to 0.49 (delayed), 0.68 (eager, M = 4) and 0.57 (eager, M = 8). arXiv
# 2502.12996 Tab. 2 also lowers the rate.
LATE_RATE = 0.4
# The mean of more replicas is shorter, because their outer gradients differ; the radial-directional
# mean keeps the norm. The same table has this rate for 4 and 8 replicas; arXiv 2503.09799 Fig. 7
# also has a higher rate for 8.
MANY, RATE_OF_MANY = 4, 1.0


ADAM_B1 = 0.9  # optax's default


def momentum(outer_optimizer: str) -> float:
    """Return the momentum of an outer optimizer, one of outer.OPTIMIZERS; for Adam its b1."""
    return ADAM_B1 if outer_optimizer == "adam" else MOMENTUM


def rate(num_replicas: int, *, round_overlap: str, aggregation: str) -> float:
    """Return the default outer learning rate.

    Args:
      num_replicas: M.
      round_overlap: one of schedule.ROUND_OVERLAPS.
      aggregation: one of outer.AGGREGATIONS.
    """
    if num_replicas >= MANY and round_overlap == "none" and aggregation == "mean":
        return RATE_OF_MANY
    is_late = round_overlap == "delayed" or (round_overlap == "eager" and num_replicas >= MANY)
    return LATE_RATE if is_late else RATE
