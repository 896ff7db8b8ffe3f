"""The decoder-only transformer: parameters as a plain nested dict, layers stacked and scanned."""
# B sequences  L tokens  D model  N query heads  K key/value heads  H head dim  V vocabulary
# S slots of the cache; `layers` is the leading dim of stacked parameters

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxdiloco.diloco.fragments import Vocabulary
from maxdiloco.models import spec as spec_lib
from maxdiloco.models.attention import attend
from maxdiloco.models.layers import DecoderLayer, Ends
from maxdiloco.models.loss import Head, head_logits, next_tokens, token_losses
from maxdiloco.models.remat import checkpointed
from maxdiloco.models.rope import rotation
from maxdiloco.models.spec import ModelConfig, ModelSpec
from maxdiloco.parallel.sharding import gathered

Params = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """One replica's view of a model: functions over a nested dict of parameters.

    init: key -> params.
    loss: (params, {"tokens", "segment_ids"} of int32 [B, L]) -> (sum of the token losses, aux);
        aux: float32 sums "tokens" (targets that count), "cross_entropy", "z_loss" (in the loss).
    logical_axes: like params, a tuple of logical names per leaf.
    layer_axis: like params, the dim that counts layers; Vocabulary(dim) or None for the rest.
    spec: sizes and choices, the attention kernel among them.
    """

    init: Callable[[jax.Array], Params]
    loss: Callable[[Params, dict[str, jax.Array]], tuple[jax.Array, dict[str, jax.Array]]]
    logical_axes: Params
    layer_axis: Params
    spec: ModelSpec


def build(cfg: ModelConfig, *, backend: str) -> Model:
    """The model of a config.

    backend: `cpu`, `gpu` or `tpu`; chooses the attention kernel and what dtype=auto means.
    Raises ConfigError for a kernel that the backend lacks.
    """
    spec = spec_lib.from_config(cfg, backend=backend)
    layer_names = _names(functools.partial(DecoderLayer, spec))
    end_names = _names(functools.partial(Ends, spec))
    stacked = _map_names(lambda names: ("layers", *names), layer_names)
    return Model(
        init=functools.partial(init, spec),
        loss=functools.partial(loss, spec),
        logical_axes={**end_names, "layers": stacked},
        layer_axis={
            **_map_names(_vocabulary, end_names),
            "layers": _map_names(lambda _: 0, layer_names),
        },
        spec=spec,
    )


def count_parameters(model: Model) -> int:
    """Parameters of the model; nothing is allocated."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def init(spec: ModelSpec, key: jax.Array) -> Params:
    """Fresh parameters in spec.weight_dtype; the same key gives the same on any mesh."""
    key_ends, key_layers = jax.random.split(key)

    def one_layer(key):
        return nnx.to_pure_dict(nnx.state(DecoderLayer(spec, nnx.Rngs(params=key))))

    layers = jax.vmap(one_layer)(jax.random.split(key_layers, spec.num_layers))
    ends = nnx.to_pure_dict(nnx.state(Ends(spec, nnx.Rngs(params=key_ends))))
    return {**ends, "layers": layers}


def loss(
    spec: ModelSpec, params: Params, batch: dict[str, jax.Array]
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Sum of the token losses of a replica's batch, and its parts: Algorithm 2, line 4.

    See Model.loss.
    """
    tokens_BL, segment_ids_BL = batch["tokens"], batch["segment_ids"]
    x_BLD = hidden_states(spec, params, tokens_BL, segment_ids_BL)
    targets_BL, counts_BL = next_tokens(tokens_BL, segment_ids_BL)
    w, head = head_of(spec, params)
    total, (cross_entropy, z_loss) = token_losses(head, x_BLD, w, targets_BL, counts_BL)
    tokens = jnp.sum(counts_BL, dtype=jnp.float32)
    aux = {"tokens": tokens, "cross_entropy": cross_entropy, "z_loss": z_loss}
    return total, jax.lax.stop_gradient(aux)


