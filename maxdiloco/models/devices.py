"""The part of an array that each device has, inside a program that XLA partitions.

XLA cannot split a kernel over an automatic axis. Scattered gradients (kernels/matmul.py) and the
sums of a mixture of experts are written out by hand as well.

With `length` over C devices a sequence is cut into 2 C chunks. Device i has the chunks i and
2 C - 1 - i: an early one that sees few keys, and a late one that sees many (Llama 3, arXiv
2407.21783, section 3.3.2). With one contiguous chunk per device, the second of two devices would
have 1.5 times the mean work (benchmarks/results/gpu.md, "Sequences over devices").
"""
# B sequences  L tokens of a sequence, or of one device's part of it

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxdiloco.errors import ConfigError
from maxdiloco.parallel.sharding import Names, Rules, automatic_spec, axes_of, constrain, spec


def split_axes(names: Names, rules: Rules) -> list[tuple[str, ...]]:
    """Find the mesh axes that split an array on the mesh of the context.

    Args:
      names: logical axis name of each dimension.
      rules: logical axis name -> mesh axes.

    Returns:
      For each dimension its axes that are automatic and have several devices.
    """
    sizes = jax.sharding.get_abstract_mesh().shape
    single = [axis for axis, size in sizes.items() if size == 1]
    return [axes_of(entry) for entry in automatic_spec(names, rules, without=single)]


def token_shards(rules: Rules) -> tuple[int, int]:
    """Return the numbers of devices that batch and length are spread over, in this context."""
    sizes = jax.sharding.get_abstract_mesh().shape
    batch, length = split_axes(("batch", "length"), rules)
    return math.prod(sizes[axis] for axis in batch), math.prod(sizes[axis] for axis in length)


def is_gathered(names: Names, rules: Rules) -> bool:
    """Tell whether a weight with these names is split over devices that also split the tokens."""
    of_tokens = {axis for axes in split_axes(("batch", "length"), rules) for axis in axes}
    return any(not of_tokens.isdisjoint(axes) for axes in split_axes(names, rules))


def on_each_device(fn: Callable, *, in_names: list[Any], out_names: Any, rules: Rules) -> Callable:
    """Make a function of one device's parts a function of whole arrays.

    All axes of the mesh that are still automatic become manual around it.

    Args:
      fn: function of the parts.
      in_names: logical axis names of the dimensions of each argument, as tuples, in containers like
        the arguments.
      out_names: the same for the result.
      rules: logical axis name -> mesh axes.

    Returns:
      The function of whole arrays.
    """

    def specs(tree):
        of_array = functools.partial(automatic_spec, rules=rules)
        return jax.tree.map(of_array, tree, is_leaf=lambda names: isinstance(names, tuple))

    mesh = jax.sharding.get_abstract_mesh()
    automatic = set(mesh.axis_names) - set(mesh.manual_axes)
    return map_shards(fn, tuple(specs(in_names)), specs(out_names), automatic)


def map_shards(fn: Callable, in_specs: Any, out_specs: Any, manual: set[str]) -> Callable:
    """Apply jax.shard_map over axes of the context's mesh.

    Args:
      fn: function of one device's parts.
      in_specs: PartitionSpec of each argument.
      out_specs: PartitionSpec of the result.
      manual: the axes. Without any, fn itself is returned.

    Returns:
      The function of whole arrays.
    """
    if not manual:
        return fn
    return jax.shard_map(
        fn,
        mesh=jax.sharding.get_abstract_mesh(),
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=manual,
        check_vma=False,  # kernels carry no replication types, nor does the map over replicas
    )


def shards_on(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, rules: Rules) -> int:
    """Return the number of devices of a mesh that a sequence is spread over."""
    return math.prod(mesh.shape[axis] for axis in axes_of(spec(("batch", "length"), rules)[1]))


def check(length: int, shards: int) -> None:
    """Raise ConfigError unless a sequence can be cut into two chunks for each of its devices."""
    if shards > 1 and length % (2 * shards):
        divisor = 2 * shards
        raise ConfigError(
            f"max_target_length={length} is not a multiple of 2 * context {shards} = {divisor}: "
            f"each device of a sequence holds two chunks of it. Use "
            f"max_target_length={length // divisor * divisor or divisor}, or another "
            f"dcn_context_parallelism or ici_context_parallelism."
        )


def to_device_order(x_BL: jax.Array, rules: Rules) -> jax.Array:
    """Reorder [B, L] from text order to device order, and shard it."""
    _, shards = token_shards(rules)
    if shards == 1:
        return x_BL
    x_BL = unshard_length(x_BL, rules)[:, positions(x_BL.shape[1], shards)]
    return constrain(x_BL, ("batch", "length"), rules)


def unshard_length(x_BL: jax.Array, rules: Rules) -> jax.Array:
    """Put all tokens of a sequence [B, L] on each of its devices."""
    return constrain(x_BL, ("batch", None), rules) if token_shards(rules)[1] > 1 else x_BL


def positions(length: int, shards: int) -> np.ndarray:
    """Return the position in the text of each token in device order, int32 [L]."""
    if shards == 1:  # the length may be odd
        return np.arange(length, dtype=np.int32)
    chunks = np.arange(length, dtype=np.int32).reshape(2 * shards, -1)
    return chunks[[c for i in range(shards) for c in (i, 2 * shards - 1 - i)]].reshape(-1)


def local_positions(length: int, rules: Rules) -> jax.Array:
    """Return `positions` on the mesh of the context."""
    _, shards = token_shards(rules)
    return jnp.arange(length) if shards == 1 else jnp.array(positions(length, shards))


def to_text_order(x_BL: jax.Array, shards: int) -> jax.Array:
    """Reorder [B, L, ...] from device order to text order."""
    B, L, *rest = x_BL.shape
    pairs = x_BL.reshape(B, shards, 2, L // (2 * shards), *rest)
    chunks = jnp.concatenate([pairs[:, :, 0], pairs[:, ::-1, 1]], axis=1)
    return chunks.reshape(x_BL.shape)


def gathered_text(x_BL: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Gather whole sequences in the order of the text, in a function of each device's parts.

    Args:
      x_BL: a device's part [B, L, ...].
      axes: mesh axes that length is spread over.

    Returns:
      [B, all L, ...].
    """
    all_BL = jax.lax.all_gather(x_BL, axes, axis=1, tiled=True)
    return to_text_order(all_BL, all_BL.shape[1] // x_BL.shape[1])
