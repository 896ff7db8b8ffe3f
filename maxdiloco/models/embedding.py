"""Look up rows of the embedding table, which may be sharded."""
# B sequences  L tokens  V vocabulary  D model

import functools
from typing import Any

import jax
import jax.numpy as jnp

from maxdiloco.models.each_device import automatic_spec, on_each_device
from maxdiloco.parallel.sharding import Rules, axes_of


def look_up(
    table_VD: jax.Array, tokens_BL: jax.Array, rules: Rules, dtype: Any, scale: float = 1.0
) -> jax.Array:
    """[B, L, D] in `dtype`: the row of each token times `scale`, NaN for a token that has none.

    On a mesh each device gathers the columns of its part of the vocabulary, scaled and in `dtype`,
    and looks up those tokens of its sequences that are in that part; a psum adds the parts. The
    gradient is summed in the table's own dtype. Written by hand because the partitioner of jax 0.10
    aborts on a gather from a table that is split in both dims while another axis is manual.
    """
    return _look_up(rules, jnp.dtype(dtype), scale, table_VD, tokens_BL)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _look_up(rules, dtype, scale, table_VD, tokens_BL):
    _, over_columns = _table_axes(rules)
    if over_columns:  # the same values as of rows that are scaled and rounded, and fewer bytes
        return _rows(rules, _scaled(table_VD, scale).astype(dtype), tokens_BL).astype(dtype)
    return _scaled(_rows(rules, table_VD, tokens_BL), scale).astype(dtype)


def _look_up_forward(rules, dtype, scale, table_VD, tokens_BL):
    return _look_up(rules, dtype, scale, table_VD, tokens_BL), (table_VD, tokens_BL)


def _look_up_backward(rules, dtype, scale, found, dx_BLD):
    table_VD, tokens_BL = found
    _, transposed = jax.vjp(
        lambda table: _scaled(_rows(rules, table, tokens_BL), scale), table_VD
    )
    return *transposed(dx_BLD.astype(table_VD.dtype)), None  # sums of many rows drift in bfloat16


_look_up.defvjp(_look_up_forward, _look_up_backward)


def _scaled(x: jax.Array, scale: float) -> jax.Array:
    return x if scale == 1 else x * scale


_TABLE = ("vocab", "embed")


def _table_axes(rules: Rules) -> tuple[tuple[str, ...], ...]:
    """Mesh axes that split the table's rows, and its columns."""
    return tuple(axes_of(entry) for entry in automatic_spec(_TABLE, rules, split_only=True))


def _rows(rules: Rules, table_VD: jax.Array, tokens_BL: jax.Array) -> jax.Array:
    """The rows of a table in its dtype, or in float32 where its rows are split."""
    vocab_size = table_VD.shape[0]
    rows_names = ("batch", "length")
    over_rows, over_columns = _table_axes(rules)

    def local(table_VD, tokens_BL):
        if over_columns:
            table_VD = jax.lax.all_gather(table_VD, over_columns, axis=1, tiled=True)
        first = jax.lax.axis_index(over_rows) * table_VD.shape[0] if over_rows else 0
        index_BL = tokens_BL - first
        inside_BL = (index_BL >= 0) & (index_BL < table_VD.shape[0])
        x_BLD = table_VD.at[jnp.where(inside_BL, index_BL, 0)].get(mode="promise_in_bounds")
        if over_rows:
            x_BLD = x_BLD.astype(jnp.float32)  # XLA:CPU aborts on a psum of bfloat16
            x_BLD = jax.lax.psum(jnp.where(inside_BL[..., None], x_BLD, 0), over_rows)
        known_BL = (tokens_BL >= 0) & (tokens_BL < vocab_size)
        return jnp.where(known_BL[..., None], x_BLD, jnp.nan)

    return on_each_device(
        local,
        in_names=(_TABLE, rows_names),
        out_names=(*rows_names, None),
        rules=rules,
        split_only=True,
    )(table_VD, tokens_BL)
