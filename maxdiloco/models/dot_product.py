"""Causal attention in array code, block by block of queries, for any backend.

A block of queries meets the keys up to its own end only, so about half of the square is never
computed. The backward pass forms the weights again from the saved log normalisers (FlashAttention,
arXiv 2205.14135, algorithm 4), so memory grows with block * L, not L * L.
"""
# B sequences  L queries  S keys  N query heads  K key/value heads  G = N / K  H head dim

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxdiloco.models.product import float32_product, soft_capped
from maxdiloco.models.remat import CONTEXT, keep
from maxdiloco.models.spec import ModelSpec

f32 = jnp.float32
# Queries of a block, in sequences of up to two and in longer ones. Each is unrolled into the
# program: our choice from step and compile time in benchmarks/log.
SHORT_BLOCK, BLOCK = 128, 256
MAX_BLOCKS = 8  # still longer sequences get longer blocks


class Queries(NamedTuple):
    """Queries that are a device's part of the sequences of the keys, see models/over_length.py.

    shard: index of the part. positions: int [L], in the whole sequence.
    """

    shard: jax.Array
    positions_L: jax.Array
    segment_ids_BL: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def dot_product(
    spec: ModelSpec,
    window: int,
    q_BLNH: jax.Array,
    k_BLKH: jax.Array,
    v_BLKH: jax.Array,
    segment_ids_BL: jax.Array,
    sinks_N: jax.Array | None = None,
    queries: Queries | None = None,
) -> jax.Array:
    """softmax(soft_cap(q k / divisor)) v over keys that are not later and of the same segment.

    Grouped queries: N is a multiple of K. Matmuls in the type of q, softmax in float32.
    window: keys a query sees, 0 is off.
    sinks: a logit of each head that every query sees and that has no value.
    queries: of q where the keys and segment_ids are of longer sequences than q.
    Returns context [B, L, N, H].
    """
    return _forward(spec, window, q_BLNH, k_BLKH, v_BLKH, segment_ids_BL, sinks_N, queries)[0]


def _forward(spec, window, q_BLNH, k_BLKH, v_BLKH, segment_ids_BL, sinks_N, queries):
    q_BKGLH = _by_group(q_BLNH, k_BLKH.shape[2])
    kT_BKHS, v_BKSH = k_BLKH.transpose(0, 2, 3, 1), v_BLKH.transpose(0, 2, 1, 3)
    contexts, lses = [], []
    for rows, keys in _blocks(window, q_BLNH, k_BLKH):
        logits_BKGLS = _logits(spec, q_BKGLH[..., rows, :], kT_BKHS[..., keys])
        mask = _mask(window, segment_ids_BL, queries, rows, keys)
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
        sums_BKGLH = float32_product("bkgls,bksh->bkglh", weights_BKGLS, v_BKSH[..., keys, :], spec)
        contexts.append((sums_BKGLH / total_BKGL1).astype(q_BLNH.dtype))
        lses.append(top_BKGL1 + jnp.log(total_BKGL1))
    context_BLNH = keep(_by_head(jnp.concatenate(contexts, axis=3)), CONTEXT)
    lse_BKGL1 = keep(jnp.concatenate(lses, axis=3), CONTEXT)
    inputs = (q_BLNH, k_BLKH, v_BLKH, segment_ids_BL, sinks_N, queries)
    return context_BLNH, (*inputs, context_BLNH, lse_BKGL1)


def _backward(spec, window, residuals, d_BLNH):
    q_BLNH, k_BLKH, v_BLKH, segment_ids_BL, sinks_N, queries, context_BLNH, lse_BKGL1 = residuals
    B, S, K, H = k_BLKH.shape
    q_BKGLH, d_BKGLH = _by_group(q_BLNH, K), _by_group(d_BLNH, K)
    products = d_BLNH.astype(f32) * context_BLNH.astype(f32)
    mean_BKGL1 = _by_group(products, K).sum(-1, keepdims=True)  # of d weights, under the weights
    kT_BKHS, vT_BKHS = k_BLKH.transpose(0, 2, 3, 1), v_BLKH.transpose(0, 2, 3, 1)
    k_BKSH = k_BLKH.transpose(0, 2, 1, 3)
    dq, dkT_BKHS, dvT_BKHS = [], jnp.zeros((B, K, H, S), f32), jnp.zeros(vT_BKHS.shape, f32)
    for rows, keys in _blocks(window, q_BLNH, k_BLKH):
        q, d = q_BKGLH[..., rows, :], d_BKGLH[..., rows, :]
        logits_BKGLS = _logits(spec, q, kT_BKHS[..., keys])
        mask = _mask(window, segment_ids_BL, queries, rows, keys)
        weights_BKGLS = jnp.where(mask, jnp.exp(logits_BKGLS - lse_BKGL1[..., rows, :]), 0)
        d_weights_BKGLS = float32_product("bkglh,bkhs->bkgls", d, vT_BKHS[..., keys], spec)
        d_logits_BKGLS = weights_BKGLS * (d_weights_BKGLS - mean_BKGL1[..., rows, :])
        if spec.attn_logits_soft_cap:
            d_logits_BKGLS *= 1 - jnp.square(logits_BKGLS / spec.attn_logits_soft_cap)
        d_logits_BKGLS = (d_logits_BKGLS / divisor(spec, H)).astype(q.dtype)
        dq.append(float32_product("bkgls,bksh->bkglh", d_logits_BKGLS, k_BKSH[..., keys, :], spec))
        # The [L, S] arrays are the right operands, so that XLA makes no transposed copy of them.
        dkT = float32_product("bkglh,bkgls->bkhs", q, d_logits_BKGLS, spec)
        dvT = float32_product("bkglh,bkgls->bkhs", d, weights_BKGLS.astype(d.dtype), spec)
        dkT_BKHS = dkT_BKHS.at[..., keys].add(dkT)
        dvT_BKHS = dvT_BKHS.at[..., keys].add(dvT)
    dq_BLNH = _by_head(jnp.concatenate(dq, axis=3)).astype(q_BLNH.dtype)
    dk_BLKH = dkT_BKHS.transpose(0, 3, 1, 2).astype(k_BLKH.dtype)
    dv_BLKH = dvT_BKHS.transpose(0, 3, 1, 2).astype(v_BLKH.dtype)
    rows = B, -1, q_BLNH.shape[1]
    d_sinks_N = _d_sinks(sinks_N, mean_BKGL1.reshape(rows), lse_BKGL1.reshape(rows))
    return dq_BLNH, dk_BLKH, dv_BLKH, None, d_sinks_N, None


