"""Attention as array code for any backend, block by block of queries.

The backward pass recomputes the attention weights from the saved log normalisers (FlashAttention,
arXiv 2205.14135, algorithm 4). Memory grows with block * L, not with L * L.
"""
# B sequences  L queries  S keys  N query heads  K key/value heads  G = N / K  H head dim

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxdiloco.models.kernels.matmul import Products, einsum_to_float32
from maxdiloco.models.remat import CONTEXT, keep

f32 = jnp.float32
# Queries of a block, in sequences of up to two blocks and in longer ones. Each block is unrolled
# into the program; the sizes follow from step and compile time in benchmarks/results/step_time.md.
SHORT_BLOCK, BLOCK = 128, 256
MAX_BLOCKS = 8  # sequences of more blocks get longer blocks instead


class Scores(NamedTuple):
    """How attention logits are formed.

    Attributes:
      divisor: divisor of the products q k, usually the square root of the head dimension.
      window: keys that a query sees, itself included. 0: unlimited.
      soft_cap: logits become soft_cap * tanh(logits / soft_cap). 0 is off.
      products: types and precision of array code.
    """

    divisor: float
    window: int = 0
    soft_cap: float = 0.0
    products: Products = Products()


class Queries(NamedTuple):
    """Queries that are a part of the keys' sequences: on one device, or one query with a cache.

    Attributes:
      positions_L: positions in the whole sequence, int.
      segment_ids_BL: segments of the queries.
      shard: index of the device's part, see models/devices.py.
    """

    positions_L: jax.Array
    segment_ids_BL: jax.Array
    shard: jax.Array | None = None


def soft_capped(logits: jax.Array, cap: float) -> jax.Array:
    """Return cap * tanh(logits / cap), or the logits if the cap is 0."""
    return cap * jnp.tanh(logits / cap) if cap else logits


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention(
    scores: Scores,
    q_BLNH: jax.Array,
    k_BLKH: jax.Array,
    v_BLKH: jax.Array,
    segment_ids_BL: jax.Array,
    sinks_N: jax.Array | None = None,
    queries: Queries | None = None,
) -> jax.Array:
    """Compute causal attention within segments; a block of queries attends to keys up to its end.

    About half of the products of queries and keys are never computed. Products are in the type of
    q, the softmax is in float32.

    Args:
      scores: how logits are formed.
      q_BLNH: queries. N is a multiple of K.
      k_BLKH: keys; as long as the segment ids.
      v_BLKH: values.
      segment_ids_BL: equal ids see each other and are adjacent.
      sinks_N: a logit of each head that every query sees and that has no value, or None.
      queries: positions and segments of the queries if the keys belong to longer sequences.

    Returns:
      The context [B, L, N, H].
    """
    return _forward(scores, q_BLNH, k_BLKH, v_BLKH, segment_ids_BL, sinks_N, queries)[0]


def _forward(scores, q_BLNH, k_BLKH, v_BLKH, segment_ids_BL, sinks_N, queries):
    einsum = functools.partial(einsum_to_float32, scores.products)
    q_BKGLH = _by_group(q_BLNH, k_BLKH.shape[2])
    kT_BKHS, v_BKSH = k_BLKH.transpose(0, 2, 3, 1), v_BLKH.transpose(0, 2, 1, 3)
    contexts, lses = [], []
    for rows, keys in blocks(q_BLNH.shape[1], k_BLKH.shape[1], scores.window):
        logits_BKGLS = _logits(scores, q_BKGLH[..., rows, :], kT_BKHS[..., keys])
        mask = mask_of_segments(segment_ids_BL, scores.window, rows, keys, queries)
        logits_BKGLS = jnp.where(mask, logits_BKGLS, -jnp.inf)
        top_BKGL1 = jnp.max(logits_BKGLS, axis=-1, keepdims=True)
        if sinks_N is not None:
            sinks_KG11 = sinks_N.astype(f32).reshape(k_BLKH.shape[2], -1, 1, 1)
            top_BKGL1 = jnp.maximum(top_BKGL1, sinks_KG11)
        weights_BKGLS = jnp.exp(logits_BKGLS - top_BKGL1)
        total_BKGL1 = jnp.sum(weights_BKGLS, axis=-1, keepdims=True)
        if sinks_N is not None:
            total_BKGL1 = total_BKGL1 + jnp.exp(sinks_KG11 - top_BKGL1)
        weights_BKGLS = weights_BKGLS.astype(v_BKSH.dtype)
        sums_BKGLH = einsum("bkgls,bksh->bkglh", weights_BKGLS, v_BKSH[..., keys, :])
        contexts.append((sums_BKGLH / total_BKGL1).astype(q_BLNH.dtype))
        lses.append(top_BKGL1 + jnp.log(total_BKGL1))
    context_BLNH = keep(_by_head(jnp.concatenate(contexts, axis=3)), CONTEXT)
    lse_BKGL1 = keep(jnp.concatenate(lses, axis=3), CONTEXT)
    inputs = (q_BLNH, k_BLKH, v_BLKH, segment_ids_BL, sinks_N, queries)
    return context_BLNH, (*inputs, context_BLNH, lse_BKGL1)


