"""Small values exchanged between all processes of a run; nothing is sent with one process."""

import jax
import numpy as np
from jax.experimental import multihost_utils


def from_first_process(value: int) -> int:
    """The first process's value, in all processes."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def from_all(value: int) -> list[int]:
    """The values of all processes, in all processes."""
    if jax.process_count() == 1:
        return [int(value)]
    return multihost_utils.process_allgather(np.int32(value)).tolist()


def in_any_process(flag: bool) -> bool:
    """Whether flag is true in at least one process."""
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.int32(flag))))