dot_product.defvjp(_forward, _backward)


def blocks(length: int, window: int) -> list[tuple[slice, slice]]:
    """Blocks of queries, each with the run of keys that some query of it can see."""
    return _chunk_blocks(range(length), 0, 0, window, size=_block_size(length))


def _blocks(window, q_BLNH, k_BLKH):
    """The blocks of a device's queries: of all, or of two chunks as over_length deals them out."""
    L, shards = q_BLNH.shape[1], k_BLKH.shape[1] // q_BLNH.shape[1]
    if shards == 1:
        return blocks(L, window)
    half, size = L // 2, _block_size(L)
    slices = []
    for first_chunk, rows in ((0, range(half)), (shards, range(half, L))):
        least, most = first_chunk * half, (first_chunk + shards - 1) * half
        slices += _chunk_blocks(rows, least, most, window, size=size)
    return slices


def _block_size(length):
    if length <= 2 * SHORT_BLOCK:
        return SHORT_BLOCK
    return max(BLOCK, math.ceil(length / MAX_BLOCKS))


def _chunk_blocks(rows, least, most, window, *, size):
    """Blocks of a run of queries whose first is at position `least` to `most` of its sequence."""
    slices = []
    for start in range(rows.start, rows.stop, size):
        end = min(start + size, rows.stop)
        before, until = start - rows.start, end - rows.start
        first_key = max(0, least + before - window + 1) if window else 0
        slices.append((slice(start, end), slice(first_key, most + until)))
    return slices


def causal_mask(query_positions: jax.Array, key_positions: jax.Array, window: int) -> jax.Array:
    """[..., L], [..., S] -> bool [..., L, S]: the key is not later, and inside the window."""
    distance = query_positions[..., :, None] - key_positions[..., None, :]
    mask = distance >= 0
    return mask & (distance < window) if window else mask


def _mask(window, segment_ids_BS, queries, rows, keys):
    """bool [B, 1, 1, L, S] of one block."""
    positions_S = jnp.arange(segment_ids_BS.shape[1])
    positions_L, segment_ids_BL = positions_S, segment_ids_BS
    if queries is not None:
        _, positions_L, segment_ids_BL = queries
    same_BLS = segment_ids_BL[:, rows, None] == segment_ids_BS[:, None, keys]
    mask_LS = causal_mask(positions_L[rows], positions_S[keys], window)
    return (same_BLS & mask_LS)[:, None, None]


def divisor(spec: ModelSpec, head_dim: int) -> float:
    """Of the raw logits q k."""
    return math.sqrt(head_dim) if spec.query_divisor is None else spec.query_divisor


def _logits(spec, q_BKGLH, kT_BKHS):
    logits_BKGLS = float32_product("bkglh,bkhs->bkgls", q_BKGLH, kT_BKHS, spec)
    logits_BKGLS = logits_BKGLS / divisor(spec, q_BKGLH.shape[-1])
    return soft_capped(logits_BKGLS, spec.attn_logits_soft_cap)


def _d_sinks(sinks_N, mean_BNL, lse_BNL):
    """A sink's weight has the value 0, so its gradient is minus that of the others' mean.

    mean: of the weights' gradients, under the weights. lse: log normalisers, with the sink.
    """
    if sinks_N is None:
        return None
    weights_BNL = jnp.exp(sinks_N.astype(f32)[:, None] - lse_BNL)
    return -jnp.sum(weights_BNL * mean_BNL, axis=(0, 2)).astype(sinks_N.dtype)



def _by_group(x_BLNH, num_kv_heads):
    """[B, L, N, H] -> [B, K, G, L, H]."""
    B, L, N, H = x_BLNH.shape
    grouped = x_BLNH.reshape(B, L, num_kv_heads, N // num_kv_heads, H)
    return grouped.transpose(0, 2, 3, 1, 4)


def _by_head(x_BKGLH):
    B, K, G, L, H = x_BKGLH.shape
    return x_BKGLH.transpose(0, 3, 1, 2, 4).reshape(B, L, K * G, H)
