"""Text generation: the prompt in one pass, then one token at a time with a key/value cache."""
# B sequences  L prompt tokens  P the same, padded  T new tokens  C slots of the cache  D model
# V vocabulary  N query heads  K key/value heads  H head dim

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxdiloco.errors import ConfigError
from maxdiloco.models.kernels import blockwise
from maxdiloco.models.kernels.blockwise import Queries
from maxdiloco.models.loss import head_logits, head_names
from maxdiloco.models.model import Model
from maxdiloco.models.params import Params
from maxdiloco.parallel.sharding import gather_weight


def prefill(
    model: Model,
    params: Params,
    tokens_BP: jax.Array,
    length: int | jax.Array,
    *,
    cache_length: int,
) -> tuple[jax.Array, Any]:
    """Run the prompts and fill the caches, one for each stack of layers.

    Args:
      model: the decoder.
      params: its parameters.
      tokens_BP: int32; the first `length` of them count. decode_step overwrites the cache slots of
        the others before it reads them.
      length: tokens of a prompt.
      cache_length: slots, at least P, and `length` plus the tokens to come.

    Returns:
      Float32 logits [B, V] of the next token, and the caches: keys and values [layers, B, C, K, H],
      slot i for position i.
    """
    P = tokens_BP.shape[1]
    segment_ids_BP = jnp.ones_like(tokens_BP)
    padding = [(0, 0), (0, cache_length - P), (0, 0), (0, 0)]

    def attend(kind, _, q, k, v, sinks_N):
        scores = model.kernels.scores(model.config, kind.window)
        context = blockwise.attention(scores, q, k, v, segment_ids_BP, sinks_N)
        return context, (jnp.pad(k, padding), jnp.pad(v, padding))

    decoder = model.decoder(params)
    x_BPD, caches, _ = decoder(tokens_BP, jnp.arange(P)[None], attend)
    return _logits(model, decoder, x_BPD[:, length - 1]), caches


def decode_step(
    model: Model, params: Params, caches: Any, tokens_B: jax.Array, position: jax.Array
) -> tuple[jax.Array, Any]:
    """Run one more token of each sequence.

    Args:
      model: the decoder.
      params: its parameters.
      caches: the caches from `prefill` or from the last step.
      tokens_B: int32, the token at `position`, whose slot is written first.
      position: its position; later slots are masked.

    Returns:
      Float32 logits [B, V] of the next token, and the caches.
    """

    def attend(kind, cache, q, k, v, sinks_N):
        scores = model.kernels.scores(model.config, kind.window)
        keys, values = cache
        filled = keys.at[:, position].set(k[:, 0]), values.at[:, position].set(v[:, 0])
        segment_ids_BC = jnp.ones(keys.shape[:2], jnp.int32)
        queries = Queries(position[None], segment_ids_BC[:, :1])
        return blockwise.attention(scores, q, *filled, segment_ids_BC, sinks_N, queries), filled

    decoder = model.decoder(params)
    x_B1D, caches, _ = decoder(tokens_B[:, None], position[None, None], attend, caches)
    return _logits(model, decoder, x_B1D[:, 0]), caches


def _logits(model, decoder, x_BD):
    config = model.config
    x_BD = decoder.final_norm(x_BD)
    w = decoder.head_weight().astype(x_BD.dtype)
    w = gather_weight(w, head_names(config), config.rules)
    return head_logits(config, model.kernels, x_BD, w)


def sample(
    model: Model,
    params: Params,
    prompt_tokens: jax.Array,
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    key: jax.Array,
) -> jax.Array:
    """Continue prompts.

    The program is compiled for L rounded up to a power of two. The cache has a slot for each of
    these tokens and for each new token.

    Args:
      model: the decoder.
      params: its parameters.
      prompt_tokens: int32 [B, L].
      max_new_tokens: T.
      temperature: 0 takes the likeliest token, 1 samples from the model's distribution.
      top_k: only the k likeliest tokens are sampled. 0: all.
      key: a key of jax.random.

    Returns:
      The new tokens, int32 [B, T].

    Raises:
      ConfigError: an empty prompt, no new tokens, a temperature that is negative or exceeds
        float32, or a negative top_k.
    """
    if prompt_tokens.shape[1] < 1:
        raise ConfigError("prompt is empty: expected at least one token to continue.")
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={max_new_tokens}: expected an integer >= 1.")
    if temperature < 0:
        raise ConfigError(f"temperature={temperature}: expected 0 (greedy) or a number above 0.")
    if temperature > float(np.finfo(np.float32).max):
        raise ConfigError(f"temperature={temperature} overflows float32. Use a value near 1.")
    if top_k < 0:
        raise ConfigError(f"top_k={top_k}: expected an integer >= 0 (0: the whole vocabulary).")
    L = prompt_tokens.shape[1]
    filled_up = jnp.pad(prompt_tokens, [(0, 0), (0, (1 << (L - 1).bit_length()) - L)])
    return _generate(
        model,
        params,
        filled_up.astype(jnp.int32),
        jnp.int32(L),
        key,
        jnp.float32(temperature),
        max_new_tokens=max_new_tokens,
        top_k=min(top_k, model.config.vocab_size),
        greedy=temperature < np.finfo(np.float32).tiny,
    )


@functools.partial(jax.jit, static_argnums=0, static_argnames=("max_new_tokens", "top_k", "greedy"))
def _generate(
    model: Model, params, tokens_BP, length, key, temperature, *, max_new_tokens, top_k, greedy
):
    cache_length = tokens_BP.shape[1] + max_new_tokens
    logits_BV, caches = prefill(model, params, tokens_BP, length, cache_length=cache_length)

    def step(carry, key):
        logits_BV, caches, position = carry
        tokens_B = next_token(logits_BV, key, temperature=temperature, top_k=top_k, greedy=greedy)
        logits_BV, caches = decode_step(model, params, caches, tokens_B, position)
        return (logits_BV, caches, position + 1), tokens_B

    keys_T = jax.random.split(key, max_new_tokens)
    _, tokens_TB = jax.lax.scan(step, (logits_BV, caches, length), keys_T)
    return tokens_TB.T


def next_token(
    logits_BV: jax.Array, key: jax.Array, *, temperature: jax.Array, top_k: int, greedy: bool
) -> jax.Array:
    """Draw one token of each row.

    Args:
      logits_BV: float32.
      key: a key of jax.random.
      temperature: divides the logits.
      top_k: only the k likeliest tokens are drawn. 0: all.
      greedy: take the likeliest token instead.

    Returns:
      int32 [B].
    """
    if greedy:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    if top_k:
        least_B1 = jax.lax.top_k(logits_BV, top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV >= least_B1, logits_BV, -jnp.inf)
    return jax.random.categorical(key, logits_BV / temperature, axis=-1).astype(jnp.int32)
