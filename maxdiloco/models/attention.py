"""Causal attention within documents: the choice of a kernel, and the kernels.

Every kernel computes softmax(soft_cap(q k / sqrt(H)) + mask) v for grouped queries. Position t
sees position s when s <= t, both are of one segment and, with a window, t - s < window.
"""
# B sequences  L queries  S keys  N query heads  K key/value heads  G = N / K  H head dim

import functools
import math
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from maxdiloco.errors import ConfigError
from maxdiloco.models.dot_product import Queries, Softmax, causal_mask, dot_product
from maxdiloco.models.each_device import on_each_device
from maxdiloco.models.over_length import gathered_text, length_axes, part, positions
from maxdiloco.models.remat import CONTEXT, keep
from maxdiloco.parallel.sharding import Rules

SPLASH_BLOCK = 512  # tile of queries and keys, our choice from the kernel's power-of-two sizes
# Tokens in the lanes, which heads of less than 128 features do not fill: XLA then lays out what
# comes before the kernel so, too, and the program takes 0.8 times as long (benchmarks/log).
SPLASH_LAYOUT = "SEQ_MINOR"  # a QKVLayout of the kernel
SPLASH_LANES = 128  # tiles are multiples of a TPU vector register's lanes
# What cuDNN's fused attention takes of jax.nn.dot_product_attention on every GPU that has it; heads
# of up to 256 features would need compute capability 9.0, and jax asks the machine that compiles.
CUDNN_HEAD_DIM = 128
CAPABILITY = 8  # of CUDA, from which on GPUs have cuDNN's attention and Triton's bfloat16 products


def choose_kernel(
    attention: str,
    backend: str,
    *,
    head_dim: int,
    length: int,
    dtype: DTypeLike,
    value_dim: int | None = None,
    soft_cap: float = 0.0,
    sink: bool = False,
    shards: int = 1,
    compute_capability: str = "",
) -> str:
    """The kernel for a backend: `dot_product`, `cudnn` or `splash`.

    attention: `dot_product`; `flash`, the backend's fused kernel or an error; `autoselected`, the
    fused kernel where it can compute this model and dot_product elsewhere.
    backend: `cpu`, `gpu` or `tpu`. length: tokens of a sequence. shards: devices it is spread over.
    value_dim: of a head's values, None as its keys. soft_cap, sink: see dot_product.
    compute_capability: see has_kernels.
    Raises ConfigError when attention=flash has no kernel for the backend and model.
    """
    if attention == "dot_product":
        return "dot_product"
    kernel = {"gpu": "cudnn", "tpu": "splash"}.get(backend)
    if kernel == "splash":
        obstacle = _splash_obstacle(length, shards)
    elif kernel == "cudnn":
        obstacle = _cudnn_obstacle(
            head_dim, length, jnp.dtype(dtype), value_dim, soft_cap, sink, shards,
            compute_capability,
        )  # fmt: skip
    else:
        obstacle = f"the {backend} backend has no fused attention"
    if obstacle is None:
        return kernel
    if attention == "flash":
        raise ConfigError(f"attention=flash cannot be used: {obstacle}. Use autoselected.")
    return "dot_product"


def has_kernels(compute_capability: str) -> bool:
    """Whether a GPU has the kernels of attention and of grouped products (models/triton_ragged.py).

    compute_capability: by jax.Device, such as `8.0`, or AMD's name of a GPU, which has neither; ""
    is not known and taken for one that has both.
    """
    major = re.match(r"(\d+)\.\d+$", compute_capability)
    return not compute_capability or (major is not None and int(major[1]) >= CAPABILITY)


def check_cudnn(attention: str) -> None:
    """Raise ConfigError where JAX finds no cuDNN, which it looks for when it traces a program."""
    heads = jax.ShapeDtypeStruct((1, 2, 1, 8), jnp.bfloat16)
    fused = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    try:
        jax.eval_shape(fused, heads, heads, heads)
    except RuntimeError as error:
        raise ConfigError(
            f"attention={attention} takes cuDNN's kernel on GPUs, but JAX says: {error} Install "
            f"the extra cuda12, or cudacompile on a machine without a GPU: pip install -e "
            f"'.[cuda12]'. Or use attention=dot_product."
        ) from error