def _backward(scores, residuals, d_BLNH):
    q_BLNH, k_BLKH, v_BLKH, segment_ids_BL, sinks_N, queries, context_BLNH, lse_BKGL1 = residuals
    einsum = functools.partial(einsum_to_float32, scores.products)
    B, S, K, H = k_BLKH.shape
    q_BKGLH, d_BKGLH = _by_group(q_BLNH, K), _by_group(d_BLNH, K)
    products = d_BLNH.astype(f32) * context_BLNH.astype(f32)
    mean_BKGL1 = _by_group(products, K).sum(-1, keepdims=True)  # weighted mean of d weights
    kT_BKHS, vT_BKHS = k_BLKH.transpose(0, 2, 3, 1), v_BLKH.transpose(0, 2, 3, 1)
    k_BKSH = k_BLKH.transpose(0, 2, 1, 3)
    dq, dkT_BKHS, dvT_BKHS = [], jnp.zeros((B, K, H, S), f32), jnp.zeros(vT_BKHS.shape, f32)
    for rows, keys in blocks(q_BLNH.shape[1], k_BLKH.shape[1], scores.window):
        q, d = q_BKGLH[..., rows, :], d_BKGLH[..., rows, :]
        logits_BKGLS = _logits(scores, q, kT_BKHS[..., keys])
        mask = mask_of_segments(segment_ids_BL, scores.window, rows, keys, queries)
        weights_BKGLS = jnp.where(mask, jnp.exp(logits_BKGLS - lse_BKGL1[..., rows, :]), 0)
        d_weights_BKGLS = einsum("bkglh,bkhs->bkgls", d, vT_BKHS[..., keys])
        d_logits_BKGLS = weights_BKGLS * (d_weights_BKGLS - mean_BKGL1[..., rows, :])
        if scores.soft_cap:
            d_logits_BKGLS *= 1 - jnp.square(logits_BKGLS / scores.soft_cap)
        d_logits_BKGLS = (d_logits_BKGLS / scores.divisor).astype(q.dtype)
        dq.append(einsum("bkgls,bksh->bkglh", d_logits_BKGLS, k_BKSH[..., keys, :]))
        # The [L, S] arrays are the right operands, so that XLA makes no transposed copy of them.
        dkT = einsum("bkglh,bkgls->bkhs", q, d_logits_BKGLS)
        dvT = einsum("bkglh,bkgls->bkhs", d, weights_BKGLS.astype(d.dtype))
        dkT_BKHS = dkT_BKHS.at[..., keys].add(dkT)
        dvT_BKHS = dvT_BKHS.at[..., keys].add(dvT)
    dq_BLNH = _by_head(jnp.concatenate(dq, axis=3)).astype(q_BLNH.dtype)
    dk_BLKH = dkT_BKHS.transpose(0, 3, 1, 2).astype(k_BLKH.dtype)
    dv_BLKH = dvT_BKHS.transpose(0, 3, 1, 2).astype(v_BLKH.dtype)
    d_sinks_N = None
    if sinks_N is not None:  # a sink has the value 0: its gradient is -weight * mean
        mean_BNL, lse_BNL = (x.reshape(B, -1, q_BLNH.shape[1]) for x in (mean_BKGL1, lse_BKGL1))
        weights_BNL = jnp.exp(sinks_N.astype(f32)[:, None] - lse_BNL)
        d_sinks_N = -jnp.sum(weights_BNL * mean_BNL, axis=(0, 2)).astype(sinks_N.dtype)
    return dq_BLNH, dk_BLKH, dv_BLKH, None, d_sinks_N, None


