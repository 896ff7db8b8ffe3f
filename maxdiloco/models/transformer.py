"""The decoder-only transformer: parameters as a plain nested dict, layers stacked and scanned."""
# B sequences  L tokens  D model  N query heads  K key/value heads  H head dim  V vocabulary
# `layers` is the leading dim of stacked parameters

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from maxdiloco.diloco.fragments import Stacked, Vocabulary
from maxdiloco.flags.config import Config
from maxdiloco.models import attention, over_length, router
from maxdiloco.models import spec as spec_lib
from maxdiloco.models.latent import LatentAttention
from maxdiloco.models.layers import Attention, DecoderLayer, EmbedAndHead
from maxdiloco.models.loss import Head, next_tokens, token_losses
from maxdiloco.models.moe import MoE
from maxdiloco.models.rope import rotation
from maxdiloco.models.router import Usage
from maxdiloco.models.spec import LayerKind, ModelSpec
from maxdiloco.models.stack import over_layers
from maxdiloco.parallel.sharding import gathered, is_vector

Params = dict[str, Any]
LAYERS = "layers"  # the stack's key among the parameters; all layers but the first dense ones


class Blueprint(NamedTuple):
    """An nnx module without its weights.

    graphdef: its structure. names: nested dict, the logical axis names of each weight.
    """

    graphdef: nnx.GraphDef
    names: Params

    def with_weights(self, weights: Params) -> Any:
        """The module over these weights, a nested dict like `names`."""
        return nnx.merge(self.graphdef, weights)


class Stack(NamedTuple):
    """Layers of equal shapes, whose parameters have one leading dim.

    name: their key among the parameters. layers: their numbers in the model, rising.
    make: one layer's module from its nnx.Rngs. blueprint: that module without its weights.
    """

    name: str
    layers: tuple[int, ...]
    make: Callable[[nnx.Rngs], DecoderLayer]
    blueprint: Blueprint


