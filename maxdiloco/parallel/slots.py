"""Programs over parameters that are alike everywhere, or that differ between the slots of `diloco`.

    # S slots of the mesh axis diloco
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from maxdiloco.parallel.replicas import manual
from maxdiloco.processes import agree


def of_all(fn: Callable[[Any, Any, Any], Any], mesh: Mesh) -> Callable[[Any, Any, Any], Any]:
    """fn(params, batch, shared) on the whole mesh."""

    def program(params, batch, shared):
        # The context mesh lets a model lay out its activations.
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return fn(params, batch, shared)

    return program


def of_each(fn: Callable[[Any, Any, Any], Any], mesh: Mesh) -> Callable[[Any, Any, Any], Any]:
    """fn(params, batch, shared) of one slot, for params [S, ...]; no traffic between slots.

    The first dim of a batch is divided over the slots; what is shared, all of them have whole.
    Leaves of the result are [1, ...] in fn and [S, ...] outside.
    """

    def of_slot(params, batch, shared):
        return fn(jax.tree.map(lambda x: x[0], params), batch, shared)

    return manual(of_slot, mesh, P("diloco"), in_specs=(P("diloco"), P("diloco"), P()))


def first_here(x: jax.Array) -> np.ndarray:
    """x[0] of an array [S, ...], or the first entry that this process holds."""
    shards = sorted(x.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return np.asarray(shards[0].data)[0]


def sums_of_all(batches: Sequence[Sequence[jax.Array]]) -> list[float]:
    """n arrays [S] a batch, added up in float64 over batches and slots, in all processes."""
    of_slot: dict[int, jax.Device] = {}
    like = batches[0][0]
    for device, (index,) in like.sharding.devices_indices_map(like.shape).items():
        of_slot.setdefault(index.start or 0, device)
    S, n = len(of_slot), len(batches[0])
    owned_S = [of_slot[slot].process_index == jax.process_index() for slot in range(S)]
    sums_Sn = np.zeros((S, n))
    for batch in batches:
        for i, x in enumerate(batch):
            for shard in x.addressable_shards:
                if shard.device in of_slot.values():
                    sums_Sn[shard.index[0].start or 0, i] += float(np.asarray(shard.data)[0])
    sums_Sn = agree.from_owners(sums_Sn.reshape(-1), np.repeat(owned_S, n)).reshape(S, n)
    return [math.fsum(column) for column in sums_Sn.T]
