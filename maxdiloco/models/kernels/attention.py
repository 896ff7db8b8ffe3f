"""Causal attention within documents, by the chosen kernel on each device's part of the arrays.

Every kernel computes softmax(soft_cap(q k / divisor) + mask) v for grouped queries. Position t sees
position s if s <= t, both have the same segment id and, with a window, t - s < window.
"""
# B sequences  L queries  S keys  N query heads  K key/value heads  H head dim

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from maxdiloco.models.devices import gathered_text, on_each_device, positions, split_axes
from maxdiloco.models.kernels import blockwise, cudnn, splash
from maxdiloco.models.kernels.blockwise import Queries, Scores
from maxdiloco.parallel.sharding import Rules


def _kernel(name: str) -> Callable:
    match name:
        case "dot_product":
            return blockwise.attention
        case "splash":
            return splash.attention
        case "cudnn":
            return cudnn.attention
        case "cudnn_documents":
            return functools.partial(cudnn.attention, by_offsets=True)
        case "cudnn_public":
            return cudnn.attention_by_public_api
    raise ValueError(f"attention={name}")


def attend(
    name: str,
    scores: Scores,
    rules: Rules,
    q_BLNH: jax.Array,
    k_BLKH: jax.Array,
    v_BLKH: jax.Array,
    segment_ids_BL: jax.Array,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """Compute the attention of a training window with itself.

    Args:
      name: the kernel, a value of choice.Kernels.attention.
      scores: how logits are formed.
      rules: logical axis name -> mesh axes.
      q_BLNH: queries. N is a multiple of K.
      k_BLKH: keys.
      v_BLKH: values, whose heads may have another size.
      segment_ids_BL: equal ids see each other and are adjacent.
      sinks_N: a logit of each head that every query sees and that has no value, or None.

    Returns:
      The context [B, L, N, H]. If sequences are spread over devices, q, k, v and the context are in
      device order, and segment_ids in text order; see models/devices.py.
    """
    _, axes = split_axes(("batch", "length"), rules)
    arrays = (q_BLNH, k_BLKH, v_BLKH, segment_ids_BL)
    arrays += () if sinks_N is None else (sinks_N,)
    if name == "dot_product" and not axes:
        return blockwise.attention(scores, *arrays)
    local = functools.partial(_kernel(name), scores)
    if axes:
        local = _with_all_keys(local, axes)
    q_names, kv_names = (("batch", "length", heads, None) for heads in ("heads_act", "kv_act"))
    over_heads, over_kv = (split_axes((name,), rules)[0] for name in ("heads_act", "kv_act"))
    sizes, K = jax.sharding.get_abstract_mesh().shape, k_BLKH.shape[2]
    if over_heads != over_kv or K % math.prod(sizes[axis] for axis in over_heads):
        # A device needs the keys and values of its query heads.
        repeats = q_BLNH.shape[2] // K
        k, v = (jnp.repeat(x, repeats, axis=2) for x in (k_BLKH, v_BLKH))
        arrays, kv_names = (q_BLNH, k, v, *arrays[3:]), q_names
    in_names = [q_names, kv_names, kv_names, ("batch", None), ("heads_act",)][: len(arrays)]
    return on_each_device(local, in_names=in_names, out_names=q_names, rules=rules)(*arrays)


def _with_all_keys(kernel: Callable, axes: tuple[str, ...]) -> Callable:
    """Return a kernel for a device's part of the sequences, which gathers their keys and values.

    Llama 3 (arXiv 2407.21783, section 3.3.2) does so: with few key/value heads there is little to
    gather, and the kernel and its mask for whole sequences need no change. The gradients of keys
    and values are summed and scattered back.
    """

    def local(q_BLNH, k_BLKH, v_BLKH, segment_ids_BS, sinks_N=None):
        k_BSKH, v_BSKH = gathered_text(k_BLKH, axes), gathered_text(v_BLKH, axes)
        shard, (L, S) = jax.lax.axis_index(axes), (q_BLNH.shape[1], segment_ids_BS.shape[1])
        positions_L = jnp.array(positions(S, S // L).reshape(-1, L))[shard]
        queries = Queries(positions_L, segment_ids_BS[:, positions_L], shard)
        return kernel(q_BLNH, k_BSKH, v_BSKH, segment_ids_BS, sinks_N, queries)

    return local
