"""cuDNN's fused attention, with documents by their offsets and named residuals.

Without offsets, documents are a mask that the kernels read for each head. The log normalisers and
the context have a name for remat policies, so that a recomputed layer does not run the forward
kernel again.
"""
# B sequences  L tokens  N query heads  K key/value heads  H head dim
# M capacity: the most documents of a window, as a mean over the batch

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxdiloco.errors import ConfigError
from maxdiloco.models.kernels.blockwise import Scores, mask_of_segments
from maxdiloco.models.kernels.private_jax import cudnn_attention
from maxdiloco.models.remat import CONTEXT, keep

# The capacities M are 1 and L divided by each of these numbers of tokens, within the bounds. Unused
# capacity makes kernels slower (benchmarks/results/gpu.md). A batch with more documents needs a
# mask.
TOKENS_PER_DOCUMENT, LEAST_DOCUMENTS, MOST_DOCUMENTS = (512, 256, 64), 4, 64
MOST_VALUES = 2**31 - 1  # most values of the queries, which JAX counts in int32


class Documents(NamedTuple):
    """Lengths and offsets of the documents of all windows, as cuDNN reads them.

    Existing documents come first.

    Attributes:
      lengths_BM: tokens of each document, int32, then 0.
      query_offsets_BM: number of values before a document in the queries, int32 [B, M + 1], then
        the size of the queries.
      key_offsets_BM: the same in keys and values.
      token_documents: the number of each token's document, and its position in the document, int32
        [B, L].
    """

    lengths_BM: jax.Array
    query_offsets_BM: jax.Array
    key_offsets_BM: jax.Array
    token_documents: tuple[jax.Array, jax.Array]


class _Options(NamedTuple):
    """Arguments that both passes share. by_offsets: pass documents as offsets if they fit."""

    scale: float
    window: int
    by_offsets: bool

    def mask(self, segment_ids_BL):
        """Return bool [B, 1, L, L]."""
        return mask_of_segments(segment_ids_BL, self.window)[:, 0]


def check_installed(attention: str) -> None:
    """Refuse cuDNN's kernel if JAX does not find cuDNN.

    Args:
      attention: value of the key, for the message.

    Raises:
      ConfigError: JAX, which looks for cuDNN when it traces a program, does not find it.
    """
    heads = jax.ShapeDtypeStruct((1, 2, 1, 8), jnp.bfloat16)
    fused = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    try:
        jax.eval_shape(fused, heads, heads, heads)
    except RuntimeError as error:
        raise ConfigError(
            f"attention={attention} uses cuDNN's kernel on GPUs, which JAX cannot use: {error} "
            f"Install the extra cuda13 (cuda12 for a driver before 580), or cudacompile on a "
            f"machine without a GPU: pip install -e '.[cuda13]'. Or use attention=dot_product."
        ) from error


def attention_by_public_api(
    scores: Scores,
    q_BLNH: jax.Array,
    k_BLKH: jax.Array,
    v_BLKH: jax.Array,
    segment_ids_BL: jax.Array,
) -> jax.Array:
    """Compute causal attention in segments by jax.nn, for a JAX whose private primitives differ.

    Documents are a mask, and a recomputed layer runs the forward kernel again.

    Args:
      scores: how logits are formed, without a soft cap.
      q_BLNH: queries.
      k_BLKH: keys.
      v_BLKH: values.
      segment_ids_BL: equal ids see each other.

    Returns:
      The context [B, L, N, H].
    """
    return jax.nn.dot_product_attention(
        q_BLNH,
        k_BLKH,
        v_BLKH,
        mask=mask_of_segments(segment_ids_BL, scores.window)[:, 0],
        scale=1 / scores.divisor,
        is_causal=True,
        implementation="cudnn",
    )


def attention(
    scores: Scores,
    q_BLNH: jax.Array,
    k_BLKH: jax.Array,
    v_BLKH: jax.Array,
    segment_ids_BL: jax.Array,
    *,
    by_offsets: bool = False,
) -> jax.Array:
    """Compute causal attention within segments.

    Args:
      scores: how logits are formed, without a soft cap.
      q_BLNH: queries.
      k_BLKH: keys.
      v_BLKH: values, of the queries' head dimension.
      segment_ids_BL: equal ids see each other and are adjacent.
      by_offsets: pass documents to cuDNN by their offsets instead of a mask. A window still needs
        the mask.

    Returns:
      The context [B, L, N, H].
    """
    options = _Options(1 / scores.divisor, scores.window, by_offsets and not scores.window)
    forward = _folded(functools.partial(_forward, options))
    backward = _folded(functools.partial(_backward, options))

    @jax.custom_vjp
    def fused(*arrays):
        return forward(*arrays)[0]

    def kept(*arrays):
        context_BLNH, normalisers = (keep(x, CONTEXT) for x in forward(*arrays))
        return context_BLNH, (*arrays, context_BLNH, normalisers)

    fused.defvjp(kept, lambda residuals, d_BLNH: (*backward(*residuals, d_BLNH), None))
    return fused(q_BLNH, k_BLKH, v_BLKH, segment_ids_BL)


