"""Sizes and choices of a decoder, as one frozen record that every module reads.

The record defines the function that the decoder computes. `models/kernels` chooses the
implementation for a device.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from maxdiloco.models.rope import RopeConfig
from maxdiloco.parallel.sharding import Rules, rules_with

LAYERS = "layers"  # name of the stack of layers among the parameters
DENSE_LAYERS = "dense_layers"  # name of the stack of first layers without experts, if there is one


class LayerKind(NamedTuple):
    """Properties that differ between layers whose parameters have equal shapes.

    Attributes:
      window: number of keys that a query sees, itself included. 0: unlimited.
      rope: frequencies of the rotary embedding.
    """

    window: int
    rope: RopeConfig


class LatentConfig(NamedTuple):
    """Ranks and widths of latent attention: the entries of the key `latent_attention`.

    Attributes:
      kv_lora_rank: rank of keys and values.
      qk_nope_head_dim: features of a query or key that are not rotated.
      qk_rope_head_dim: features that are rotated.
      v_head_dim: features of a value.
      q_lora_rank: rank of queries. 0 is full rank.
    """

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int = 0


class RouterConfig(NamedTuple):
    """How a token's experts are selected: the entries of the key `router`. See models/router.py."""

    score_function: str = "softmax"
    normalise_weights: bool = False
    scaling_factor: float = 1.0
    balance_bias: bool = False
    num_groups: int = 1
    groups_per_token: int = 1
    logit_bias: bool = False


