"""Causal attention within documents by the kernel that was chosen.

Every kernel computes softmax(soft_cap(q k / divisor) + mask) v for grouped queries. Position t sees
position s when s <= t, both are of one segment and, with a window, t - s < window. Arguments are
those of dot_product.
"""
# B sequences  L queries  S keys  N query heads  K key/value heads  G = N / K  H head dim

import functools
import math

import jax
import jax.numpy as jnp

from maxdiloco.models.devices import gathered_text, on_each_device, part, positions, split_axes
from maxdiloco.models.dot_product import Queries, causal_mask, divisor, dot_product
from maxdiloco.models.remat import CONTEXT, keep

SPLASH_BLOCK = 512  # tile of queries and keys, our choice from the kernel's power-of-two sizes
# Tokens in the lanes, which heads of less than 128 features do not fill: XLA then lays out what
# comes before the kernel so, too, and the program takes 0.8 times as long (benchmarks/log).
SPLASH_LAYOUT = "SEQ_MINOR"  # a QKVLayout of the kernel


def attend(spec, window, q_BLNH, k_BLKH, v_BLKH, segment_ids_BL, sinks_N=None) -> jax.Array:
    """Attention of a training window with itself: context [B, L, N, H].

    Where sequences are spread over devices q, k, v and the context are in their order, and
    segment_ids whole in the order of the text, see models/devices.py.
    """
    _, axes = split_axes(("batch", "length"), spec.rules)
    arrays = (q_BLNH, k_BLKH, v_BLKH, segment_ids_BL)
    arrays += () if sinks_N is None else (sinks_N,)
    if spec.attention == "dot_product" and not axes:
        return dot_product(spec, window, *arrays)
    kernel = {"dot_product": dot_product, "splash": splash, "cudnn": cudnn}[spec.attention]
    local = functools.partial(kernel, spec, window)
    if axes:
        local = _with_all_keys(local, axes)
    q_names, kv_names = (("batch", "length", heads, None) for heads in ("heads_act", "kv_act"))
    in_names = (q_names, kv_names, kv_names, ("batch", None), ("heads_act",))[: len(arrays)]
    return on_each_device(local, in_names=in_names, out_names=q_names, rules=spec.rules)(*arrays)


def _with_all_keys(kernel, axes):
    """A kernel of a device's part of the sequences, whose keys and values it gathers.

    Llama 3 (arXiv 2407.21783, section 3.3.2): with few key/value heads there is little to gather,
    and the kernel and its mask stay those of whole sequences. Their gradients are summed and
    scattered back.
    """

    def local(q_BLNH, k_BLKH, v_BLKH, segment_ids_BS, sinks_N=None):
        k_BSKH, v_BSKH = gathered_text(k_BLKH, axes), gathered_text(v_BLKH, axes)
        shard, S = jax.lax.axis_index(axes), segment_ids_BS.shape[1]
        rows = (jnp.arange(S)[None], segment_ids_BS)
        positions_1L, segment_ids_BL = (part(x, shard, S // q_BLNH.shape[1]) for x in rows)
        queries = Queries(shard, positions_1L[0], segment_ids_BL)
        return kernel(q_BLNH, k_BSKH, v_BSKH, segment_ids_BS, sinks_N, queries)

    return local


def splash(
    spec, window, q_BLNH, k_BSKH, v_BSKH, segments_BS, sinks_N=None, queries=None, interpret=False
) -> jax.Array:
    """The Pallas TPU kernel of jax.experimental. L is a multiple of 128.

    interpret: run it as array code, for tests without a TPU.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention

    kernels = splash_attention.splash_attention_kernel
    masks = splash_attention.splash_attention_mask
    (L, N, H), S = q_BLNH.shape[1:], k_BSKH.shape[1]
    shards = S // L
    block = math.gcd(L if shards == 1 else L // 2, SPLASH_BLOCK)
    blocks = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    layouts = dict.fromkeys(("q_layout", "k_layout", "v_layout"), kernels.QKVLayout[SPLASH_LAYOUT])
    mask = masks.LocalMask((S, S), (window - 1 if window else None, 0), 0)
    mask.q_sequence = positions(S, shards)
    kernel = kernels.make_splash_mha(
        masks.MultiHeadMask([mask] * N),
        block_sizes=kernels.BlockSizes(**dict.fromkeys(blocks, block), **layouts),
        attn_logits_soft_cap=spec.attn_logits_soft_cap or None,
        head_shards=1,
        q_seq_shards=shards,
        residual_checkpoint_name=CONTEXT,
        interpret=interpret,
    )
    segments = kernels.SegmentIds(segments_BS, segments_BS)
    if queries is not None:
        segments = kernels.SegmentIds(queries.segment_ids_BL, segments_BS)
        kernel = _shard_of(kernel, queries.shard, shards)
    q_BNLH = (q_BLNH / divisor(spec, H)).astype(q_BLNH.dtype).swapaxes(1, 2)
    arrays = (q_BNLH, k_BSKH.swapaxes(1, 2), v_BSKH.swapaxes(1, 2), segments)
    arrays += () if sinks_N is None else (sinks_N,)
    out_BNLH = jax.vmap(kernel, in_axes=(0, 0, 0, 0, None)[: len(arrays)])(*arrays)
    return out_BNLH.swapaxes(1, 2)  # the kernel has marked it to be kept


def _shard_of(kernel, shard, shards):
    """The kernel of one shard of the queries: its rows of the tables that describe the mask."""

    def rows(table):  # [heads, blocks of queries, blocks of keys], or [queries]
        dim = 1 if table.ndim == 3 else 0
        size = table.shape[dim] // shards
        return jax.lax.dynamic_slice_in_dim(table, shard * size, size, dim)

    return jax.tree.map(rows, kernel)


def cudnn(spec, window, q_BLNH, k_BLKH, v_BLKH, segment_ids_BL) -> jax.Array:
    """cuDNN's fused attention by jax.nn.dot_product_attention, of choose_kernel's models.

    Documents and the window are a mask [B, 1, L, L], a bias for cuDNN, which before 9.10.2 takes no
    window of its own beside one. Replicas of a slot come one after another: jax 0.10's rule for a
    vmap wants a mask for each head. The backward pass runs the forward kernel again: what jax keeps
    for it cannot pass that loop.
    """

    one_by_one = jax.custom_batching.sequential_vmap

    def plain(q_BLNH, k_BLKH, v_BLKH, segment_ids_BL):
        positions_L = jnp.arange(segment_ids_BL.shape[1])
        same_B1LL = (segment_ids_BL[:, :, None] == segment_ids_BL[:, None])[:, None]
        return jax.nn.dot_product_attention(
            q_BLNH,
            k_BLKH,
            v_BLKH,
            mask=same_B1LL & causal_mask(positions_L, positions_L, window),
            scale=1 / divisor(spec, q_BLNH.shape[-1]),
            is_causal=True,
            implementation="cudnn",
        )

    @one_by_one
    def pulled(*arrays):
        *qkv, segment_ids_BL, d_BLNH = arrays
        _, pull = jax.vjp(lambda *qkv: plain(*qkv, segment_ids_BL), *qkv)
        return pull(d_BLNH)

    fused = jax.custom_vjp(one_by_one(plain))
    fused.defvjp(
        lambda *arrays: (fused(*arrays), arrays),
        lambda arrays, d_BLNH: (*pulled(*arrays, d_BLNH), None),
    )
    return keep(fused(q_BLNH, k_BLKH, v_BLKH, segment_ids_BL), CONTEXT)
