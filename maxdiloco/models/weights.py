"""Parameters before they have values: shapes, logical names, and how they begin."""

import dataclasses
import itertools
import math
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import random as jax_random
from jax.typing import DTypeLike

from maxdiloco.models.spec import ModelSpec

f32, u32 = jnp.float32, jnp.uint32
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))  # of Threefry-2x32
# Logical name of each dim in an equation of models/product.py.
LETTERS = {
    "b": "batch",
    "l": "length",
    "d": "embed",
    "n": "heads",
    "k": "kv_heads",
    "h": "head_dim",
    "p": "head_dim",  # of latent attention: keys not rotated, beside values
    "o": "head_dim",  # values
    "f": "mlp",
    "r": "lora",  # queries
    "s": "lora",  # keys and values
    "c": "lora",  # the same beside keys rotated
    "e": "router",
    "v": "vocab",
}


@dataclasses.dataclass(frozen=True)
class Weight:
    """A parameter of one layer, or outside of them.

    shape, names: size and logical name of each dim. std: of a truncated normal; 0 where every
    entry begins as `value`. dtype: None is spec.weight_dtype.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]
    std: float = 0.0
    value: float = 0.0
    dtype: DTypeLike | None = None


def factor(equation: str, *, gain: float = 1.0, **sizes: int) -> Weight:
    """The second factor of an equation, a matrix. sizes: of its dims, by their letters."""
    letters, out = equation.split(",")[1].split("->")
    return Weight(
        tuple(sizes[letter] for letter in letters),
        tuple(LETTERS[letter] for letter in letters),
        spread(math.prod(sizes[letter] for letter in letters if letter not in out), gain),
    )


def spread(fan_in: int, gain: float = 1.0) -> float:
    """Of a truncated normal whose deviation is gain / sqrt(fan_in) (LeCun et al. 1998, 4.6).

    The constant restores the variance that truncation at two standard deviations removes.
    """
    return gain / math.sqrt(fan_in) / 0.87962566103423978


def factors(spec: ModelSpec, equations: dict[str, str], **sizes: int) -> dict[str, Weight]:
    """The second factor of each equation; those that write to the residual stream begin smaller.

    By 1 / sqrt(2 layers), as GPT-2's (Radford et al. 2019, section 2.3): each layer writes twice.
    """
    gain = 1 / math.sqrt(2 * spec.num_layers)
    return {
        name: factor(equation, gain=gain if equation.endswith("->bld") else 1.0, **sizes)
        for name, equation in equations.items()
    }


def initial(spec: ModelSpec, table: dict[str, Any], key: jax.Array) -> dict[str, Any]:
    """Values of a nested dict of Weights; the n-th matrix draws with fold_in(key, n)."""
    numbers = itertools.count()

    def value(entry):
        if isinstance(entry, dict):
            return {name: value(inner) for name, inner in entry.items()}
        dtype = spec.weight_dtype if entry.dtype is None else entry.dtype
        if not entry.std:
            return jnp.full(entry.shape, entry.value, dtype)
        own_key = jax.random.fold_in(key, next(numbers))
        values = jax.random.truncated_normal(own_key, -2, 2, entry.shape, f32) * entry.std
        return values.astype(dtype)

    return value(table)


def unrolled_threefry() -> Hashable:
    """JAX's threefry2x32 for jax.random.key(impl=...), its rounds one after another.

    The same keys and bits, with jax_threefry_partitionable as by default. On a CPU JAX makes a loop
    over whole arrays of the rounds, eight times as long without optimisation (benchmarks/log).
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
    """Of at most 2^32 entries from their places in the flat array: Threefry-2x32 of 20 rounds.

    Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3.
    """
    place = jnp.zeros(shape, u32)
    for dim, size in enumerate(shape):
        stride = u32(math.prod(shape[dim + 1 :]) if size > 1 else 0)
        place = place + lax.broadcasted_iota(u32, shape, dim) * stride
    keys = (key_0, key_1, key_0 ^ key_1 ^ u32(0x1BD11BDA))
    x_0, x_1 = jnp.broadcast_to(key_0, shape), place + key_1
    for group in range(5):
        for by in ROTATIONS[group % 2]:
            x_0 = x_0 + x_1
            x_1 = ((x_1 << u32(by)) | (x_1 >> u32(32 - by))) ^ x_0
        x_0 = x_0 + keys[(group + 1) % 3]
        x_1 = x_1 + keys[(group + 2) % 3] + u32(group + 1)
    return x_0 ^ x_1
