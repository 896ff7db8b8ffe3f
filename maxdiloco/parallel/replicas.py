"""The map over replicas, broadcast to replicas, and means over them.

A small vocabulary in the manner of DrJAX (arXiv 2403.07128). Every array that differs between
replicas has R, of size M, as its first dim, sharded over the mesh axis `diloco`. Each of the S
positions of that axis holds M / S replicas.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from maxdiloco.cluster import agree


def map_fn(fn: Callable, *, mesh: Mesh) -> Callable:
    """Map a function of one replica over arrays with a leading R: Algorithm 2, line 1.

    It is manual over `diloco` and automatic over the other axes, so that nothing in fn can reach
    another replica. The replicas of a mesh position are under a vmap, even if there is only one:
    removing R and adding it again made XLA copy the optimizer state
    (benchmarks/results/step_time.md). Code that supports no vmap goes into
    `without_singleton_vmap`. Call the result under jit.
    """
    return manual(jax.vmap(fn), mesh, P("diloco"))


def without_singleton_vmap(fn: Callable) -> Callable:
    """Remove the vmap of `map_fn` if a mesh position holds one replica.

    For the heavy part of an inner step, such as the gradient: kernels that support no vmap work
    with one replica a position, and matrix products have no dim of size 1. It has no derivative.
    """
    fn = jax.jit(fn, inline=True)  # traced once for the call, the rule and an eval_shape of it
    wrapped = jax.custom_batching.custom_vmap(fn)

    @wrapped.def_vmap
    def rule(axis_size, in_batched, *args):
        if axis_size > 1:
            in_axes = jax.tree.map(lambda batched: 0 if batched else None, tuple(in_batched))
            out = jax.vmap(fn, in_axes=in_axes)(*args)
        else:
            first = jax.tree.map(lambda x, b: x[0] if b else x, args, tuple(in_batched))
            out = jax.tree.map(lambda x: x[None], fn(*first))
        return out, jax.tree.map(lambda _: True, out)

    return wrapped


def broadcast(x: jax.Array, num_replicas: int) -> jax.Array:
    """Repeat an array for each replica: [...] -> [R, ...]."""
    return jnp.broadcast_to(x[None], (num_replicas, *x.shape))


def fold_in_replica(keys_R: jax.Array, numbers_R: jax.Array) -> jax.Array:
    """Fold the number of each replica into its typed PRNG keys, [R, ...]."""

    def of_replica(keys, number):
        folded = jax.vmap(lambda key: jax.random.fold_in(key, number))(keys.ravel())
        return folded.reshape(keys.shape)

    return jax.vmap(of_replica)(keys_R, numbers_R)


def reduce_mean(x_R: jax.Array) -> jax.Array:
    """Take the unweighted mean over replicas, summed in float32 in their order: [R, ...] -> [...].

    It divides; diloco.outer.ordered_mean multiplies by 1 / M, rounded, which gives other bits.
    """
    total = x_R[0].astype(jnp.float32)
    for m in range(1, x_R.shape[0]):
        total = total + x_R[m].astype(jnp.float32)
    return total / x_R.shape[0]


def mean_over_replicas(outer_R: Any, mesh: Mesh) -> Any:
    """Take the mean over all replicas: leaves [R, ...] -> [...], on all mesh positions."""
    of_all = functools.partial(jax.lax.all_gather, axis_name="diloco", tiled=True)
    return _over_positions(lambda x_S: reduce_mean(of_all(x_S)), P(), outer_R, mesh)


def mean_per_position(outer_R: Any, mesh: Mesh) -> Any:
    """Take the mean over the replicas of each mesh position: leaves [S, ...]; no traffic."""
    return _over_positions(lambda x_S: reduce_mean(x_S)[None], P("diloco"), outer_R, mesh)


def _over_positions(fn, out_specs, outer_R, mesh):
    # A TPU computes only in device memory.
    on_device = jax.device_put(outer_R, jax.memory.Space.Device)
    return jax.tree.map(manual(fn, mesh, out_specs), on_device)


def manual(fn: Callable, mesh: Mesh, out_specs: P, in_specs: Any = None) -> Callable:
    """Make a function manual over `diloco`, on the part of arrays [R, ...] of a mesh position.

    It stays automatic over the axes inside a position.
    """
    return jax.shard_map(
        fn,
        mesh=mesh,
        in_specs=in_specs or P("diloco"),
        out_specs=out_specs,
        axis_names={"diloco"},
        check_vma=False,  # replication over the automatic axes is not known here
    )


# -- programs between the steps --------------------------------------------------------------------
# S positions of the mesh axis diloco


def with_context_mesh(
    fn: Callable[[Any, Any, Any], Any], mesh: Mesh
) -> Callable[[Any, Any, Any], Any]:
    """Make a program fn(params, batch, shared) on the whole mesh."""

    def program(params, batch, shared):
        # The context mesh lets a model lay out its activations.
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return fn(params, batch, shared)

    return program


def map_positions(fn: Callable[[Any, Any, Any], Any], mesh: Mesh) -> Callable[[Any, Any, Any], Any]:
    """Make a program fn(params, batch, shared) of each mesh position, for params [S, ...].

    Batches are divided over the positions, without traffic between them. Leaves of the result are
    [1, ...] in fn and [S, ...] outside.
    """

    def of_position(params, batch, shared):
        return fn(jax.tree.map(lambda x: x[0], params), batch, shared)

    return manual(of_position, mesh, P("diloco"), in_specs=(P("diloco"), P("diloco"), P()))


def first_local(x: jax.Array) -> np.ndarray:
    """Return x[0] of an array [S, ...], or the first entry that this process holds."""
    shards = sorted(x.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return np.asarray(shards[0].data)[0]


def sum_over_batches(batches: Sequence[Sequence[jax.Array]]) -> list[float]:
    """Add up N arrays [S] a batch over batches and positions, in float64, in all processes."""
    sums_Sn = np.zeros((*batches[0][0].shape, len(batches[0])))
    owned_Sn = np.zeros(sums_Sn.shape, bool)
    for batch in batches:
        for i, x in enumerate(batch):
            for shard in x.addressable_shards:
                if shard.replica_id == 0:  # one of the devices that hold a position's sum
                    sums_Sn[shard.index[0], i] += np.asarray(shard.data, np.float64)
                    owned_Sn[shard.index[0], i] = True
    found = agree.from_owners(sums_Sn.reshape(-1), owned_Sn.reshape(-1)).reshape(sums_Sn.shape)
    return [math.fsum(column) for column in found.T]
