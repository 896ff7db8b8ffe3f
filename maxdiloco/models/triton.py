"""Causal attention within documents as Triton kernels, for GPUs.

The algorithm is FlashAttention-2's (arXiv 2307.08691). No mask is in memory: a query sees one run
of keys, from its document's first (or its window's) to itself, so two integers a token say all, and
blocks of keys that no query of a block sees are left out. The backward pass forms the weights again
from the saved log normalisers.
"""
# B sequences  L queries and keys  N query heads  K key/value heads  G = N / K
# H head dim of queries and keys  E head dim of values

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from maxdiloco.models import triton_kernels
from maxdiloco.models.dot_product import Softmax, d_sinks
from maxdiloco.models.remat import CONTEXT, keep
from maxdiloco.models.triton_kernels import padded, tiles

f32 = jnp.float32


class Reach(NamedTuple):
    """What sees what; each row grows. first: of a query its first key. last: of a key its last
    query. Both int32 [B, L]."""

    first_BL: jax.Array
    last_BL: jax.Array


def reach(segment_ids_BL: jax.Array, window: int) -> Reach:
    """Of sequences whose documents, runs of equal ids, lie end to end."""
    positions_L = jnp.arange(segment_ids_BL.shape[1], dtype=jnp.int32)
    starts_BL = segment_ids_BL[:, 1:] != segment_ids_BL[:, :-1]
    starts_BL = jnp.pad(starts_BL, ((0, 0), (1, 0)))
    first_BL = jax.lax.cummax(jnp.where(starts_BL, positions_L, 0), axis=1)
    ends_BL = jnp.pad(starts_BL[:, 1:], ((0, 0), (0, 1)), constant_values=True)
    last_BL = jax.lax.cummin(jnp.where(ends_BL, positions_L, positions_L[-1]), axis=1, reverse=True)
    if window:
        first_BL = jnp.maximum(first_BL, positions_L - window + 1)
        last_BL = jnp.minimum(last_BL, positions_L + window - 1)
    return Reach(first_BL, last_BL)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend(
    softmax_config: Softmax,
    interpret: bool,
    q_BLNH: jax.Array,
    k_BLKH: jax.Array,
    v_BLKE: jax.Array,
    segment_ids_BL: jax.Array,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """dot_product of whole sequences: context [B, L, N, E].

    interpret: run it as array code, for tests without a GPU. L: a multiple of 16. H, E: up to 256.
    Documents lie end to end, see reach.
    """
    return _forward(softmax_config, interpret, q_BLNH, k_BLKH, v_BLKE, segment_ids_BL, sinks_N)[0]


def _forward(softmax_config, interpret, q_BLNH, k_BLKH, v_BLKE, segment_ids_BL, sinks_N):
    B, L, N, H = q_BLNH.shape
    E, G = v_BLKE.shape[-1], N // k_BLKH.shape[2]
    sizes = tiles("forward", max(H, E), L)
    found = reach(segment_ids_BL, softmax_config.window)
    context_BLNE, lse_BNL = pl.pallas_call(
        functools.partial(triton_kernels.forward, softmax_config, sizes, (H, E)),
        grid=(L // sizes.own, N, B),
        in_specs=[
            _rows(sizes.own, H),
            _all_rows(L, H, G),
            _all_rows(L, E, G),
            pl.BlockSpec((None, L), lambda i, n, b: (b, 0)),
            None if sinks_N is None else pl.BlockSpec((1,), lambda i, n, b: (n,)),
        ],
        out_specs=[_rows(sizes.own, E), pl.BlockSpec((None, None, sizes.own), _of_head)],
        out_shape=[
            jax.ShapeDtypeStruct((B, L, N, E), q_BLNH.dtype),
            jax.ShapeDtypeStruct((B, N, L), f32),
        ],
        compiler_params=_params(sizes),
        interpret=interpret,
        name="attention_forward",
    )(q_BLNH, k_BLKH, v_BLKE, found.first_BL, sinks_N)
    context_BLNE, lse_BNL = keep(context_BLNE, CONTEXT), keep(lse_BNL, CONTEXT)
    inputs = (q_BLNH, k_BLKH, v_BLKE, segment_ids_BL, sinks_N)
    return context_BLNE, (*inputs, context_BLNE, lse_BNL)


def _backward(softmax_config, interpret, residuals, d_BLNE):
    q_BLNH, k_BLKH, v_BLKE, segment_ids_BL, sinks_N, context_BLNE, lse_BNL = residuals
    B, L, N, H = q_BLNH.shape
    K, E = v_BLKE.shape[2:]
    G = N // K
    found = reach(segment_ids_BL, softmax_config.window)
    products = d_BLNE.astype(f32) * context_BLNE.astype(f32)
    mean_BNL = products.sum(-1).swapaxes(1, 2)  # of d weights, under the weights

    sizes = tiles("d_queries", max(H, E), L)
    of_rows = pl.BlockSpec((None, None, sizes.own), _of_head)
    dq_BLNH = pl.pallas_call(
        functools.partial(triton_kernels.d_queries, softmax_config, sizes, (H, E)),
        grid=(L // sizes.own, N, B),
        in_specs=[
            _rows(sizes.own, H),
            _all_rows(L, H, G),
            _all_rows(L, E, G),
            _rows(sizes.own, E),
            of_rows,
            of_rows,
            pl.BlockSpec((None, L), lambda i, n, b: (b, 0)),
        ],
        out_specs=_rows(sizes.own, H),
        out_shape=jax.ShapeDtypeStruct(q_BLNH.shape, q_BLNH.dtype),
        compiler_params=_params(sizes),
        name="attention_d_queries",
        interpret=interpret,
    )(q_BLNH, k_BLKH, v_BLKE, d_BLNE, lse_BNL, mean_BNL, found.first_BL)

    sizes = tiles("d_keys_values", max(H, E), L)
    of_group = pl.BlockSpec((None, G, L), lambda i, n, b: (b, n, 0))
    dk_BLKH, dv_BLKE = pl.pallas_call(
        functools.partial(triton_kernels.d_keys_values, softmax_config, sizes, (H, E), G),
        grid=(L // sizes.own, K, B),
        in_specs=[
            _group_rows(L, H, G),
            _rows(sizes.own, H),
            _rows(sizes.own, E),
            _group_rows(L, E, G),
            of_group,
            of_group,
            pl.BlockSpec((None, L), lambda i, n, b: (b, 0)),
        ],
        out_specs=[_rows(sizes.own, H), _rows(sizes.own, E)],
        out_shape=[
            jax.ShapeDtypeStruct(k_BLKH.shape, k_BLKH.dtype),
            jax.ShapeDtypeStruct(v_BLKE.shape, v_BLKE.dtype),
        ],
        compiler_params=_params(sizes),
        name="attention_d_keys_values",
        interpret=interpret,
    )(q_BLNH, k_BLKH, v_BLKE, d_BLNE, lse_BNL, mean_BNL, found.last_BL)
    d_sinks_N = d_sinks(sinks_N, mean_BNL, lse_BNL)
    return dq_BLNH, dk_BLKH, dv_BLKE, None, d_sinks_N


attend.defvjp(_forward, _backward)


def _of_head(i, n, b):
    return b, n, i


def _rows(size, dim):
    """A block of rows of the array [B, L, heads, dim]."""
    return pl.BlockSpec((None, size, None, padded(dim)), lambda i, n, b: (b, i, n, 0))


def _all_rows(length, dim, num_groups):
    """All rows of the key/value head of query head n."""
    block = (None, length, None, padded(dim))
    return pl.BlockSpec(block, lambda i, n, b: (b, 0, n // num_groups, 0))


def _group_rows(length, dim, num_groups):
    """All rows of the query heads of key/value head n."""
    block = (None, length, num_groups, padded(dim))
    return pl.BlockSpec(block, lambda i, n, b: (b, 0, n, 0))


def _params(sizes):
    return triton.CompilerParams(num_warps=sizes.warps, num_stages=sizes.stages)
