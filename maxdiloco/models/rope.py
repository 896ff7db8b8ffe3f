"""Rotary position embedding (arXiv 2104.09864), pairs taken from the two halves of a head."""
# B sequences, or 1 where all share the positions  L tokens  N heads  H head dim  I = H / 2 pairs

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

f32 = jnp.float32


class RopeConfig(NamedTuple):
    """Frequencies of a rotation: the key rope_max_timescale and the entries of rope_scaling.

    rope_type: empty without the table. attention_factor: 0 is yarn's own.
    """

    max_timescale: float
    rope_type: str = ""
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 0.0


class Rotation(NamedTuple):
    """Sine and cosine of the angle of each position and pair, float32, times yarn's factor."""

    sin_BLI: jax.Array
    cos_BLI: jax.Array


def rotation(positions_BL: jax.Array, head_dim: int, rope: RopeConfig) -> Rotation:
    """Angle of pair i at a position: position / max_timescale^(2i/H), stretched by rope_type."""
    exponents_I = jnp.arange(0, head_dim, 2, dtype=f32) / head_dim
    angles_BLI = positions_BL[..., None].astype(f32) / rope.max_timescale**exponents_I
    if not rope.rope_type:
        return Rotation(jnp.sin(angles_BLI), jnp.cos(angles_BLI))
    angles_BLI = angles_BLI * _stretch(head_dim, rope)
    factor = 1.0
    if rope.rope_type == "yarn":
        factor = rope.attention_factor or 0.1 * math.log(rope.factor) + 1
    return Rotation(jnp.sin(angles_BLI) * factor, jnp.cos(angles_BLI) * factor)


def _stretch(head_dim: int, rope: RopeConfig) -> np.ndarray:
    """Factor of each pair's frequency, float32 [I]: 1 / rope.factor for slow pairs, 1 for fast."""
    pairs_I = np.arange(head_dim // 2)
    if rope.rope_type == "linear":
        divided_I = np.ones(head_dim // 2)
    elif rope.rope_type == "llama3":
        # Of a pair: its rotations in a text of the first training (arXiv 2407.21783, section 3.4).
        wavelengths_I = 2 * math.pi * rope.max_timescale ** (2 * pairs_I / head_dim)
        rotations_I = rope.original_max_position_embeddings / wavelengths_I
        width = rope.high_freq_factor - rope.low_freq_factor
        divided_I = 1 - np.clip((rotations_I - rope.low_freq_factor) / width, 0, 1)
    else:
        divided_I = _yarn_ramp(pairs_I, head_dim, rope)
    return (divided_I / rope.factor + 1 - divided_I).astype(np.float32)


def _yarn_ramp(pairs_I, head_dim, rope):
    """YaRN, arXiv 2309.00071 section 3.2: linear in the pair between two numbers of rotations."""

    def pair_of(rotations):
        wavelength = rope.original_max_position_embeddings / (2 * math.pi * rotations)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.max_timescale))

    first, last = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first or 0.001  # the authors' program: a step where the borders meet
    return np.clip((pairs_I - first) / width, 0, 1)


def rotate(x_BLNH: jax.Array, rope: Rotation, swap: str = "split") -> jax.Array:
    """Rotate pair (i, i + H/2) of every head; computed in float32, returned in x's type.

    swap: how the halves change places, to the same bits: by `split` and concatenation; by a
    `reverse`, which XLA:GPU fuses in both passes where it puts the others' halves through memory;
    or in a `product` with a permutation, also in the gradient, which XLA:TPU fuses with what is
    around it. A product is for bfloat16, whose products with 1 and 0 are exact, and for finite x
    (benchmarks/results).
    """
    if swap == "product":
        return _by_product(x_BLNH, rope)
    sin_BL1I, cos_BL1I = rope.sin_BLI[..., None, :], rope.cos_BLI[..., None, :]
    if swap == "reverse":
        halves = x_BLNH.astype(f32).reshape(*x_BLNH.shape[:-1], 2, -1)
        signed_BL12I = jnp.stack([-sin_BL1I, sin_BL1I], axis=-2)
        rotated = halves * cos_BL1I[..., None, :] + jnp.flip(halves, axis=-2) * signed_BL12I
        return rotated.reshape(x_BLNH.shape).astype(x_BLNH.dtype)
    first, second = jnp.split(x_BLNH.astype(f32), 2, axis=-1)
    rotated = jnp.concatenate(
        [first * cos_BL1I - second * sin_BL1I, second * cos_BL1I + first * sin_BL1I], axis=-1
    )
    return rotated.astype(x_BLNH.dtype)


@jax.custom_vjp
def _by_product(x_BLNH, rope):
    H = x_BLNH.shape[-1]
    swap_HH = jnp.roll(jnp.eye(H, dtype=x_BLNH.dtype), H // 2, axis=1)
    swapped = jnp.einsum("blnh,hg->blng", x_BLNH, swap_HH, preferred_element_type=f32)
    sin_BL1H = jnp.concatenate([-rope.sin_BLI, rope.sin_BLI], axis=-1)[..., None, :]
    cos_BL1H = jnp.concatenate([rope.cos_BLI, rope.cos_BLI], axis=-1)[..., None, :]
    return (x_BLNH.astype(f32) * cos_BL1H + swapped * sin_BL1H).astype(x_BLNH.dtype)


_by_product.defvjp(
    lambda x_BLNH, rope: (_by_product(x_BLNH, rope), rope),
    lambda rope, d_BLNH: (_by_product(d_BLNH, rope._replace(sin_BLI=-rope.sin_BLI)), None),
)
