"""Causal attention within documents: the choice of a kernel, and the kernels.

Every kernel computes softmax(soft_cap(q k / sqrt(H)) + mask) v for grouped queries. Position t
sees position s when s <= t, both are of one segment and, with a window, t - s < window.
"""
# B sequences  L queries  S keys  N query heads  K key/value heads  G = N / K  H head dim

import functools
import math
import re

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from maxdiloco.errors import ConfigError
from maxdiloco.models.dot_product import Queries, Softmax, dot_product
from maxdiloco.models.each_device import on_each_device
from maxdiloco.models.over_length import gathered_text, length_axes, part, positions
from maxdiloco.models.remat import CONTEXT
from maxdiloco.parallel.sharding import Rules

SPLASH_BLOCK = 512  # tile of queries and keys, our choice from the kernel's power-of-two sizes
# Tokens in the lanes, which heads of less than 128 features do not fill: XLA then lays out what
# comes before the kernel so, too, and the program takes 0.8 times as long (benchmarks/log).
SPLASH_LAYOUT = "SEQ_MINOR"  # a QKVLayout of the kernel
SPLASH_LANES = 128  # tiles are multiples of a TPU vector register's lanes
TRITON_ROWS = 16  # tiles are multiples of what a GPU's matrix units take
TRITON_HEAD_DIM = 256  # the accumulators of wider heads have no room in a GPU's registers
TRITON_CAPABILITY = 8  # XLA compiles Triton for NVIDIA's compute capability 8.0 and later


def choose_kernel(
    attention: str,
    backend: str,
    *,
    head_dim: int,
    length: int,
    dtype: DTypeLike,
    shards: int = 1,
    compute_capability: str = "",
) -> str:
    """The kernel for a backend: `dot_product`, `triton` or `splash`.

    attention: `dot_product`; `flash`, the backend's fused kernel or an error; `autoselected`, the
    fused kernel where it can compute this model and dot_product elsewhere.
    backend: `cpu`, `gpu` or `tpu`. length: tokens of a sequence. shards: devices it is spread over.
    compute_capability: see has_triton.
    Raises ConfigError when attention=flash has no kernel for the backend and model.
    """
    if attention == "dot_product":
        return "dot_product"
    kernel = {"gpu": "triton", "tpu": "splash"}.get(backend)
    dtype = jnp.dtype(dtype)
    obstacle = _obstacle(kernel, backend, head_dim, length, dtype, shards, compute_capability)
    if obstacle is None:
        return kernel
    if attention == "flash":
        raise ConfigError(f"attention=flash cannot be used: {obstacle}. Use autoselected.")
    return "dot_product"


def has_triton(compute_capability: str) -> bool:
    """Whether XLA compiles Triton kernels for a GPU.

    compute_capability: of jax.Device, such as `8.0`; "" and AMD's names are taken for one that has.
    """
    major = re.match(r"(\d+)\.\d+$", compute_capability)
    return major is None or int(major.group(1)) >= TRITON_CAPABILITY


def _obstacle(
    kernel, backend, head_dim, length, dtype, shards, compute_capability
) -> str | None:
    """Why the kernel cannot compute this model; None when it can."""
    if kernel is None:
        return f"the {backend} backend has no fused attention"
    if kernel == "splash":
        if length % SPLASH_LANES:
            return f"max_target_length={length} is not a multiple of {SPLASH_LANES} (splash on TPU)"
        if shards > 1 and length % (2 * shards * SPLASH_LANES):
            return (
                f"max_target_length={length} is not a multiple of {SPLASH_LANES} * 2 * context "
                f"{shards} (splash on TPU)"
            )
        return None
    if not has_triton(compute_capability):
        return (
            f"the GPU's compute capability {compute_capability} is below {TRITON_CAPABILITY}.0 "
            f"(Triton on GPU)"
        )
    if shards > 1:
        return f"context parallelism {shards} spreads a sequence over devices (Triton on GPU)"
    if dtype not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
        return f"dtype={dtype} is not bfloat16 or float16 (Triton on GPU)"
    if head_dim > TRITON_HEAD_DIM:
        return f"head_dim={head_dim} is above {TRITON_HEAD_DIM} (Triton on GPU)"
    if length % TRITON_ROWS:
        return f"max_target_length={length} is not a multiple of {TRITON_ROWS} (Triton on GPU)"
    return None