def logits(
    spec: ModelSpec, params: Params, tokens_BL: jax.Array, segment_ids_BL: jax.Array
) -> jax.Array:
    """Logits of every position, float32 [B, L, V]: for short sequences and tests."""
    x_BLD = hidden_states(spec, params, tokens_BL, segment_ids_BL)
    w, head = head_of(spec, params)
    return head_logits(x_BLD, w.astype(x_BLD.dtype), head)


def hidden_states(
    spec: ModelSpec, params: Params, tokens_BL: jax.Array, segment_ids_BL: jax.Array
) -> jax.Array:
    """The residual stream after the last layer and the final norm, [B, L, D] in spec.dtype."""
    ends = ends_of(spec, params)
    positions_BL = jnp.arange(tokens_BL.shape[1])[None]
    turn = rotation(positions_BL, spec.head_dim, spec.rope_max_timescale)

    names = _names(functools.partial(DecoderLayer, spec))

    def body(x_BLD, layer_params):
        whole = jax.tree.map(lambda w, n: gathered(w, n, spec.rules), layer_params, names)
        layer = layer_of(spec, whole)
        q, k, v = layer.project(x_BLD, turn)
        context_BLNH = attend(
            spec.attention,
            q,
            k,
            v,
            segment_ids_BL,
            soft_cap=spec.attn_logits_soft_cap,
            window=spec.sliding_window_size,
            rules=spec.rules,
            precision=spec.precision,
        )
        return layer.finish(x_BLD, context_BLNH), None

    x_BLD = ends.embed(tokens_BL)
    layers = compute_weights(spec, params["layers"])
    x_BLD, _ = jax.lax.scan(checkpointed(body, spec.remat_policy), x_BLD, layers)
    return ends.final_norm(x_BLD)


def compute_weights(spec: ModelSpec, layers: Params) -> Params:
    """Stacked weights in spec.dtype, cast before the scan so that gathers move the small type.

    Norm scales are applied in float32 and stay as they are.
    """
    names = _names(functools.partial(DecoderLayer, spec))
    return jax.tree.map(lambda w, n: w if "norm" in n else w.astype(spec.dtype), layers, names)


def head_of(spec: ModelSpec, params: Params) -> tuple[jax.Array, Head]:
    """The head's weight (the embedding, when tied) and how it is used."""
    head = Head(
        tied=spec.tied_head,
        soft_cap=spec.final_logits_soft_cap,
        z_loss=spec.z_loss_multiplier,
        precision=spec.precision,
        rules=spec.rules,
        float32_products=spec.float32_products,
    )
    return params["embedding"] if spec.tied_head else params["head"], head


def layer_of(spec: ModelSpec, layer_params: Params) -> DecoderLayer:
    """One layer as a module over the given parameters, without a layer dim."""
    return nnx.merge(_graph(functools.partial(DecoderLayer, spec)), layer_params)


def ends_of(spec: ModelSpec, params: Params) -> Ends:
    """Embedding, final norm and head as a module."""
    own = {name: value for name, value in params.items() if name != "layers"}
    return nnx.merge(_graph(functools.partial(Ends, spec)), own)


def _graph(make):
    return nnx.graphdef(_abstract(make))


def _abstract(make):
    return nnx.eval_shape(lambda: make(nnx.Rngs(params=0)))


def _names(make) -> Params:
    """Logical names of a module's parameters, a nested dict."""
    state = nnx.state(_abstract(make))
    names = {path: variable.get_metadata("names") for path, variable in nnx.to_flat_state(state)}
    return nnx.to_pure_dict(nnx.from_flat_state(names))


def _vocabulary(names):
    return Vocabulary(names.index("vocab")) if "vocab" in names else None


def _map_names(fn, names):
    return jax.tree.map(fn, names, is_leaf=lambda leaf: isinstance(leaf, tuple))