@dataclass(frozen=True, eq=False)  # hashed by identity: a static argument of jax.jit
class Model:
    """One replica's view of a decoder: functions of a nested dict of parameters.

    spec: sizes and choices, the attention kernel among them.
    stacks: the layers, in their order. embed_and_head: the module of the other parameters.
    logical_axes: like the parameters, a tuple of logical names per leaf.
    layer_axis: like the parameters, the dim that counts layers, with their numbers where they are
        not all; Vocabulary(dim) or None for the others.
    """

    spec: ModelSpec
    stacks: tuple[Stack, ...]
    embed_and_head: Blueprint
    logical_axes: Params
    layer_axis: Params

    def init(self, key: jax.Array) -> Params:
        """Fresh parameters in spec.weight_dtype; the same key gives the same on any mesh."""
        spec = self.spec
        key_embed, key_layers = jax.random.split(key)

        keys = jax.random.split(key_layers, spec.num_layers)
        embed_and_head = EmbedAndHead(spec, nnx.Rngs(params=key_embed))
        params = nnx.to_pure_dict(nnx.state(embed_and_head))
        for stack in self.stacks:

            def init_layer(key, make=stack.make):
                return nnx.to_pure_dict(nnx.state(make(nnx.Rngs(params=key))))

            params[stack.name] = jax.vmap(init_layer)(keys[stack.layers[0] : stack.layers[-1] + 1])
        return params

    def loss(
        self, params: Params, batch: dict[str, jax.Array]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Sum of the token losses of one replica's batch, and its parts: Algorithm 2, line 4.

        batch: "tokens" and "segment_ids", int32 [B, L].
        Returns (total, aux); aux: float32 sums "tokens" (targets that count), "cross_entropy" and
        "z_loss", the two terms of the total. aux has no gradient. With experts: also
        "load_balance_loss" and "router_z_loss" where they have a weight, terms of the total (the
        mean over the batch's tokens times the targets), and the sums of models/router.py.
        """
        tokens_BL, segment_ids_BL = batch["tokens"], batch["segment_ids"]
        targets_BL, counts_BL = next_tokens(tokens_BL, segment_ids_BL)
        tokens_BL, targets_BL, counts_BL = (
            over_length.spread(x_BL, self.spec.rules) for x_BL in (tokens_BL, targets_BL, counts_BL)
        )
        segment_ids_BL = over_length.whole(segment_ids_BL, self.spec.rules)
        x_BLD, used = self._hidden_states(params, tokens_BL, segment_ids_BL)
        w, head = head_of(self.spec, params)
        total, (cross_entropy, z_loss) = token_losses(head, x_BLD, w, targets_BL, counts_BL)
        tokens = jnp.sum(counts_BL, dtype=jnp.float32)
        aux = {"tokens": tokens, "cross_entropy": cross_entropy, "z_loss": z_loss}
        if used is not None:
            terms = router.losses(self.spec, used)
            terms = {name: mean * tokens for name, mean in terms.items()}
            total += sum(terms.values())
            aux |= terms | router.sums(self.spec, used)
        return total, jax.lax.stop_gradient(aux)

    def _hidden_states(self, params, tokens_BL, segment_ids_BL):
        """The residual stream after the last layer and the final norm, [B, L, D] in spec.dtype.

        And the use of experts, see through_layers.
        """
        spec = self.spec

        def attend(kind, _, q_BLNH, k_BLKH, v_BLKH, sinks_N):
            context_BLNH = attention.attend(
                spec.attention,
                q_BLNH,
                k_BLKH,
                v_BLKH,
                segment_ids_BL,
                sinks_N,
                soft_cap=spec.attn_logits_soft_cap,
                window=kind.window,
                rules=spec.rules,
                precision=spec.precision,
                divisor=spec.query_divisor,
                float32_factors=spec.float32_factors,
            )
            return context_BLNH, None

        embed_and_head = self.embed_and_head_of(params)
        positions_BL = over_length.positions_here(tokens_BL.shape[1], spec.rules)[None]
        x_BLD, _, used = self.through_layers(
            params,
            embed_and_head.embed(tokens_BL),
            positions_BL,
            attend,
            real_BL=over_length.spread(segment_ids_BL != 0, spec.rules),
            policy=spec.remat_policy,
        )
        return embed_and_head.final_norm(x_BLD), used

    def through_layers(
        self,
        params: Params,
        x_BLD: jax.Array,
        positions_BL: jax.Array,
        attend: Callable,
        caches: Sequence[Any] | None = None,
        *,
        real_BL: jax.Array | None = None,
        policy: str = "none",
    ) -> tuple[jax.Array, tuple[Any, ...], Usage | None]:
        """The residual stream after the last layer, the caches that attend returned, experts' use.

        positions: one row serves all sequences. attend: (kind, cache, q, k, v, sinks) -> (context,
        cache), see DecoderLayer; kind: spec.LayerKind. caches: of each stack a pytree of
        [layers, ...] or None, as the second result. real_BL: which tokens are not padding, see
        models/moe.py. policy: see remat.checkpointed. Usage: leaves [layers with experts, ...];
        None without experts.
        """
        spec, out, used = self.spec, [], None
        ropes = {
            kind.rope: rotation(positions_BL, spec.rotated_dim, kind.rope) for kind in spec.pattern
        }
        for i, stack in enumerate(self.stacks):

            def body(kind: LayerKind, x_BLD, entry, blueprint=stack.blueprint):
                weights, cache = entry
                weights = jax.tree.map(
                    functools.partial(
                        gathered, rules=spec.rules, scattered=spec.scattered_gradients
                    ),
                    weights,
                    blueprint.names,
                )
                layer = blueprint.with_weights(weights)
                x_BLD, cache, used = layer(
                    x_BLD, ropes[kind.rope], functools.partial(attend, kind, cache), real_BL
                )
                return x_BLD, (cache, used)

            weights = self._compute_weights(stack, params[stack.name])
            stacked = (weights, None if caches is None else caches[i])
            x_BLD, (cache, used) = over_layers(
                body, x_BLD, stacked, spec.kinds(stack.layers), policy=policy
            )
            out.append(cache)
        return x_BLD, tuple(out), used  # the last stack is the one with experts

    def _compute_weights(self, stack: Stack, layers: Params) -> Params:
        """Stacked weights in spec.dtype, cast before the scan so that gathers move the small type.

        Norm scales are applied in float32, a router chooses in it; they stay as they are, like
        biases and sinks.
        """
        dtype = self.spec.dtype
        return jax.tree.map(
            lambda w, names: w if is_vector(names) or "router" in names else w.astype(dtype),
            layers,
            stack.blueprint.names,
        )

    def rebalanced(self, params: Params, counts_lE: jax.Array) -> Params:
        """The parameters with the routed biases of the next step, see router.rebalanced.

        counts_lE: choices of each expert in the step, over the whole batch of the replica.
        """
        layers = params[LAYERS]
        bias_lE = router.rebalanced(
            layers["moe"]["routed_bias"], counts_lE, self.spec.routed_bias_update_rate
        )
        return params | {LAYERS: layers | {"moe": layers["moe"] | {"routed_bias": bias_lE}}}

    def embed_and_head_of(self, params: Params) -> EmbedAndHead:
        """The module of the parameters outside the layers."""
        names = self.embed_and_head.names
        return self.embed_and_head.with_weights({name: params[name] for name in names})


def build(
    cfg: Config, *, backend: str, length_shards: int = 1, compute_capability: str = ""
) -> Model:
    """The model of a config.

    backend: `cpu`, `gpu` or `tpu`; chooses the attention kernel and what dtype=auto means.
    length_shards: devices that a sequence is spread over. compute_capability: of a GPU, see
    attention.has_kernels.
    Raises ConfigError for a kernel that the backend lacks.
    """
    spec = spec_lib.from_config(
        cfg,
        backend=backend,
        length_shards=length_shards,
        compute_capability=compute_capability,
    )
    embed_and_head = _blueprint(functools.partial(EmbedAndHead, spec))
    logical_axes = dict(embed_and_head.names)
    layer_axis = _map_names(_vocabulary, embed_and_head.names)
    stacks = _stacks(spec)
    for stack in stacks:
        names = stack.blueprint.names
        every = len(stack.layers) == spec.num_layers
        axis = 0 if every else Stacked(0, stack.layers)
        logical_axes[stack.name] = _map_names(lambda names: ("layers", *names), names)
        layer_axis[stack.name] = _map_names(lambda _, axis=axis: axis, names)
    return Model(
        spec=spec,
        stacks=stacks,
        embed_and_head=embed_and_head,
        logical_axes=logical_axes,
        layer_axis=layer_axis,
    )


def _stacks(spec: ModelSpec) -> tuple[Stack, ...]:
    """Runs of layers of equal shapes, in their order."""
    n = spec.first_num_dense_layers
    runs = [("dense_layers", range(n), None)] if n else []
    runs.append((LAYERS, range(n, spec.num_layers), MoE if spec.num_experts > 1 else None))
    attention_class = Attention if spec.latent is None else LatentAttention
    stacks = []
    for name, layers, moe in runs:
        make = functools.partial(DecoderLayer, spec, moe=moe, attention=attention_class)
        stacks.append(Stack(name, tuple(layers), make, _blueprint(make)))
    return tuple(stacks)


def count_parameters(model: Model) -> int:
    """Parameters of the model; nothing is allocated."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def head_of(spec: ModelSpec, params: Params) -> tuple[jax.Array, Head]:
    """The head's weight (the embedding, when tied) and its options."""
    head = Head(
        tied=spec.tied_head,
        soft_cap=spec.final_logits_soft_cap,
        z_loss=spec.z_loss_multiplier,
        precision=spec.precision,
        rules=spec.rules,
        vocab_size=spec.vocab_size,
        float32_products=spec.float32_products,
        float32_factors=spec.float32_factors,
        scattered_gradients=spec.scattered_gradients,
    )
    return params["embedding"] if spec.tied_head else params["head"], head


def _blueprint(make: Callable[[nnx.Rngs], nnx.Module]) -> Blueprint:
    """Of the module that make(rngs) makes; nothing is allocated."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(params=0))))
    names = {path: variable.get_metadata("names") for path, variable in nnx.to_flat_state(state)}
    return Blueprint(graphdef, nnx.to_pure_dict(nnx.from_flat_state(names)))


def _vocabulary(names):
    return Vocabulary(names.index("vocab")) if "vocab" in names else None


def _map_names(fn, names):
    return jax.tree.map(fn, names, is_leaf=lambda leaf: isinstance(leaf, tuple))
