"""Products of activations and weights, with other types or gradients if that is faster.

XLA:CPU has instructions for bfloat16 factors only if the result is float32. Without them a product
takes two to three times as long. On a TPU a reduce-scatter moves half of a gradient's bytes. The
measured gains are in docs/reference/results.md ("Compared with a PyTorch loop") and
benchmarks/results/compile_estimates.md ("The step of 1b").
"""
# B sequences  L tokens  G groups of tokens

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from maxdiloco.models.devices import map_shards, split_axes
from maxdiloco.models.kernels import quantized
from maxdiloco.parallel.sharding import Names, Rules

f32 = jnp.float32


@dataclasses.dataclass(frozen=True)
class Products:
    """How products of activations and weights are computed.

    Attributes:
      precision: `precision` of jax.lax.dot_general.
      float32_results: sum in float32 and round once. Accelerators do so by themselves.
      float32_operands: also convert the factors to float32 first, for processors that multiply
        float32 faster.
      scattered_gradients: reduce the gradient of a weight directly to the devices that store its
        parts. Otherwise the partitioner sums whole gradients on every device and cuts them
        afterwards, or cuts the product into one piece for each device. Both take longer
        (benchmarks/results/compile_estimates.md).
      quantization: `none`, or the format of the factors, see quantized.py.
    """

    precision: str = "default"
    float32_results: bool = False
    float32_operands: bool = False
    scattered_gradients: bool = False
    quantization: str = quantized.NONE

    @property
    def result_type(self) -> DTypeLike | None:
        """`preferred_element_type` of a product whose result is rounded to its factors' type."""
        return f32 if self.float32_results else None


