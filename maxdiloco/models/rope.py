"""Rotary position embedding (arXiv 2104.09864); a pair has one feature of each half of a head."""
# B sequences, or 1 if all share the positions  L tokens  N heads  H head dim  I = H / 2 pairs

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

f32 = jnp.float32


class RopeConfig(NamedTuple):
    """Frequencies of a rotation: the key `rope_max_timescale` and the entries of `rope_scaling`.

    Attributes:
      max_timescale: wavelength of the slowest pair, over 2 pi.
      rope_type: `linear`, `llama3` or `yarn`; empty without scaling.
      factor: slow pairs turn 1 / factor as fast.
      original_max_position_embeddings: length of the sequences of the first training.
      low_freq_factor: llama3: pairs with fewer turns in that length are slow.
      high_freq_factor: llama3: pairs with more turns are fast.
      beta_fast: yarn: as high_freq_factor.
      beta_slow: yarn: as low_freq_factor.
      truncate: yarn: round the borders to whole pairs.
      attention_factor: yarn: factor on sine and cosine. 0 stands for 0.1 ln(factor) + 1.
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
    """Sine and cosine of the angle of each position and pair, float32, times yarn's factor.

    Attributes:
      sin_BLI: the sines.
      cos_BLI: the cosines.
    """

    sin_BLI: jax.Array
    cos_BLI: jax.Array


def rotation(positions_BL: jax.Array, head_dim: int, rope: RopeConfig) -> Rotation:
    """Compute the rotation of positions.

    The angle of pair i at a position is position / max_timescale^(2i/H), scaled by rope_type.

    Args:
      positions_BL: int; B may be 1.
      head_dim: H, the number of features that are rotated.
      rope: the frequencies.

    Returns:
      Sines and cosines.
    """
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
    """Return the factor on each pair's frequency, float32 [I]: 1 / rope.factor if slow, else 1."""
    pairs_I = np.arange(head_dim // 2)
    if rope.rope_type == "linear":
        divided_I = np.ones(head_dim // 2)
    elif rope.rope_type == "llama3":
        # Turns of a pair in a sequence of the first training (arXiv 2407.21783, section 3.4).
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


def rotate(x_BLNH: jax.Array, rope: Rotation) -> jax.Array:
    """Rotate pairs (i, i + H/2) of every head.

    Args:
      x_BLNH: queries or keys.
      rope: sines and cosines of the positions.

    Returns:
      An array like x, computed in float32.
    """
    sin_BL1I, cos_BL1I = rope.sin_BLI[..., None, :], rope.cos_BLI[..., None, :]
    first, second = jnp.split(x_BLNH.astype(f32), 2, axis=-1)
    rotated = jnp.concatenate(
        [first * cos_BL1I - second * sin_BL1I, second * cos_BL1I + first * sin_BL1I], axis=-1
    )
    return rotated.astype(x_BLNH.dtype)
