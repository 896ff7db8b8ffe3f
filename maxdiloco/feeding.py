"""From the rows a process reads to arrays that span the mesh.

    # R replicas  B sequences per replica  L tokens
"""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

Rows = tuple[range, ...]  # the part of [R, B] (or [B]) that this process's devices hold


def local_rows(sharding: NamedSharding, shape: tuple[int, ...]) -> Rows:
    """The smallest box of leading indices that covers every shard of this process.

    shape: of the whole array; its last dim (L) is always read whole.
    """
    places = sharding.addressable_devices_indices_map(shape).values()
    ranges = []
    for dim, size in enumerate(shape[:-1]):
        bounds = [index[dim].indices(size)[:2] for index in places]
        ranges.append(range(min(b[0] for b in bounds), max(b[1] for b in bounds)))
    return tuple(ranges)


def to_global(batch: Any, rows: Rows, sharding: NamedSharding, shape: tuple[int, ...]) -> Any:
    """Arrays of the whole shape from the local rows; nothing moves between processes."""

    def one(local: np.ndarray) -> jax.Array:
        def shard(index):
            starts = [r.start for r in rows]
            own = [
                slice(i.indices(n)[0] - s, i.indices(n)[1] - s)
                for i, n, s in zip(index[:-1], shape[:-1], starts, strict=True)
            ]
            return local[(*own, index[-1])]

        return jax.make_array_from_callback(shape, sharding, shard)

    return jax.tree.map(one, batch)


def feed(
    batches: Iterator[Any], rows: Rows, sharding: NamedSharding, shape: tuple[int, ...]
) -> Iterator[Any]:
    """Every batch of local rows as global arrays."""
    for batch in batches:
        yield to_global(batch, rows, sharding, shape)
