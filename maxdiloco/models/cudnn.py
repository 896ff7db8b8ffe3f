"""cuDNN's fused attention: documents by their offsets, and what the backward pass needs by name.

jax.nn.dot_product_attention takes documents as a mask alone, which the kernels read for each head,
and keeps nothing under a name, so that a layer that is computed again runs the forward kernel
again. Both are operands of the primitives that it binds; those are private to JAX and bound here.
"""
# B sequences  L tokens  N query heads  K key/value heads  H head dim  M most documents of a window

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxdiloco.models.remat import CONTEXT, keep

# M: one for so many tokens, within these. Kernels take longer for room that nobody fills
# (benchmarks/log), and log normalisers are kept for each; with 64 they are as large as a context
# of 128 features a head. A batch with a window of more documents takes a mask.
TOKENS_PER_DOCUMENT, LEAST_DOCUMENTS, MOST_DOCUMENTS = 128, 8, 64
MOST_VALUES = 2**31 - 1  # of the queries, which JAX counts in int32


class Choice(NamedTuple):
    """What both passes share. mask: segment_ids -> bool [B, 1, L, L]. by_offsets: of documents."""

    scale: float
    mask: Callable[[jax.Array], jax.Array]
    by_offsets: bool


class Documents(NamedTuple):
    """Where documents lie in their windows, int32 [B, M] and [B, M + 1]; -1 after the last one."""

    lengths_BM: jax.Array
    offsets_BM: jax.Array


def attend(choice: Choice, q_BLNH, k_BLKH, v_BLKH, segment_ids_BL) -> jax.Array:
    """Causal attention where the mask is, or within runs of equal segment_ids: [B, L, N, H].

    choice: by_offsets where the mask says no more than these runs. A vmap then has to be around
    both passes: normalisers of a batch are not those of its part in a larger one.
    """
    forward = _folded(functools.partial(_forward, choice))
    backward = _folded(functools.partial(_backward, choice))

    @jax.custom_vjp
    def fused(*arrays):
        return forward(*arrays)[0]

    def kept(*arrays):
        context_BLNH, normalisers = (keep(x, CONTEXT) for x in forward(*arrays))
        return context_BLNH, (*arrays, context_BLNH, normalisers)

    fused.defvjp(kept, lambda residuals, d_BLNH: (*backward(*residuals, d_BLNH), None))
    return fused(q_BLNH, k_BLKH, v_BLKH, segment_ids_BL)


def _folded(fn):
    """fn of arrays [B, ...]; a vmap makes it one call of more sequences."""
    mapped = jax.custom_batching.custom_vmap(fn)

    @mapped.def_vmap
    def rule(size, in_batched, *arrays):
        whole = [
            x if has else jnp.broadcast_to(x, (size, *x.shape))
            for x, has in zip(arrays, in_batched, strict=True)
        ]
        out = mapped(*(x.reshape(-1, *x.shape[2:]) for x in whole))
        out = tuple(x.reshape(size, -1, *x.shape[1:]) for x in out)
        return out, (True,) * len(out)

    return mapped


def documents(segment_ids_BL: jax.Array) -> tuple[jax.Array, Documents]:
    """Whether no window has more than M documents, bool []; if so, where they lie."""
    L, M = segment_ids_BL.shape[1], _most_documents(segment_ids_BL.shape[1])
    first_BL = jnp.diff(segment_ids_BL, axis=1, prepend=segment_ids_BL[:, :1] - 1) != 0
    count_B1 = jnp.sum(first_BL, axis=1, keepdims=True)
    starts_BL = jnp.sort(jnp.where(first_BL, jnp.arange(L), L), axis=1)
    starts_BM = jnp.pad(starts_BL, ((0, 0), (0, M + 1)), constant_values=L)[:, : M + 1]
    lengths_BM = jnp.where(jnp.arange(M) < count_B1, jnp.diff(starts_BM, axis=1), -1)
    offsets_BM = jnp.where(jnp.arange(M + 1) < count_B1, starts_BM, -1)
    found = Documents(lengths_BM.astype(jnp.int32), offsets_BM.astype(jnp.int32))
    return jnp.all(count_B1 <= M), found


