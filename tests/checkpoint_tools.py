"""What tests of checkpoints share: states by their step, and what devices hold."""

import math
from collections import Counter

import jax
import numpy as np

from maxdiloco.storage.run_folder import locate


def folder_of(path):
    """Of the checkpoints of the run `run`."""
    return locate(path, "run").checkpoints


def values(step):
    return np.random.default_rng(step).standard_normal((64, 64)).astype(np.float32)


def items(step):
    return {
        "outer_params": {"w": jax.device_put(values(step))},
        "state": {name: jax.device_put(values(step + n)) for n, name in enumerate("ab")},
    }


def save_and_wait(checkpointer, step, given=None):
    checkpointer.save(step, items(step) if given is None else given, {})
    checkpointer.wait()


def wanted(meta):
    return jax.eval_shape(lambda: items(0))


def bytes_on_devices(arrays):
    """Counter of the bytes that each device holds of some arrays."""
    held = Counter()
    for array in arrays:
        nbytes = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        held.update(dict.fromkeys(array.sharding.device_set, nbytes))
    return held


def bytes_of_new_arrays(before):
    """The same of arrays that are not `before`: kept, or new arrays would take over their ids."""
    ids = set(map(id, before))
    return bytes_on_devices([x for x in jax.live_arrays() if id(x) not in ids])
