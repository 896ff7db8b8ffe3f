"""Tokens in the order of their experts and back, with gradients that gather instead of scatter."""
# T tokens  D model  E experts  K experts of a token
# A = K T choices, in order of k, then of t; rows, sorted by expert

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from maxdiloco.models.remat import ROUTED, keep

f32 = jnp.float32


class Rows(NamedTuple):
    """Choices sorted by expert, earlier tokens first; choices of other devices' experts are last.

    Attributes:
      order_A: choice of each row.
      inverse_A: row of each choice.
      sizes_E: rows of each expert on this device.
    """

    order_A: jax.Array
    inverse_A: jax.Array
    sizes_E: jax.Array


def sort_by_expert(
    experts_TK: jax.Array, first: int | jax.Array, num_experts: int
) -> tuple[jax.Array, Rows]:
    """Sort choices by expert.

    Args:
      experts_TK: experts of each token.
      first: number of the first expert on this device.
      num_experts: E, number of experts on this device.

    Returns:
      The expert of each choice [A], counted from `first`, or num_experts if it is on another
      device; and the rows.
    """
    E = num_experts
    keys_A = experts_TK.T.reshape(-1) - first
    keys_A = jnp.where((keys_A >= 0) & (keys_A < E), keys_A, E)
    order_A = jnp.argsort(keys_A, stable=True)
    inverse_A = jnp.argsort(order_A)
    sizes_E = jnp.sum(keys_A[:, None] == jnp.arange(E), axis=0, dtype=jnp.int32)
    return keys_A, Rows(*(keep(x, ROUTED) for x in (order_A, inverse_A, sizes_E)))


def rows_of_round(rows: Rows, number: jax.Array | int, num_rows: int) -> Rows:
    """Return one round's part of the rows of this device's experts.

    Args:
      rows: all rows.
      number: i; round i has the rows from i * num_rows on.
      num_rows: R, rows of a round.

    Returns:
      Rows with order_A of length R and the round's rows of each expert. A choice that is not in the
      round has an inverse of at least R.
    """
    A, first = len(rows.order_A), number * num_rows
    order_A = jnp.pad(rows.order_A, (0, -A % num_rows))
    ends_E = jnp.cumsum(rows.sizes_E)
    begin_E, end_E = (jnp.clip(x - first, 0, num_rows) for x in (ends_E - rows.sizes_E, ends_E))
    row_A = rows.inverse_A - first
    return Rows(
        order_A=jax.lax.dynamic_slice_in_dim(order_A, first, num_rows),
        inverse_A=jnp.where(row_A < 0, num_rows, row_A),
        sizes_E=end_E - begin_E,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gather_rows(K: int, x_TD: jax.Array, rows: Rows) -> jax.Array:
    """Gather the entry of each row's choice.

    The gradient gathers by the inverse order. The gradient of an indexing would be a scatter.

    Args:
      K: choices of each entry of x.
      x_TD: [T, D] or [T]. With K = 1 one entry for each choice.
      rows: order of the choices.

    Returns:
      [A, D] or [A].
    """
    return x_TD[rows.order_A % x_TD.shape[0]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def sum_rows(K: int, x_AD: jax.Array, rows: Rows) -> jax.Array:
    """Sum the rows of each token's choices, without the choices of experts on other devices.

    The choices are added one by one: a reduction over K takes XLA:TPU five times as long
    (benchmarks/results/experts.md). XLA:TPU would lay out every row in memory like the residual
    stream. With the layout constraint it transposes only the sum.

    Args:
      K: choices of each token.
      x_AD: [A, D] or [A].
      rows: order of the choices.

    Returns:
      [T, D] or [T].
    """
    x_KTD = x_AD[rows.inverse_A].reshape(K, -1, *x_AD.shape[1:])
    here_A = rows.inverse_A < jnp.sum(rows.sizes_E)
    here_KTD = here_A.reshape(*x_KTD.shape[:2], *[1] * (x_AD.ndim - 1))
    x_TD = sum(jnp.where(here_KTD[k], x_KTD[k], 0).astype(f32) for k in range(K))
    return with_layout_constraint(x_TD.astype(x_AD.dtype), Layout(tuple(range(x_AD.ndim))))


gather_rows.defvjp(
    lambda K, x_TD, rows: (gather_rows(K, x_TD, rows), rows),
    lambda K, rows, d_AD: (sum_rows(K, d_AD, rows), None),
)
sum_rows.defvjp(
    lambda K, x_AD, rows: (sum_rows(K, x_AD, rows), rows),
    lambda K, rows, d_TD: (gather_rows(K, d_TD, rows), None),
)


@jax.custom_vjp
def fork(x_AD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return x twice, for two products. Adding their gradients in float32 takes half the time."""
    return x_AD, x_AD


fork.defvjp(
    lambda x_AD: ((x_AD, x_AD), None),
    lambda _, d: ((d[0].astype(f32) + d[1].astype(f32)).astype(d[0].dtype),),
)
