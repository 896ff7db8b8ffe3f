"""Products of 8-bit factors and their gradients: the key `quantization`, with qwix's arrays.

Both factors of all three products are rounded, as in MaxText's recipes for qwix. The result needs
rounded activations and weights. Each of the two gradients needs the rounded gradient of the result,
and the existing 8-bit values of the weight or of the activations. A scale is float32: the largest
absolute value among the numbers that are summed for one index of the result, divided by the largest
value of the format. There is one scale per token, and one per column of the weight. If a gradient
sums over the index of a scale, the gradient of the result is multiplied by the scale before it is
rounded. Rounding is to the nearest. Sums are in int32, and in float32 for fp8.

The rounding is implemented here and passed to Linear as its `dot_general`. Training through qwix's
NNX API, `quantize_model` with a `QtProvider`, reaches the same loss: three seeds of int8 and of fp8
stay within 0.3% of bfloat16. However, the provider replaces a whole product and its gradients, and
with them the reduce-scattered gradient of matmul.py. libtpu estimates 1.16 times the cycles for a
step on four v5e (benchmarks/results/step_time.md, "qwix's training provider compared with our
rounding").
"""

import string
from typing import Any

import jax
import jax.numpy as jnp

from maxdiloco.data.packages import require
from maxdiloco.errors import ConfigError
from maxdiloco.models.remat import ROUNDED, keep
from maxdiloco.parallel import chips

f32 = jnp.float32
NONE = "none"
FORMATS = {"int8": (jnp.int8, 127), "fp8": (jnp.float8_e4m3fn, 448)}  # type, largest value
SMALLEST = 1e-30  # lower bound of a row's largest value, so that its scale has a finite inverse


def check_device(quantization: str, backend: str, device_kind: str, capability: str) -> None:
    """Refuse a format that the device multiplies no faster than bfloat16.

    A CPU computes the same values, slowly.

    Args:
      quantization: the key.
      backend: `cpu`, `gpu` or `tpu`.
      device_kind: `device_kind` of jax.Device, or "" if it is unknown.
      capability: compute capability of a GPU, or "".

    Raises:
      ConfigError: the device has no fast products of this format.
    """
    if quantization == NONE or backend == "cpu" or not (device_kind or capability):
        return
    has = chips.eight_bit_formats(device_kind, capability)
    if quantization not in has:
        raise ConfigError(
            f"quantization={quantization}: {device_kind} multiplies {quantization} no faster than "
            f"bfloat16. Use quantization={' or '.join([*has, NONE])}."
        )


def check_package(quantization: str) -> None:
    """Raise ConfigError if qwix is needed and cannot be imported."""
    if quantization != NONE:
        user, otherwise = f"quantization={quantization}", ", or use quantization=none"
        require("qwix", user, extra="quantization", otherwise=otherwise)


def quantize(quantization: str, x: jax.Array, summed: tuple[int, ...]) -> Any:
    """Round an array to 8 bits.

    Args:
      quantization: a key of FORMATS.
      x: the array.
      summed: dimensions that share a scale, because a product sums over them.

    Returns:
      A qwix.QArray whose scale has size 1 in these dimensions.
    """
    import qwix

    x, (dtype, largest) = x.astype(f32), FORMATS[quantization]
    scale = jnp.max(jnp.abs(x), axis=summed, keepdims=True, initial=SMALLEST) / largest
    values = x * (1 / scale)
    return qwix.QArray((jnp.round(values) if dtype == jnp.int8 else values).astype(dtype), scale)


def product(
    quantization: str, x: jax.Array, w: jax.Array, num_summed: int
) -> tuple[jax.Array, Any, Any]:
    """Multiply rounded factors.

    Args:
      quantization: a key of FORMATS.
      x: [B, L, *in].
      w: [*in, *out].
      num_summed: number of dimensions `in`.

    Returns:
      The product [B, L, *out] in float32, and x and w as qwix.QArrays.
    """
    dims_x, dims_w = tuple(range(x.ndim - num_summed, x.ndim)), tuple(range(num_summed))
    x = jax.tree.map(lambda x: keep(x, ROUNDED), quantize(quantization, x, dims_x))
    w = quantize(quantization, w, dims_w)
    return _einsum(x, w, dims_x, dims_w), x, w


def gradient(
    quantization: str,
    d_out: jax.Array,
    values: jax.Array,
    dims_d: tuple[int, ...],
    dims_values: tuple[int, ...],
    *,
    values_first: bool = False,
) -> jax.Array:
    """Multiply a gradient, which is rounded first, by the 8-bit values of a factor.

    Args:
      quantization: a key of FORMATS.
      d_out: gradient of the product, multiplied by the scales that the sum is taken over.
      values: 8-bit values of a factor, without its scales.
      dims_d: dimensions of d_out that are summed over.
      dims_values: the same dimensions of `values`.
      values_first: order of the result.

    Returns:
      Float32 with the other dimensions of d_out, then the other ones of `values`; with values_first
      in the opposite order.
    """
    d = quantize(quantization, d_out, dims_d)
    return _einsum(d, values, dims_d, dims_values, y_first=values_first)


def _einsum(x, y, dims_x, dims_y, *, y_first=False):
    """Sum over pairs of dimensions, by qwix.einsum, which chooses the order of the factors."""
    import qwix

    of_x = string.ascii_lowercase[: x.ndim]
    of_y = list(string.ascii_uppercase[: y.ndim])
    for dim_x, dim_y in zip(dims_x, dims_y, strict=True):
        of_y[dim_y] = of_x[dim_x]
    rest_x = [letter for dim, letter in enumerate(of_x) if dim not in dims_x]
    rest_y = [letter for dim, letter in enumerate(of_y) if dim not in dims_y]
    out = [*rest_y, *rest_x] if y_first else [*rest_x, *rest_y]
    return qwix.einsum(f"{of_x},{''.join(of_y)}->{''.join(out)}", x, y)