class StackConfig(NamedTuple):
    """Consecutive layers of equal shapes, whose parameters are stacked.

    Attributes:
      name: name of the stack among the parameters.
      layers: numbers of its layers in the model, rising.
      has_experts: whether the feed-forward layers are mixtures of experts.
    """

    name: str
    layers: tuple[int, ...]
    has_experts: bool


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and choices of a decoder. A soft cap, a limit or a window of 0 is off."""

    emb_dim: int
    num_layers: int
    mlp_dim: int  # hidden width of a dense feed-forward layer
    num_experts: int  # 1: no experts
    num_experts_per_tok: int
    moe_mlp_dim: int  # hidden width of one expert
    shared_experts: int
    first_num_dense_layers: int
    router: RouterConfig
    routed_bias_update_rate: float
    load_balance_loss_weight: float
    router_z_loss_weight: float
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # tokens
    padded_vocab_size: int  # rows of the embedding and columns of the head
    mlp_activations: tuple[str, ...]  # (f,): f(x w_up) w_out; (f, g): f(x w_gate) g(x w_up) w_out
    mlp_activations_limit: float
    mlp_bias: bool
    norm_epsilon: float
    norm_placement: str  # pre, post or sandwich
    norm_scale_offset: float
    pattern: tuple[LayerKind, ...]  # kinds of the layers, repeated over them
    tied_head: bool
    embedding_multiplier: float
    qk_norm: str  # "", head or projection
    query_divisor: float  # of attention logits
    attention_bias: str  # none, qkv or all
    attention_sink: bool
    latent: LatentConfig | None
    attn_logits_soft_cap: float
    final_logits_soft_cap: float
    z_loss_multiplier: float
    dtype: DTypeLike  # of activations and of the factors of products
    weight_dtype: DTypeLike  # of the parameters
    remat_policy: str  # AUTO or a key of remat.POLICIES
    rules: Rules  # logical axis name -> mesh axes

    @property
    def rotated_dim(self) -> int:
        """Number of features of a head that are rotated."""
        return self.head_dim if self.latent is None else self.latent.qk_rope_head_dim

    @property
    def residual_gain(self) -> float:
        """Factor on the initial values of matrices that write to the residual stream.

        Each layer writes twice, so 1 / sqrt(2 layers) keeps the variance of the stream (GPT-2,
        Radford et al. 2019, section 2.3).
        """
        return 1 / math.sqrt(2 * self.num_layers)

    @property
    def stacks(self) -> tuple[StackConfig, ...]:
        """Stacks of layers, in the order in which they are applied."""
        n, has_experts = self.first_num_dense_layers, self.num_experts > 1
        stacks = (
            StackConfig(DENSE_LAYERS, tuple(range(n)), has_experts=False),
            StackConfig(LAYERS, tuple(range(n, self.num_layers)), has_experts),
        )
        return tuple(stack for stack in stacks if stack.layers)

    def kind(self, layer: int) -> LayerKind:
        """Return the kind of the layer with this number."""
        return self.pattern[layer % len(self.pattern)]


def from_keys(cfg: Any, *, auto_dtype: DTypeLike = jnp.float32) -> ModelConfig:
    """Read the model's keys of a run.

    Args:
      cfg: an object whose attributes are the keys of base.yml. Their values have been checked.
      auto_dtype: type of activations if the key `dtype` is `auto`.

    Returns:
      The model's sizes and choices.
    """
    rows = cfg.vocab_size if cfg.padded_vocab_size == "auto" else cfg.padded_vocab_size
    scalar = cfg.head_dim if cfg.query_pre_attn_scalar == "auto" else cfg.query_pre_attn_scalar
    multiplier = {"auto": cfg.logits_via_embedding, "sqrt_emb_dim": True, "one": False}
    return ModelConfig(
        emb_dim=cfg.base_emb_dim,
        num_layers=cfg.base_num_decoder_layers,
        mlp_dim=cfg.base_mlp_dim,
        num_experts=cfg.num_experts,
        num_experts_per_tok=cfg.num_experts_per_tok,
        moe_mlp_dim=cfg.base_mlp_dim if cfg.base_moe_mlp_dim == -1 else cfg.base_moe_mlp_dim,
        shared_experts=cfg.shared_experts,
        first_num_dense_layers=cfg.first_num_dense_layers,
        router=RouterConfig(**dict(cfg.router)),
        routed_bias_update_rate=cfg.routed_bias_update_rate,
        load_balance_loss_weight=cfg.load_balance_loss_weight,
        router_z_loss_weight=cfg.router_z_loss_weight,
        num_query_heads=cfg.base_num_query_heads,
        num_kv_heads=cfg.base_num_kv_heads,
        head_dim=cfg.head_dim,
        vocab_size=cfg.vocab_size,
        padded_vocab_size=rows,
        mlp_activations=tuple(cfg.mlp_activations),
        mlp_activations_limit=max(cfg.mlp_activations_limit, 0.0),
        mlp_bias=cfg.mlp_bias,
        norm_epsilon=cfg.normalization_layer_epsilon,
        norm_placement=cfg.norm_placement,
        norm_scale_offset=cfg.norm_scale_offset,
        pattern=_pattern(cfg),
        tied_head=cfg.logits_via_embedding,
        embedding_multiplier=(
            math.sqrt(cfg.base_emb_dim) if multiplier[cfg.embedding_scale] else 1.0
        ),
        qk_norm="" if cfg.use_qk_norm == "false" else cfg.use_qk_norm,
        query_divisor=math.sqrt(scalar),
        attention_bias=cfg.attention_bias,
        attention_sink=cfg.attention_sink,
        latent=LatentConfig(**dict(cfg.latent_attention)) if cfg.latent_attention else None,
        attn_logits_soft_cap=cfg.attn_logits_soft_cap,
        final_logits_soft_cap=cfg.final_logits_soft_cap,
        z_loss_multiplier=cfg.z_loss_multiplier,
        dtype=jnp.dtype(auto_dtype if cfg.dtype == "auto" else cfg.dtype),
        weight_dtype=jnp.dtype(cfg.weight_dtype),
        remat_policy=cfg.remat_policy,
        rules=rules_with(cfg.logical_axis_rules),
    )


def _pattern(cfg: Any) -> tuple[LayerKind, ...]:
    """Return the kinds in `attention_pattern`; without a pattern every layer has the window."""
    rope = RopeConfig(cfg.rope_max_timescale, **dict(cfg.rope_scaling))
    window, base = cfg.sliding_window_size, cfg.local_rope_max_timescale
    local = LayerKind(window, rope if base == -1 else RopeConfig(base))
    kinds = {"local": local, "global": LayerKind(0, rope)}
    return tuple(kinds[name] for name in cfg.attention_pattern) or (LayerKind(window, rope),)
