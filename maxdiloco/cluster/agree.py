"""Exchange small values between all processes of a run. All processes call each function together.

In a run of one process nothing is exchanged.
"""

import jax
import numpy as np
from jax.experimental import multihost_utils


def from_first_process(value: int) -> int:
    """Broadcast the value of process 0: return it in all processes."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def from_all(value: int) -> list[int]:
    """Gather the values of all processes: return them in all processes, in order of process."""
    if jax.process_count() == 1:
        return [int(value)]
    return multihost_utils.process_allgather(np.int32(value)).tolist()


def in_any_process(flag: bool) -> bool:
    """Return whether the flag is true in at least one process; the result is equal in all."""
    return any(from_all(flag))


def from_owners(values: np.ndarray, owned: np.ndarray) -> np.ndarray:
    """Return each value from the process that owns it, in all processes.

    Args:
      values: float64 [n].
      owned: bool [n], True for each value that this process owns; each value has one owner.
    """
    if jax.process_count() == 1:
        return values
    # Sent as integers, because JAX would convert float64 to float32. Values not owned are zero.
    bits = np.where(owned, values, 0.0).view(np.int32)
    return multihost_utils.process_allgather(bits).sum(axis=0, dtype=np.int32).view(np.float64)
