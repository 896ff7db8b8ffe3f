"""From the rows a process reads to arrays that span the mesh.

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
    """The rows of the devices of this process, each once.

    They need not form a box: the hosts of a large TPU slice hold tiles of its torus.
    shape: of the whole array; its last dim (L) is always read whole.
    """
    return rows_of(sharding.addressable_devices_indices_map(shape).values(), shape)


def rows_of(shards: Iterable[tuple[slice, ...]], shape: tuple[int, ...]) -> Rows:
    """The rows of an array of `shape` that are in at least one of the shards."""
    in_a_shard = np.zeros(shape[:-1], bool)
    for shard in shards:
        in_a_shard[shard[:-1]] = True
    return np.nonzero(in_a_shard)


def shard_taker(rows: Rows, shape: tuple[int, ...]) -> Callable[..., np.ndarray]:
    """(local rows [N, L], shard) -> that shard of the whole array; IndexError for other rows."""
    positions = np.full(shape[:-1], len(rows[0]))  # in the local rows; N for other processes'
    positions[rows] = np.arange(len(rows[0]))
    return lambda local_NL, shard: local_NL[positions[shard[:-1]], shard[-1]]


def feed(
    batches: Iterable[Any], rows: Rows, sharding: NamedSharding, shape: tuple[int, ...]
) -> Iterator[Any]:
    """Batches with leaves [N, L], as arrays of the whole shape; nothing moves between processes."""
    take_shard = shard_taker(rows, shape)

    def whole(local_NL):
        part = functools.partial(take_shard, local_NL)
        return jax.make_array_from_callback(shape, sharding, part)

    for batch in batches:
        yield jax.tree.map(whole, batch)
