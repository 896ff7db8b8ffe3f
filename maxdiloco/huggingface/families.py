"""Hugging Face's model types: which key of config.json is which of ours, which tensor which leaf.

Tables, not code: a model type is a Family. Rules are for what is more than another name.
"""

from maxdiloco.huggingface import deepseek, rules
from maxdiloco.huggingface.family import (
    ATTENTION,
    GATED_MLP,
    LAYER,
    OUTSIDE,
    POST_NORMS,
    PRE_NORMS,
    QK_NORMS,
    SANDWICH_NORMS,
    Family,
    Field,
    Tensor,
    expert_fields,
    experts,
    grouped,
    sizes,
)

_GEMMA = {
    "norm_placement": "sandwich",
    "norm_scale_offset": 1.0,
    "embedding_scale": "sqrt_emb_dim",
}
_YARN_OF_GPT_OSS = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
_EXPERTS_OF_GPT_OSS = {
    "attention.sinks": Tensor(LAYER + "self_attn.sinks"),
    "moe.router": Tensor(LAYER + "mlp.router.weight", inputs=1),
    "moe.router_bias": Tensor(LAYER + "mlp.router.bias"),
    "moe.w_gate": Tensor(LAYER + "mlp.experts.gate_up_proj", half=0),
    "moe.w_up": Tensor(LAYER + "mlp.experts.gate_up_proj", half=1),
    "moe.w_out": Tensor(LAYER + "mlp.experts.down_proj"),
    "moe.w_gate_bias": Tensor(LAYER + "mlp.experts.gate_up_proj_bias", half=0),
    "moe.w_up_bias": Tensor(LAYER + "mlp.experts.gate_up_proj_bias", half=1),
    "moe.w_out_bias": Tensor(LAYER + "mlp.experts.down_proj_bias"),
}


def families() -> tuple[Family, ...]:
    """All model types. The first that has all options of a config is what it is exported as."""
    return (*_dense(), *_gemmas(), *_with_experts(), deepseek.v2(), deepseek.v3())


def _dense() -> tuple[Family, ...]:
    silu, rope = rules.activation("hidden_act", "silu"), rules.rope(10000.0)
    bias = rules.attention_bias(False)
    llama = Family(
        model_type="llama",
        fields=(*sizes(epsilon=1e-6), Field("mlp_bias", "mlp_bias", False)),
        rules=(silu, bias, rope),
        tensors={**OUTSIDE, **ATTENTION, **PRE_NORMS, **GATED_MLP},
    )
    mistral = llama._replace(
        model_type="mistral",
        fields=sizes(epsilon=1e-6, num_key_value_heads=grouped(8)),
        rules=(silu, rope, rules.or_null("sliding_window", "sliding_window_size", 4096)),
    )
    qwen2 = llama._replace(
        model_type="qwen2",
        fields=sizes(epsilon=1e-6),
        rules=(silu, rope, rules.qwen_window()),
        fixed={"attention_bias": "qkv"},
    )
    qwen3 = llama._replace(
        model_type="qwen3",
        fields=sizes(epsilon=1e-6, head_dim=128),
        rules=(*qwen2.rules, bias),
        fixed={"use_qk_norm": "head"},
        tensors={**llama.tensors, **QK_NORMS},
    )
    olmo2 = llama._replace(
        model_type="olmo2",
        fields=sizes(epsilon=1e-5),
        fixed={"use_qk_norm": "projection", "norm_placement": "post"},
        tensors={**OUTSIDE, **ATTENTION, **POST_NORMS, **GATED_MLP, **QK_NORMS},
    )
    return llama, mistral, qwen2, qwen3, olmo2


