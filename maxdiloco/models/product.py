"""Products of activations and weights: einsum, with other types or gradients where faster.

The gains, in benchmarks/log/2026-11-22.md: float32 sums and factors on a CPU, 0.885 of a step's CPU
time ("CPU, one device": float32 factors); scattered gradients on a TPU, half of the bytes ("The
step of 1b": 648.1 ms).
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec as P

from maxdiloco.models.each_device import automatic_spec
from maxdiloco.models.float32 import float32_product
from maxdiloco.models.spec import ModelSpec
from maxdiloco.parallel.sharding import Names, Rules, axes_of

f32 = jnp.float32


def product(
    equation: str, x: jax.Array, w: jax.Array, spec: ModelSpec, names: Names = ()
) -> jax.Array:
    """einsum of x and a weight in one type, and its two gradients, rounded once to that type.

    Accelerators sum in float32 by themselves. XLA:CPU has instructions for bfloat16 factors only
    where the result is float32, and computes in float32 altogether otherwise, which takes two to
    three times as long (benchmarks/log); spec.float32_products asks for that result, and
    spec.float32_factors makes the factors float32 first, for processors that are faster so.
    names: logical names of the weight's dims, for spec.scattered_gradients, see _scattered_product;
    b and l in the equation are batch and length then. () leaves the sum to the partitioner.
    """
    if spec.float32_products:
        return _product(equation, spec.precision, spec.float32_factors, x, w)
    if spec.scattered_gradients and names:
        return _scattered_product(equation, spec.precision, tuple(names), spec.rules, x, w)
    return jnp.einsum(equation, x, w, precision=spec.precision)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _product(equation, precision, float32_factors, x, w):
    return float32_product(equation, x, w, precision, float32_factors).astype(x.dtype)


def _forward(equation, precision, float32_factors, x, w):
    return _product(equation, precision, float32_factors, x, w), (x, w)


def _backward(equation, precision, float32_factors, factors, d_out):
    x, w = factors
    factors_in, out = equation.split("->")
    x_in, w_in = factors_in.split(",")
    dx = _product(f"{out},{w_in}->{x_in}", precision, float32_factors, d_out, w)
    # XLA:CPU turns the left factor of a sum over tokens in memory: better the smaller one, and dw.
    (left, a), (right, b) = sorted(((x_in, x), (out, d_out)), key=lambda factor: factor[1].size)
    order = "".join(letter for letter in left + right if letter in w_in)
    dw = _product(f"{left},{right}->{order}", precision, float32_factors, a, b)
    return dx, jnp.einsum(f"{order}->{w_in}", dw)


_product.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _scattered_product(equation, precision, names, rules, x, w):
    """einsum whose weight's gradient is reduced straight to the devices that keep its parts.

    The partitioner adds up whole gradients on every device and cuts them afterwards, or cuts the
    product into as many pieces as there are devices; both take longer (benchmarks/log).
    """
    return jnp.einsum(equation, x, w, precision=precision)


def _scattered_forward(equation, precision, names, rules, x, w):
    return _scattered_product(equation, precision, names, rules, x, w), (x, w)


def _scattered_backward(equation, precision, names, rules, factors, d_out):
    x, w = factors
    factors_in, out = equation.split("->")
    x_in, w_in = factors_in.split(",")
    dx = jnp.einsum(f"{out},{w_in}->{x_in}", d_out, w, precision=precision)
    over_batch, over_length = automatic_spec(("batch", "length"), rules, split_only=True)
    parts = _parts(names, rules, over=(*axes_of(over_batch), *axes_of(over_length)))
    lies = {"b": over_batch, "l": over_length} | dict(zip(w_in, parts.kept, strict=True))

    def local(x, d_out):
        return parts.sum(jnp.einsum(f"{x_in},{out}->{w_in}", x, d_out, precision=precision))

    in_specs = (P(*(lies[letter] or None for letter in letters)) for letters in (x_in, out))
    return dx, parts.on_each_device(local, *in_specs)(x, d_out)


_scattered_product.defvjp(_scattered_forward, _scattered_backward)


def scattered_sum(dw_G: jax.Array, names: Names, rules: Rules) -> jax.Array:
    """The sum over G, a part for each device that tokens are spread over, as the names say."""
    (over_tokens,) = automatic_spec((("batch", "length"),), rules, split_only=True)
    parts = _parts(names, rules, over=axes_of(over_tokens))
    spec_G = P(over_tokens, *(axes or None for axes in parts.kept))
    return parts.on_each_device(lambda dw_G: parts.sum(dw_G.sum(0)), spec_G)(dw_G)


class _Parts(NamedTuple):
    """Mesh axes that hold parts of an array: of each dim those that keep it split, and those that
    split its sum, which is over `over`.
    """

    kept: list[tuple[str, ...]]
    scattered: list[tuple[str, ...]]
    over: set[str]

    def sum(self, dw: jax.Array) -> jax.Array:
        """This device's part of the sum of every device's dw."""
        for dim, axes in enumerate(self.scattered):
            if axes:
                dw = _reduce_scattered(dw, axes, dim)
        left = tuple(sorted(self.over.difference(*self.scattered)))
        return jax.lax.psum(dw, left) if left else dw

    def on_each_device(self, local: Callable, *in_specs: P) -> Callable:
        """local of each device's parts, to an array of these parts."""
        manual = self.over.union(*self.kept, *self.scattered)
        if not manual:
            return local
        pairs = zip(self.kept, self.scattered, strict=True)
        return jax.shard_map(
            local,
            mesh=jax.sharding.get_abstract_mesh(),
            in_specs=in_specs,
            out_specs=P(*((*kept, *scattered) or None for kept, scattered in pairs)),
            axis_names=manual,
            check_vma=False,  # as in on_each_device
        )


def _parts(names, rules, *, over):
    lies = [axes_of(entry) for entry in automatic_spec(names, rules, split_only=True)]
    scattered = [tuple(axis for axis in axes if axis in over) for axes in lies]
    kept = [tuple(axis for axis in axes if axis not in over) for axes in lies]
    return _Parts(kept, scattered, set(over))


def _reduce_scattered(dw, axes, dim):
    """The sum over mesh axes, a part of dim for each device.

    The dim becomes the rows of a matrix, in memory too: where the dim to scatter lies in the lanes
    XLA:TPU makes an all-reduce, of twice the bytes.
    """
    rows_first = jnp.moveaxis(dw, dim, 0)
    rows = with_layout_constraint(rows_first.reshape(dw.shape[dim], -1), Layout((0, 1)))
    part = jax.lax.psum_scatter(rows, axes, scatter_dimension=0, tiled=True)
    return jnp.moveaxis(part.reshape(-1, *rows_first.shape[1:]), 0, dim)
