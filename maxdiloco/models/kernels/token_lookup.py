"""Look-up of tokens in an embedding table that is split over devices.

Each device's part is written out because the partitioner of jax 0.10 aborts on some gathers: from a
table that is split in both dimensions while another axis of the mesh is manual.
"""
# B sequences  L tokens  D model  V vocabulary

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from maxdiloco.models.config import ModelConfig
from maxdiloco.models.devices import map_shards, split_axes

NAMES = ("vocab", "embed")  # logical axis names of the table


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def look_up(config: ModelConfig, table_VD: jax.Array, tokens_BL: jax.Array) -> jax.Array:
    """Look up tokens in a table that may be split over devices in both dimensions.

    On a mesh each device gathers the columns of its part of the vocabulary, scaled and in
    config.dtype. It looks up its tokens that are in this part, and a psum adds the parts. The
    gradient is summed in the table's own type.

    Args:
      config: multiplier, type and rules.
      table_VD: the table.
      tokens_BL: int32.

    Returns:
      [B, L, D] in config.dtype; NaN for a token outside the table.
    """
    if split_axes(NAMES, config.rules)[1]:  # fewer bytes, the values of scaled, rounded rows
        table_VD = _scaled(config, table_VD).astype(config.dtype)
        return _rows(config, table_VD, tokens_BL).astype(config.dtype)
    return _scaled(config, _rows(config, table_VD, tokens_BL)).astype(config.dtype)


def _look_up_backward(config, residuals, dx_BLD):
    table_VD, tokens_BL = residuals
    _, transposed = jax.vjp(
        lambda table: _scaled(config, _rows(config, table, tokens_BL)), table_VD
    )
    return *transposed(dx_BLD.astype(table_VD.dtype)), None  # sums of many rows drift in bfloat16


look_up.defvjp(
    lambda config, table, tokens: (look_up(config, table, tokens), (table, tokens)),
    _look_up_backward,
)


def _scaled(config, x):
    return x if config.embedding_multiplier == 1 else x * config.embedding_multiplier


def _rows(config, table_VD, tokens_BL):
    """Return the rows of a table in its type, or in float32 if its rows are split."""
    vocab_size = table_VD.shape[0]
    over_rows, over_columns = split_axes(NAMES, config.rules)

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

    batch, length = split_axes(("batch", "length"), config.rules)
    of_tokens = P(batch or None, length or None)
    in_specs = P(over_rows or None, over_columns or None), of_tokens
    axes = {*over_rows, *over_columns, *batch, *length}
    return map_shards(local, in_specs, of_tokens, axes)(table_VD, tokens_BL)
