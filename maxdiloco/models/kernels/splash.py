"""Splash attention, the Pallas kernel for TPUs of jax.experimental."""
# B sequences  L queries  S keys  N query heads  K key/value heads  H head dim

import math

import jax

from maxdiloco.models.devices import positions
from maxdiloco.models.kernels.blockwise import Queries, Scores
from maxdiloco.models.remat import CONTEXT

LANES = 128  # tiles are multiples of a TPU vector register's lanes
BLOCK = 512  # tile of queries and keys, one of the kernel's power-of-two sizes
# Tokens are in the lanes, because heads of less than 128 features do not fill them. XLA then also
# uses this layout before the kernel, and the program takes 0.8 times as long
# (benchmarks/results/compile_estimates.md).
LAYOUT = "SEQ_MINOR"  # a QKVLayout of the kernel
BLOCK_SIZES = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")


def attention(
    scores: Scores,
    q_BLNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segment_ids_BS: jax.Array,
    sinks_N: jax.Array | None = None,
    queries: Queries | None = None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Compute causal attention within segments.

    Args:
      scores: how logits are formed.
      q_BLNH: queries; L is a multiple of LANES.
      k_BSKH: keys.
      v_BSKH: values.
      segment_ids_BS: segments of the keys.
      sinks_N: a logit of each head without a value, or None.
      queries: positions and segments of the queries if the keys belong to longer sequences.
      interpret: run the kernel as array code, for tests without a TPU.

    Returns:
      The context [B, L, N, H], which the kernel has marked for remat policies.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention

    kernels = splash_attention.splash_attention_kernel
    masks = splash_attention.splash_attention_mask
    L, N = q_BLNH.shape[1:3]
    S, window = k_BSKH.shape[1], scores.window
    shards = S // L
    block = math.gcd(L if shards == 1 else L // 2, BLOCK)
    layouts = dict.fromkeys(("q_layout", "k_layout", "v_layout"), kernels.QKVLayout[LAYOUT])
    mask = masks.LocalMask((S, S), (window - 1 if window else None, 0), 0)
    mask.q_sequence = positions(S, shards)
    kernel = kernels.make_splash_mha(
        masks.MultiHeadMask([mask] * N),
        block_sizes=kernels.BlockSizes(**dict.fromkeys(BLOCK_SIZES, block), **layouts),
        attn_logits_soft_cap=scores.soft_cap or None,
        head_shards=1,
        q_seq_shards=shards,
        residual_checkpoint_name=CONTEXT,
        interpret=interpret,
    )
    segments = kernels.SegmentIds(segment_ids_BS, segment_ids_BS)
    if queries is not None:
        segments = kernels.SegmentIds(queries.segment_ids_BL, segment_ids_BS)
        kernel = _shard_of(kernel, queries.shard, shards)
    q_BNLH = (q_BLNH / scores.divisor).astype(q_BLNH.dtype).swapaxes(1, 2)
    arrays = (q_BNLH, k_BSKH.swapaxes(1, 2), v_BSKH.swapaxes(1, 2), segments)
    arrays += () if sinks_N is None else (sinks_N,)
    out_BNLH = jax.vmap(kernel, in_axes=(0, 0, 0, 0, None)[: len(arrays)])(*arrays)
    return out_BNLH.swapaxes(1, 2)


def _shard_of(kernel, shard, shards):
    """Return the kernel of one shard of the queries, with its rows of the mask's tables."""

    def rows(table):  # [heads, blocks of queries, blocks of keys], or [queries]
        dim = 1 if table.ndim == 3 else 0
        size = table.shape[dim] // shards
        return jax.lax.dynamic_slice_in_dim(table, shard * size, size, dim)

    return jax.tree.map(rows, kernel)
