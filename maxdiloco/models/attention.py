"""Causal attention within documents by the kernel that was chosen.

Every kernel computes softmax(soft_cap(q k / divisor) + mask) v for grouped queries. Position t sees
position s when s <= t, both are of one segment and, with a window, t - s < window. Arguments are
those of dot_product, array code for any backend.
"""
# B sequences  L queries  S keys  N query heads  K key/value heads  G = N / K  H head dim

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxdiloco.models import cudnn as fused
from maxdiloco.models.devices import gathered_text, on_each_device, positions, split_axes
from maxdiloco.models.product import float32_product, soft_capped
from maxdiloco.models.remat import CONTEXT, keep
from maxdiloco.models.spec import ModelSpec

f32 = jnp.float32
SPLASH_BLOCK = 512  # tile of queries and keys, our choice from the kernel's power-of-two sizes
# Tokens in the lanes, which heads of less than 128 features do not fill: XLA then lays out what
# comes before the kernel so, too, and the program takes 0.8 times as long (benchmarks/results).
SPLASH_LAYOUT = "SEQ_MINOR"  # a QKVLayout of the kernel
# Queries of a block, in sequences of up to two and in longer ones. Each is unrolled into the
# program: our choice from step and compile time in benchmarks/results.
SHORT_BLOCK, BLOCK = 128, 256
MAX_BLOCKS = 8  # still longer sequences get longer blocks


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
    kernel = {
        "dot_product": dot_product,
        "splash": splash,
        "cudnn": cudnn,
        "cudnn_documents": functools.partial(cudnn, by_offsets=True),
    }[spec.attention]
    local = functools.partial(kernel, spec, window)
    if axes:
        local = _with_all_keys(local, axes)
    q_names, kv_names = (("batch", "length", heads, None) for heads in ("heads_act", "kv_act"))
    over_heads, over_kv = (split_axes((name,), spec.rules)[0] for name in ("heads_act", "kv_act"))
    sizes, K = jax.sharding.get_abstract_mesh().shape, k_BLKH.shape[2]
    if over_heads != over_kv or K % math.prod(sizes[axis] for axis in over_heads):
        # So that a device's query heads have their keys and values beside them.
        repeats = q_BLNH.shape[2] // K
        k, v = (jnp.repeat(x, repeats, axis=2) for x in (k_BLKH, v_BLKH))
        arrays, kv_names = (q_BLNH, k, v, *arrays[3:]), q_names
    in_names = [q_names, kv_names, kv_names, ("batch", None), ("heads_act",)][: len(arrays)]
    return on_each_device(local, in_names=in_names, out_names=q_names, rules=spec.rules)(*arrays)


