"""The decoder-only transformer: embedding, stacked layers, final norm and head."""
# B sequences  L tokens  D model  V vocabulary
# `layers` is the leading dimension of stacked parameters

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from maxdiloco.models import devices
from maxdiloco.models.attention import Attend, Attention
from maxdiloco.models.config import DENSE_LAYERS, LAYERS, LayerKind, ModelConfig, StackConfig
from maxdiloco.models.embedding import Embedding
from maxdiloco.models.kernels.choice import Kernels
from maxdiloco.models.latent_attention import LatentAttention
from maxdiloco.models.layer_scan import scan_layers
from maxdiloco.models.linear import Linear, Names
from maxdiloco.models.mlp import MLP
from maxdiloco.models.moe import MoE
from maxdiloco.models.norms import RMSNorm
from maxdiloco.models.params import leaves, map_weights, names_of
from maxdiloco.models.rope import Rotation, rotation
from maxdiloco.models.router import Usage
from maxdiloco.parallel.sharding import constrain, gather_weight, is_vector


class DecoderLayer(nnx.Module):
    """Attention and a feed-forward layer on the residual stream.

    The inputs of both blocks (pre), their outputs (post) or both (sandwich) are normed.

    Attributes:
      attention: Attention or LatentAttention.
      mlp: the feed-forward layer, or None.
      moe: the mixture of experts that replaces `mlp`, or None.
      attention_norm: norm before attention, or None.
      mlp_norm: norm before the feed-forward layer, or None.
      post_attention_norm: norm after attention, or None.
      post_mlp_norm: norm after the feed-forward layer, or None.
    """

    def __init__(self, config: ModelConfig, kernels: Kernels, *, has_experts: bool, rngs: nnx.Rngs):
        """Create the blocks.

        Args:
          config: the model.
          kernels: implementations to compute with.
          has_experts: whether the feed-forward layer is a mixture of experts.
          rngs: draws from the stream `params`.
        """
        self.config = config
        make_attention = Attention if config.latent is None else LatentAttention
        self.attention = make_attention(config, kernels, rngs=rngs)
        self.moe = MoE(config, kernels, rngs=rngs) if has_experts else None
        self.mlp = None if has_experts else MLP(config, kernels, config.mlp_dim, rngs=rngs)
        before, after = config.norm_placement != "post", config.norm_placement != "pre"
        shape = (config.emb_dim,)
        self.attention_norm = RMSNorm(config, shape) if before else None
        self.mlp_norm = RMSNorm(config, shape) if before else None
        self.post_attention_norm = RMSNorm(config, shape) if after else None
        self.post_mlp_norm = RMSNorm(config, shape) if after else None

    def __call__(
        self,
        x_BLD: jax.Array,
        rope: Rotation,
        attend: Attend,
        real_BL: jax.Array | None = None,
    ) -> tuple[jax.Array, Any, Usage | None]:
        """Apply the layer.

        Args:
          x_BLD: the residual stream.
          rope: rotation of the tokens' positions.
          attend: attention of projected queries, keys and values.
          real_BL: tokens that are not padding, see MoE.

        Returns:
          The residual stream, the cache of `attend`, and the use of experts or None.
        """
        y_BLD = _normed(self.attention_norm, x_BLD)
        y_BLD, cache = self.attention(y_BLD, rope, attend)
        x_BLD = x_BLD + _normed(self.post_attention_norm, y_BLD)
        y_BLD, used = _normed(self.mlp_norm, x_BLD), None
        if self.moe is not None:
            y_BLD, used = self.moe(y_BLD, real_BL)
        else:
            y_BLD = self.mlp(y_BLD)
        x_BLD = x_BLD + _normed(self.post_mlp_norm, y_BLD)
        x_BLD = constrain(x_BLD, ("batch", "length", "embed_act"), self.config.rules)
        return x_BLD, cache, used


def _normed(norm, x_BLD):
    return x_BLD if norm is None else norm(x_BLD)


