"""Grouped-query attention."""
# B sequences  L tokens  D model  N query heads  K key/value heads  H head dim

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from maxdiloco.models.config import ModelConfig
from maxdiloco.models.kernels.choice import Kernels
from maxdiloco.models.linear import Linear, constant
from maxdiloco.models.norms import RMSNorm
from maxdiloco.models.remat import ATTENTION_OUT, QKV, keep
from maxdiloco.models.rope import Rotation
from maxdiloco.parallel.sharding import constrain

# (queries [B, L, N, H], keys and values [B, L, K, H], sinks [N] or None) ->
# (context [B, L, N, H], cache). The cache belongs to the caller; it is None in training.
Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None], tuple[jax.Array, Any]]


class Attention(nnx.Module):
    """Grouped-query attention (arXiv 2305.13245) with rotary embedding.

    The config decides whether it has biases, norms of queries and keys, and sinks. A sink is a
    logit of each head without a value, as in gpt-oss (arXiv 2508.10925).

    Attributes:
      query: [D] -> [N, H].
      key: [D] -> [K, H].
      value: [D] -> [K, H].
      out: [N, H] -> [D].
      query_norm: over one head, or over all heads together (OLMo 2, arXiv 2501.00656), or None.
      key_norm: the same for keys.
      sinks: [N], or None.
    """

    def __init__(self, config: ModelConfig, kernels: Kernels, *, rngs: nnx.Rngs):
        """Create the projections, and the norms and sinks of the config.

        Args:
          config: the model.
          kernels: products and the rotary embedding.
          rngs: draws from the stream `params`.
        """
        self.config, self.kernels = config, kernels
        D, N, K = config.emb_dim, config.num_query_heads, config.num_kv_heads
        H = config.head_dim
        linear = functools.partial(Linear, config, kernels, rngs=rngs)
        has_bias, out_has_bias = config.attention_bias != "none", config.attention_bias == "all"
        self.query = linear((D,), (N, H), ("embed", "heads", "head_dim"), use_bias=has_bias)
        self.key = linear((D,), (K, H), ("embed", "kv_heads", "head_dim"), use_bias=has_bias)
        self.value = linear((D,), (K, H), ("embed", "kv_heads", "head_dim"), use_bias=has_bias)
        self.out = linear(
            (N, H),
            (D,),
            ("heads", "head_dim", "embed"),
            gain=config.residual_gain,
            use_bias=out_has_bias,
        )
        query_norm = key_norm = None
        if config.qk_norm == "head":
            query_norm, key_norm = RMSNorm(config, (H,)), RMSNorm(config, (H,))
        elif config.qk_norm == "projection":
            query_norm = RMSNorm(config, (N, H), ("heads", "norm"))
            key_norm = RMSNorm(config, (K, H), ("kv_heads", "norm"))
        self.query_norm, self.key_norm = query_norm, key_norm
        dtype = config.weight_dtype
        self.sinks = constant((N,), ("heads",), dtype=dtype) if config.attention_sink else None

    def __call__(self, x_BLD: jax.Array, rope: Rotation, attend: Attend) -> tuple[jax.Array, Any]:
        """Mix tokens.

        Args:
          x_BLD: the normed residual stream.
          rope: rotation of the tokens' positions.
          attend: attention of projected queries, keys and values.

        Returns:
          The term for the residual stream [B, L, D], and the cache that `attend` returned.
        """
        q_BLNH = self.query(x_BLD, name=QKV)
        k_BLKH = self.key(x_BLD, name=QKV)
        v_BLKH = self.value(x_BLD, name=QKV)
        if self.query_norm is not None:
            q_BLNH, k_BLKH = self.query_norm(q_BLNH), self.key_norm(k_BLKH)
        q_BLNH, k_BLKH = self.kernels.rotate(q_BLNH, rope), self.kernels.rotate(k_BLKH, rope)
        q_BLNH, k_BLKH, v_BLKH = (
            constrain(x, ("batch", "length", heads, None), self.config.rules)
            for x, heads in ((q_BLNH, "heads_act"), (k_BLKH, "kv_act"), (v_BLKH, "kv_act"))
        )
        sinks_N = None if self.sinks is None else self.sinks[...]
        context_BLNH, cache = attend(q_BLNH, k_BLKH, v_BLKH, sinks_N)
        return keep(self.out(context_BLNH), ATTENTION_OUT), cache