attention.defvjp(_forward, _backward)


def blocks(num_queries: int, num_keys: int, window: int) -> list[tuple[slice, slice]]:
    """Cut the queries into blocks, each with the keys that some query of it can see.

    If a sequence is spread over devices, every device runs the same program. The assignment of
    chunks in models/devices.py gives a least and a largest start for a device's two chunks of
    queries. A single query, with a cache, may be at any position.

    Args:
      num_queries: queries on this device.
      num_keys: keys of the whole sequence.
      window: keys that a query sees. 0: unlimited.

    Returns:
      Pairs (queries, keys) of slices.
    """
    if num_queries == 1:
        return [(slice(0, 1), slice(0, num_keys))]
    shards = num_keys // num_queries
    chunks = 1 if shards == 1 else 2
    length = num_queries // chunks
    size = SHORT_BLOCK
    if num_queries > 2 * SHORT_BLOCK:
        size = max(BLOCK, math.ceil(num_queries / MAX_BLOCKS))
    slices = []
    for chunk in range(chunks):
        least, most = chunk * shards * length, (chunk * shards + shards - 1) * length
        for start in range(0, length, size):
            end = min(start + size, length)
            first_key = max(0, least + start - window + 1) if window else 0
            rows = slice(chunk * length + start, chunk * length + end)
            slices.append((rows, slice(first_key, most + end)))
    return slices


def mask_of_segments(
    segment_ids_BL: jax.Array,
    window: int,
    rows: slice = slice(None),
    keys: slice = slice(None),
    queries: Queries | None = None,
) -> jax.Array:
    """Mark the keys that each query sees.

    Args:
      segment_ids_BL: segments of the keys.
      window: keys that a query sees. 0: unlimited.
      rows: the block of queries.
      keys: the keys that the block attends to.
      queries: positions and segments of the queries if the keys belong to longer sequences.

    Returns:
      bool [B, 1, 1, L, S].
    """
    positions_S = jnp.arange(segment_ids_BL.shape[1])
    positions_L, segments_BL = positions_S, segment_ids_BL
    if queries is not None:
        positions_L, segments_BL, _ = queries
    same_BLS = segments_BL[:, rows, None] == segment_ids_BL[:, None, keys]
    distance_LS = positions_L[rows][:, None] - positions_S[keys][None, :]
    mask_LS = distance_LS >= 0
    mask_LS = mask_LS & (distance_LS < window) if window else mask_LS
    return (same_BLS & mask_LS)[:, None, None]


def _logits(scores, q_BKGLH, kT_BKHS):
    logits_BKGLS = einsum_to_float32(scores.products, "bkglh,bkhs->bkgls", q_BKGLH, kT_BKHS)
    logits_BKGLS = logits_BKGLS / scores.divisor
    return soft_capped(logits_BKGLS, scores.soft_cap)


def _by_group(x_BLNH, num_kv_heads):
    """Reshape [B, L, N, H] to [B, K, G, L, H]."""
    B, L, N, H = x_BLNH.shape
    grouped = x_BLNH.reshape(B, L, num_kv_heads, N // num_kv_heads, H)
    return grouped.transpose(0, 2, 3, 1, 4)


def _by_head(x_BKGLH):
    B, K, G, L, H = x_BKGLH.shape
    return x_BKGLH.transpose(0, 3, 1, 2, 4).reshape(B, L, K * G, H)
