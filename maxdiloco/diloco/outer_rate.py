"""Outer learning rate and momentum where the user gives none, for the trainer and the library."""

# The best of a grid for DiLoCo at H of 10, 30 and 100, streaming, eager and Muon alike
# (benchmarks/README.md, what a mode costs in loss), and MuLoCo's (arXiv 2505.23725).
RATE, MOMENTUM = 0.7, 0.6
DELAYED_RATE = 0.4  # the same table: 0.7 all but diverges; arXiv 2502.12996 Tab. 2 lowers it too
# The mean of more replicas is shorter, as their gradients differ; rda keeps the norm. The same
# table has it at 4 and 8 replicas, arXiv 2503.09799 Fig. 7 a higher rate at 8, too. Not for eager,
# which was measured with two alone, where 0.98 was 4 % of loss worse than 0.7.
MANY, RATE_OF_MANY = 4, 1.0


def rate(num_replicas: int, *, overlap: str, merge: str) -> float:
    """The outer learning rate. overlap, merge: outer_overlap and merge of maxdiloco.DiLoCo."""
    if overlap == "delayed":
        return DELAYED_RATE
    of_mean = overlap == "none" and merge == "mean"
    return RATE_OF_MANY if of_mean and num_replicas >= MANY else RATE