def _gemmas() -> tuple[Family, ...]:
    """The first has norms of the input alone, no soft-caps and no windows. gemma3 is the text model
    of a multimodal checkpoint; older and newer versions name its tensors unlike."""
    gelu = rules.activation("hidden_act", "gelu_pytorch_tanh", gelu_is_tanh=True)
    tanh = rules.activation("hidden_activation", "gelu_pytorch_tanh")
    bias, rope = rules.attention_bias(False), rules.rope(10000.0)

    def with_windows(rope, period, cap, final_cap):
        return (
            tanh,
            bias,
            rope,
            rules.pattern(4096, period),
            rules.or_null("attn_logit_softcapping", "attn_logits_soft_cap", cap),
            rules.or_null("final_logit_softcapping", "final_logits_soft_cap", final_cap),
        )

    def of_heads(queries, keys, **more):
        heads = {"num_attention_heads": queries, "num_key_value_heads": keys, "head_dim": 256}
        return sizes(epsilon=1e-6, tied=True, **heads, **more)

    gemma = Family(
        model_type="gemma",
        fields=of_heads(16, 16),
        rules=(gelu, bias, rope),
        fixed=_GEMMA | {"norm_placement": "pre"},
        must={"use_bidirectional_attention": False},
        tensors={**OUTSIDE, **ATTENTION, **PRE_NORMS, **GATED_MLP},
    )
    scalar = Field("query_pre_attn_scalar", "query_pre_attn_scalar", 256.0)
    gemma2 = gemma._replace(
        model_type="gemma2",
        fields=(*of_heads(8, 4), scalar),
        rules=with_windows(rope, 2, 50.0, 30.0),
        fixed=_GEMMA,
        tensors={**OUTSIDE, **ATTENTION, **SANDWICH_NORMS, **GATED_MLP},
    )
    text = gemma2._replace(
        model_type="gemma3_text",
        fields=(*of_heads(8, 4, vocab_size=262208), scalar),
        rules=with_windows(rules.rope(1e6, local=1e4), 6, 0.0, 0.0),
        fixed=_GEMMA | {"use_qk_norm": "head"},
        tensors={**gemma2.tensors, **QK_NORMS},
    )
    images = text._replace(
        model_type="gemma3",
        inner="text_config",
        prefixes=(("language_model.model.", "model."), ("model.language_model.", "model."),
                  ("language_model.lm_head.", "lm_head.")),
        left_out=("vision_tower.", "multi_modal_projector.", "model.vision_tower.",
                  "model.multi_modal_projector."),
        left_out_part="the part for images",
        of_exports={"model_type": text.model_type, "architectures": [text.architecture]},
    )  # fmt: skip
    return gemma, gemma2, text, images


def _with_experts() -> tuple[Family, ...]:
    silu, outside = rules.activation("hidden_act", "silu"), {**OUTSIDE, **ATTENTION, **PRE_NORMS}
    mixtral = Family(
        model_type="mixtral",
        fields=(
            *sizes(epsilon=1e-5, num_key_value_heads=grouped(8)),
            *expert_fields("num_local_experts", 8, per_token=2, width=("intermediate_size", 14336)),
        ),
        rules=(silu, rules.rope(1e6), rules.or_null("sliding_window", "sliding_window_size", 0)),
        fixed={"router.normalise_weights": True},
        tensors={**outside, **experts("block_sparse_moe", "w1", "w3", "w2")},
    )
    qwen3_moe = mixtral._replace(
        model_type="qwen3_moe",
        fields=(
            *sizes(epsilon=1e-6, num_key_value_heads=grouped(4)),
            *expert_fields("num_experts", 128, per_token=8, width=("moe_intermediate_size", 768)),
            Field("norm_topk_prob", "router.normalise_weights", False),
        ),
        rules=(silu, rules.rope(10000.0), rules.attention_bias(False)),
        fixed={"use_qk_norm": "head"},
        must={"use_sliding_window": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        tensors={**outside, **QK_NORMS, **experts("mlp", "gate_proj", "up_proj", "down_proj")},
    )
    gpt_oss = mixtral._replace(
        model_type="gpt_oss",
        fields=(
            *sizes(epsilon=1e-5, head_dim=64, num_key_value_heads=8),
            *expert_fields(
                "num_local_experts", 128, per_token=4, width=("intermediate_size", 2880)
            ),
            Field("swiglu_limit", "mlp_activations_limit", 7.0),
        ),
        rules=(
            rules.rope(150000.0, _YARN_OF_GPT_OSS),
            rules.pattern(128, 2),
            rules.attention_bias(True),
        ),
        fixed={
            "router.normalise_weights": True,
            "mlp_activations": ("quick_gelu", "plus_one"),
            "mlp_bias": True,
            "router.logit_bias": True,
            "attention_sink": True,
        },
        must={"swiglu_alpha": 1.702},
        tensors={**outside, **_EXPERTS_OF_GPT_OSS},
    )
    return mixtral, qwen3_moe, gpt_oss
