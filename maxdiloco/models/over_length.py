"""Sequences whose tokens are spread over devices: which device has which.

With `length` over C devices a sequence is 2 C chunks, and device i has chunks i and 2 C - 1 - i
(Llama 3, arXiv 2407.21783, section 3.3.2). The early chunk sees few keys and the late one many, so
every device has as much attention to compute as the others; with runs in order the last would have
1.5 times the mean of two, by arithmetic (benchmarks/log/2026-11-24.md, "Sequences over devices").
"""
# B sequences  L tokens of a sequence, or of one device's part of it

import math

import jax
import jax.numpy as jnp
import numpy as np

from maxdiloco.errors import ConfigError
from maxdiloco.models.each_device import split_axes, token_shards
from maxdiloco.parallel.sharding import Rules, axes_of, constrain, spec


def shards_on(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, rules: Rules) -> int:
    """Number of devices of a mesh that a sequence is spread over."""
    return math.prod(mesh.shape[axis] for axis in axes_of(spec(("batch", "length"), rules)[1]))


def length_axes(rules: Rules) -> tuple[str, ...]:
    """The mesh axes of the context that a sequence is spread over, those of size 1 left out."""
    return split_axes(("batch", "length"), rules)[1]


def check(length: int, shards: int) -> None:
    """Raise ConfigError unless a sequence can be cut into two chunks for each of its devices."""
    if shards > 1 and length % (2 * shards):
        divisor = 2 * shards
        raise ConfigError(
            f"max_target_length={length} is not a multiple of 2 * context {shards} = {divisor}: "
            f"each device of a sequence takes two chunks of it. Use "
            f"max_target_length={length // divisor * divisor or divisor}, or another "
            f"dcn_context_parallelism or ici_context_parallelism."
        )


def spread(x_BL: jax.Array, rules: Rules) -> jax.Array:
    """[B, L] from the order of the text to that of the devices, sharded; as it is with one."""
    _, shards = token_shards(rules)
    if shards == 1:
        return x_BL
    x_BL = whole(x_BL, rules)[:, positions(x_BL.shape[1], shards)]
    return constrain(x_BL, ("batch", "length"), rules)


def whole(x_BL: jax.Array, rules: Rules) -> jax.Array:
    """[B, L] of a few bytes with all tokens of a sequence on each of its devices."""
    return constrain(x_BL, ("batch", None), rules) if length_axes(rules) else x_BL


def part(x_BL: jax.Array, shard: jax.Array, shards: int) -> jax.Array:
    """What the device with the index `shard` has of [B, L] in the order of the text."""
    size = x_BL.shape[1] // (2 * shards)
    chunks = (shard, 2 * shards - 1 - shard)
    pieces = [jax.lax.dynamic_slice_in_dim(x_BL, chunk * size, size, axis=1) for chunk in chunks]
    return jnp.concatenate(pieces, axis=1)


def positions(length: int, shards: int) -> np.ndarray:
    """Position in the text of each token in the order of the devices, int32 [L]."""
    if shards == 1:  # which need not be even
        return np.arange(length, dtype=np.int32)
    chunks = np.arange(length, dtype=np.int32).reshape(2 * shards, -1)
    return chunks[[c for i in range(shards) for c in (i, 2 * shards - 1 - i)]].reshape(-1)


def positions_here(length: int, rules: Rules) -> jax.Array:
    """`positions` on the mesh of the context."""
    _, shards = token_shards(rules)
    return jnp.arange(length) if shards == 1 else jnp.array(positions(length, shards))


def by_text(x_BL: jax.Array, shards: int) -> jax.Array:
    """[B, L, ...] from the order of the devices to that of the text: `positions` undone."""
    B, L, *rest = x_BL.shape
    pairs = x_BL.reshape(B, shards, 2, L // (2 * shards), *rest)
    chunks = jnp.concatenate([pairs[:, :, 0], pairs[:, ::-1, 1]], axis=1)
    return chunks.reshape(x_BL.shape)


def gathered_text(x_BL: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """A device's part [B, L, ...] as the whole sequences, in the order of the text.

    axes: of length_axes. Call in a function of each device's parts (models/each_device.py).
    """
    all_BL = jax.lax.all_gather(x_BL, axes, axis=1, tiled=True)
    return by_text(all_BL, all_BL.shape[1] // x_BL.shape[1])
