"""Products of activations and weights: for CPU with dtype=bfloat16; einsum everywhere else."""

import functools

import jax
import jax.numpy as jnp

from maxdiloco.models.spec import ModelSpec

f32 = jnp.float32


def product(equation: str, x: jax.Array, w: jax.Array, spec: ModelSpec) -> jax.Array:
    """einsum of x and a weight in one type, and its two gradients, rounded once to that type.

    Accelerators sum in float32 by themselves. XLA:CPU has instructions for bfloat16 factors only
    where the result is float32, and computes in float32 altogether otherwise, which takes two to
    three times as long (benchmarks/README.md); spec.float32_products asks for that result.
    """
    if not spec.float32_products:
        return jnp.einsum(equation, x, w, precision=spec.precision)
    return _product(equation, spec.precision, x, w)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(equation, precision, x, w):
    out = jnp.einsum(equation, x, w, precision=precision, preferred_element_type=f32)
    return out.astype(x.dtype)


def _forward(equation, precision, x, w):
    return _product(equation, precision, x, w), (x, w)


def _backward(equation, precision, factors, d_out):
    x, w = factors
    factors_in, out = equation.split("->")
    x_in, w_in = factors_in.split(",")
    dx = _product(f"{out},{w_in}->{x_in}", precision, d_out, w)
    dw = _product(f"{x_in},{out}->{w_in}", precision, x, d_out)
    return dx, dw


_product.defvjp(_forward, _backward)