@dataclasses.dataclass(frozen=True)
class _Call:
    """One product: x [B, L, *in] times w [*in, *out], where `in` has `num_summed` dimensions."""

    products: Products
    num_summed: int
    names: Names  # of the dimensions of w
    rules: Rules
    dtype: Any  # of activations
    heads_first: bool  # order of the sum in dot_transposed

    def dot(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """Return [B, L, *out]."""
        n = self.num_summed
        return self.sum_over(x, w, innermost_first(x.ndim, n), innermost_first(n))

    def dot_transposed(self, d_out: jax.Array, w: jax.Array) -> jax.Array:
        """Return [B, L, *in] of d_out [B, L, *out]."""
        dims_d, dims_w = _last_dims(d_out, w.ndim - self.num_summed, w)
        if self.heads_first:
            dims_d, dims_w = dims_d[::-1], dims_w[::-1]
        return self.sum_over(d_out, w, dims_d, dims_w)

    def sum_over(self, x: jax.Array, y: jax.Array, dims_x: Any, dims_y: Any) -> jax.Array:
        """Return the product of two arrays in the type of x, summed over these dimensions."""
        options = self.products
        if options.float32_operands:
            x_in, y_in = x.astype(f32), y.astype(f32)
        else:
            x_in, y_in = x, y
        out = jax.lax.dot_general(
            x_in,
            y_in,
            ((dims_x, dims_y), ((), ())),
            precision=options.precision,
            preferred_element_type=options.result_type,
        )
        return out.astype(x.dtype)


def innermost_first(ndim: int, num_last: int | None = None) -> tuple[int, ...]:
    """Return the last dimensions of an array in the order in which products sum over them.

    Heads and head dimension are summed in this order, except for `heads_first`. On a CPU the order
    changes the last bits.

    Args:
      ndim: dimensions of the array.
      num_last: number of dimensions to return. None: all.
    """
    num_last = ndim if num_last is None else num_last
    return tuple(range(ndim - 1, ndim - num_last - 1, -1))


def dot_general(
    products: Products, names: Names, rules: Rules, dtype: DTypeLike, *, heads_first: bool = False
) -> Callable:
    """Return a product for one weight, with the signature of jax.lax.dot_general.

    Args:
      products: how it is computed.
      names: logical axis names of the weight's dimensions.
      rules: logical axis name -> mesh axes.
      dtype: type of activations, in which devices sum the gradient of a quantised product.
      heads_first: sum over heads before their features in the gradient of x, which changes the last
        bits of that gradient only. Quantised products ignore it.

    Returns:
      A function (x [B, L, *in], w [*in, *out], dimension_numbers) -> [B, L, *out]. It sums over the
      last dimensions of x and the first of w, and has no batch dimensions.
    """

    def product(x: jax.Array, w: jax.Array, dimension_numbers: Any) -> jax.Array:
        (_, summed_w), _ = dimension_numbers
        call = _Call(products, len(summed_w), tuple(names), rules, jnp.dtype(dtype), heads_first)
        if products.quantization != quantized.NONE:
            return _quantized(call, x, w)
        if products.float32_results or products.scattered_gradients:
            return _product(call, x, w)
        return jax.lax.dot_general(x, w, dimension_numbers, precision=products.precision)

    return product


def einsum_to_float32(products: Products, equation: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """Return an einsum with a float32 result; factors become float32 first if that is faster."""
    if products.float32_operands:
        x, w = x.astype(f32), w.astype(f32)
    return jnp.einsum(equation, x, w, precision=products.precision, preferred_element_type=f32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(call: _Call, x: jax.Array, w: jax.Array) -> jax.Array:
    return call.dot(x, w)


def _product_backward(call, factors, d_out):
    x, w = factors
    gradient = _scattered_gradient
    if call.products.float32_results:
        gradient = _rounded_gradient
    return call.dot_transposed(d_out, w), gradient(call, x, d_out)


_product.defvjp(lambda call, x, w: (_product(call, x, w), (x, w)), _product_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _quantized(call: _Call, x: jax.Array, w: jax.Array) -> jax.Array:
    return _quantized_forward(call, x, w)[0]


def _quantized_forward(call, x, w):
    out, *factors = quantized.product(call.products.quantization, x, w, call.num_summed)
    return out.astype(x.dtype), factors


def _quantized_backward(call, factors, d_out):
    x, w = factors
    name = call.products.quantization
    num_out = w.qvalue.ndim - call.num_summed
    scaled_by_w = d_out.astype(f32) * w.scale.reshape(1, 1, *w.scale.shape[call.num_summed :])
    dx = quantized.gradient(name, scaled_by_w, w.qvalue, *_last_dims(d_out, num_out, w.qvalue))
    scaled_by_x = d_out.astype(f32) * x.scale.reshape(*x.scale.shape[:2], *[1] * num_out)
    gradient = _scattered_gradient if call.products.scattered_gradients else _gradient
    return dx.astype(d_out.dtype), gradient(call, x.qvalue, scaled_by_x)


_quantized.defvjp(_quantized_forward, _quantized_backward)


def _last_dims(d_out, num_out, w):
    """Return the output dimensions of d_out and of w."""
    return innermost_first(d_out.ndim, num_out), innermost_first(w.ndim, num_out)


def _gradient(call, x, d_out):
    """Return the gradient [*in, *out] of the weight; x in 8 bits if the product is quantised."""
    if call.products.quantization != quantized.NONE:
        name = call.products.quantization
        dw = quantized.gradient(name, d_out, x, (0, 1), (0, 1), values_first=True)
        return dw.astype(call.dtype)  # before it is summed over devices: half the bytes
    return jax.lax.dot_general(
        x, d_out, (((0, 1), (0, 1)), ((), ())), precision=call.products.precision
    )


def _rounded_gradient(call, x, d_out):
    """Return the gradient of the weight, summed in float32 and rounded once.

    XLA:CPU transposes the left factor of a sum over tokens in memory. The smaller factor therefore
    is the left one, and the result is transposed.
    """
    if d_out.size < x.size:
        return _in_before_out(call.sum_over(d_out, x, (0, 1), (0, 1)), d_out.ndim - 2)
    return call.sum_over(x, d_out, (0, 1), (0, 1))


def _in_before_out(dw, num_out):
    """Transpose [*out, *in] to [*in, *out]."""
    return dw.transpose(*range(num_out, dw.ndim), *range(num_out))


def _scattered_gradient(call, x, d_out):
    """Return the gradient of the weight, reduced directly to the devices that store its parts."""
    batch, length = split_axes(("batch", "length"), call.rules)
    over = (*batch, *length)
    kept, scattered = _kept_and_scattered(call.names, call.rules, over)
    tokens = (batch or None, length or None)
    of_in, of_out = kept[: call.num_summed], kept[call.num_summed :]
    in_specs = tuple(P(*tokens, *(axes or None for axes in dims)) for dims in (of_in, of_out))
    local = functools.partial(_gradient, call)
    return _summed(local, kept, scattered, over, in_specs)(x, d_out)


def scattered_sum(dw_G: jax.Array, names: Names, rules: Rules) -> jax.Array:
    """Sum the parts of a gradient, one from each device that tokens are spread over.

    Args:
      dw_G: [G, *shape of the weight].
      names: logical axis names of the weight's dimensions.
      rules: logical axis name -> mesh axes.

    Returns:
      The sum over G, sharded as the names say.
    """
    (over_tokens,) = split_axes((("batch", "length"),), rules)
    kept, scattered = _kept_and_scattered(names, rules, over_tokens)
    spec_G = P(over_tokens or None, *(axes or None for axes in kept))
    return _summed(lambda dw_G: dw_G.sum(0), kept, scattered, over_tokens, (spec_G,))(dw_G)


def _kept_and_scattered(names, rules, over):
    """Return the mesh axes of each dimension that keep it split, and that scatter its sum."""
    axes = split_axes(names, rules)
    kept = [tuple(axis for axis in of_dim if axis not in over) for of_dim in axes]
    return kept, [tuple(axis for axis in of_dim if axis in over) for of_dim in axes]


def _summed(local, kept, scattered, over, in_specs):
    """Sum `local` of each device's parts over the axes in `over`; each device gets a part."""

    def part(*arrays):
        dw = local(*arrays)
        for dim, axes in enumerate(scattered):
            if axes:
                dw = _reduce_scatter(dw, axes, dim)
        left = tuple(sorted(set(over).difference(*scattered)))
        return jax.lax.psum(dw, left) if left else dw

    out_specs = P(*((*axes, *more) or None for axes, more in zip(kept, scattered, strict=True)))
    return map_shards(part, in_specs, out_specs, set(over).union(*kept))


def _reduce_scatter(dw, axes, dim):
    """Sum over mesh axes and give each device a part of `dim`.

    The dimension becomes the rows of a matrix, also in memory. If the dimension to scatter were in
    the lanes, XLA:TPU would make an all-reduce with twice the bytes.
    """
    rows_first = jnp.moveaxis(dw, dim, 0)
    rows = with_layout_constraint(rows_first.reshape(dw.shape[dim], -1), Layout((0, 1)))
    part = jax.lax.psum_scatter(rows, axes, scatter_dimension=0, tiled=True)
    return jnp.moveaxis(part.reshape(-1, *rows_first.shape[1:]), 0, dim)
