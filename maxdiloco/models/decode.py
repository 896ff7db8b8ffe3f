"""Generation with a key/value cache: the prompt in one pass, then one token at a time."""
# B sequences  L prompt tokens  C slots of the cache  D model  N query heads  K key/value heads
# G = N / K  H head dim  V vocabulary

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxdiloco.models.dot_product import Softmax, causal_mask, dot_product
from maxdiloco.models.loss import head_logits
from maxdiloco.models.rope import rotation
from maxdiloco.models.spec import ModelSpec
from maxdiloco.models.transformer import Params, compute_weights, ends_of, head_of, layer_of

f32 = jnp.float32


class Cache(NamedTuple):
    """Keys and values of every layer, [layers, B, C, K, H]; slot i is position i."""

    keys: jax.Array
    values: jax.Array


def prefill(
    spec: ModelSpec,
    params: Params,
    tokens_BL: jax.Array,
    lengths_B: jax.Array,
    *,
    cache_length: int,
) -> tuple[jax.Array, Cache]:
    """Run the prompts and fill the cache.

    tokens: int32, prompts padded on the right to L. lengths: valid tokens of each prompt, >= 1.
    cache_length: slots, at least L plus the tokens to come.
    Returns float32 logits [B, V] after each prompt's last token, and the cache.
    """
    B, L = tokens_BL.shape
    how = Softmax(spec.attn_logits_soft_cap, spec.sliding_window_size, spec.precision)
    turn = rotation(jnp.arange(L)[None], spec.head_dim, spec.rope_max_timescale)
    one_document_BL = jnp.ones((B, L), jnp.int32)  # padding is later than every valid token
    room = [(0, 0), (0, cache_length - L), (0, 0), (0, 0)]

    def body(x_BLD, layer_params):
        layer = layer_of(spec, layer_params)
        q, k, v = layer.project(x_BLD, turn)
        x_BLD = layer.finish(x_BLD, dot_product(how, q, k, v, one_document_BL))
        return x_BLD, Cache(jnp.pad(k, room), jnp.pad(v, room))

    ends = ends_of(spec, params)
    layers = compute_weights(spec, params["layers"])
    x_BLD, cache = jax.lax.scan(body, ends.embed(tokens_BL), layers)
    x_BD = x_BLD[jnp.arange(B), lengths_B - 1]
    return _logits(spec, params, ends.final_norm(x_BD)), cache


def decode_step(
    spec: ModelSpec, params: Params, cache: Cache, tokens_B: jax.Array, positions_B: jax.Array
) -> tuple[jax.Array, Cache]:
    """One more token of each sequence.

    tokens: int32, the token at `positions`, whose slot is written first; slots after it are not
    looked at. Returns float32 logits [B, V] of the next token, and the cache.
    """
    turn = rotation(positions_B[:, None], spec.head_dim, spec.rope_max_timescale)
    rows_B = jnp.arange(tokens_B.shape[0])

    def body(x_B1D, layer_and_cache):
        layer_params, own = layer_and_cache
        layer = layer_of(spec, layer_params)
        q, k, v = layer.project(x_B1D, turn)
        own = Cache(
            own.keys.at[rows_B, positions_B].set(k[:, 0]),
            own.values.at[rows_B, positions_B].set(v[:, 0]),
        )
        return layer.finish(x_B1D, _attend_cache(spec, q, own, positions_B)), own

    ends = ends_of(spec, params)
    layers = compute_weights(spec, params["layers"])
    x_B1D, cache = jax.lax.scan(body, ends.embed(tokens_B[:, None]), (layers, cache))
    return _logits(spec, params, ends.final_norm(x_B1D[:, 0])), cache


def _attend_cache(spec, q_B1NH, cache, positions_B):
    B, _, N, H = q_B1NH.shape
    C, K = cache.keys.shape[1:3]
    q_BKGH = q_B1NH.reshape(B, K, N // K, H)
    logits_BKGC = jnp.einsum(
        "bkgh,bckh->bkgc", q_BKGH, cache.keys, precision=spec.precision, preferred_element_type=f32
    ) / math.sqrt(H)
    if spec.attn_logits_soft_cap:
        cap = spec.attn_logits_soft_cap
        logits_BKGC = cap * jnp.tanh(logits_BKGC / cap)
    seen_BC = causal_mask(positions_B[:, None], jnp.arange(C)[None], spec.sliding_window_size)[:, 0]
    logits_BKGC = jnp.where(seen_BC[:, None, None], logits_BKGC, -jnp.inf)
    weights_BKGC = jax.nn.softmax(logits_BKGC, axis=-1).astype(q_B1NH.dtype)
    context = jnp.einsum("bkgc,bckh->bkgh", weights_BKGC, cache.values, precision=spec.precision)
    return context.reshape(B, 1, N, H)


def _logits(spec, params, x_BD):
    w, head = head_of(spec, params)
    return head_logits(x_BD, w.astype(x_BD.dtype), head)
