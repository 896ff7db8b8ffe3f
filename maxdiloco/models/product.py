"""Products of activations and weights: einsum, with other types or gradients where faster.

The gains: on a CPU the rows of docs/results.md, "Compared with a PyTorch loop" (float32 sums
and factors take 0.885 of a step's time); on a TPU half of the gradients' bytes (benchmarks/results,
"The step of 1b").
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec as P

from maxdiloco.models import quantized
from maxdiloco.models.devices import by_parts, split_axes
from maxdiloco.models.spec import ModelSpec
from maxdiloco.models.weights import LETTERS
from maxdiloco.parallel.sharding import Names, Rules

f32 = jnp.float32


def product(equation: str, x: jax.Array, w: jax.Array, spec: ModelSpec) -> jax.Array:
    """einsum of x and a weight in one type, and its two gradients, rounded once to that type.

    Letters: see weights.LETTERS. Accelerators sum in float32 by themselves. XLA:CPU has
    instructions for bfloat16 factors only where the result is float32, which
    spec.float32_products asks for; without, it takes two to three times as long.
    spec.float32_factors: of factors made float32 first, for processors that are faster so.
    spec.scattered_gradients: see _scattered_gradient. spec.quantization: see models/quantized.py.
    """
    if spec.quantization != quantized.NONE:
        return _quantized(equation, spec, x, w)
    if spec.float32_products or spec.scattered_gradients:
        return _product(equation, spec, x, w)
    return jnp.einsum(equation, x, w, precision=spec.precision)


def float32_product(equation: str, x, w, spec: ModelSpec) -> jax.Array:
    """einsum with a float32 result, of factors made float32 first where that is faster."""
    if spec.float32_factors:
        x, w = x.astype(f32), w.astype(f32)
    return jnp.einsum(equation, x, w, precision=spec.precision, preferred_element_type=f32)


def soft_capped(logits: jax.Array, cap: float) -> jax.Array:
    """cap * tanh(logits / cap); 0 is off."""
    return cap * jnp.tanh(logits / cap) if cap else logits


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(equation, spec, x, w):
    if spec.float32_products:
        return float32_product(equation, x, w, spec).astype(x.dtype)
    return jnp.einsum(equation, x, w, precision=spec.precision)


def _backward(equation, spec, factors, d_out):
    x, w = factors
    x_in, w_in, out = _letters(equation)
    dx = _product(f"{out},{w_in}->{x_in}", spec, d_out, w)
    gradient = _rounded_gradient if spec.float32_products else _scattered_gradient
    return dx, gradient(spec, (x_in, x), (out, d_out), w_in)


_product.defvjp(
    lambda equation, spec, x, w: (_product(equation, spec, x, w), (x, w)),
    _backward,
)


def _letters(equation):
    factors, out = equation.split("->")
    return *factors.split(","), out


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _quantized(equation, spec, x, w):
    return _quantized_forward(equation, spec, x, w)[0]


def _quantized_forward(equation, spec, x, w):
    out, *factors = quantized.product(spec.quantization, equation, x, w)
    return out.astype(x.dtype), factors


def _quantized_backward(equation, spec, factors, d_out):
    x, w = factors
    x_in, w_in, out = _letters(equation)
    of_w, of_x = (
        quantized.times_scale(d_out, out, factor.scale, letters)
        for factor, letters in ((w, w_in), (x, x_in))
    )
    dx = quantized.gradient(spec.quantization, f"{out},{w_in}->{x_in}", of_w, w.qvalue)
    gradient = _scattered_gradient if spec.scattered_gradients else _gradient
    return dx.astype(d_out.dtype), gradient(spec, (x_in, x.qvalue), (out, of_x), w_in)


_quantized.defvjp(_quantized_forward, _quantized_backward)


def _gradient(spec, x, d_out, w_in):
    """Of a weight with these letters; x, d_out: letters and values, x in 8 bits where quantized."""
    (x_in, x), (out, d_out) = x, d_out
    if spec.quantization != quantized.NONE:
        dw = quantized.gradient(spec.quantization, f"{out},{x_in}->{w_in}", d_out, x)
        return dw.astype(spec.dtype)  # before it is summed over devices: half the bytes
    return jnp.einsum(f"{x_in},{out}->{w_in}", x, d_out, precision=spec.precision)


def _rounded_gradient(spec, x, d_out, w_in):
    """Of a weight with these letters; x, d_out: letters and values."""
    # XLA:CPU turns the left factor of a sum over tokens in memory: better the smaller one, and dw.
    (left, a), (right, b) = sorted((x, d_out), key=lambda factor: factor[1].size)
    order = "".join(letter for letter in left + right if letter in w_in)
    return jnp.einsum(f"{order}->{w_in}", _product(f"{left},{right}->{order}", spec, a, b))


def _scattered_gradient(spec, x, d_out, w_in):
    """The same, reduced straight to the devices that keep its parts.

    The partitioner adds up whole gradients on every device and cuts them afterwards, or cuts the
    product into as many pieces as there are devices; both take longer (benchmarks/results).
    """
    (x_in, x), (out, d_out) = x, d_out
    batch, length = split_axes(("batch", "length"), spec.rules)
    names, over = [LETTERS[letter] for letter in w_in], (*batch, *length)
    kept, scattered = _kept_and_scattered(names, spec.rules, over)
    axes = {"b": batch, "l": length} | dict(zip(w_in, kept, strict=True))

    def local(x, d_out):
        return _gradient(spec, (x_in, x), (out, d_out), w_in)

    in_specs = tuple(P(*(axes[letter] or None for letter in letters)) for letters in (x_in, out))
    return _summed(local, kept, scattered, over, in_specs)(x, d_out)


def scattered_sum(dw_G: jax.Array, names: Names, rules: Rules) -> jax.Array:
    """The sum over G, a part for each device that tokens are spread over, as the names say."""
    (over_tokens,) = split_axes((("batch", "length"),), rules)
    kept, scattered = _kept_and_scattered(names, rules, over_tokens)
    spec_G = P(over_tokens or None, *(axes or None for axes in kept))
    return _summed(lambda dw_G: dw_G.sum(0), kept, scattered, over_tokens, (spec_G,))(dw_G)


def _kept_and_scattered(names, rules, over):
    """Mesh axes of each dim: those that keep it split, and those that split its sum over `over`."""
    axes = split_axes(names, rules)
    kept = [tuple(axis for axis in of_dim if axis not in over) for of_dim in axes]
    return kept, [tuple(axis for axis in of_dim if axis in over) for of_dim in axes]


def _summed(local, kept, scattered, over, in_specs):
    """local of each device's parts, summed over `over`: a part for each device."""

    def part(*arrays):
        dw = local(*arrays)
        for dim, axes in enumerate(scattered):
            if axes:
                dw = _reduce_scattered(dw, axes, dim)
        left = tuple(sorted(set(over).difference(*scattered)))
        return jax.lax.psum(dw, left) if left else dw

    out_specs = P(*((*axes, *more) or None for axes, more in zip(kept, scattered, strict=True)))
    return by_parts(part, in_specs, out_specs, set(over).union(*kept))


def _reduce_scattered(dw, axes, dim):
    """The sum over mesh axes, a part of dim for each device.

    The dim becomes the rows of a matrix, in memory too: where the dim to scatter lies in the lanes
    XLA:TPU makes an all-reduce, of twice the bytes.
    """
    rows_first = jnp.moveaxis(dw, dim, 0)
    rows = with_layout_constraint(rows_first.reshape(dw.shape[dim], -1), Layout((0, 1)))
    part = jax.lax.psum_scatter(rows, axes, scatter_dimension=0, tiled=True)
    return jnp.moveaxis(part.reshape(-1, *rows_first.shape[1:]), 0, dim)
