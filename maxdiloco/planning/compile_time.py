"""Estimate compile times, before anything is compiled.

Imports no JAX, so that a program can log it in its first second.
"""

from maxdiloco.config.keys import Config

# Compile time of a program with the inner step on two cores, for TPUs [s]: the geometric mean of 20
# for a model of 0.2B parameters, 60 for 1.2B and 173 for 671B.
STEP_S = 60.0
STEP_ON_CPU_S = 10.0  # 4 for `tiny`, 8 on a loaded machine


def step_seconds(cfg: Config) -> float:
    """Return the expected compile time of a program with the inner step [s]."""
    return STEP_S if cfg.compile_topology else STEP_ON_CPU_S


def run_seconds(cfg: Config) -> float:
    """Return the expected compile time of all programs of a run [s].

    All programs without the inner step together take about as long as one program with it.
    """
    has_exchange = cfg.enable_diloco and cfg.num_communication_overlapping_steps > 0
    return step_seconds(cfg) * (2 + has_exchange)