def _with_all_keys(kernel, axes):
    """A kernel of a device's part of the sequences, whose keys and values it gathers.

    Llama 3 (arXiv 2407.21783, section 3.3.2): with few key/value heads there is little to gather,
    and the kernel and its mask stay those of whole sequences. Their gradients are summed and
    scattered back.
    """

    def local(q_BLNH, k_BLKH, v_BLKH, segment_ids_BS, sinks_N=None):
        k_BSKH, v_BSKH = gathered_text(k_BLKH, axes), gathered_text(v_BLKH, axes)
        shard, (L, S) = jax.lax.axis_index(axes), (q_BLNH.shape[1], segment_ids_BS.shape[1])
        positions_L = jnp.array(positions(S, S // L).reshape(-1, L))[shard]
        queries = Queries(positions_L, segment_ids_BS[:, positions_L], shard)
        return kernel(q_BLNH, k_BSKH, v_BSKH, segment_ids_BS, sinks_N, queries)

    return local


class Queries(NamedTuple):
    """Queries that are a part of the sequences of the keys: a device's, or one beside a cache.

    positions: int [L], in the whole sequence. shard: index of a device's part, see
    models/devices.py.
    """

    positions_L: jax.Array
    segment_ids_BL: jax.Array
    shard: jax.Array | None = None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def dot_product(
    spec, window, q_BLNH, k_BLKH, v_BLKH, segment_ids_BL, sinks_N=None, queries=None
) -> jax.Array:
    """Attention block by block of queries, each with the keys up to its end.

    So about half of the square is never computed. The backward pass forms the weights again from
    the saved log normalisers (FlashAttention, arXiv 2205.14135, algorithm 4): memory grows with
    block * L, not L * L.
    spec: ModelSpec. window: keys a query sees, 0 is off. segment_ids: equal ids see each other and
    lie side by side. sinks: a logit of each head that every query sees and that has no value, or
    None. queries: Queries where the keys and segment_ids are of longer sequences than q.
    Grouped queries: N is a multiple of K. Matmuls in the type of q, softmax in float32.
    Returns context [B, L, N, H].
    """
    return _forward(spec, window, q_BLNH, k_BLKH, v_BLKH, segment_ids_BL, sinks_N, queries)[0]


def _forward(spec, window, q_BLNH, k_BLKH, v_BLKH, segment_ids_BL, sinks_N, queries):
    q_BKGLH = _by_group(q_BLNH, k_BLKH.shape[2])
    kT_BKHS, v_BKSH = k_BLKH.transpose(0, 2, 3, 1), v_BLKH.transpose(0, 2, 1, 3)
    contexts, lses = [], []
    for rows, keys in blocks(q_BLNH.shape[1], k_BLKH.shape[1], window):
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
    for rows, keys in blocks(q_BLNH.shape[1], k_BLKH.shape[1], window):
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
    d_sinks_N = None
    if sinks_N is not None:  # a sink's weight has the value 0: minus the gradient of the others'
        mean_BNL, lse_BNL = (x.reshape(B, -1, q_BLNH.shape[1]) for x in (mean_BKGL1, lse_BKGL1))
        weights_BNL = jnp.exp(sinks_N.astype(f32)[:, None] - lse_BNL)
        d_sinks_N = -jnp.sum(weights_BNL * mean_BNL, axis=(0, 2)).astype(sinks_N.dtype)
    return dq_BLNH, dk_BLKH, dv_BLKH, None, d_sinks_N, None


dot_product.defvjp(_forward, _backward)


def blocks(num_queries: int, num_keys: int, window: int) -> list[tuple[slice, slice]]:
    """Blocks of queries, each with the run of keys that some query of it can see.

    A device's queries are of as many keys, or two chunks of longer sequences as devices.py deals
    them out, whatever the device: the first query of a chunk is at position `least` to `most`. A
    single query may be anywhere, as beside a cache.
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
        positions_L, segment_ids_BL, _ = queries
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


def _by_group(x_BLNH, num_kv_heads):
    """[B, L, N, H] -> [B, K, G, L, H]."""
    B, L, N, H = x_BLNH.shape
    grouped = x_BLNH.reshape(B, L, num_kv_heads, N // num_kv_heads, H)
    return grouped.transpose(0, 2, 3, 1, 4)


def _by_head(x_BKGLH):
    B, K, G, L, H = x_BKGLH.shape
    return x_BKGLH.transpose(0, 3, 1, 2, 4).reshape(B, L, K * G, H)


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


def cudnn(spec, window, q_BLNH, k_BLKH, v_BLKH, segment_ids_BL, *, by_offsets=False) -> jax.Array:
    """cuDNN's fused attention, of choose_kernel's models. by_offsets: of documents, not a mask."""

    def mask(segment_ids_BL):
        return _mask(window, segment_ids_BL, None, slice(None), slice(None))[:, 0]

    scale = 1 / divisor(spec, q_BLNH.shape[-1])
    choice = fused.Choice(scale, mask, by_offsets and not window)
    return fused.attend(choice, q_BLNH, k_BLKH, v_BLKH, segment_ids_BL)
