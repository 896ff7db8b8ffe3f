"""Global batches: arrays that span the mesh, from the rows that each process reads.

# R replicas  B sequences per replica  L tokens  N rows that this process reads
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

# Coordinates of rows: one int array [N] for each dim of [R, B], or of [B], in row-major order.
Rows = tuple[np.ndarray, ...]


def local_rows(sharding: NamedSharding, shape: tuple[int, ...]) -> Rows:
    """Return the rows of the devices of this process, each once.

    They need not form a box: the hosts of a large TPU slice hold tiles of its torus.

    Args:
      sharding: of the whole array.
      shape: of the whole array, whose last dim (L) is always read whole.
    """
    return rows_of(sharding.addressable_devices_indices_map(shape).values(), shape)


def rows_of(shards: Iterable[tuple[slice, ...]], shape: tuple[int, ...]) -> Rows:
    """Return the rows of an array of `shape` that are in at least one of the shards."""
    in_a_shard = np.zeros(shape[:-1], bool)
    for shard in shards:
        in_a_shard[shard[:-1]] = True
    return np.nonzero(in_a_shard)


def shard_reader(rows: Rows, shape: tuple[int, ...]) -> Callable[..., np.ndarray]:
    """Return a function of the local rows [N, L] and a shard, which returns the shard's values.

    It raises IndexError for a shard with rows of other processes.
    """
    positions = np.full(shape[:-1], len(rows[0]))  # in the local rows; N for other processes'
    positions[rows] = np.arange(len(rows[0]))
    return lambda local_NL, shard: local_NL[positions[shard[:-1]], shard[-1]]


def assemble(
    batches: Iterable[Any], rows: Rows, sharding: NamedSharding, shape: tuple[int, ...]
) -> Iterator[Any]:
    """Yield batches with leaves [N, L] as arrays of the whole shape.

    Nothing moves between processes.

    Args:
      batches: with the rows of this process.
      rows: of local_rows.
      sharding: of the arrays.
      shape: of the arrays.
    """
    read_shard = shard_reader(rows, shape)

    def whole(local_NL):
        part = functools.partial(read_shard, local_NL)
        return jax.make_array_from_callback(shape, sharding, part)

    for batch in batches:
        yield jax.tree.map(whole, batch)