def _splash_obstacle(length, shards) -> str | None:
    """Why splash cannot compute this model; None when it can."""
    if length % SPLASH_LANES:
        return f"max_target_length={length} is not a multiple of {SPLASH_LANES} (splash on TPU)"
    if shards > 1 and length % (2 * shards * SPLASH_LANES):
        return (
            f"max_target_length={length} is not a multiple of {SPLASH_LANES} * 2 * context "
            f"{shards} (splash on TPU)"
        )
    return None


def _cudnn_obstacle(
    head_dim, length, dtype, value_dim, soft_cap, sink, shards, compute_capability
) -> str | None:
    """Why cuDNN cannot compute this model; None when it can."""
    found = None
    if not has_kernels(compute_capability):
        found = f"the GPU's compute capability {compute_capability} is below {CAPABILITY}.0"
    elif shards > 1:
        found = f"context parallelism {shards} spreads a sequence over devices"
    elif dtype not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
        found = f"dtype={dtype} is not bfloat16 or float16"
    elif head_dim % 8 or head_dim > CUDNN_HEAD_DIM:
        found = f"head_dim={head_dim} is not a multiple of 8 up to {CUDNN_HEAD_DIM}"
    elif value_dim not in (None, head_dim):
        found = f"v_head_dim={value_dim} is not the {head_dim} of queries and keys"
    elif length % 2:
        found = f"max_target_length={length} is odd"
    elif soft_cap:
        found = f"attn_logits_soft_cap={soft_cap} is not 0"
    elif sink:
        found = "attention_sink=true has no place in its softmax"
    return None if found is None else f"{found} (cuDNN on GPU)"


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
        local = functools.partial(cudnn, softmax_config)
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


def cudnn(
    softmax_config: Softmax,
    q_BLNH: jax.Array,
    k_BLKH: jax.Array,
    v_BLKH: jax.Array,
    segment_ids_BL: jax.Array,
) -> jax.Array:
    """cuDNN's fused attention by jax.nn.dot_product_attention, of choose_kernel's models.

    Documents and the window are a mask [B, 1, L, L], a bias for cuDNN, which before 9.10.2 takes no
    window of its own beside one. The backward pass runs the forward kernel again: what jax keeps
    for it cannot pass _joined.
    """

    def plain(q_BLNH, k_BLKH, v_BLKH, segment_ids_BL):
        L, H = segment_ids_BL.shape[1], q_BLNH.shape[-1]
        positions_L = jnp.arange(L)
        same_B1LL = (segment_ids_BL[:, :, None] == segment_ids_BL[:, None])[:, None]
        return jax.nn.dot_product_attention(
            q_BLNH,
            k_BLKH,
            v_BLKH,
            mask=same_B1LL & causal_mask(positions_L, positions_L, softmax_config.window),
            scale=1 / softmax_config.divisor_of(H),
            is_causal=True,
            implementation="cudnn",
        )

    def pulled(*arrays):
        *qkv, segment_ids_BL, d_BLNH = arrays
        _, pull = jax.vjp(lambda *qkv: plain(*qkv, segment_ids_BL), *qkv)
        return pull(d_BLNH)

    fused = jax.custom_vjp(_joined(plain))
    fused.defvjp(
        lambda *arrays: (fused(*arrays), arrays),
        lambda arrays, d_BLNH: (*_joined(pulled)(*arrays, d_BLNH), None),
    )
    return keep(fused(q_BLNH, k_BLKH, v_BLKH, segment_ids_BL), CONTEXT)


def _joined(fn: Callable) -> Callable:
    """fn of arrays [B, ...]; a vmap over it, of the replicas of a slot, makes their batch longer.

    jax 0.10's rule for a vmap over cuDNN wants a mask for each head.
    """
    wrapped = jax.custom_batching.custom_vmap(fn)

    @wrapped.def_vmap
    def _(size, in_batched, *args):
        whole = (
            x if batched else jnp.broadcast_to(x, (size, *x.shape))
            for x, batched in zip(args, in_batched, strict=True)
        )
        out = wrapped(*(x.reshape(-1, *x.shape[2:]) for x in whole))
        out = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    return wrapped
