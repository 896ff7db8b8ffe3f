"""Keys of the decoder, which a model file sets, and of its numerics."""

from typing import Annotated, Any, Literal

from annotated_types import Ge, MaxLen, MinLen
from pydantic import WithJsonSchema

from maxdiloco.config import checks
from maxdiloco.config.fields import DIFFER, FREE, SHAPES, Group, Table, key
from maxdiloco.config.values import (
    LIST,
    NESTED,
    TABLE,
    AtLeastTwo,
    Auto,
    Count,
    Even,
    MinusOne,
    MinusOneFloat,
    Natural,
    NonNegative,
    Positive,
)

Activation = Literal["silu", "gelu", "relu", "linear", "quick_gelu", "plus_one"]
QkNorm = Annotated[
    Literal["false", "head", "projection"],
    WithJsonSchema({"enum": [False, "head", "projection"]}),
]
Axis = Literal["diloco", "data", "fsdp", "expert", "context", "tensor"]
Activations = Annotated[tuple[Activation, ...], MinLen(1), MaxLen(2), LIST, NESTED]
AxisRule = Annotated[tuple[str, Axis | Annotated[tuple[Axis, ...], LIST]], LIST]


class ModelChoice(Group, group="model"):
    """The decoder; a model file sets these keys and no others."""

    model_name: str = key("default", hosts=DIFFER, from_checkpoint=True, start_here=True)
    """Name in configs/models, or the path of a yml file with keys of this group."""
    override_model_config: bool = key(False, hosts=DIFFER, from_checkpoint=True)
    """Allow a key to differ from the model file."""


class ModelSizes(Group, group="model"):
    """Sizes."""

    # The sizes are equal to configs/models/tiny.yml, which a laptop trains on bytes.
    base_emb_dim: Count = key(128, unit="features", resume=SHAPES)
    """Width of the residual stream."""
    base_num_decoder_layers: Count = key(4, unit="layers", resume=SHAPES)
    """Number of decoder layers."""
    # Four times base_emb_dim, as all models of arXiv 2503.09799, table 3.
    base_mlp_dim: Count = key(512, unit="features", resume=SHAPES)
    """Hidden width of a dense feed-forward layer."""
    mlp_activations: Activations = key(("silu", "linear"), resume=SHAPES)
    """Activations of a feed-forward layer: one, or two for a gated layer (their product)."""
    mlp_activations_limit: Positive | MinusOneFloat = key(-1.0)
    """Clamp activation inputs: the gate from above, the linear branch on both sides. -1: off."""
    mlp_bias: bool = key(False, resume=SHAPES)
    """Add a bias to each matrix product of the feed-forward layers."""
    # The 257 tokens of the byte tokenizer, in a multiple of 128.
    vocab_size: AtLeastTwo | Auto = key(384, unit="tokens", resume=SHAPES)
    """Size of the vocabulary. auto: the tokenizer's, and the default with a tokenizer file."""
    padded_vocab_size: AtLeastTwo | Auto = key("auto", unit="rows", resume=SHAPES)
    """Rows of embedding and head; those from vocab_size on are padding. auto: vocab_size,
    and with vocab_size=auto a multiple of 128."""
    # The sizes of arXiv 2503.09799, table 3, fit a tied head only.
    logits_via_embedding: bool = key(True, resume=SHAPES)
    """Tie the output head to the embedding."""
    embedding_scale: Literal["auto", "sqrt_emb_dim", "one"] = key("auto")
    """Multiply embeddings by sqrt(base_emb_dim) or by 1. auto: sqrt if the head is tied."""
    final_logits_soft_cap: NonNegative = key(0.0)
    """Soft cap c tanh(x / c) of the output logits. 0: off."""
    # arXiv 2501.18512 section 3.2 and arXiv 2503.09799 section 3.
    z_loss_multiplier: NonNegative = key(1e-4)
    """Weight of the squared log-partition of the output logits in the loss."""

    def _check(self: Any) -> None:
        tokens, rows = self.vocab_size, self.padded_vocab_size
        if "auto" not in (tokens, rows):
            what = f"at least {tokens}"
            checks.expect(self, rows >= tokens, "padded_vocab_size", what, "vocab_size")


