"""Cross-entropy of next tokens from the last hidden states, without the logits of a whole batch.

The gradient is formed beside the loss: each chunk of tokens makes its logits once, and from them
the loss, the gradient of its hidden states and its part of the head's gradient. So a training
step runs three matmuls of the head's size where recomputed logits would take four.
"""
# B sequences  L tokens  D model  V vocabulary  C chunks
# G groups of tokens, one per device that batch and length are spread over  S sequences of a group
# T tokens of a sequence in one chunk

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from maxdiloco.models.each_device import automatic_spec
from maxdiloco.models.float32 import float32_product
from maxdiloco.models.over_length import length_shards
from maxdiloco.models.product import scattered_sum
from maxdiloco.parallel.sharding import Rules, axes_of, constrain

f32 = jnp.float32
# Logits of so many tokens exist on a device at once; ours, see benchmarks/log. Products of
# bfloat16 are so fast on a CPU that what a chunk writes has to stay in the cache.
CHUNK_TOKENS, CPU_BF16_CHUNK_TOKENS = 1024, 256
TOKENS = ("batch", "length")  # what spreads groups of tokens over devices
MIN_CHUNKS = 2  # for small batches too: the whole float32 [B, L, V] never exists


@dataclass(frozen=True)
class Head:
    """The head and the loss without the head's weight.

    tied: the head's weight is the embedding, [V, D], instead of [D, V].
    soft_cap: logits are soft_cap * tanh(raw / soft_cap); 0 is off.
    z_loss: multiplier of the squared log normaliser (PaLM, arXiv 2204.02311, section 5).
    vocab_size: tokens; the weight's rows from it on are padding, whose logits are -inf. -1: none.
    """

    tied: bool
    soft_cap: float
    z_loss: float
    precision: str
    rules: Rules
    vocab_size: int = -1
    float32_products: bool = False
    float32_factors: bool = False
    scattered_gradients: bool = False


