"""The blocks of a decoder: of each the table of its weights, and the function of their values.

A block of spec `spec` takes its values `w` as a nested dict like its table, of one layer.
"""
# B sequences  L tokens  D model  N query heads  K key/value heads  H head dim  F hidden
# V vocabulary  R rank  P features not rotated  T features rotated

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from maxdiloco.models.each_device import on_each_device, split_axes
from maxdiloco.models.product import product
from maxdiloco.models.remat import ATTENTION_OUT, MLP_IN, NORM_FACTOR, QKV, keep
from maxdiloco.models.rope import Rotation, rotate
from maxdiloco.models.spec import ModelSpec
from maxdiloco.models.weights import Weight, bias, factor, residual_gain, spread
from maxdiloco.parallel.sharding import Rules, constrain

f32 = jnp.float32
Table = dict[str, Any]  # nested, of Weights
Values = dict[str, Any]

ACTIVATIONS: dict[str, Callable] = {
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "relu": jax.nn.relu,
    "linear": lambda x: x,
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),  # arXiv 1606.08415, section 2
    "plus_one": lambda x: x + 1,
}

# Matrix -> the product that it is a factor of. Values are drawn in this order.
ATTENTION = {
    "query": "bld,dnh->blnh",
    "key": "bld,dkh->blkh",
    "value": "bld,dkh->blkh",
    "out": "blnh,nhd->bld",
}
LATENT_ATTENTION = {
    "query_down": "bld,dr->blr",
    "query_up": "blr,rnh->blnh",
    "query": "bld,dnh->blnh",
    "kv_down": "bld,dr->blr",
    "kv_up": "blr,rnh->blnh",
    "out": "blnh,nhd->bld",
}
EMBEDDING = ("vocab", "embed")  # names of its dims
FEED_FORWARD = {"w_gate": "bld,df->blf", "w_up": "bld,df->blf", "w_out": "blf,fd->bld"}


def norm_table(spec: ModelSpec, *shape: int, names: tuple[str, ...] = ("norm",)) -> Table:
    """The scale of rms_norm over dims of this shape."""
    return {"scale": Weight(shape, names, spec.weight_dtype, value=1 - spec.norm_scale_offset)}


def rms_norm(spec: ModelSpec, w: Values, x: jax.Array) -> jax.Array:
    """x with root mean square 1 over the scale's dims, times the scale (arXiv 1910.07467).

    Computed in float32, in the type of x.
    """
    x_f32 = x.astype(f32)  # squares of bf16 values lose half their digits
    scale = w["scale"].astype(f32)
    dims = tuple(range(-scale.ndim, 0))
    mean_square = jnp.mean(jnp.square(x_f32), axis=dims, keepdims=True)
    normed = x_f32 * keep(jax.lax.rsqrt(mean_square + spec.norm_epsilon), NORM_FACTOR)
    offset = spec.norm_scale_offset
    return (normed * (scale + offset if offset else scale)).astype(x.dtype)


def attention_table(spec: ModelSpec) -> Table:
    """Weights of `attention`."""
    D, N, K, H = spec.emb_dim, spec.num_query_heads, spec.num_kv_heads, spec.head_dim
    if spec.latent is None:
        table = {name: factor(spec, ATTENTION[name], d=D, n=N, k=K, h=H) for name in ATTENTION}
        table["out"] = factor(spec, ATTENTION["out"], gain=residual_gain(spec), n=N, h=H, d=D)
    else:
        table = _latent_table(spec)
    if spec.use_qk_norm and spec.qk_norm_scope == "head":
        table |= {"query_norm": norm_table(spec, H), "key_norm": norm_table(spec, H)}
    elif spec.use_qk_norm:
        table["query_norm"] = norm_table(spec, N, H, names=("heads", "norm"))
        table["key_norm"] = norm_table(spec, K, H, names=("kv_heads", "norm"))
    if spec.attention_bias != "none":
        table["query_bias"] = bias(spec, (N, H), ("heads", "bias"))
        table["key_bias"] = bias(spec, (K, H), ("kv_heads", "bias"))
        table["value_bias"] = bias(spec, (K, H), ("kv_heads", "bias"))
    if spec.attention_bias == "all":
        table["out_bias"] = bias(spec, (D,), ("bias",))
    if spec.attention_sink:
        table["sinks"] = bias(spec, (N,), ("heads",))
    return table


