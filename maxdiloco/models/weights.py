"""Initial values of weights, and the logical names that nnx keeps beside them."""

import math
from collections.abc import Hashable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.extend import random as jax_random

f32, u32 = jnp.float32, jnp.uint32
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))  # of Threefry-2x32


def weight(key, shape, names, *, fan_in, spec, gain=1.0):
    """Truncated normal with standard deviation gain / sqrt(fan_in) (LeCun et al. 1998, 4.6).

    The constant restores the variance that truncation at two standard deviations removes.
    """
    std = gain / math.sqrt(fan_in) / 0.87962566103423978
    values = jax.random.truncated_normal(key, -2, 2, shape, f32) * std
    return nnx.Param(values.astype(spec.weight_dtype), names=names)


def unrolled_threefry() -> Hashable:
    """JAX's threefry2x32 for jax.random.key(impl=...), its rounds one after another.

    The same keys and bits. On a CPU JAX makes a loop over whole arrays of the rounds, which takes
    eight times as long without optimisation (benchmarks/log). jax_threefry_partitionable, the
    default, is taken for granted.
    """
    jaxs = jax_random.threefry_prng_impl

    def random_bits(key, bit_width, shape):
        if bit_width != 32 or math.prod(shape) >= 2**32:
            return jaxs.random_bits(key, bit_width, shape)
        return _bits(*key, shape)

    return jax_random.define_prng_impl(
        key_shape=(2,),
        seed=jaxs.seed,
        split=jaxs.split,
        random_bits=random_bits,
        fold_in=jaxs.fold_in,
        name="unrolled_threefry2x32",
        tag="fry",
    )


@jax.jit(static_argnums=(2,))
def _bits(key_0, key_1, shape):
    """Of each entry from its place in the flat array: Threefry-2x32 with 20 rounds.

    Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3. At most 2^32.
    """
    place = lax.full(shape, u32(0))
    for dim, size in enumerate(shape):
        stride = lax.full(shape, u32(math.prod(shape[dim + 1 :]) if size > 1 else 0))
        place = lax.add(place, lax.mul(lax.broadcasted_iota(u32, shape, dim), stride))
    keys = (key_0, key_1, key_0 ^ key_1 ^ u32(0x1BD11BDA))
    keys = [lax.broadcast(key, shape) for key in keys]
    x_0, x_1 = keys[0], lax.add(place, keys[1])
    for group in range(5):
        for by in ROTATIONS[group % 2]:
            x_0 = lax.add(x_0, x_1)
            left = lax.shift_left(x_1, lax.full(shape, u32(by)))
            right = lax.shift_right_logical(x_1, lax.full(shape, u32(32 - by)))
            x_1 = lax.bitwise_xor(lax.bitwise_or(left, right), x_0)
        x_0 = lax.add(x_0, keys[(group + 1) % 3])
        x_1 = lax.add(lax.add(x_1, keys[(group + 2) % 3]), lax.full(shape, u32(group + 1)))
    return lax.bitwise_xor(x_0, x_1)


def residual_gain(num_layers: int) -> float:
    """1 / sqrt(2 layers): GPT-2's scaling of the matrices that write to the residual stream.

    Radford et al. 2019, section 2.3; each layer writes twice.
    """
    return 1 / math.sqrt(2 * num_layers)


def names_of(weight: nnx.Param) -> tuple[str, ...]:
    """The logical axis names of a parameter."""
    return tuple(weight.get_metadata("names"))