def _folded(fn: Callable) -> Callable:
    """Turn a vmap of fn, a function of arrays [B, ...], into one call with more sequences."""
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


def document_capacities(length: int) -> list[int]:
    """Return the capacities M for windows of `length` tokens, the smallest first."""
    wanted = {length // tokens for tokens in TOKENS_PER_DOCUMENT}
    return [1, *sorted({min(max(LEAST_DOCUMENTS, M), MOST_DOCUMENTS) for M in wanted})]


def documents(first_BL: jax.Array, M: int, q_BLNH: jax.Array, k_BLKH: jax.Array) -> Documents:
    """Find the documents of a batch.

    Args:
      first_BL: tokens that begin a document, bool; at most B * M of them.
      M: the capacity: most documents of a window, as a mean over the batch.
      q_BLNH: queries, whose sizes count in the offsets.
      k_BLKH: keys, whose sizes also count in the offsets.

    Returns:
      Their lengths and offsets.
    """
    B, L = first_BL.shape
    starts = jnp.flatnonzero(first_BL, size=B * M + B, fill_value=B * L).astype(jnp.int32)
    lengths_BM = jnp.diff(starts[: B * M + 1]).reshape(B, M)
    query_offsets_BM, key_offsets_BM = (
        (starts * (x.shape[2] * x.shape[3])).reshape(B, M + 1) for x in (q_BLNH, k_BLKH)
    )
    numbers = jnp.cumsum(first_BL, dtype=jnp.int32) - 1
    positions = jnp.arange(B * L) - starts[numbers]
    token_documents = numbers.reshape(B, L), positions.reshape(B, L)
    return Documents(lengths_BM, query_offsets_BM, key_offsets_BM, token_documents)


def _by_documents(options, segment_ids_BL, few, many, *arrays):
    """Call `few` with the smallest Documents that the batch fits, or `many` if it fits none.

    few(None, ...) is for windows of one document each. Without by_offsets `many` is always called.
    """
    if not options.by_offsets:
        return many(*arrays)
    B, L = segment_ids_BL.shape
    capacities = document_capacities(L)
    first_BL = jnp.diff(segment_ids_BL, axis=1, prepend=segment_ids_BL[:, :1] - 1) != 0
    found = [None if M == 1 else documents(first_BL, M, *arrays[:2]) for M in capacities]
    too_small = [jnp.sum(first_BL) > B * M for M in capacities]
    branches = [*(functools.partial(few, one) for one in found), many]
    return jax.lax.switch(sum(x.astype(jnp.int32) for x in too_small), branches, *arrays)


def _countable(options, q_BLNH):
    """Return the options, without offsets that exceed JAX's int32."""
    return options._replace(by_offsets=options.by_offsets and q_BLNH.size <= MOST_VALUES)


def _forward(options, q_BLNH, k_BLKH, v_BLKH, segment_ids_BL):
    """Return the context and the log normaliser of each query, float32 [B, N, L]."""
    options = _countable(options, q_BLNH)

    def few(found, *qkv):
        context_BLNH, normalisers = cudnn_attention(options.scale, qkv, documents=found)
        if found is None:
            return context_BLNH, normalisers
        numbers_BL, positions_BL = found.token_documents
        return context_BLNH, jnp.swapaxes(normalisers[numbers_BL, :, positions_BL], 1, 2)

    def many(*qkv):
        return tuple(cudnn_attention(options.scale, qkv, mask=options.mask(segment_ids_BL)))

    return _by_documents(options, segment_ids_BL, few, many, q_BLNH, k_BLKH, v_BLKH)


def _backward(options, q_BLNH, k_BLKH, v_BLKH, segment_ids_BL, context_BLNH, normalisers, d_BLNH):
    """Return the gradients of queries, keys and values."""
    options = _countable(options, q_BLNH)

    def few(found, *arrays):
        *qkv, normalisers_BNL, context_BLNH, d_BLNH = arrays
        normalisers = normalisers_BNL
        if found is not None:
            numbers_BL, positions_BL = found.token_documents
            room = jnp.zeros((found.lengths_BM.size, *normalisers_BNL.shape[1:]), jnp.float32)
            of_tokens = jnp.swapaxes(normalisers_BNL, 1, 2)
            normalisers = room.at[numbers_BL, :, positions_BL].set(of_tokens, unique_indices=True)
        residuals = (normalisers, context_BLNH, d_BLNH)
        return tuple(cudnn_attention(options.scale, qkv, residuals, documents=found))

    def many(*arrays):
        mask = options.mask(segment_ids_BL)
        return tuple(cudnn_attention(options.scale, arrays[:3], arrays[3:], mask=mask))

    arrays = (q_BLNH, k_BLKH, v_BLKH, normalisers, context_BLNH, d_BLNH)
    return _by_documents(options, segment_ids_BL, few, many, *arrays)