def _latent_table(spec):
    D, N, H, latent = spec.emb_dim, spec.num_query_heads, spec.head_dim, spec.latent
    sizes = {
        "query_down": dict(d=D, r=latent.q_rank),
        "query_up": dict(r=latent.q_rank, n=N, h=H),
        "query": dict(d=D, n=N, h=H),
        "kv_down": dict(d=D, r=latent.kv_rank + latent.rope_dim),
        "kv_up": dict(r=latent.kv_rank, n=N, h=latent.nope_dim + latent.v_dim),
        "out": dict(n=N, h=latent.v_dim, d=D, gain=residual_gain(spec)),
    }
    for name in ("query",) if latent.q_rank else ("query_down", "query_up"):
        del sizes[name]
    table = {name: factor(spec, LATENT_ATTENTION[name], **sizes[name]) for name in sizes}
    if latent.q_rank:
        table["query_norm"] = norm_table(spec, latent.q_rank)
    return table | {"kv_norm": norm_table(spec, latent.kv_rank)}


def attention(
    spec: ModelSpec, w: Values, x_BLD: jax.Array, rope: Rotation, attend: Callable
) -> tuple[jax.Array, Any]:
    """Grouped-query or latent attention: [B, L, D] -> ([B, L, D], cache of attend).

    attend: (q [B, L, N, H], k and v [B, L, K, H], sinks [N] or None) -> (context [B, L, N, H],
    cache); the cache is the caller's, None in training.
    """
    project = _projected if spec.latent is None else _latent_projected
    context_BLNH, cache = attend(*project(spec, w, x_BLD, rope), w.get("sinks"))
    out_BLD = product(ATTENTION["out"], context_BLNH, w["out"], spec)
    return keep(_plus(out_BLD, w.get("out_bias")), ATTENTION_OUT), cache


def _plus(x, bias):
    return x if bias is None else x + bias.astype(x.dtype)


def _projected(spec, w, x_BLD, rope):
    """Queries [B, L, N, H], keys and values [B, L, K, H], normed and rotated."""
    q_BLNH, k_BLKH, v_BLKH = (
        keep(product(ATTENTION[name], x_BLD, w[name], spec), QKV)
        for name in ("query", "key", "value")
    )
    q_BLNH = _plus(q_BLNH, w.get("query_bias"))
    k_BLKH, v_BLKH = _plus(k_BLKH, w.get("key_bias")), _plus(v_BLKH, w.get("value_bias"))
    if spec.use_qk_norm:
        q_BLNH = rms_norm(spec, w["query_norm"], q_BLNH)
        k_BLKH = rms_norm(spec, w["key_norm"], k_BLKH)
    by_product = spec.attention == "splash" and x_BLD.dtype == jnp.bfloat16
    q_BLNH, k_BLKH = (rotate(x, rope, by_product=by_product) for x in (q_BLNH, k_BLKH))
    return tuple(
        constrain(x, ("batch", "length", heads, None), spec.rules)
        for x, heads in ((q_BLNH, "heads_act"), (k_BLKH, "kv_act"), (v_BLKH, "kv_act"))
    )


