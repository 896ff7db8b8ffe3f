"""Small values exchanged between all processes of a run; one process exchanges nothing."""

import jax
import numpy as np
from jax.experimental import multihost_utils


def from_first_process(value: int) -> int:
    """Return the first process's value in all processes."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def from_all(value: int) -> list[int]:
    """Return the values of all processes in all processes."""
    if jax.process_count() == 1:
        return [int(value)]
    return multihost_utils.process_allgather(np.int32(value)).tolist()


def in_any_process(flag: bool) -> bool:
    """Return whether flag is true in at least one process."""
    return any(from_all(flag))


def from_owners(values: np.ndarray, owned: np.ndarray) -> np.ndarray:
    """Return each value from the process that owns it, in all processes.

    Args:
      values: float64 [n].
      owned: bool [n], which of them this process owns; each has one owner.
    """
    if jax.process_count() == 1:
        return values
    # As integers: JAX would convert them to float32. Values of other processes count as zero bits.
    bits = np.where(owned, values, 0.0).view(np.int32)
    return multihost_utils.process_allgather(bits).sum(axis=0, dtype=np.int32).view(np.float64)
