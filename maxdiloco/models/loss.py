"""Cross-entropy of next tokens from the last hidden states, without the logits of a whole batch.

The logits of a chunk of tokens are computed once. They give the loss, the gradient of the hidden
states, and the chunk's part of the head's gradient. These are three matmuls of the head's size,
instead of four with recomputed logits.
"""
# B sequences  L tokens  D model  V vocabulary  C chunks
# G groups of tokens, one per device that batch and length are spread over  S sequences of a group
# T tokens of a sequence in one chunk

import functools
import math

import jax
import jax.numpy as jnp

from maxdiloco.models.config import ModelConfig
from maxdiloco.models.devices import token_shards
from maxdiloco.models.kernels.blockwise import soft_capped
from maxdiloco.models.kernels.choice import Kernels
from maxdiloco.models.kernels.matmul import scattered_sum
from maxdiloco.models.kernels.reductions import is_target
from maxdiloco.parallel.sharding import constrain

f32 = jnp.float32
TOKENS = ("batch", "length")  # the mesh axes of these spread groups of tokens
MIN_CHUNKS = 2  # for small batches too: the whole float32 [B, L, V] never exists


def next_tokens(tokens_BL: jax.Array, segment_ids_BL: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Find the targets of each position.

    Position t predicts token t + 1 if both belong to one document. The last position never counts.

    Args:
      tokens_BL: int32.
      segment_ids_BL: document of each token; segment 0 is padding.

    Returns:
      Targets [B, L], and which of them count, bool [B, L].
    """
    targets_BL = jnp.roll(tokens_BL, -1, axis=1)
    same_BL = (segment_ids_BL == jnp.roll(segment_ids_BL, -1, axis=1)) & (segment_ids_BL != 0)
    return targets_BL, same_BL.at[:, -1].set(False)


def head_logits(config: ModelConfig, kernels: Kernels, x: jax.Array, w: jax.Array) -> jax.Array:
    """Compute logits.

    Args:
      config: the model.
      kernels: products.
      x: hidden states after the final norm [..., D].
      w: the head's weight in the type of x, [D, V], or [V, D] if it is the embedding.

    Returns:
      Float32 [..., V]. Columns of padding are -inf: they do not count in a softmax and are never
      sampled.
    """
    equation = "...d,vd->...v" if config.tied_head else "...d,dv->...v"
    logits = soft_capped(kernels.einsum_to_float32(equation, x, w), config.final_logits_soft_cap)
    return _where_token(config, logits, -jnp.inf)


def head_names(config: ModelConfig) -> tuple[str, str]:
    """Return the logical axis names of the head's weight."""
    return ("vocab", "embed") if config.tied_head else ("embed", "vocab")


def _where_token(config, x, otherwise):
    """Put another value into the columns of padding of x [..., V]."""
    rows = x.shape[-1]
    if config.vocab_size >= rows:
        return x
    return jnp.where(jnp.arange(rows) < config.vocab_size, x, otherwise)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def token_losses(
    config: ModelConfig,
    kernels: Kernels,
    x_BLD: jax.Array,
    w: jax.Array,
    targets_BL: jax.Array,
    counts_BL: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Sum the losses over the positions that count.

    The z-loss is the squared log normaliser (PaLM, arXiv 2204.02311, section 5) times its
    multiplier.

    Args:
      config: the model.
      kernels: products and reductions.
      x_BLD: hidden states after the final norm, in the type of the products.
      w: the head's weight, in the type of its gradient.
      targets_BL: int32.
      counts_BL: positions that count, bool.

    Returns:
      Cross-entropy plus z-loss; and both as a pair, which is for display and has no gradient.
    """
    losses, _ = _forward(config, kernels, x_BLD, w, targets_BL, counts_BL)
    return losses  # XLA drops the gradient, which nothing uses here


def _forward(config, kernels, x_BLD, w, targets_BL, counts_BL):
    """Compute the loss, with its gradient as the residual."""
    back = "gstv,vd->gstd" if config.tied_head else "gstv,dv->gstd"
    across = "gstv,gstd->gvd" if config.tied_head else "gstd,gstv->gdv"
    # Inside the loop the weight is whole over the batch's mesh axes, split over vocabulary.
    names_w = ("vocab_act", None) if config.tied_head else (None, "vocab_act")
    einsum = functools.partial(jnp.einsum, precision=kernels.products.precision)
    product_type = kernels.products.result_type

    def chunk(carry, inputs):
        cross_G, z_G, dw_G = carry
        x_GSTD, *targets = inputs
        logits_GSTV = head_logits(config, kernels, x_GSTD, w_compute)
        names = (TOKENS, None, None, "vocab_act")
        logits_GSTV = constrain(logits_GSTV, names, config.rules)
        *losses_G, lse_GST = _losses(config, kernels, logits_GSTV, *targets)
        d_GSTV = _d_logits(config, logits_GSTV, lse_GST, *targets).astype(w_compute.dtype)
        x_GSTD = x_GSTD.astype(w_compute.dtype)
        dx_GSTD = einsum(back, d_GSTV, w_compute, preferred_element_type=product_type)
        pair = (d_GSTV, x_GSTD) if config.tied_head else (x_GSTD, d_GSTV)
        dw_G = dw_G + einsum(across, *pair, preferred_element_type=f32)
        dw_G = constrain(dw_G, (TOKENS, *names_w), config.rules)
        sums_G = (cross_G + losses_G[0], z_G + losses_G[1])
        return (*sums_G, dw_G), dx_GSTD.astype(x_BLD.dtype)

    compute_type = f32 if kernels.products.float32_operands else x_BLD.dtype
    w_compute = constrain(w.astype(compute_type), names_w, config.rules)
    chunks = _chunks(config, kernels, (x_BLD, targets_BL, counts_BL))
    groups = chunks[0].shape[1]
    # One sum for each group: a sum over the groups would make devices wait in every chunk.
    zeros_G = constrain(jnp.zeros(groups, f32), (TOKENS,), config.rules)
    start = (zeros_G, zeros_G, jnp.zeros((groups, *w.shape), f32))
    (cross_G, z_G, dw_G), dx_CGSTD = jax.lax.scan(chunk, start, chunks)
    cross, z_loss = cross_G.sum(), z_G.sum()
    if kernels.products.scattered_gradients and groups == math.prod(token_shards(config.rules)):
        dw = scattered_sum(dw_G, head_names(config), config.rules).astype(w.dtype)
    else:
        dw = constrain(dw_G.sum(0), head_names(config), config.rules).astype(w.dtype)
    dx_BLD = _unchunk(config, dx_CGSTD, x_BLD.shape)
    return (cross + z_loss, (cross, z_loss)), (dx_BLD, dw)


def _backward(config, kernels, residuals, cotangents):
    dx_BLD, dw = residuals
    d_total, _ = cotangents
    return (dx_BLD * d_total).astype(dx_BLD.dtype), (dw * d_total).astype(dw.dtype), None, None


token_losses.defvjp(_forward, _backward)


def _losses(config, kernels, logits_GSTV, targets_GST, counts_GST):
    """Return cross-entropy and z-loss, summed in each group, and the log normalisers."""
    lse_GST = kernels.logsumexp(logits_GSTV)
    target_GST = kernels.target_logits(config, logits_GSTV, targets_GST)
    cross_G = jnp.sum(jnp.where(counts_GST, lse_GST - target_GST, 0), axis=(1, 2))
    squares_G = jnp.sum(jnp.where(counts_GST, jnp.square(lse_GST), 0), axis=(1, 2))
    return cross_G, config.z_loss_multiplier * squares_G, lse_GST


def _d_logits(config, logits_GSTV, lse_GST, targets_GST, counts_GST):
    """Return the gradient of the summed losses by the logits before the soft cap, float32."""
    softmax_GSTV = jnp.exp(logits_GSTV - lse_GST[..., None])
    z_factor_GST1 = 1 + 2 * config.z_loss_multiplier * lse_GST[..., None]
    d_GSTV = softmax_GSTV * z_factor_GST1 - is_target(targets_GST, logits_GSTV)
    if config.final_logits_soft_cap:
        d_GSTV = d_GSTV * (1 - jnp.square(logits_GSTV / config.final_logits_soft_cap))
    d_GSTV = _where_token(config, d_GSTV, 0)  # -inf times 0 is NaN in the soft-cap's factor
    return jnp.where(counts_GST[..., None], d_GSTV, 0)


def _chunks(config, kernels, arrays):
    """Reshape each [B, L, ...] to [C, G, S, T, ...]; zeros, which do not count, pad each part.

    Only the length is divided, so that every chunk has tokens of every device's sequences.
    """
    B, L = arrays[0].shape[:2]
    shards, parts = token_shards(config.rules)
    G, L = shards if B % shards == 0 else 1, L // parts
    num_chunks = max(MIN_CHUNKS, math.ceil(B // G * L / kernels.head_chunk))
    T = math.ceil(L / min(num_chunks, L))
    C = math.ceil(L / T)

    def chunked(x):
        rest = x.shape[2:]
        x = x.reshape(G, B // G, parts, L, *rest)
        x = jnp.pad(x, [(0, 0)] * 3 + [(0, C * T - L)] + [(0, 0)] * len(rest))
        x = x.reshape(G, B // G, parts, C, T, *rest)
        x = jnp.moveaxis(x, (3, 2), (0, 2)).reshape(C, G * parts, B // G, T, *rest)
        return constrain(x, (None, TOKENS, *[None] * (x.ndim - 2)), config.rules)

    return jax.tree.map(chunked, arrays)


def _unchunk(config, x_CGSTD, shape):
    B, L, D = shape
    _, parts = token_shards(config.rules)
    C, groups, S, T = x_CGSTD.shape[:4]
    x = x_CGSTD.reshape(C, groups // parts, parts, S, T, D)
    x = jnp.moveaxis(x, (0, 2), (3, 2)).reshape(B, parts, C * T, D)[:, :, : L // parts]
    return constrain(x.reshape(B, L, D), ("batch", "length", "embed_act"), config.rules)
