"""Forms of the rotary embedding that compilers fuse better, with the bits of rope.rotate."""
# B sequences  L tokens  N heads  H head dim  I = H / 2 pairs

import jax
import jax.numpy as jnp

from maxdiloco.models import rope
from maxdiloco.models.rope import Rotation

f32 = jnp.float32


def rotate(form: str, x_BLNH: jax.Array, rotation: Rotation) -> jax.Array:
    """Rotate pairs (i, i + H/2) of every head.

    The forms differ in how they exchange the two halves of a head
    (benchmarks/results/compile_estimates.md).

    Args:
      form: "concatenate" is rope.rotate; XLA:GPU writes its halves to memory. "reverse" flips the
        halves, which XLA:GPU fuses in both passes. "permute" multiplies by a permutation, also in
        the gradient, which XLA:TPU fuses with the surrounding operations. It is for bfloat16, whose
        products with 1 and 0 are exact, and for finite x.
      x_BLNH: queries or keys.
      rotation: sines and cosines of the positions.

    Returns:
      An array like x, computed in float32.
    """
    if form == "permute":
        return _by_permutation(x_BLNH, rotation)
    if form == "reverse":
        return _by_reversal(x_BLNH, rotation)
    return rope.rotate(x_BLNH, rotation)


def _by_reversal(x_BLNH, rotation):
    sin_BL1I, cos_BL1I = rotation.sin_BLI[..., None, :], rotation.cos_BLI[..., None, :]
    halves = x_BLNH.astype(f32).reshape(*x_BLNH.shape[:-1], 2, -1)
    signed_BL12I = jnp.stack([-sin_BL1I, sin_BL1I], axis=-2)
    rotated = halves * cos_BL1I[..., None, :] + jnp.flip(halves, axis=-2) * signed_BL12I
    return rotated.reshape(x_BLNH.shape).astype(x_BLNH.dtype)


@jax.custom_vjp
def _by_permutation(x_BLNH, rotation):
    H = x_BLNH.shape[-1]
    swap_HH = jnp.roll(jnp.eye(H, dtype=x_BLNH.dtype), H // 2, axis=1)
    swapped = jnp.einsum("blnh,hg->blng", x_BLNH, swap_HH, preferred_element_type=f32)
    sin_BL1H = jnp.concatenate([-rotation.sin_BLI, rotation.sin_BLI], axis=-1)[..., None, :]
    cos_BL1H = jnp.concatenate([rotation.cos_BLI, rotation.cos_BLI], axis=-1)[..., None, :]
    return (x_BLNH.astype(f32) * cos_BL1H + swapped * sin_BL1H).astype(x_BLNH.dtype)


_by_permutation.defvjp(
    lambda x_BLNH, rotation: (_by_permutation(x_BLNH, rotation), rotation),
    lambda rotation, d_BLNH: (
        _by_permutation(d_BLNH, rotation._replace(sin_BLI=-rotation.sin_BLI)),
        None,
    ),
)