def attend(
    kernel: str,
    q_BLNH: jax.Array,
    k_BLKH: jax.Array,
    v_BLKH: jax.Array,
    segment_ids_BL: jax.Array,
    sinks_N: jax.Array | None = None,
    *,
    soft_cap: float,
    window: int,
    rules: Rules,
    precision: str,
    divisor: float | None = None,
    float32_factors: bool = False,
) -> jax.Array:
    """Attention of a training window with itself: context [B, L, N, H].

    kernel: from choose_kernel. segment_ids: equal ids see each other and lie side by side.
    soft_cap, window: 0 is off.
    sinks, divisor, float32_factors: see dot_product and Softmax.
    Where sequences are spread over devices q, k, v and the context are in their order, and
    segment_ids whole in the order of the text, see models/over_length.py.
    """
    axes = length_axes(rules)
    softmax_config = Softmax(soft_cap, window, precision, divisor, float32_factors)
    if kernel == "dot_product" and not axes:
        return dot_product(softmax_config, q_BLNH, k_BLKH, v_BLKH, segment_ids_BL, sinks_N)
    if kernel == "dot_product":
        local = functools.partial(dot_product, softmax_config)
    elif kernel == "splash":
        local = functools.partial(splash, soft_cap=soft_cap, window=window, divisor=divisor)
    else:
        from maxdiloco.models import triton

        local = functools.partial(triton.attend, softmax_config, False)
    if axes:
        local = _with_all_keys(local, axes)
    q_names, kv_names = (("batch", "length", heads, None) for heads in ("heads_act", "kv_act"))
    in_names = (q_names, kv_names, kv_names, ("batch", None))
    arrays = (q_BLNH, k_BLKH, v_BLKH, segment_ids_BL)
    if sinks_N is not None:
        in_names, arrays = (*in_names, ("heads_act",)), (*arrays, sinks_N)
    return on_each_device(local, in_names=in_names, out_names=q_names, rules=rules)(*arrays)


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
    q_BLNH,
    k_BSKH,
    v_BSKH,
    segment_ids_BS,
    sinks_N=None,
    queries=None,
    *,
    soft_cap,
    window,
    divisor=None,
    interpret=False,
):
    """The Pallas TPU kernel of jax.experimental. L is a multiple of 128.

    queries: as of dot_product. interpret: run it as array code, for tests without a TPU.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention

    kernels = splash_attention.splash_attention_kernel
    masks = splash_attention.splash_attention_mask
    L, N, H = q_BLNH.shape[1:]
    S = k_BSKH.shape[1]
    shards = S // L
    layout = kernels.QKVLayout[SPLASH_LAYOUT]
    block = math.gcd(L if shards == 1 else L // 2, SPLASH_BLOCK)
    mask = masks.LocalMask((S, S), (window - 1 if window else None, 0), 0)
    mask.q_sequence = positions(S, shards)
    kernel = kernels.make_splash_mha(
        masks.MultiHeadMask([mask] * N),
        block_sizes=kernels.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=block,
            block_kv_dq=block,
            q_layout=layout,
            k_layout=layout,
            v_layout=layout,
        ),
        attn_logits_soft_cap=soft_cap or None,
        head_shards=1,
        q_seq_shards=shards,
        residual_checkpoint_name=CONTEXT,
        interpret=interpret,
    )
    segment_ids_BL = segment_ids_BS
    if queries is not None:
        segment_ids_BL = queries.segment_ids_BL
        kernel = _shard_of(kernel, queries.shard, shards)
    segments = kernels.SegmentIds(segment_ids_BL, segment_ids_BS)
    divisor = math.sqrt(H) if divisor is None else divisor
    q_BNLH = (q_BLNH / divisor).astype(q_BLNH.dtype).swapaxes(1, 2)
    arrays = (q_BNLH, k_BSKH.swapaxes(1, 2), v_BSKH.swapaxes(1, 2), segments)
    if sinks_N is None:
        out_BNLH = jax.vmap(kernel)(*arrays)
    else:
        out_BNLH = jax.vmap(kernel, in_axes=(0, 0, 0, 0, None))(*arrays, sinks_N)
    return out_BNLH.swapaxes(1, 2)  # the kernel has marked it to be kept


def _shard_of(kernel, shard, shards):
    """The kernel of one shard of the queries: its rows of the tables that describe the mask."""

    def rows(table):  # [heads, blocks of queries, blocks of keys], or [queries]
        dim = 1 if table.ndim == 3 else 0
        size = table.shape[dim] // shards
        return jax.lax.dynamic_slice_in_dim(table, shard * size, size, dim)

    return jax.tree.map(rows, kernel)
