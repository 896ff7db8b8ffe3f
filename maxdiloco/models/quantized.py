"""Products of 8-bit factors and their gradients: the key `quantization`, by qwix.

Both factors of all three products are rounded, as by MaxText's recipes for qwix: activations and
weight for the result; its gradient once for each of the other two, beside the values of the weight
and the activations that are there already. A scale, float32, is the largest absolute value of what
is summed up for one index of the result, over the largest of the format: of each token, of each
column of the weight. Where a gradient sums over the index of such a scale, the scale goes into the
gradient of the result before that is rounded. Rounding is to the nearest; sums are in int32, of fp8
in float32.
"""

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
SMALLEST = 1e-30  # of the largest value of a row, so that the inverse of its scale is finite


def check_device(quantization: str, backend: str, device_kind: str, capability: str) -> None:
    """Raise ConfigError for devices that multiply such factors no faster than bfloat16 ones.

    A CPU computes the same values, slowly. The other arguments: see spec.from_config.
    """
    if quantization == NONE or backend == "cpu" or not (device_kind or capability):
        return
    has = chips.eight_bit(device_kind, capability)
    if quantization not in has:
        raise ConfigError(
            f"quantization={quantization}: {device_kind} multiplies {quantization} no faster than "
            f"bfloat16. Use quantization={' or '.join([*has, NONE])}."
        )


def check_package(quantization: str) -> None:
    """Raise ConfigError where qwix is needed and cannot be imported."""
    if quantization != NONE:
        user, otherwise = f"quantization={quantization}", ", or use quantization=none"
        require("qwix", user, extra="quantization", otherwise=otherwise)


def rounded(quantization: str, letters: str, kept: str, x: jax.Array) -> Any:
    """x as a qwix.QArray, a scale for each index of the dims in `kept`; letters: of its dims.

    Not qwix.quantize, which divides by the scale, in bfloat16 with bfloat16 x.
    """
    import qwix  # which loads flax

    x, (dtype, largest) = x.astype(f32), FORMATS[quantization]
    summed = tuple(dim for dim, letter in enumerate(letters) if letter not in kept)
    scale = jnp.max(jnp.abs(x), axis=summed, keepdims=True, initial=SMALLEST) / largest
    values = x * (1 / scale)
    return qwix.QArray((jnp.round(values) if dtype == jnp.int8 else values).astype(dtype), scale)


def product(quantization: str, equation: str, x: jax.Array, w: jax.Array) -> tuple[Any, ...]:
    """einsum of both factors rounded, float32, and these as QArrays."""
    import qwix

    letters, out = equation.split("->")
    x_in, w_in = letters.split(",")
    x = jax.tree.map(lambda x: keep(x, ROUNDED), rounded(quantization, x_in, out, x))
    w = rounded(quantization, w_in, out, w)
    return qwix.einsum(equation, x, w), x, w


def times_scale(d_out: jax.Array, out: str, scale: jax.Array, letters: str) -> jax.Array:
    """The gradient of a product, float32, times a factor's scales; letters: of their dims."""
    sizes = dict(zip(letters, scale.shape, strict=True))
    return d_out.astype(f32) * scale.reshape([sizes.get(letter, 1) for letter in out])


def gradient(quantization: str, equation: str, d_out: jax.Array, values: jax.Array) -> jax.Array:
    """einsum of d_out of times_scale, which is rounded first, and a factor's 8-bit values."""
    import qwix

    letters, of_result = equation.split("->")
    d = rounded(quantization, letters.split(",")[0], of_result, d_out)
    return qwix.einsum(equation, d, values)