def _latent_projected(spec, w, x_BLD, rope):
    """Queries and keys [B, L, N, P + T], values [B, L, N, V]: multi-head latent attention.

    DeepSeek-V2, arXiv 2405.04434, section 2.1. Keys and values are formed for every head, in
    training and for the cache. The rotated features of a key are shared by all heads.
    """
    latent = spec.latent

    def kept(name, x):
        return keep(product(LATENT_ATTENTION[name], x, w[name], spec), QKV)

    if latent.q_rank:
        q_BLNH = kept("query_up", rms_norm(spec, w["query_norm"], kept("query_down", x_BLD)))
    else:
        q_BLNH = kept("query", x_BLD)
    low_BLR, k_BLT = jnp.split(kept("kv_down", x_BLD), [latent.kv_rank], axis=-1)
    kv_BLNH = kept("kv_up", rms_norm(spec, w["kv_norm"], low_BLR))
    q_BLNP, q_BLNT = jnp.split(q_BLNH, [latent.nope_dim], axis=-1)
    k_BLNP, v_BLNV = jnp.split(kv_BLNH, [latent.nope_dim], axis=-1)
    k_BL1T = rotate(k_BLT[..., None, :], rope)
    k_BLNT = jnp.broadcast_to(k_BL1T, (*k_BLNP.shape[:3], latent.rope_dim))
    q_BLNH = jnp.concatenate([q_BLNP, rotate(q_BLNT, rope)], axis=-1)
    k_BLNH = jnp.concatenate([k_BLNP, k_BLNT], axis=-1)
    names = ("batch", "length", "heads_act", None)
    return tuple(constrain(x, names, spec.rules) for x in (q_BLNH, k_BLNH, v_BLNV))


def feed_forward_table(spec: ModelSpec, width: int, num_experts: int = 0) -> Table:
    """Weights of `mlp` with this hidden width, or of so many experts, each in a first dim.

    w_gate where the activations are two. Each bias has its matrix's output as its dim.
    """
    names = list(FEED_FORWARD)[2 - len(spec.mlp_activations) :]
    D, gains = spec.emb_dim, {"w_out": residual_gain(spec)}
    table = {
        name: factor(spec, FEED_FORWARD[name], gain=gains.get(name, 1.0), d=D, f=width)
        for name in names
    }
    biases = {
        f"{name}_bias": bias(spec, table[name].shape[1:], ("bias" if name == "w_out" else "mlp",))
        for name in names
        if spec.mlp_bias
    }
    if num_experts:
        table = {name: w.of_experts("stored_expert", num_experts) for name, w in table.items()}
        biases = {name: w.of_experts("expert", num_experts) for name, w in biases.items()}
    return table | biases


def mlp(spec: ModelSpec, w: Values, x_BLD: jax.Array) -> jax.Array:
    """[B, L, D] -> [B, L, D]: f(x w_up) w_out, or f(x w_gate) * g(x w_up) w_out (2002.05202)."""

    def projected(name):
        x_BLF = product(FEED_FORWARD[name], x_BLD, w[name], spec)
        x_BLF = constrain(x_BLF, ("batch", "length", "mlp_act"), spec.rules)
        return _plus(keep(x_BLF, MLP_IN), w.get(f"{name}_bias"))

    out_BLD = product(FEED_FORWARD["w_out"], activated(spec, projected), w["w_out"], spec)
    return _plus(out_BLD, w.get("w_out_bias"))


def activated(spec: ModelSpec, projected: Callable[[str], jax.Array]) -> jax.Array:
    """An MLP's hidden values [..., F], f(up) or, of a gated layer, f(gate) * g(up).

    projected: w_up or w_gate -> the product of the layer's input with it, in the type that is
    returned.
    XLA:CPU rounds bfloat16 after every operation, in several instructions, so that it computes
    them in float32 (spec.float32_products) and rounds once. A limit binds up from both sides and
    the gate from above alone.
    """
    up, limit = projected("w_up"), spec.mlp_activations_limit
    dtype = up.dtype
    wide = f32 if spec.float32_products else dtype
    up = up.astype(wide)
    hidden = ACTIVATIONS[spec.mlp_activations[-1]](jnp.clip(up, -limit, limit) if limit else up)
    if len(spec.mlp_activations) == 2:
        gate = projected("w_gate").astype(wide)
        gate = jnp.minimum(gate, limit) if limit else gate
        hidden = ACTIVATIONS[spec.mlp_activations[0]](gate) * hidden
    return hidden.astype(dtype)


