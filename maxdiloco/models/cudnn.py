"""cuDNN's fused attention: documents by their offsets, and what the backward pass needs by name.

jax.nn.dot_product_attention takes documents as a mask alone, which the kernels read for each head,
and keeps nothing under a name, so that a layer that is computed again runs the forward kernel
again. Both are operands of the primitives that it binds; those are private to JAX and bound here.
"""
# B sequences  L tokens  N query heads  K key/value heads  H head dim
# M documents of a window that there is room for, in the mean of all windows

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxdiloco.models.remat import CONTEXT, keep

# One M for so many tokens, within these bounds, beside one document a window. Kernels take longer
# for room that nobody fills (benchmarks/results); a batch of more documents than the last takes
# a mask.
TOKENS_PER_DOCUMENT, LEAST_DOCUMENTS, MOST_DOCUMENTS = (512, 256, 64), 4, 64
MOST_VALUES = 2**31 - 1  # of the queries, which JAX counts in int32


class Choice(NamedTuple):
    """What both passes share. mask: segment_ids -> bool [B, 1, L, L]. by_offsets: of documents."""

    scale: float
    mask: Callable[[jax.Array], jax.Array]
    by_offsets: bool


class Documents(NamedTuple):
    """Where the documents of all windows lie, as cuDNN wants it: those that there are come first.

    lengths: in tokens, int32 [B, M], then 0. offsets: values before a document in the queries, and
    in the keys and values, int32 [B, M + 1], then the size of these arrays. of_tokens: the number
    of each token's document among them, and its own in that, int32 [B, L].
    """

    lengths_BM: jax.Array
    of_queries_BM: jax.Array
    of_keys_BM: jax.Array
    of_tokens: tuple[jax.Array, jax.Array]


def attend(choice: Choice, q_BLNH, k_BLKH, v_BLKH, segment_ids_BL) -> jax.Array:
    """Causal attention where the mask is, or within runs of equal segment_ids: [B, L, N, H].

    choice: by_offsets where the mask says no more than these runs.
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


def rooms(length: int) -> list[int]:
    """Every M of windows of this many tokens, the smallest first."""
    wanted = {length // tokens for tokens in TOKENS_PER_DOCUMENT}
    return [1, *sorted({min(max(LEAST_DOCUMENTS, M), MOST_DOCUMENTS) for M in wanted})]


def documents(first_BL: jax.Array, M: int, q_BLNH: jax.Array, k_BLKH: jax.Array) -> Documents:
    """first: where a document begins, bool; of no more than B * M."""
    B, L = first_BL.shape
    starts = jnp.flatnonzero(first_BL, size=B * M + B, fill_value=B * L).astype(jnp.int32)
    lengths_BM = jnp.diff(starts[: B * M + 1]).reshape(B, M)
    of_queries_BM, of_keys_BM = (
        (starts * (x.shape[2] * x.shape[3])).reshape(B, M + 1) for x in (q_BLNH, k_BLKH)
    )
    numbers = jnp.cumsum(first_BL, dtype=jnp.int32) - 1
    places = jnp.arange(B * L) - starts[numbers]
    of_tokens = numbers.reshape(B, L), places.reshape(B, L)
    return Documents(lengths_BM, of_queries_BM, of_keys_BM, of_tokens)


def _by_documents(choice, segment_ids_BL, few, many, *arrays):
    """few(Documents, ...) where there is room, few(None, ...) of windows of one document each;
    many(...) where not, or where documents are not taken by offsets."""
    if not choice.by_offsets:
        return many(*arrays)
    B, L = segment_ids_BL.shape
    first_BL = jnp.diff(segment_ids_BL, axis=1, prepend=segment_ids_BL[:, :1] - 1) != 0
    found = [None if M == 1 else documents(first_BL, M, *arrays[:2]) for M in rooms(L)]
    too_small = [jnp.sum(first_BL) > B * M for M in rooms(L)]
    branches = [*(functools.partial(few, one) for one in found), many]
    return jax.lax.switch(sum(x.astype(jnp.int32) for x in too_small), branches, *arrays)


def _countable(choice, q_BLNH):
    """choice, without offsets that JAX cannot count."""
    return choice._replace(by_offsets=choice.by_offsets and q_BLNH.size <= MOST_VALUES)


def _forward(choice, q_BLNH, k_BLKH, v_BLKH, segment_ids_BL):
    """The context and the log normaliser of each query, float32 [B, N, L]."""
    choice = _countable(choice, q_BLNH)

    def few(found, *qkv):
        context_BLNH, normalisers = bound(choice, qkv, found=found)
        if found is None:
            return context_BLNH, normalisers
        numbers_BL, places_BL = found.of_tokens
        return context_BLNH, jnp.swapaxes(normalisers[numbers_BL, :, places_BL], 1, 2)

    def many(*qkv):
        return tuple(bound(choice, qkv, mask=choice.mask(segment_ids_BL)))

    return _by_documents(choice, segment_ids_BL, few, many, q_BLNH, k_BLKH, v_BLKH)


def _backward(choice, q_BLNH, k_BLKH, v_BLKH, segment_ids_BL, context_BLNH, normalisers, d_BLNH):
    """Gradients of queries, keys and values."""
    choice = _countable(choice, q_BLNH)

    def few(found, *arrays):
        *qkv, normalisers_BNL, context_BLNH, d_BLNH = arrays
        normalisers = normalisers_BNL
        if found is not None:
            numbers_BL, places_BL = found.of_tokens
            room = jnp.zeros((found.lengths_BM.size, *normalisers_BNL.shape[1:]), jnp.float32)
            of_tokens = jnp.swapaxes(normalisers_BNL, 1, 2)
            normalisers = room.at[numbers_BL, :, places_BL].set(of_tokens, unique_indices=True)
        return tuple(bound(choice, qkv, (normalisers, context_BLNH, d_BLNH), found=found))

    def many(*arrays):
        return tuple(bound(choice, arrays[:3], arrays[3:], mask=choice.mask(segment_ids_BL)))

    arrays = (q_BLNH, k_BLKH, v_BLKH, normalisers, context_BLNH, d_BLNH)
    return _by_documents(choice, segment_ids_BL, few, many, *arrays)


def bound(choice, qkv, kept=(), *, mask=None, found=None) -> list[jax.Array]:
    """JAX's primitive of cuDNN's forward or backward kernel, causal, with a mask or Documents.

    kept: nothing for the forward kernel; log normalisers, context and the context's gradient.
    Normalisers: [B, N, L], or [B M, N, L] of all Documents that there is room for.
    Returns the context and the log normalisers, or the gradients of queries, keys and values.
    The primitive that jax.nn binds, which is around this one, would form Documents in every call.
    """
    from jax._src.cudnn import fused_attention_stablehlo as stablehlo

    zero = jnp.zeros((), qkv[0].dtype)
    absent = jnp.zeros(0, zero.dtype)
    bias, places, mask_type = absent, [absent] * 4, stablehlo.MaskType.CAUSAL
    if found is not None:
        mask_type = stablehlo.MaskType.PADDING_CAUSAL
        places = [found.lengths_BM] * 2 + [found.of_queries_BM, found.of_keys_BM]
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
        options |= {"score_mod_name": None, "score_mod_jaxpr": None}
    operands = (*qkv, bias, *places, absent, absent, *kept)
    if kept:
        return stablehlo._dot_product_attention_bwd_p.bind(*operands, **options)
    return stablehlo._dot_product_attention_fwd_p.bind(*operands, is_training=True, **options)
