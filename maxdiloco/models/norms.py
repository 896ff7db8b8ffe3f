"""Root-mean-square normalisation."""

import jax
import jax.numpy as jnp
from flax import nnx

from maxdiloco.models.config import ModelConfig
from maxdiloco.models.linear import Names, constant
from maxdiloco.models.remat import NORM_FACTOR, keep


class RMSNorm(nnx.Module):
    """Scale to a root mean square of 1, then by a learned factor (arXiv 1910.07467).

    Attributes:
      scale: [*shape], minus `config.norm_scale_offset`.
    """

    def __init__(self, config: ModelConfig, shape: tuple[int, ...], names: Names = ("norm",)):
        """Create a scale with the initial value 1.

        Args:
          config: epsilon, offset of the scale and type.
          shape: sizes of the last dimensions of the input, over which the mean is taken.
          names: their logical axis names.
        """
        self.epsilon, self.offset = config.norm_epsilon, config.norm_scale_offset
        self.scale = constant(shape, names, value=1 - self.offset, dtype=config.weight_dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise over the last dimensions.

        Args:
          x: [..., *shape].

        Returns:
          An array like x. It is computed in float32: squares of bfloat16 values lose half of their
          digits.
        """
        scale = self.scale[...].astype(jnp.float32)
        x_f32 = x.astype(jnp.float32)
        dims = tuple(range(-scale.ndim, 0))
        mean_square = jnp.mean(jnp.square(x_f32), axis=dims, keepdims=True)
        normed = x_f32 * keep(jax.lax.rsqrt(mean_square + self.epsilon), NORM_FACTOR)
        return (normed * (scale + self.offset if self.offset else scale)).astype(x.dtype)