def next_tokens(tokens_BL: jax.Array, segment_ids_BL: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Targets [B, L] and which of them count, bool [B, L].

    Position t predicts token t + 1 when both are of one document; segment 0 is padding. The last
    position never counts.
    """
    targets_BL = jnp.roll(tokens_BL, -1, axis=1)
    same_BL = (segment_ids_BL == jnp.roll(segment_ids_BL, -1, axis=1)) & (segment_ids_BL != 0)
    return targets_BL, same_BL.at[:, -1].set(False)


def head_logits(x: jax.Array, w: jax.Array, head: Head) -> jax.Array:
    """Logits [..., V] in float32 of hidden states [..., D]; w in the type of x.

    Those of padding are -inf, which takes no part in a softmax and is never drawn.
    """
    equation = "...d,vd->...v" if head.tied else "...d,dv->...v"
    logits = float32_product(equation, x, w, head.precision, head.float32_factors)
    if head.soft_cap:
        logits = head.soft_cap * jnp.tanh(logits / head.soft_cap)
    return _where_token(logits, -jnp.inf, head)


def _where_token(x, otherwise, head):
    """x [..., V], with another value in the columns of padding."""
    rows = x.shape[-1]
    if head.vocab_size in (-1, rows):
        return x
    return jnp.where(jnp.arange(rows) < head.vocab_size, x, otherwise)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def token_losses(
    head: Head, x_BLD: jax.Array, w: jax.Array, targets_BL: jax.Array, counts_BL: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Sums over the positions that count: (cross-entropy + z-loss, (cross-entropy, z-loss)).

    x: hidden states after the final norm, in the type the matmuls run in. w: the head's weight,
    in the type its gradient is wanted in. The inner pair is for display and has no gradient.
    """
    w_compute = _gather(w.astype(_factor_type(x_BLD, head)), head)

    def chunk(sums, inputs):
        x_GSTD, targets_GST, counts_GST = inputs
        logits_GSTV = _chunk_logits(x_GSTD, w_compute, head)
        cross, z_loss, _ = _losses(logits_GSTV, targets_GST, counts_GST, head)
        return (sums[0] + cross, sums[1] + z_loss), None

    chunks = _chunks((x_BLD, targets_BL, counts_BL), head)
    (cross, z_loss), _ = jax.lax.scan(chunk, (f32(0), f32(0)), chunks)
    return cross + z_loss, (cross, z_loss)


def _forward(head, x_BLD, w, targets_BL, counts_BL):
    """The loss with its gradient as the residual."""
    w_compute = _gather(w.astype(_factor_type(x_BLD, head)), head)
    chunks = _chunks((x_BLD, targets_BL, counts_BL), head)

    def chunk(carry, inputs):
        cross_sum, z_sum, dw_G = carry
        x_GSTD, targets_GST, counts_GST = inputs
        logits_GSTV = _chunk_logits(x_GSTD, w_compute, head)
        cross, z_loss, lse_GST = _losses(logits_GSTV, targets_GST, counts_GST, head)
        d_GSTV = _d_logits(logits_GSTV, targets_GST, counts_GST, lse_GST, head)
        d_GSTV = d_GSTV.astype(w_compute.dtype)
        x_GSTD = x_GSTD.astype(w_compute.dtype)
        back = "gstv,vd->gstd" if head.tied else "gstv,dv->gstd"
        across = "gstv,gstd->gvd" if head.tied else "gstd,gstv->gdv"
        pair = (d_GSTV, x_GSTD) if head.tied else (x_GSTD, d_GSTV)
        product_type = f32 if head.float32_products else None  # see models/product.py
        dx_GSTD = jnp.einsum(
            back, d_GSTV, w_compute, precision=head.precision, preferred_element_type=product_type
        ).astype(x_BLD.dtype)
        dw_G = dw_G + jnp.einsum(
            across, *pair, precision=head.precision, preferred_element_type=f32
        )
        dw_G = constrain(dw_G, (TOKENS, *_weight_names(head)), head.rules)
        return (cross_sum + cross, z_sum + z_loss, dw_G), dx_GSTD

    groups = chunks[0].shape[1]
    start = (f32(0), f32(0), jnp.zeros((groups, *w.shape), f32))
    (cross, z_loss, dw_G), dx_CGSTD = jax.lax.scan(chunk, start, chunks)
    names = ("vocab", "embed") if head.tied else ("embed", "vocab")
    devices = batch_shards(head.rules) * length_shards(head.rules)
    if head.scattered_gradients and groups == devices:
        dw = scattered_sum(dw_G, names, head.rules).astype(w.dtype)
    else:
        dw = constrain(dw_G.sum(0), names, head.rules).astype(w.dtype)
    dx_BLD = _unchunk(dx_CGSTD, x_BLD.shape, head.rules)
    return (cross + z_loss, (cross, z_loss)), (dx_BLD, dw)


def _backward(head, residuals, cotangents):
    dx_BLD, dw = residuals
    d_total, _ = cotangents
    return (dx_BLD * d_total).astype(dx_BLD.dtype), (dw * d_total).astype(dw.dtype), None, None


token_losses.defvjp(_forward, _backward)


def _factor_type(x, head):
    return f32 if head.float32_factors else x.dtype  # see models/product.py


def _chunk_logits(x_GSTD, w, head):
    logits_GSTV = head_logits(x_GSTD, w, head)
    return constrain(logits_GSTV, (TOKENS, None, None, "vocab_act"), head.rules)


def _losses(logits_GSTV, targets_GST, counts_GST, head):
    """Summed cross-entropy, summed z-loss and the log normaliser of each position."""
    lse_GST = jax.nn.logsumexp(logits_GSTV, axis=-1)
    target_GST = _target_logits(logits_GSTV, targets_GST, head)
    cross = jnp.sum(jnp.where(counts_GST, lse_GST - target_GST, 0))
    z_loss = head.z_loss * jnp.sum(jnp.where(counts_GST, jnp.square(lse_GST), 0))
    return cross, z_loss, lse_GST


def _target_logits(logits_GSTV, targets_GST, head):
    """The logit of each target, 0 for one outside the vocabulary.

    One CPU device reads it: XLA:CPU writes and reads all logits for the other way, which splits
    over a mesh and fuses on accelerators. Both give the same bits.
    """
    if head.float32_products and jax.sharding.get_abstract_mesh().size <= 1:
        one_GST1 = targets_GST[..., None]
        found = jnp.take_along_axis(logits_GSTV, one_GST1, axis=-1, mode="fill", fill_value=0)
        return found[..., 0]
    hit_GSTV = _is_target(targets_GST, logits_GSTV.shape[-1])
    return jnp.sum(jnp.where(hit_GSTV, logits_GSTV, 0), axis=-1)


def _d_logits(logits_GSTV, targets_GST, counts_GST, lse_GST, head):
    """Gradient of the summed losses by the logits before the soft-cap, float32."""
    softmax_GSTV = jnp.exp(logits_GSTV - lse_GST[..., None])
    z_factor_GST1 = 1 + 2 * head.z_loss * lse_GST[..., None]
    hit_GSTV = _is_target(targets_GST, logits_GSTV.shape[-1])
    d_GSTV = softmax_GSTV * z_factor_GST1 - hit_GSTV
    if head.soft_cap:
        d_GSTV = d_GSTV * (1 - jnp.square(logits_GSTV / head.soft_cap))
    d_GSTV = _where_token(d_GSTV, 0, head)  # -inf times 0 is NaN in the soft-cap's factor
    return jnp.where(counts_GST[..., None], d_GSTV, 0)


def _is_target(targets, vocab_size):
    return targets[..., None] == jnp.arange(vocab_size, dtype=targets.dtype)


def _weight_names(head):
    """Inside the loop the weight is whole over the batch's mesh axes, split over vocabulary."""
    return ("vocab_act", None) if head.tied else (None, "vocab_act")


def _gather(w, head):
    return constrain(w, _weight_names(head), head.rules)


def batch_shards(rules: Rules) -> int:
    """Number of devices that the batch dim is sharded over, on the mesh of the context."""
    axes = axes_of(automatic_spec(("batch",), rules)[0])
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in axes)


