"""Cross-entropy of next tokens from the last hidden states, without the logits of a whole batch.

Each chunk of tokens makes its logits once, and from them the loss, the gradient of its hidden
states and its part of the head's gradient: three matmuls of the head's size, not four.
"""
# B sequences  L tokens  D model  V vocabulary  C chunks
# G groups of tokens, one per device that batch and length are spread over  S sequences of a group
# T tokens of a sequence in one chunk

import functools
import math

import jax
import jax.numpy as jnp

from maxdiloco.models.devices import token_shards
from maxdiloco.models.product import float32_product, scattered_sum, soft_capped
from maxdiloco.models.spec import ModelSpec
from maxdiloco.parallel.sharding import constrain

f32 = jnp.float32
TOKENS = ("batch", "length")  # what spreads groups of tokens over devices
MIN_CHUNKS = 2  # for small batches too: the whole float32 [B, L, V] never exists


def next_tokens(tokens_BL: jax.Array, segment_ids_BL: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Targets [B, L] and which of them count, bool [B, L].

    Position t predicts token t + 1 when both are of one document; segment 0 is padding. The last
    position never counts.
    """
    targets_BL = jnp.roll(tokens_BL, -1, axis=1)
    same_BL = (segment_ids_BL == jnp.roll(segment_ids_BL, -1, axis=1)) & (segment_ids_BL != 0)
    return targets_BL, same_BL.at[:, -1].set(False)


def head_logits(spec: ModelSpec, x: jax.Array, w: jax.Array) -> jax.Array:
    """Logits [..., V] in float32 of hidden states [..., D].

    w: the head's weight in the type of x, [D, V], or [V, D] when it is the embedding. Logits of
    padding are -inf, which takes no part in a softmax and is never drawn.
    """
    equation = "...d,vd->...v" if spec.tied_head else "...d,dv->...v"
    logits = soft_capped(float32_product(equation, x, w, spec), spec.final_logits_soft_cap)
    return _where_token(spec, logits, -jnp.inf)


def head_names(spec: ModelSpec) -> tuple[str, str]:
    """Logical names of the dims of the head's weight."""
    return ("vocab", "embed") if spec.tied_head else ("embed", "vocab")


def _where_token(spec, x, otherwise):
    """x [..., V], with another value in the columns of padding."""
    rows = x.shape[-1]
    if spec.vocab_size >= rows:
        return x
    return jnp.where(jnp.arange(rows) < spec.vocab_size, x, otherwise)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def token_losses(spec: ModelSpec, x_BLD, w, targets_BL, counts_BL):
    """Sums over the positions that count: (cross-entropy + z-loss, (cross-entropy, z-loss)).

    x: hidden states after the final norm, in the type the matmuls run in. w: the head's weight,
    in the type its gradient is wanted in. The inner pair is for display and has no gradient.
    z-loss: the squared log normaliser (PaLM, arXiv 2204.02311, section 5) times its multiplier.
    """
    return _forward(spec, x_BLD, w, targets_BL, counts_BL)[0]  # XLA drops a gradient nobody takes


def _forward(spec, x_BLD, w, targets_BL, counts_BL):
    """The loss with its gradient as the residual."""
    back = "gstv,vd->gstd" if spec.tied_head else "gstv,dv->gstd"
    across = "gstv,gstd->gvd" if spec.tied_head else "gstd,gstv->gdv"
    # Inside the loop the weight is whole over the batch's mesh axes, split over vocabulary.
    names_w = ("vocab_act", None) if spec.tied_head else (None, "vocab_act")
    einsum = functools.partial(jnp.einsum, precision=spec.precision)
    product_type = f32 if spec.float32_products else None  # see models/product.py

    def chunk(carry, inputs):
        cross_sum, z_sum, dw_G = carry
        x_GSTD, *targets = inputs
        logits_GSTV = head_logits(spec, x_GSTD, w_compute)
        names = (TOKENS, None, None, "vocab_act")
        logits_GSTV = constrain(logits_GSTV, names, spec.rules)
        cross, z_loss, lse_GST = _losses(spec, logits_GSTV, *targets)
        d_GSTV = _d_logits(spec, logits_GSTV, lse_GST, *targets).astype(w_compute.dtype)
        x_GSTD = x_GSTD.astype(w_compute.dtype)
        dx_GSTD = einsum(back, d_GSTV, w_compute, preferred_element_type=product_type)
        pair = (d_GSTV, x_GSTD) if spec.tied_head else (x_GSTD, d_GSTV)
        dw_G = dw_G + einsum(across, *pair, preferred_element_type=f32)
        dw_G = constrain(dw_G, (TOKENS, *names_w), spec.rules)
        return (cross_sum + cross, z_sum + z_loss, dw_G), dx_GSTD.astype(x_BLD.dtype)

    compute_type = f32 if spec.float32_factors else x_BLD.dtype  # see models/product.py
    w_compute = constrain(w.astype(compute_type), names_w, spec.rules)
    chunks = _chunks(spec, (x_BLD, targets_BL, counts_BL))
    groups = chunks[0].shape[1]
    start = (f32(0), f32(0), jnp.zeros((groups, *w.shape), f32))
    (cross, z_loss, dw_G), dx_CGSTD = jax.lax.scan(chunk, start, chunks)
    if spec.scattered_gradients and groups == math.prod(token_shards(spec.rules)):
        dw = scattered_sum(dw_G, head_names(spec), spec.rules).astype(w.dtype)
    else:
        dw = constrain(dw_G.sum(0), head_names(spec), spec.rules).astype(w.dtype)
    dx_BLD = _unchunk(spec, dx_CGSTD, x_BLD.shape)
    return (cross + z_loss, (cross, z_loss)), (dx_BLD, dw)


def _backward(spec, residuals, cotangents):
    dx_BLD, dw = residuals
    d_total, _ = cotangents
    return (dx_BLD * d_total).astype(dx_BLD.dtype), (dw * d_total).astype(dw.dtype), None, None


token_losses.defvjp(_forward, _backward)


def _losses(spec, logits_GSTV, targets_GST, counts_GST):
    """Summed cross-entropy, summed z-loss and the log normaliser of each position."""
    lse_GST = (_in_one_pass if spec.on_gpu else jax.nn.logsumexp)(logits_GSTV, axis=-1)
    target_GST = _target_logits(spec, logits_GSTV, targets_GST)
    cross = jnp.sum(jnp.where(counts_GST, lse_GST - target_GST, 0))
    z_loss = spec.z_loss_multiplier * jnp.sum(jnp.where(counts_GST, jnp.square(lse_GST), 0))
    return cross, z_loss, lse_GST


def _in_one_pass(x, axis):
    """logsumexp, reading x once: maximum and sum go together (arXiv 1805.02867, section 3).

    XLA:GPU reads all logits twice for the other one. No derivative; two of +inf give NaN.
    """
    start = (jnp.finfo(x.dtype).min, x.dtype.type(0))
    top, total = jax.lax.reduce((x, jnp.ones_like(x)), start, _joined, (axis % x.ndim,))
    return top + jnp.log(total)


def _joined(one, other):
    """(maximum, sum of exponentials to it) of two parts; of -inf alone the least finite number."""
    (top, total), (top_other, total_other) = one, other
    least = jnp.finfo(top.dtype).min
    top, top_other = jnp.maximum(top, least), jnp.maximum(top_other, least)
    smaller = jnp.exp(-jnp.abs(top - top_other))
    is_top = top >= top_other
    factor, factor_other = jnp.where(is_top, 1, smaller), jnp.where(is_top, smaller, 1)
    return jnp.maximum(top, top_other), total * factor + total_other * factor_other


def _target_logits(spec, logits_GSTV, targets_GST):
    """The logit of each target, 0 for one outside the vocabulary.

    One CPU device reads it: XLA:CPU writes and reads all logits for the other way, which splits
    over a mesh and fuses on accelerators. Both give the same bits.
    """
    if spec.float32_products and jax.sharding.get_abstract_mesh().size <= 1:
        one_GST1 = targets_GST[..., None]
        found = jnp.take_along_axis(logits_GSTV, one_GST1, axis=-1, mode="fill", fill_value=0)
        return found[..., 0]
    return jnp.sum(jnp.where(_is_target(targets_GST, logits_GSTV), logits_GSTV, 0), axis=-1)


def _d_logits(spec, logits_GSTV, lse_GST, targets_GST, counts_GST):
    """Gradient of the summed losses by the logits before the soft-cap, float32."""
    softmax_GSTV = jnp.exp(logits_GSTV - lse_GST[..., None])
    z_factor_GST1 = 1 + 2 * spec.z_loss_multiplier * lse_GST[..., None]
    d_GSTV = softmax_GSTV * z_factor_GST1 - _is_target(targets_GST, logits_GSTV)
    if spec.final_logits_soft_cap:
        d_GSTV = d_GSTV * (1 - jnp.square(logits_GSTV / spec.final_logits_soft_cap))
    d_GSTV = _where_token(spec, d_GSTV, 0)  # -inf times 0 is NaN in the soft-cap's factor
    return jnp.where(counts_GST[..., None], d_GSTV, 0)


def _is_target(targets_GST, logits_GSTV):
    return targets_GST[..., None] == jnp.arange(logits_GSTV.shape[-1], dtype=targets_GST.dtype)


def _chunks(spec, arrays):
    """Each [B, L, ...] as [C, G, S, T, ...], zeros (not counted) after the last token of a part.

    Only the length is divided, so that every chunk has tokens of every device's sequences.
    """
    B, L = arrays[0].shape[:2]
    shards, parts = token_shards(spec.rules)
    G, L = shards if B % shards == 0 else 1, L // parts
    num_chunks = max(MIN_CHUNKS, math.ceil(B // G * L / spec.head_chunk))
    T = math.ceil(L / min(num_chunks, L))
    C = math.ceil(L / T)

    def chunked(x):
        rest = x.shape[2:]
        x = x.reshape(G, B // G, parts, L, *rest)
        x = jnp.pad(x, [(0, 0)] * 3 + [(0, C * T - L)] + [(0, 0)] * len(rest))
        x = x.reshape(G, B // G, parts, C, T, *rest)
        x = jnp.moveaxis(x, (3, 2), (0, 2)).reshape(C, G * parts, B // G, T, *rest)
        return constrain(x, (None, TOKENS, *[None] * (x.ndim - 2)), spec.rules)

    return jax.tree.map(chunked, arrays)


def _unchunk(spec, x_CGSTD, shape):
    B, L, D = shape
    _, parts = token_shards(spec.rules)
    C, groups, S, T = x_CGSTD.shape[:4]
    x = x_CGSTD.reshape(C, groups // parts, parts, S, T, D)
    x = jnp.moveaxis(x, (0, 2), (3, 2)).reshape(B, parts, C * T, D)[:, :, : L // parts]
    return constrain(x.reshape(B, L, D), ("batch", "length", "embed_act"), spec.rules)
