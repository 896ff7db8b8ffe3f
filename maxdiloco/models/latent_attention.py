"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""
# B sequences  L tokens  D model  N heads  R rank  P features not rotated  T features rotated
# V features of a value  H = P + T features of a query or key

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxdiloco.models.attention import Attend
from maxdiloco.models.config import ModelConfig
from maxdiloco.models.kernels.choice import Kernels
from maxdiloco.models.linear import Linear, constant
from maxdiloco.models.norms import RMSNorm
from maxdiloco.models.remat import ATTENTION_OUT, QKV, keep
from maxdiloco.models.rope import Rotation, rotate
from maxdiloco.parallel.sharding import constrain


class LatentAttention(nnx.Module):
    """Attention whose queries, keys and values are projected up from a low rank.

    Keys and values are formed for every head, in training and for the cache. The rotated features
    of a key are shared by all heads.

    Attributes:
      query_down: [D] -> [R]. This and the next two exist if queries have low rank.
      query_norm: over R.
      query_up: [R] -> [N, H].
      query: [D] -> [N, H], or None if queries have low rank.
      kv_down: [D] -> [R + T].
      kv_norm: over R.
      kv_up: [R] -> [N, P + V].
      out: [N, V] -> [D].
      sinks: [N], or None.
    """

    def __init__(self, config: ModelConfig, kernels: Kernels, *, rngs: nnx.Rngs):
        """Create the projections and norms.

        Args:
          config: the model; `config.latent` has the ranks and widths.
          kernels: products.
          rngs: draws from the stream `params`.
        """
        self.config = config
        latent, D, N = config.latent, config.emb_dim, config.num_query_heads
        P, T, V = latent.qk_nope_head_dim, latent.qk_rope_head_dim, latent.v_head_dim
        linear = functools.partial(Linear, config, kernels, rngs=rngs)
        down, up = ("embed", "lora"), ("lora", "heads", "head_dim")
        if R := latent.q_lora_rank:
            self.query_down = linear((D,), (R,), down)
            self.query_norm = RMSNorm(config, (R,))
            self.query_up = linear((R,), (N, P + T), up)
            self.query = None
        else:
            self.query = linear((D,), (N, P + T), ("embed", "heads", "head_dim"))
        R = latent.kv_lora_rank
        self.kv_down = linear((D,), (R + T,), down)
        self.kv_norm = RMSNorm(config, (R,))
        self.kv_up = linear((R,), (N, P + V), up, heads_first=True)
        self.out = linear((N, V), (D,), ("heads", "head_dim", "embed"), gain=config.residual_gain)
        dtype = config.weight_dtype
        self.sinks = constant((N,), ("heads",), dtype=dtype) if config.attention_sink else None

    def __call__(self, x_BLD: jax.Array, rope: Rotation, attend: Attend) -> tuple[jax.Array, Any]:
        """Mix tokens.

        Args:
          x_BLD: the normed residual stream.
          rope: rotation of the tokens' positions, for T features.
          attend: attention of queries and keys [B, L, N, H] and values [B, L, N, V].

        Returns:
          The term for the residual stream [B, L, D], and the cache that `attend` returned.
        """
        latent = self.config.latent
        if self.query is not None:
            q_BLNH = self.query(x_BLD, name=QKV)
        else:
            q_BLNH = self.query_up(self.query_norm(self.query_down(x_BLD, name=QKV)), name=QKV)
        down_BLR = self.kv_down(x_BLD, name=QKV)
        low_BLR, k_BLT = jnp.split(down_BLR, [latent.kv_lora_rank], axis=-1)
        kv_BLNH = self.kv_up(self.kv_norm(low_BLR), name=QKV)

        q_BLNP, q_BLNT = jnp.split(q_BLNH, [latent.qk_nope_head_dim], axis=-1)
        k_BLNP, v_BLNV = jnp.split(kv_BLNH, [latent.qk_nope_head_dim], axis=-1)
        k_BL1T = rotate(k_BLT[..., None, :], rope)
        k_BLNT = jnp.broadcast_to(k_BL1T, (*k_BLNP.shape[:3], latent.qk_rope_head_dim))
        q_BLNH = jnp.concatenate([q_BLNP, rotate(q_BLNT, rope)], axis=-1)
        k_BLNH = jnp.concatenate([k_BLNP, k_BLNT], axis=-1)

        names = ("batch", "length", "heads_act", None)
        qkv = (constrain(x, names, self.config.rules) for x in (q_BLNH, k_BLNH, v_BLNV))
        context_BLNV, cache = attend(*qkv, None if self.sinks is None else self.sinks[...])
        return keep(self.out(context_BLNV), ATTENTION_OUT), cache