def _chunks(arrays, head):
    """Each [B, L, ...] as [C, G, S, T, ...], zeros (not counted) after the last token of a part.

    Only the length is divided, so that every chunk has tokens of every device's sequences.
    """
    B, L = arrays[0].shape[:2]
    rules, chunk_tokens = head.rules, CHUNK_TOKENS
    if head.float32_products and not head.float32_factors:
        chunk_tokens = CPU_BF16_CHUNK_TOKENS
    parts = length_shards(rules)
    shards = batch_shards(rules)
    G, L = shards if B % shards == 0 else 1, L // parts
    num_chunks = max(MIN_CHUNKS, math.ceil(B // G * L / chunk_tokens))
    T = math.ceil(L / min(num_chunks, L))
    C = math.ceil(L / T)

    def chunked(x):
        rest = x.shape[2:]
        x = x.reshape(G, B // G, parts, L, *rest)
        x = jnp.pad(x, [(0, 0)] * 3 + [(0, C * T - L)] + [(0, 0)] * len(rest))
        x = x.reshape(G, B // G, parts, C, T, *rest)
        x = jnp.moveaxis(x, (3, 2), (0, 2)).reshape(C, G * parts, B // G, T, *rest)
        return constrain(x, (None, TOKENS, *[None] * (x.ndim - 2)), rules)

    return jax.tree.map(chunked, arrays)


def _unchunk(x_CGSTD, shape, rules):
    B, L, D = shape
    parts = length_shards(rules)
    C, groups, S, T = x_CGSTD.shape[:4]
    x = x_CGSTD.reshape(C, groups // parts, parts, S, T, D)
    x = jnp.moveaxis(x, (0, 2), (3, 2)).reshape(B, parts, C * T, D)[:, :, : L // parts]
    return constrain(x.reshape(B, L, D), ("batch", "length", "embed_act"), rules)
