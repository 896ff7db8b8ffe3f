"""Multi-head latent attention: queries, keys and values of all heads from vectors of low rank.

DeepSeek-V2, arXiv 2405.04434, section 2.1. Keys and values are formed for every head, in training
and for the cache; the smaller cache of the latent vectors themselves is not made.
"""
# B sequences  L tokens  D model  N heads  R rank  P features not rotated  T features rotated

import jax.numpy as jnp

from maxdiloco.models.layers import Attention, RMSNorm
from maxdiloco.models.product import product
from maxdiloco.models.remat import QKV, keep
from maxdiloco.models.rope import rotate
from maxdiloco.models.weights import names_of, residual_gain, weight
from maxdiloco.parallel.sharding import constrain


class LatentAttention(Attention):
    """Attention whose query and key of a head are its own P features and T rotated ones.

    The rotated features of a key are shared by all heads. Called like Attention.
    """

    def _make_projections(self, rngs):
        spec = self.spec
        D, N, latent = spec.emb_dim, spec.num_query_heads, spec.latent

        def matrix(shape, names, fan_in, gain=1.0):
            return weight(rngs.params(), shape, names, fan_in=fan_in, spec=spec, gain=gain)

        up = ("lora", "heads", "head_dim")
        if latent.q_lora_rank:
            self.query_down = matrix((D, latent.q_lora_rank), ("embed", "lora"), D)
            self.query_norm = RMSNorm((latent.q_lora_rank,), spec)
            self.query_up = matrix((latent.q_lora_rank, N, spec.head_dim), up, latent.q_lora_rank)
        else:
            self.query = matrix((D, N, spec.head_dim), ("embed", *up[1:]), D)
        self.kv_down = matrix(
            (D, latent.kv_lora_rank + latent.qk_rope_head_dim), ("embed", "lora"), D
        )
        self.kv_norm = RMSNorm((latent.kv_lora_rank,), spec)
        kv_dim = latent.qk_nope_head_dim + latent.v_head_dim
        self.kv_up = matrix((latent.kv_lora_rank, N, kv_dim), up, latent.kv_lora_rank)
        self.out = matrix(
            (N, latent.v_head_dim, D),
            ("heads", "head_dim", "embed"),
            N * latent.v_head_dim,
            residual_gain(spec.num_layers),
        )

    def _project(self, x_BLD, rope):
        """Queries and keys [B, L, N, P + T], values [B, L, N, V]."""
        spec, latent = self.spec, self.spec.latent
        P = latent.qk_nope_head_dim
        if latent.q_lora_rank:
            low_BLR = self._kept("bld,dr->blr", x_BLD, self.query_down)
            low_BLR = self.query_norm(low_BLR)
            q_BLNH = self._kept("blr,rnh->blnh", low_BLR, self.query_up)
        else:
            q_BLNH = self._kept("bld,dnh->blnh", x_BLD, self.query)
        down_BLR = self._kept("bld,dr->blr", x_BLD, self.kv_down)
        low_BLR, k_BLT = jnp.split(down_BLR, [latent.kv_lora_rank], axis=-1)
        low_BLR = self.kv_norm(low_BLR)
        kv_BLNH = self._kept("blr,rnh->blnh", low_BLR, self.kv_up)
        q_BLNP, q_BLNT = jnp.split(q_BLNH, [P], axis=-1)
        k_BLNP, v_BLNV = jnp.split(kv_BLNH, [P], axis=-1)
        k_BL1T = rotate(k_BLT[..., None, :], rope)
        k_BLNT = jnp.broadcast_to(k_BL1T, (*k_BLNP.shape[:3], latent.qk_rope_head_dim))
        q_BLNH = jnp.concatenate([q_BLNP, rotate(q_BLNT, rope)], axis=-1)
        k_BLNH = jnp.concatenate([k_BLNP, k_BLNT], axis=-1)
        names = ("batch", "length", "heads_act", None)
        return tuple(constrain(x, names, spec.rules) for x in (q_BLNH, k_BLNH, v_BLNV))

    def _kept(self, equation, x, w):
        return keep(product(equation, x, w[...], self.spec, names_of(w)), QKV)
