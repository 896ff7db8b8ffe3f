"""The parts of a decoder layer as flax nnx modules.

Each parameter carries its logical axis names as nnx metadata, `names`. Modules hold one layer;
the transformer stacks them.
"""
# B sequences  L tokens  D model  N query heads  K key/value heads  H head dim  F hidden
# V vocabulary

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from maxdiloco.models.embedding import look_up
from maxdiloco.models.product import product
from maxdiloco.models.remat import ATTENTION_OUT, MLP_IN, NORM_FACTOR, QKV, keep
from maxdiloco.models.rope import rotate
from maxdiloco.models.spec import ModelSpec
from maxdiloco.models.weights import names_of, residual_gain
from maxdiloco.models.weights import weight as _weight
from maxdiloco.parallel.sharding import constrain

ACTIVATIONS: dict[str, Callable] = {
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "relu": jax.nn.relu,
    "linear": lambda x: x,
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),  # arXiv 1606.08415, section 2
    "plus_one": lambda x: x + 1,
}

f32 = jnp.float32


def _bias(shape, names, spec):
    return nnx.Param(jnp.zeros(shape, spec.weight_dtype), names=names)


class RMSNorm(nnx.Module):
    """Root mean square norm over the last dims, those of the scale (arXiv 1910.07467)."""

    def __init__(self, shape, spec, names=("norm",)):
        self.epsilon, self.offset = spec.norm_epsilon, spec.norm_scale_offset
        scale = jnp.full(shape, 1 - self.offset, spec.weight_dtype)
        self.scale = nnx.Param(scale, names=names)

    def __call__(self, x):
        """x with root mean square 1 times the scale; computed in float32, in the type of x."""
        x_f32 = x.astype(f32)  # squares of bf16 values lose half their digits
        scale = self.scale[...].astype(f32)
        dims = tuple(range(-scale.ndim, 0))
        mean_square = jnp.mean(jnp.square(x_f32), axis=dims, keepdims=True)
        normed = x_f32 * keep(jax.lax.rsqrt(mean_square + self.epsilon), NORM_FACTOR)
        return (normed * (scale + self.offset if self.offset else scale)).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with rotary embedding; qk-norm, biases and sinks as spec says."""

    def __init__(self, spec, rngs):
        D, N, H = spec.emb_dim, spec.num_query_heads, spec.head_dim
        K = spec.num_kv_heads
        self.spec = spec
        self._make_projections(rngs)
        if spec.qk_norm == "head":
            self.query_norm = RMSNorm((H,), spec)
            self.key_norm = RMSNorm((H,), spec)
        elif spec.qk_norm == "projection":
            self.query_norm = RMSNorm((N, H), spec, ("heads", "norm"))
            self.key_norm = RMSNorm((K, H), spec, ("kv_heads", "norm"))
        if spec.attention_bias != "none":
            self.query_bias = _bias((N, H), ("heads", "bias"), spec)
            self.key_bias = _bias((K, H), ("kv_heads", "bias"), spec)
            self.value_bias = _bias((K, H), ("kv_heads", "bias"), spec)
        if spec.attention_bias == "all":
            self.out_bias = _bias((D,), ("bias",), spec)
        if spec.attention_sink:
            self.sinks = _bias((N,), ("heads",), spec)

    def _make_projections(self, rngs):
        spec = self.spec
        D, N, H = spec.emb_dim, spec.num_query_heads, spec.head_dim
        K = spec.num_kv_heads
        self.query = _weight(
            rngs.params(), (D, N, H), ("embed", "heads", "head_dim"), fan_in=D, spec=spec
        )
        self.key = _weight(
            rngs.params(), (D, K, H), ("embed", "kv_heads", "head_dim"), fan_in=D, spec=spec
        )
        self.value = _weight(
            rngs.params(), (D, K, H), ("embed", "kv_heads", "head_dim"), fan_in=D, spec=spec
        )
        self.out = _weight(
            rngs.params(),
            (N, H, D),
            ("heads", "head_dim", "embed"),
            fan_in=N * H,
            spec=spec,
            gain=residual_gain(spec.num_layers),
        )

    def __call__(self, x_BLD, rope, attend):
        """[B, L, D] -> ([B, L, D], cache); see DecoderLayer for rope and attend."""
        q_BLNH, k_BLKH, v_BLKH = self._project(x_BLD, rope)
        sinks_N = self.sinks[...] if self.spec.attention_sink else None
        context_BLNH, cache = attend(q_BLNH, k_BLKH, v_BLKH, sinks_N)
        out_BLD = product(
            "blnh,nhd->bld", context_BLNH, self.out[...], self.spec, names_of(self.out)
        )
        if self.spec.attention_bias == "all":
            out_BLD = out_BLD + self.out_bias[...].astype(out_BLD.dtype)
        return keep(out_BLD, ATTENTION_OUT), cache

    def _project(self, x_BLD, rope):
        """Queries [B, L, N, H], keys and values [B, L, K, H], normed and rotated."""
        spec = self.spec
        q_BLNH, k_BLKH, v_BLKH = (
            keep(product("bld,dnh->blnh", x_BLD, w[...], spec, names_of(w)), QKV)
            for w in (self.query, self.key, self.value)
        )
        if spec.attention_bias != "none":
            q_BLNH, k_BLKH, v_BLKH = (
                x + bias[...].astype(x.dtype)
                for x, bias in (
                    (q_BLNH, self.query_bias),
                    (k_BLKH, self.key_bias),
                    (v_BLKH, self.value_bias),
                )
            )
        if spec.qk_norm:
            q_BLNH, k_BLKH = self.query_norm(q_BLNH), self.key_norm(k_BLKH)
        by_product = spec.attention == "splash" and x_BLD.dtype == jnp.bfloat16
        q_BLNH, k_BLKH = (rotate(x, rope, by_product=by_product) for x in (q_BLNH, k_BLKH))
        q_BLNH = constrain(q_BLNH, ("batch", "length", "heads_act", None), spec.rules)
        kv_names = ("batch", "length", "kv_act", None)
        return (
            q_BLNH,
            constrain(k_BLKH, kv_names, spec.rules),
            constrain(v_BLKH, kv_names, spec.rules),
        )


class MLP(nnx.Module):
    """f(x w_up) w_out, or gated: f(x w_gate) * g(x w_up) w_out (arXiv 2002.05202)."""

    def __init__(self, spec, rngs):
        D, F = spec.emb_dim, spec.mlp_dim
        self.spec = spec
        if len(spec.mlp_activations) == 2:
            self.w_gate = _weight(rngs.params(), (D, F), ("embed", "mlp"), fan_in=D, spec=spec)
        self.w_up = _weight(rngs.params(), (D, F), ("embed", "mlp"), fan_in=D, spec=spec)
        self.w_out = _weight(
            rngs.params(),
            (F, D),
            ("mlp", "embed"),
            fan_in=F,
            spec=spec,
            gain=residual_gain(spec.num_layers),
        )
        if spec.mlp_bias:
            if len(spec.mlp_activations) == 2:
                self.w_gate_bias = _bias((F,), ("mlp",), spec)
            self.w_up_bias = _bias((F,), ("mlp",), spec)
            self.w_out_bias = _bias((D,), ("bias",), spec)

    def __call__(self, x_BLD):
        """[B, L, D] -> [B, L, D]."""
        spec = self.spec
        gated = len(spec.mlp_activations) == 2
        up_BLF = self._project(x_BLD, self.w_up, "w_up_bias")
        gate_BLF = self._project(x_BLD, self.w_gate, "w_gate_bias") if gated else None
        hidden_BLF = activated(spec, up_BLF, gate_BLF)
        out_BLD = product("blf,fd->bld", hidden_BLF, self.w_out[...], spec, names_of(self.w_out))
        return out_BLD + self.w_out_bias[...].astype(out_BLD.dtype) if spec.mlp_bias else out_BLD

    def _project(self, x_BLD, w_DF, bias):
        hidden_BLF = product("bld,df->blf", x_BLD, w_DF[...], self.spec, names_of(w_DF))
        hidden_BLF = constrain(hidden_BLF, ("batch", "length", "mlp_act"), self.spec.rules)
        hidden_BLF = keep(hidden_BLF, MLP_IN)
        if not self.spec.mlp_bias:
            return hidden_BLF
        return hidden_BLF + vars(self)[bias][...].astype(hidden_BLF.dtype)


def activated(spec: ModelSpec, up: jax.Array, gate: jax.Array | None = None) -> jax.Array:
    """An MLP's hidden values [..., F], f(up) or, of a gated layer, f(gate) * g(up).

    up, gate: [..., F], the products of the layer's input, in the type that is returned.
    XLA:CPU rounds bfloat16 after every operation, in several instructions, so that it computes
    them in float32 (spec.float32_products) and rounds once. A limit binds up from both sides and
    the gate from above alone.
    """
    dtype, limit = up.dtype, spec.mlp_activations_limit
    wide = f32 if spec.float32_products else dtype
    up = up.astype(wide)
    hidden = ACTIVATIONS[spec.mlp_activations[-1]](jnp.clip(up, -limit, limit) if limit else up)
    if gate is not None:
        gate = gate.astype(wide)
        gate = jnp.minimum(gate, limit) if limit else gate
        hidden = ACTIVATIONS[spec.mlp_activations[0]](gate) * hidden
    return hidden.astype(dtype)


class DecoderLayer(nnx.Module):
    """One transformer layer, its blocks' inputs (pre), outputs (post) or both (sandwich) normed.

    moe: the class of its experts (models/moe.py); None: it has an MLP. attention: its class.
    """

    def __init__(self, spec, rngs, moe=None, attention=Attention):
        self.spec = spec
        self.normed_in = spec.norm_placement != "post"
        self.normed_out = spec.norm_placement != "pre"
        if self.normed_in:
            self.attention_norm = RMSNorm((spec.emb_dim,), spec)
        self.attention = attention(spec, rngs)
        if self.normed_out:
            self.post_attention_norm = RMSNorm((spec.emb_dim,), spec)
        if self.normed_in:
            self.mlp_norm = RMSNorm((spec.emb_dim,), spec)
        self.has_experts = moe is not None
        if moe is None:
            self.mlp = MLP(spec, rngs)
        else:
            self.moe = moe(spec, rngs)
        if self.normed_out:
            self.post_mlp_norm = RMSNorm((spec.emb_dim,), spec)

    def __call__(self, x_BLD, rope, attend, real_BL=None):
        """The residual stream after the layer, the cache that attend returned, use of experts.

        rope: Rotation of the positions. attend: (q [B, L, N, H], k and v [B, L, K, H], sinks [N]
        or None) -> (context [B, L, N, H], cache); the cache is the caller's, None in training.
        real_BL: see models/moe.py. Use of experts: router.Usage, None for a layer without.
        """
        y_BLD = self.attention_norm(x_BLD) if self.normed_in else x_BLD
        y_BLD, cache = self.attention(y_BLD, rope, attend)
        x_BLD = x_BLD + (self.post_attention_norm(y_BLD) if self.normed_out else y_BLD)
        y_BLD = self.mlp_norm(x_BLD) if self.normed_in else x_BLD
        y_BLD, used = self.moe(y_BLD, real_BL) if self.has_experts else (self.mlp(y_BLD), None)
        x_BLD = x_BLD + (self.post_mlp_norm(y_BLD) if self.normed_out else y_BLD)
        return constrain(x_BLD, ("batch", "length", "embed_act"), self.spec.rules), cache, used


class EmbedAndHead(nnx.Module):
    """The parameters outside the layers: token embedding, final norm, untied head."""

    def __init__(self, spec, rngs):
        D, V = spec.emb_dim, spec.padded_vocab_size
        self.spec = spec
        small = spec.tied_head or spec.embedding_multiplier != 1
        self.embedding = _weight(
            rngs.params(), (V, D), ("vocab", "embed"), fan_in=D if small else 1, spec=spec
        )
        self.final_norm = RMSNorm((D,), spec)
        if not spec.tied_head:
            self.head = _weight(rngs.params(), (D, V), ("embed", "vocab"), fan_in=D, spec=spec)

    def embed(self, tokens_BL):
        """Residual stream at the start, [B, L, D], of unit variance with embedding_scale=auto.

        A tied table has variance 1/D for the head's sake and is scaled by sqrt(D) here
        (arXiv 1706.03762, section 3.4). A token outside the vocabulary becomes NaN, which the
        loss shows.
        """
        spec = self.spec
        scale = spec.embedding_multiplier
        x_BLD = look_up(self.embedding[...], tokens_BL, spec.rules, spec.dtype, scale)
        return constrain(x_BLD, ("batch", "length", "embed_act"), spec.rules)