class Decoder(nnx.Module):
    """A decoder-only transformer.

    The parameters of a stack of layers have a leading dimension `layers`.

    Attributes:
      embedding: [V, D].
      dense_layers: the first layers of a model with experts that have no experts, or None.
      layers: all other layers.
      final_norm: over D.
      head: [D] -> [V], or None if it is the embedding.
    """

    def __init__(self, config: ModelConfig, kernels: Kernels, *, rngs: nnx.Rngs):
        """Create the layers.

        Args:
          config: the model.
          kernels: implementations to compute with.
          rngs: the stream `params` draws embedding and head. Each layer draws from its own key,
            split from the key of the stream `layers`.
        """
        self.config, self.kernels = config, kernels
        D, V = config.emb_dim, config.padded_vocab_size
        self.embedding = Embedding(config, rngs=rngs)
        self.head = (
            None
            if config.tied_head
            else Linear(config, kernels, (D,), (V,), ("embed", "vocab"), rngs=rngs)
        )
        self.final_norm = RMSNorm(config, (D,))
        keys = jax.random.split(rngs["layers"].key[...], config.num_layers)
        stacks = {stack.name: self._stacked(stack, keys) for stack in config.stacks}
        self.dense_layers, self.layers = stacks.get(DENSE_LAYERS), stacks.get(LAYERS)

    def _stacked(self, stack: StackConfig, keys: jax.Array) -> DecoderLayer:
        """Create one module with stacked parameters. keys: PRNG keys of all layers of the model."""

        def make_layer(key):
            rngs = nnx.Rngs(params=key)
            return DecoderLayer(self.config, self.kernels, has_experts=stack.has_experts, rngs=rngs)

        return nnx.vmap(make_layer)(keys[stack.layers[0] : stack.layers[-1] + 1])

    def __call__(
        self,
        tokens_BL: jax.Array,
        positions_BL: jax.Array,
        attend: Callable,
        caches: Sequence[Any] | None = None,
        *,
        real_BL: jax.Array | None = None,
        policy: str = "none",
        unrolled: bool = False,
    ) -> tuple[jax.Array, tuple[Any, ...], Usage | None]:
        """Apply embedding and layers.

        Args:
          tokens_BL: int32.
          positions_BL: positions of the tokens in their sequences; B is 1 if all share them.
          attend: (LayerKind, cache, queries, keys, values, sinks) -> (context, cache), see
            attention.Attend.
          caches: a pytree [layers, ...] for each stack of layers, or None.
          real_BL: tokens that are not padding, see MoE.
          policy: remat policy, see remat.apply_remat_policy.
          unrolled: write out the layers instead of a loop. Layers whose weights are gathered stay a
            loop.

        Returns:
          The residual stream [B, L, D] after the last layer; the caches of each stack; the use of
          experts [layers with experts, ...], or None.
        """
        config, out, used = self.config, [], None
        x_BLD = self.embedding(tokens_BL)
        x_BLD = constrain(x_BLD, ("batch", "length", "embed_act"), config.rules)
        ropes = {
            kind.rope: rotation(positions_BL, config.rotated_dim, kind.rope)
            for kind in config.pattern
        }
        for i, stack in enumerate(config.stacks):
            layers = self.dense_layers if stack.name == DENSE_LAYERS else self.layers
            layer, weights = nnx.split(layers, nnx.Param)
            weights = map_weights(self._for_compute, weights)
            # Without a loop, the compiler would gather the weights of all layers before it uses
            # them. It would also sum the whole gradients of all layers before it scatters one
            # (benchmarks/results/gpu.md).
            at_once = unrolled and not any(
                devices.is_gathered(names, config.rules) for names in leaves(names_of(weights))
            )
            x_BLD, (cache, used) = scan_layers(
                functools.partial(self._layer, layer, ropes, attend, real_BL),
                x_BLD,
                (weights, None if caches is None else caches[i]),
                [config.kind(number) for number in stack.layers],
                policy=policy,
                unrolled=at_once,
            )
            out.append(cache)
        return x_BLD, tuple(out), used  # the last stack is the one with experts

    def _layer(self, layer, ropes, attend, real_BL, kind: LayerKind, x_BLD, entry):
        """Apply one layer of a stack. entry: its weights and its cache."""
        weights, cache = entry
        weights = map_weights(self._gathered, weights)
        attend = functools.partial(attend, kind, cache)
        x_BLD, *rest = nnx.merge(layer, weights)(x_BLD, ropes[kind.rope], attend, real_BL)
        return x_BLD, tuple(rest)

    def _gathered(self, x: jax.Array, names: Names) -> jax.Array:
        scattered = self.kernels.products.scattered_gradients
        return gather_weight(x, names, self.config.rules, scattered=scattered)

    def _for_compute(self, x: jax.Array, names: Names) -> jax.Array:
        """Cast a stacked weight to config.dtype, before the scan, so that gathers move fewer bytes.

        Norm scales are applied in float32 and a router selects in it. They stay as they are, like
        biases and sinks.
        """
        kept = is_vector(names) or "router" in names
        return x if kept else x.astype(self.config.dtype)

    def head_weight(self) -> jax.Array:
        """Return the head's weight [D, V], or the embedding [V, D] if the head is tied."""
        return (self.embedding.table if self.head is None else self.head.kernel)[...]