class ModelAttention(Group, group="model"):
    """Attention."""

    base_num_query_heads: Count = key(4, unit="heads", resume=SHAPES)
    """Number of attention heads."""
    base_num_kv_heads: Count = key(2, unit="heads", resume=SHAPES)
    """Number of key and value heads, a divisor of base_num_query_heads."""
    head_dim: Even = key(32, unit="features", resume=SHAPES)
    """Size of one attention head; RoPE rotates pairs of features."""
    attention_bias: Literal["none", "qkv", "all"] = key("none", resume=SHAPES)
    """Biases of attention: none, of queries, keys and values, or of the output too."""
    attention_sink: bool = key(False, resume=SHAPES)
    """Give every head a learned logit in the softmax that has no value (gpt-oss)."""
    attn_logits_soft_cap: NonNegative = key(0.0)
    """Soft cap c tanh(x / c) of attention logits. 0: off."""
    query_pre_attn_scalar: Positive | Auto = key("auto")
    """Attention logits are divided by the square root of this. auto: head_dim."""
    sliding_window_size: Natural = key(0, unit="tokens")
    """Number of tokens that a token attends to, including itself. 0: all before it."""
    attention_pattern: Annotated[tuple[Literal["local", "global"], ...], LIST, NESTED] = key(())
    """Attention of the layers, repeated: local has the sliding window. Empty: all layers alike."""

    def _check(self: Any) -> None:
        fits, what = self.base_num_query_heads % self.base_num_kv_heads == 0, "a multiple"
        checks.expect(self, fits, "base_num_query_heads", what, "base_num_kv_heads")
        layers, what = self.base_num_decoder_layers, "at most one entry for each layer"
        fits = len(self.attention_pattern) <= layers
        checks.expect(self, fits, "attention_pattern", what, "base_num_decoder_layers")
        window = self.sliding_window_size
        if "local" in self.attention_pattern:
            checks.expect(self, window, "sliding_window_size", "at least 1", "attention_pattern")
        else:
            checks.require_default(self, "local_rope_max_timescale", "attention_pattern")
            if self.attention_pattern:
                checks.require_default(self, "sliding_window_size", "attention_pattern")


class ModelNorms(Group, group="model"):
    """Norms."""

    norm_placement: Literal["pre", "sandwich", "post"] = key("pre", resume=SHAPES)
    """Norms of the input of a block (pre), of its input and output (sandwich), or output (post)."""
    norm_scale_offset: NonNegative = key(0.0)
    """Added to the scale of every norm. 1: the scale itself starts at 0 (Gemma)."""
    normalization_layer_epsilon: Positive = key(1e-5)
    """Added to the mean square in RMSNorm."""
    # arXiv 2501.18512 section 3.2 and arXiv 2503.09799 section 3; OLMo 2 has projection.
    use_qk_norm: QkNorm = key("head", resume=SHAPES)
    """Normalise queries and keys over each head, or over the projection of all heads."""


class RopeScaling(Table):
    """Entries of rope_scaling, named as in Hugging Face's config.json."""

    rope_type: Literal["linear", "llama3", "yarn"] = key(example="linear")
    """Which frequencies are divided: all, or the slow ones as in Llama 3.1 or YaRN."""
    factor: Annotated[float, Ge(1)] = key(example=8.0)
    """Length of the texts relative to the texts of the first training."""
    original_max_position_embeddings: Count | None = key(None, example=8192, unit="tokens")
    """Length of the texts of the first training (llama3, yarn)."""
    low_freq_factor: Positive = key(1.0, unit="rotations")
    """Frequencies with fewer rotations in such a text are divided (llama3)."""
    high_freq_factor: Positive = key(4.0, unit="rotations")
    """Frequencies with more rotations in such a text are kept (llama3)."""
    beta_fast: Positive = key(32.0, unit="rotations")
    """Frequencies with more rotations in such a text are kept (yarn)."""
    beta_slow: Positive = key(1.0, unit="rotations")
    """Frequencies with fewer rotations in such a text are divided (yarn)."""
    truncate: bool = key(True)
    """Round the limits of kept and divided frequencies to whole pairs (yarn)."""
    attention_factor: Positive | Auto = key("auto")
    """Factor of the rotated queries and keys. auto: 0.1 ln(factor) + 1 (yarn)."""