def ends_table(spec: ModelSpec) -> Table:
    """The weights outside the layers: token embedding, final norm, untied head.

    A tied table has variance 1/D for the head's sake and is scaled by sqrt(D) when it is looked up
    (arXiv 1706.03762, section 3.4).
    """
    D, V = spec.emb_dim, spec.padded_vocab_size
    small = spec.tied_head or spec.embedding_multiplier != 1
    std = spread(D if small else 1)
    table = {
        "embedding": Weight((V, D), EMBEDDING, spec.weight_dtype, std),
        "final_norm": norm_table(spec, D),
    }
    return table if spec.tied_head else table | {"head": factor(spec, "bld,dv->blv", d=D, v=V)}


def embed(spec: ModelSpec, params: Values, tokens_BL: jax.Array) -> jax.Array:
    """Residual stream at the start, [B, L, D], of unit variance with embedding_scale=auto.

    A token outside the vocabulary becomes NaN, which the loss shows.
    """
    scale = spec.embedding_multiplier
    x_BLD = look_up(params["embedding"], tokens_BL, spec.rules, spec.dtype, scale)
    return constrain(x_BLD, ("batch", "length", "embed_act"), spec.rules)


def look_up(
    table_VD: jax.Array, tokens_BL: jax.Array, rules: Rules, dtype: DTypeLike, scale: float = 1.0
) -> jax.Array:
    """[B, L, D] in `dtype`: the row of each token times `scale`, NaN for a token that has none.

    On a mesh each device gathers the columns of its part of the vocabulary, scaled and in `dtype`,
    and looks up those tokens of its sequences that are in that part; a psum adds the parts. The
    gradient is summed in the table's own dtype. Written by hand because the partitioner of jax 0.10
    aborts on a gather from a table that is split in both dims while another axis is manual.
    """
    return _look_up(rules, jnp.dtype(dtype), scale, table_VD, tokens_BL)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _look_up(rules, dtype, scale, table_VD, tokens_BL):
    if split_axes(EMBEDDING, rules)[1]:  # fewer bytes, and the values of scaled, rounded rows
        return _rows(rules, _scaled(table_VD, scale).astype(dtype), tokens_BL).astype(dtype)
    return _scaled(_rows(rules, table_VD, tokens_BL), scale).astype(dtype)


def _look_up_forward(rules, dtype, scale, table_VD, tokens_BL):
    return _look_up(rules, dtype, scale, table_VD, tokens_BL), (table_VD, tokens_BL)


def _look_up_backward(rules, dtype, scale, found, dx_BLD):
    table_VD, tokens_BL = found
    _, transposed = jax.vjp(lambda table: _scaled(_rows(rules, table, tokens_BL), scale), table_VD)
    return *transposed(dx_BLD.astype(table_VD.dtype)), None  # sums of many rows drift in bfloat16


_look_up.defvjp(_look_up_forward, _look_up_backward)


def _scaled(x, scale):
    return x if scale == 1 else x * scale


def _rows(rules, table_VD, tokens_BL):
    """The rows of a table in its dtype, or in float32 where its rows are split."""
    vocab_size = table_VD.shape[0]
    over_rows, over_columns = split_axes(EMBEDDING, rules)

    def local(table_VD, tokens_BL):
        if over_columns:
            table_VD = jax.lax.all_gather(table_VD, over_columns, axis=1, tiled=True)
        first = jax.lax.axis_index(over_rows) * table_VD.shape[0] if over_rows else 0
        index_BL = tokens_BL - first
        inside_BL = (index_BL >= 0) & (index_BL < table_VD.shape[0])
        x_BLD = table_VD.at[jnp.where(inside_BL, index_BL, 0)].get(mode="promise_in_bounds")
        if over_rows:
            x_BLD = x_BLD.astype(jnp.float32)  # XLA:CPU aborts on a psum of bfloat16
            x_BLD = jax.lax.psum(jnp.where(inside_BL[..., None], x_BLD, 0), over_rows)
        known_BL = (tokens_BL >= 0) & (tokens_BL < vocab_size)
        return jnp.where(known_BL[..., None], x_BLD, jnp.nan)

    return on_each_device(
        local,
        in_names=(EMBEDDING, ("batch", "length")),
        out_names=("batch", "length", None),
        rules=rules,
        split_only=True,
    )(table_VD, tokens_BL)
