"""Look up rows of the embedding table, which may be sharded."""
# B sequences  L tokens  V vocabulary  D model

import jax
import jax.numpy as jnp

from maxdiloco.models.each_device import automatic_spec, on_each_device
from maxdiloco.parallel.sharding import Rules, axes_of


def look_up(table_VD: jax.Array, tokens_BL: jax.Array, rules: Rules) -> jax.Array:
    """[B, L, D]: the row of each token, NaN for a token that has none.

    On a mesh each device gathers the columns of its part of the vocabulary and looks up those
    tokens of its sequences that are in that part; a psum adds the parts. Written by hand because
    the partitioner of jax 0.10 aborts on a gather from a table that is split in both dims while
    another axis is manual.
    """
    vocab_size = table_VD.shape[0]
    table_names, rows_names = ("vocab", "embed"), ("batch", "length")
    over_rows, over_columns = (
        axes_of(entry) for entry in automatic_spec(table_names, rules, split_only=True)
    )

    def local(table_VD, tokens_BL):
        if over_columns:
            table_VD = jax.lax.all_gather(table_VD, over_columns, axis=1, tiled=True)
        first = jax.lax.axis_index(over_rows) * table_VD.shape[0] if over_rows else 0
        index_BL = tokens_BL - first
        inside_BL = (index_BL >= 0) & (index_BL < table_VD.shape[0])
        x_BLD = table_VD.at[jnp.where(inside_BL, index_BL, 0)].get(mode="promise_in_bounds")
        if over_rows:
            x_BLD = jax.lax.psum(jnp.where(inside_BL[..., None], x_BLD, 0), over_rows)
        known_BL = (tokens_BL >= 0) & (tokens_BL < vocab_size)
        return jnp.where(known_BL[..., None], x_BLD, jnp.nan)

    return on_each_device(
        local,
        in_names=(table_names, rows_names),
        out_names=(*rows_names, None),
        rules=rules,
        split_only=True,
    )(table_VD, tokens_BL)