def _most_documents(length):
    """M of windows of this many tokens."""
    return min(max(LEAST_DOCUMENTS, length // TOKENS_PER_DOCUMENT), MOST_DOCUMENTS)


def _by_documents(choice, segment_ids_BL, few, many, *arrays):
    """few(Documents, ...) where they are taken by offsets and there is room, else many(...)."""
    if not choice.by_offsets:
        return many(*arrays)
    fit, found = documents(segment_ids_BL)
    return jax.lax.cond(fit, functools.partial(few, found), many, *arrays)


def _countable(choice, q_BLNH):
    """choice, without offsets that JAX cannot count."""
    return choice._replace(by_offsets=choice.by_offsets and q_BLNH.size <= MOST_VALUES)


def _forward(choice, q_BLNH, k_BLKH, v_BLKH, segment_ids_BL):
    """The context and the log normalisers, [B, N, L] or, for documents by offsets, [B M, N, L]."""
    choice = _countable(choice, q_BLNH)

    def few(found, *qkv):
        return tuple(bound(choice, qkv, found=found))

    def many(*qkv):
        context_BLNH, normalisers = bound(choice, qkv, mask=choice.mask(segment_ids_BL))
        B, _, L = normalisers.shape
        room = B * (_most_documents(L) - 1) if choice.by_offsets else 0
        return context_BLNH, jnp.pad(normalisers, ((0, room), (0, 0), (0, 0)))

    return _by_documents(choice, segment_ids_BL, few, many, q_BLNH, k_BLKH, v_BLKH)


def _backward(choice, q_BLNH, k_BLKH, v_BLKH, segment_ids_BL, context_BLNH, normalisers, d_BLNH):
    """Gradients of queries, keys and values."""
    choice = _countable(choice, q_BLNH)

    def few(found, *arrays):
        return tuple(bound(choice, arrays[:3], arrays[3:], found=found))

    def many(q_BLNH, k_BLKH, v_BLKH, normalisers, *rest):
        kept = normalisers[: q_BLNH.shape[0]], *rest
        mask = choice.mask(segment_ids_BL)
        return tuple(bound(choice, (q_BLNH, k_BLKH, v_BLKH), kept, mask=mask))

    arrays = (q_BLNH, k_BLKH, v_BLKH, normalisers, context_BLNH, d_BLNH)
    return _by_documents(choice, segment_ids_BL, few, many, *arrays)


def bound(choice, qkv, kept=(), *, mask=None, found=None) -> list[jax.Array]:
    """JAX's primitive of cuDNN's forward or backward kernel, causal, with a mask or Documents.

    kept: nothing for the forward kernel; log normalisers, context and the context's gradient.
    Returns the context and the log normalisers, or the gradients of queries, keys and values.
    """
    from jax._src.cudnn import fused_attention_stablehlo as stablehlo

    zero = jnp.zeros((), qkv[0].dtype)
    absent = jnp.zeros(0, zero.dtype)
    bias, places, mask_type = absent, [absent] * 4, stablehlo.MaskType.CAUSAL
    if found is not None:
        mask_type = stablehlo.MaskType.PADDING_CAUSAL
        places = [found.lengths_BM] * 2 + [found.offsets_BM] * 2  # of queries, and of keys
    if mask is not None:
        bias = jnp.where(mask, zero, stablehlo.get_large_negative_number(zero.dtype))
    options = {
        "scale": choice.scale,
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (mask is not None, False),  # a bias, without a gradient
        "mask_type": mask_type,
        "layout": stablehlo.AttentionLayout.BTNH.value,
        "sliding_window_length": None,
    }
    if jax.__version_info__ >= (0, 12):
        options["score_mod"] = None
    operands = (*qkv, bias, *places, absent, absent, *kept)
    if kept:
        return stablehlo._dot_product_attention_bwd_p_wrapper.bind(*operands, **options)
    return stablehlo._dot_product_attention_fwd_p_wrapper.bind(
        *operands, is_training=True, **options
    )
