"""Parameters with logical axis names, and the linear layer that most modules are made of."""
# B sequences  L tokens

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from maxdiloco.models.config import ModelConfig
from maxdiloco.models.kernels.choice import Kernels
from maxdiloco.models.kernels.matmul import innermost_first
from maxdiloco.models.remat import keep

# Standard deviation of a standard normal distribution truncated at two standard deviations.
TRUNCATED_STD = 0.87962566103423978

Names = tuple[str, ...]


def matrix(
    shape: tuple[int, ...],
    names: Names,
    *,
    fan_in: int,
    gain: float = 1.0,
    dtype: DTypeLike,
    rngs: nnx.Rngs,
) -> nnx.Param:
    """Create a parameter from a truncated normal with deviation gain / sqrt(fan_in).

    LeCun et al. 1998, section 4.6, has this scale.

    Args:
      shape: sizes of the dimensions.
      names: logical axis name of each dimension, from which shardings follow.
      fan_in: number of values that are summed up for one value of the result.
      gain: factor on the deviation.
      dtype: type of the parameter. The values are drawn in float32.
      rngs: draws from the stream `params`.

    Returns:
      The parameter; its metadata `names` are the logical axis names.
    """
    std = gain / math.sqrt(fan_in) / TRUNCATED_STD
    values = jax.random.truncated_normal(rngs.params(), -2, 2, shape, jnp.float32) * std
    return nnx.Param(values.astype(dtype), names=names)


def constant(
    shape: tuple[int, ...], names: Names, *, value: float = 0.0, dtype: DTypeLike
) -> nnx.Param:
    """Create a parameter whose entries all begin as `value`.

    Args:
      shape: sizes of the dimensions.
      names: logical axis name of each dimension.
      value: the initial value.
      dtype: type of the parameter.

    Returns:
      The parameter; its metadata `names` are the logical axis names.
    """
    return nnx.Param(jnp.full(shape, value, dtype), names=names)


def bias_names(names: Names) -> Names:
    """Return the logical axis names of a bias of outputs with these names.

    A bias is small, so it is not split over `embed` as its matrix is.
    """
    return tuple("bias" if name in ("embed", "head_dim") else name for name in names)


def add_bias(x: jax.Array, bias: nnx.Param | None) -> jax.Array:
    """Return x plus a bias in the type of x, or x itself without a bias."""
    return x if bias is None else x + bias[...].astype(x.dtype)


class Linear(nnx.Module):
    """Product over the last dimensions of the input, as nnx.LinearGeneral, with logical axis names.

    Attributes:
      kernel: [*in_shape, *out_shape].
      bias: [*out_shape], or None.
      dot_general: the product, with the signature of jax.lax.dot_general.
    """

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        in_shape: tuple[int, ...],
        out_shape: tuple[int, ...],
        names: Names,
        *,
        gain: float = 1.0,
        use_bias: bool = False,
        heads_first: bool = False,
        rngs: nnx.Rngs,
    ):
        """Create the kernel, and the bias.

        Args:
          config: types and rules.
          kernels: provide the product.
          in_shape: sizes of the dimensions that are summed over.
          out_shape: sizes of the dimensions that replace them.
          names: logical axis names of in_shape, then of out_shape.
          gain: factor on the initial values of the kernel.
          use_bias: whether there is a bias, which begins as 0.
          heads_first: order of a sum in the gradient, see kernels/matmul.py.
          rngs: draws from the stream `params`.
        """
        self.num_summed, dtype = len(in_shape), config.weight_dtype
        self.kernel = matrix(
            (*in_shape, *out_shape),
            names,
            fan_in=math.prod(in_shape),
            gain=gain,
            dtype=dtype,
            rngs=rngs,
        )
        out_names = bias_names(names[len(in_shape) :])
        self.bias = constant(out_shape, out_names, dtype=dtype) if use_bias else None
        self.dot_general = kernels.dot_general(config, names, heads_first=heads_first)

    def __call__(self, x: jax.Array, *, name: str | None = None) -> jax.Array:
        """Multiply by the kernel and add the bias.

        Args:
          x: [B, L, *in_shape], in the type of the kernel.
          name: remat policies may keep the product under this name.

        Returns:
          [B, L, *out_shape].
        """
        out = self.product(x)
        return add_bias(out if name is None else keep(out, name), self.bias)

    def product(self, x: jax.Array) -> jax.Array:
        """Multiply [B, L, *in_shape] by the kernel, without the bias."""
        summed = innermost_first(x.ndim, self.num_summed), innermost_first(self.num_summed)
        return self.dot_general(x, self.kernel[...], (summed, ((), ())))