_LENGTH = "original_max_position_embeddings"
# The entries of rope_scaling that each type reads besides rope_type and factor.
_ROPE_ENTRIES = {
    "linear": (),
    "llama3": (_LENGTH, "low_freq_factor", "high_freq_factor"),
    "yarn": (_LENGTH, "beta_fast", "beta_slow", "truncate", "attention_factor"),
}


class ModelRope(Group, group="model"):
    """RoPE."""

    rope_max_timescale: Positive = key(10000.0, unit="tokens / 2 pi")
    """Longest wavelength of the rotary position embedding."""
    local_rope_max_timescale: Positive | MinusOneFloat = key(-1.0, unit="tokens / 2 pi")
    """Longest wavelength in local layers, which are never scaled. -1: as in the others."""
    rope_scaling: Annotated[RopeScaling, TABLE] = key({})
    """Change of the frequencies for texts longer than in the first training. {}: none."""

    def _check(self: Any) -> None:
        if not self.rope_scaling:
            return
        table = RopeScaling(**self.rope_scaling)
        unused = self.rope_scaling.keys() - {"rope_type", "factor", *_ROPE_ENTRIES[table.rope_type]}
        length = table.original_max_position_embeddings
        is_rising = table.low_freq_factor < table.high_freq_factor
        for met, what in (
            (not unused, f"no {', '.join(sorted(unused))} for this rope_type"),
            (length or table.rope_type == "linear", "original_max_position_embeddings: 8192 or so"),
            (is_rising, "low_freq_factor below high_freq_factor"),
            (table.beta_slow < table.beta_fast, "beta_slow below beta_fast"),
        ):
            checks.expect(self, met, "rope_scaling", what)
        if table.rope_type == "yarn":
            longest = self.rope_max_timescale
            checks.expect(self, longest > 1, "rope_max_timescale", "a number > 1", "rope_scaling")


class Router(Table):
    """Entries of router."""

    score_function: Literal["softmax", "sigmoid"] = key("softmax")
    """Scores of a token's experts from the router's logits: over all experts, or of each."""
    normalise_weights: bool = key(False)
    """Divide the scores of the selected experts by their sum (Mixtral)."""
    scaling_factor: Positive = key(1.0)
    """Factor of the weights of the selected experts."""
    balance_bias: bool = key(False)
    """Balance by a bias that only affects the selection, updated after each step (DeepSeek-V3)."""
    num_groups: Count = key(1, unit="groups")
    """Groups of equally many experts, of which a token uses groups_per_token."""
    groups_per_token: Count = key(1, unit="groups")
    """Groups whose experts a token may use: those with the largest sum of two best scores."""
    logit_bias: bool = key(False)
    """Bias of the router's logits (gpt-oss, whose experts have biases by mlp_bias)."""


class ModelExperts(Group, group="model"):
    """Experts (docs/howto/mixture-of-experts.md)."""

    num_experts: Count = key(1, unit="experts", resume=SHAPES)
    """Number of experts of a layer. 1: a dense feed-forward layer."""
    num_experts_per_tok: Count = key(1, unit="experts")
    """Number of experts that each token uses."""
    base_moe_mlp_dim: Count | MinusOne = key(-1, unit="features", resume=SHAPES)
    """Hidden width of one expert. -1: base_mlp_dim."""
    shared_experts: Natural = key(0, unit="experts", resume=SHAPES)
    """Number of experts that every token uses in addition, as one layer of their joint width."""
    first_num_dense_layers: Natural = key(0, unit="layers", resume=SHAPES)
    """Number of first layers that have a dense feed-forward layer instead of experts."""
    router: Annotated[Router, TABLE] = key({}, resume=SHAPES)
    """How the experts of a token are selected and weighted."""

    def _check(self: Any) -> None:
        experts = self.num_experts
        if experts == 1:
            return
        checks.require(
            self, "quantization", ("none",), "num_experts", "experts have no such kernel"
        )
        router, layers = Router(**self.router), self.base_num_decoder_layers
        groups, used = router.num_groups, router.groups_per_token
        # Sizes of -1 are checked once the devices are known, in parallel.sharding.
        devices = max(1, self.dcn_expert_parallelism) * max(1, self.ici_expert_parallelism)
        parallelism = "dcn_expert_parallelism ici_expert_parallelism"
        dense, per_token = self.first_num_dense_layers, self.num_experts_per_tok
        most = used * experts // groups
        for met, name, what, because in (
            (dense < layers, "first_num_dense_layers", f"at most {layers - 1}", "num_experts"),
            (experts % groups == 0, "num_experts", f"a multiple of {groups}", "router"),
            (used <= groups, "router", "groups_per_token to be at most num_groups", ""),
            (per_token <= most, "num_experts_per_tok", f"at most {most}", "num_experts router"),
            (experts % devices == 0, "num_experts", f"a multiple of {devices}", parallelism),
        ):
            checks.expect(self, met, name, what, because)


