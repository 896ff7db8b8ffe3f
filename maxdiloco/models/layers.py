"""The blocks of a decoder: the table of a block's weights, and a function of their values `w`."""
# B sequences  L tokens  D model  N query heads  K key/value heads  H head dim  F hidden
# V vocabulary  R rank  P features not rotated  T features rotated

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from maxdiloco.models.devices import by_parts, split_axes
from maxdiloco.models.product import product
from maxdiloco.models.remat import ATTENTION_OUT, MLP_IN, NORM_FACTOR, QKV, keep
from maxdiloco.models.rope import Rotation, rotate
from maxdiloco.models.spec import ModelSpec
from maxdiloco.models.weights import Weight, factor, factors, spread
from maxdiloco.parallel.sharding import constrain

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
    "kv_down": "bld,dc->blc",
    "kv_up": "bls,snp->blnp",
    "out": "blno,nod->bld",
}
EMBEDDING = ("vocab", "embed")  # names of its dims
FEED_FORWARD = {"w_gate": "bld,df->blf", "w_up": "bld,df->blf", "w_out": "blf,fd->bld"}


def norm_table(spec: ModelSpec, *shape: int, names: tuple[str, ...] = ("norm",)) -> Table:
    """The scale of rms_norm over dims of this shape."""
    return {"scale": Weight(shape, names, value=1 - spec.norm_scale_offset)}


def rms_norm(spec: ModelSpec, w: Values, x) -> jax.Array:
    """x with root mean square 1 over the scale's dims, times the scale (arXiv 1910.07467)."""
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
    equations, sizes, norms = ATTENTION, dict(d=D, n=N, k=K, h=H), {}
    if latent := spec.latent:
        equations = dict(LATENT_ATTENTION)
        for name in ["query"] if latent.q_lora_rank else ["query_down", "query_up"]:
            del equations[name]
        sizes |= dict(r=latent.q_lora_rank, s=latent.kv_lora_rank, o=latent.v_head_dim)
        sizes |= dict(c=latent.kv_lora_rank + latent.qk_rope_head_dim)
        sizes |= dict(p=latent.qk_nope_head_dim + latent.v_head_dim)
        norms = {"kv_norm": norm_table(spec, latent.kv_lora_rank)}
        if latent.q_lora_rank:
            norms["query_norm"] = norm_table(spec, latent.q_lora_rank)
    table = factors(spec, equations, **sizes) | norms
    if spec.qk_norm == "head":
        table |= {"query_norm": norm_table(spec, H), "key_norm": norm_table(spec, H)}
    elif spec.qk_norm:
        table["query_norm"] = norm_table(spec, N, H, names=("heads", "norm"))
        table["key_norm"] = norm_table(spec, K, H, names=("kv_heads", "norm"))
    if spec.attention_bias != "none":
        table["query_bias"] = Weight((N, H), ("heads", "bias"))
        table["key_bias"] = Weight((K, H), ("kv_heads", "bias"))
        table["value_bias"] = Weight((K, H), ("kv_heads", "bias"))
    if spec.attention_bias == "all":
        table["out_bias"] = Weight((D,), ("bias",))
    if spec.attention_sink:
        table["sinks"] = Weight((N,), ("heads",))
    return table


def attention(spec, w, x_BLD, rope: Rotation, attend: Callable) -> tuple[jax.Array, Any]:
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
    if spec.qk_norm:
        q_BLNH = rms_norm(spec, w["query_norm"], q_BLNH)
        k_BLKH = rms_norm(spec, w["key_norm"], k_BLKH)
    by_product = spec.attention == "splash" and x_BLD.dtype == jnp.bfloat16
    swap = "product" if by_product else "reverse" if spec.on_gpu else "split"
    q_BLNH, k_BLKH = (rotate(x, rope, swap) for x in (q_BLNH, k_BLKH))
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

    if latent.q_lora_rank:
        q_BLNH = kept("query_up", rms_norm(spec, w["query_norm"], kept("query_down", x_BLD)))
    else:
        q_BLNH = kept("query", x_BLD)
    low_BLR, k_BLT = jnp.split(kept("kv_down", x_BLD), [latent.kv_lora_rank], axis=-1)
    kv_BLNH = kept("kv_up", rms_norm(spec, w["kv_norm"], low_BLR))
    q_BLNP, q_BLNT = jnp.split(q_BLNH, [latent.qk_nope_head_dim], axis=-1)
    k_BLNP, v_BLNV = jnp.split(kv_BLNH, [latent.qk_nope_head_dim], axis=-1)
    k_BL1T = rotate(k_BLT[..., None, :], rope)
    k_BLNT = jnp.broadcast_to(k_BL1T, (*k_BLNP.shape[:3], latent.qk_rope_head_dim))
    q_BLNH = jnp.concatenate([q_BLNP, rotate(q_BLNT, rope)], axis=-1)
    k_BLNH = jnp.concatenate([k_BLNP, k_BLNT], axis=-1)
    names = ("batch", "length", "heads_act", None)
    return tuple(constrain(x, names, spec.rules) for x in (q_BLNH, k_BLNH, v_BLNV))


def feed_forward_table(spec: ModelSpec, width: int, num_experts: int = 0) -> Table:
    """Weights of `mlp` with this hidden width, or of so many experts, each in a first dim."""
    names = list(FEED_FORWARD)[2 - len(spec.mlp_activations) :]
    equations = {name: FEED_FORWARD[name] for name in names}
    table = factors(spec, equations, d=spec.emb_dim, f=width)
    for name in names if spec.mlp_bias else ():
        dims = ("bias" if name == "w_out" else "mlp",)
        table[f"{name}_bias"] = Weight(table[name].shape[1:], dims)
    for name, w in table.items() if num_experts else ():
        dims = ("expert" if name.endswith("_bias") else "stored_expert", *w.names)
        table[name] = dataclasses.replace(w, shape=(num_experts, *w.shape), names=dims)
    return table


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

    projected: w_up or w_gate -> its product with the layer's input. A limit binds up from both
    sides and the gate from above alone. XLA:CPU rounds bfloat16 after every operation, in several
    instructions; spec.float32_products computes in float32 and rounds once. XLA:GPU would keep what
    is between for the backward pass, for more reading and writing than it saves
    (benchmarks/results).
    """
    limit = spec.mlp_activations_limit

    def hidden(up, gate=None):
        dtype = up.dtype
        wide = f32 if spec.float32_products else dtype
        up = up.astype(wide)
        out = ACTIVATIONS[spec.mlp_activations[-1]](jnp.clip(up, -limit, limit) if limit else up)
        if gate is not None:
            gate = gate.astype(wide)
            gate = jnp.minimum(gate, limit) if limit else gate
            out = ACTIVATIONS[spec.mlp_activations[0]](gate) * out
        return out.astype(dtype)

    names = ("w_up", "w_gate")[: len(spec.mlp_activations)]
    return (jax.checkpoint(hidden) if spec.on_gpu else hidden)(*map(projected, names))


def ends_table(spec: ModelSpec) -> Table:
    """The weights outside the layers: token embedding, final norm, untied head.

    A tied table has variance 1/D for the head's sake and is scaled by sqrt(D) when it is looked up
    (arXiv 1706.03762, section 3.4).
    """
    D, V = spec.emb_dim, spec.padded_vocab_size
    small = spec.tied_head or spec.embedding_multiplier != 1
    std = spread(D if small else 1)
    table = {
        "embedding": Weight((V, D), EMBEDDING, std),
        "final_norm": norm_table(spec, D),
    }
    return table if spec.tied_head else table | {"head": factor("bld,dv->blv", d=D, v=V)}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def look_up(spec: ModelSpec, table_VD, tokens_BL) -> jax.Array:
    """The row of each token times spec.embedding_multiplier, in spec.dtype; NaN for one without.

    On a mesh each device gathers the columns of its part of the vocabulary, scaled and in
    spec.dtype, and looks up its tokens that are in that part; a psum adds the parts. The gradient
    is summed in the table's own dtype. By hand, because the partitioner of jax 0.10 aborts on a
    gather from a table that is split in both dims while another axis is manual.
    """
    if split_axes(EMBEDDING, spec.rules)[1]:  # fewer bytes, the values of scaled, rounded rows
        return _rows(spec, _scaled(spec, table_VD).astype(spec.dtype), tokens_BL).astype(spec.dtype)
    return _scaled(spec, _rows(spec, table_VD, tokens_BL)).astype(spec.dtype)


def _look_up_backward(spec, found, dx_BLD):
    table_VD, tokens_BL = found
    _, transposed = jax.vjp(lambda table: _scaled(spec, _rows(spec, table, tokens_BL)), table_VD)
    return *transposed(dx_BLD.astype(table_VD.dtype)), None  # sums of many rows drift in bfloat16


look_up.defvjp(
    lambda spec, table_VD, tokens_BL: (look_up(spec, table_VD, tokens_BL), (table_VD, tokens_BL)),
    _look_up_backward,
)


def _scaled(spec, x):
    return x if spec.embedding_multiplier == 1 else x * spec.embedding_multiplier


def _rows(spec, table_VD, tokens_BL):
    """The rows of a table in its dtype, or in float32 where its rows are split."""
    vocab_size = table_VD.shape[0]
    over_rows, over_columns = split_axes(EMBEDDING, spec.rules)

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

    batch, length = split_axes(("batch", "length"), spec.rules)
    of_tokens = P(batch or None, length or None)
    in_specs = P(over_rows or None, over_columns or None), of_tokens
    axes = {*over_rows, *over_columns, *batch, *length}
    return by_parts(local, in_specs, of_tokens, axes)(table_VD, tokens_BL)