class LatentAttention(Table):
    """Entries of latent_attention."""

    q_lora_rank: Natural = key(0, unit="features")
    """Rank of the queries. 0: full rank."""
    kv_lora_rank: Count = key(example=512, unit="features")
    """Rank of keys and values."""
    qk_nope_head_dim: Count = key(example=128, unit="features")
    """Features of a query or key that are not rotated."""
    qk_rope_head_dim: Even = key(example=64, unit="features")
    """Features of a query or key that are rotated; all heads share one rotated key."""
    v_head_dim: Count = key(example=128, unit="features")
    """Features of a value."""


class ModelLatentAttention(Group, group="model"):
    """Latent attention."""

    latent_attention: Annotated[LatentAttention, TABLE] = key({}, resume=SHAPES)
    """Latent attention (DeepSeek, arXiv 2405.04434 sec. 2.1). {}: attention of separate heads."""

    def _check(self: Any) -> None:
        if not self.latent_attention:
            return
        table = LatentAttention(**self.latent_attention)
        for name, needed, reason in (
            ("head_dim", table.qk_nope_head_dim + table.qk_rope_head_dim, "a head has both parts"),
            ("base_num_kv_heads", self.base_num_query_heads, "every head has its own keys"),
            ("use_qk_norm", "false", "it has a norm of its own"),
            ("attention_bias", "none", "it has no biases"),
        ):
            checks.require(self, name, (needed,), "latent_attention", reason)


class Numerics(Group, group="numerics"):
    """Number formats, attention kernel, recomputation, layout."""

    # Few CPUs compute in bfloat16.
    dtype: Literal["auto", "bfloat16", "float32"] = key("auto", start_here=True)
    """Number format of activations and matrix products. auto: bfloat16, on CPU float32."""
    weight_dtype: Literal["float32", "bfloat16"] = key("float32")
    """Number format of the replicas' parameters. Outer parameters are always float32."""
    attention: Literal["autoselected", "dot_product", "flash"] = key("autoselected", resume=FREE)
    """Attention kernel. autoselected: flash (splash on TPU, cuDNN on GPU) if it is supported."""
    remat_policy: Literal["auto", "none", "minimal", "save_qkv_context", "save_context", "full"] = (
        key("auto", resume=FREE)
    )
    """Activations kept for the backward pass. auto: the cheapest policy that fits the memory."""
    matmul_precision: Literal["default", "high", "highest"] = key("default")
    """Precision of matrix products of float32 values."""
    quantization: Literal["none", "int8", "fp8"] = key("none")
    """Round the factors of the layers' products to 8 bits, in both passes (extra quantization)."""
    logical_axis_rules: Annotated[tuple[AxisRule, ...], LIST, NESTED] = key((), resume=FREE)
    """Entries [logical axis, [mesh axes]] that replace entries of parallel/sharding.py."""

    def _check(self: Any) -> None:
        for _, axes in self.logical_axis_rules:
            distinct = isinstance(axes, str) or len(set(axes)) == len(axes)
            checks.expect(self, distinct, "logical_axis_rules", "each mesh axis once in an entry")
