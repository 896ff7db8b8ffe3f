"""Hugging Face's model types: which key of config.json is which of ours, which tensor which leaf.

Tables, not code: a model type is a Family. Rules are for what is more than another name.
"""

from maxdiloco.huggingface import deepseek, rules
from maxdiloco.huggingface.family import Family, Field, grouped, per_token, sizes
from maxdiloco.huggingface.rules import Rule
from maxdiloco.huggingface.tensor_names import (
    ATTENTION,
    GATED_MLP,
    LAYER,
    OUTSIDE,
    POST_NORMS,
    PRE_NORMS,
    QK_NORMS,
    SANDWICH_NORMS,
    experts,
)
from maxdiloco.huggingface.tensors import Tensor


def _silu() -> Rule:
    return rules.activation("hidden_act", "silu")


def _llama() -> Family:
    return Family(
        model_type="llama",
        architecture="LlamaForCausalLM",
        fields=(*sizes(epsilon=1e-6), Field("mlp_bias", "mlp_bias", False)),
        rules=(_silu(), rules.tied(False), rules.attention_bias(False), rules.rope(10000.0)),
        fixed={},
        must={},
        tensors={**OUTSIDE, **ATTENTION, **PRE_NORMS, **GATED_MLP},
    )


def _mistral() -> Family:
    return _llama()._replace(
        model_type="mistral",
        architecture="MistralForCausalLM",
        fields=sizes(epsilon=1e-6, num_key_value_heads=grouped(8)),
        rules=(_silu(), rules.tied(False), rules.rope(10000.0), rules.window(4096)),
    )


def _qwen2() -> Family:
    return _llama()._replace(
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        fields=sizes(epsilon=1e-6),
        rules=(_silu(), rules.tied(False), rules.rope(10000.0), rules.qwen_window()),
        fixed={"attention_bias": "qkv"},
    )


def _qwen3() -> Family:
    return _llama()._replace(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        fields=sizes(epsilon=1e-6, head_dim=128),
        rules=(*_qwen2().rules, rules.attention_bias(False)),
        fixed={"use_qk_norm": True},
        tensors={**_llama().tensors, **QK_NORMS},
    )


def _olmo2() -> Family:
    return _llama()._replace(
        model_type="olmo2",
        architecture="Olmo2ForCausalLM",
        fields=sizes(epsilon=1e-5),
        fixed={"use_qk_norm": True, "qk_norm_scope": "projection", "norm_placement": "post"},
        tensors={**OUTSIDE, **ATTENTION, **POST_NORMS, **GATED_MLP, **QK_NORMS},
    )


_GEMMA = {
    "norm_placement": "sandwich",
    "norm_scale_offset": 1.0,
    "embedding_scale": "sqrt_emb_dim",
}


def _gemma_rules() -> tuple[Rule, ...]:
    return (
        rules.activation("hidden_activation", "gelu_pytorch_tanh"),
        rules.tied(True),
        rules.attention_bias(False),
    )


def _gemma() -> Family:
    """The first Gemma: norms of the input alone, no soft-caps and no windows."""
    return Family(
        model_type="gemma",
        architecture="GemmaForCausalLM",
        fields=sizes(epsilon=1e-6, num_attention_heads=16, num_key_value_heads=16, head_dim=256),
        rules=(
            rules.activation("hidden_act", "gelu_pytorch_tanh", gelu_is_tanh=True),
            rules.tied(True),
            rules.attention_bias(False),
            rules.rope(10000.0),
        ),
        fixed=_GEMMA | {"norm_placement": "pre"},
        must={"use_bidirectional_attention": False},
        tensors={**OUTSIDE, **ATTENTION, **PRE_NORMS, **GATED_MLP},
    )


def _gemma2() -> Family:
    return Family(
        model_type="gemma2",
        architecture="Gemma2ForCausalLM",
        fields=(
            *sizes(epsilon=1e-6, num_attention_heads=8, num_key_value_heads=4, head_dim=256),
            Field("query_pre_attn_scalar", "query_pre_attn_scalar", 256.0),
        ),
        rules=(
            *_gemma_rules(),
            rules.rope(10000.0),
            rules.pattern(4096, 2),
            rules.soft_caps(50.0, 30.0),
        ),
        fixed=_GEMMA,
        must={"use_bidirectional_attention": False},
        tensors={**OUTSIDE, **ATTENTION, **SANDWICH_NORMS, **GATED_MLP},
    )


def _gemma3() -> Family:
    return _gemma2()._replace(
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        fields=(
            *sizes(
                epsilon=1e-6,
                num_attention_heads=8,
                num_key_value_heads=4,
                head_dim=256,
                vocab_size=262208,
            ),
            _gemma2().fields[-1],
        ),
        rules=(
            *_gemma_rules(),
            rules.local_rope(1e6, 1e4),
            rules.pattern(4096, 6),
            rules.soft_caps(0.0, 0.0),
        ),
        fixed=_GEMMA | {"use_qk_norm": True},
        tensors={**_gemma2().tensors, **QK_NORMS},
    )


# The text model of a multimodal checkpoint; older and newer versions name its tensors unlike.


def _gemma3_images() -> Family:
    text = _gemma3()
    return text._replace(
        model_type="gemma3",
        inner="text_config",
        prefixes=(("language_model.model.", "model."), ("model.language_model.", "model."),
                  ("language_model.lm_head.", "lm_head.")),
        left_out=("vision_tower.", "multi_modal_projector.", "model.vision_tower.",
                  "model.multi_modal_projector."),
        left_out_part="the part for images",
        of_exports={"model_type": text.model_type, "architectures": [text.architecture]},
    )  # fmt: skip


def _mixtral() -> Family:
    return _mistral()._replace(
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        fields=(*sizes(epsilon=1e-5, num_key_value_heads=grouped(8)), per_token(2)),
        rules=(
            _silu(),
            rules.tied(False),
            rules.rope(1e6),
            rules.window(0),
            rules.experts("num_local_experts", 8),
            rules.expert_width("intermediate_size", 14336),
        ),
        fixed={"norm_topk_prob": True},
        tensors={
            **OUTSIDE,
            **ATTENTION,
            **PRE_NORMS,
            **experts("block_sparse_moe", "w1", "w3", "w2"),
        },
    )


def _qwen3_moe() -> Family:
    return _qwen3()._replace(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        fields=(
            *sizes(epsilon=1e-6, num_key_value_heads=grouped(4)),
            per_token(8),
            Field("norm_topk_prob", "norm_topk_prob", False),
        ),
        rules=(
            _silu(),
            rules.tied(False),
            rules.rope(10000.0),
            rules.attention_bias(False),
            rules.experts("num_experts", 128),
            rules.expert_width("moe_intermediate_size", 768),
        ),
        must={"use_sliding_window": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        tensors={
            **OUTSIDE,
            **ATTENTION,
            **PRE_NORMS,
            **QK_NORMS,
            **experts("mlp", "gate_proj", "up_proj", "down_proj"),
        },
    )


_YARN_OF_GPT_OSS = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def _gpt_oss() -> Family:
    return _mixtral()._replace(
        model_type="gpt_oss",
        architecture="GptOssForCausalLM",
        fields=(
            *sizes(epsilon=1e-5, head_dim=64, num_key_value_heads=8),
            per_token(4),
            Field("swiglu_limit", "mlp_activations_limit", 7.0),
        ),
        rules=(
            rules.tied(False),
            rules.rope(150000.0, _YARN_OF_GPT_OSS),
            rules.pattern(128, 2),
            rules.attention_bias(True),
            rules.experts("num_local_experts", 128),
            rules.expert_width("intermediate_size", 2880),
        ),
        fixed={
            "norm_topk_prob": True,
            "mlp_activations": ("quick_gelu", "plus_one"),
            "mlp_bias": True,
            "router_bias": True,
            "attention_sink": True,
        },
        must={"swiglu_alpha": 1.702},
        tensors={
            **OUTSIDE,
            **ATTENTION,
            **PRE_NORMS,
            "attention.sinks": Tensor(LAYER + "self_attn.sinks"),
            "moe.router": Tensor(LAYER + "mlp.router.weight", inputs=1),
            "moe.router_bias": Tensor(LAYER + "mlp.router.bias"),
            "moe.w_gate": Tensor(LAYER + "mlp.experts.gate_up_proj", half=0),
            "moe.w_up": Tensor(LAYER + "mlp.experts.gate_up_proj", half=1),
            "moe.w_out": Tensor(LAYER + "mlp.experts.down_proj"),
            "moe.w_gate_bias": Tensor(LAYER + "mlp.experts.gate_up_proj_bias", half=0),
            "moe.w_up_bias": Tensor(LAYER + "mlp.experts.gate_up_proj_bias", half=1),
            "moe.w_out_bias": Tensor(LAYER + "mlp.experts.down_proj_bias"),
        },
    )


def families() -> tuple[Family, ...]:
    """All model types. The first that has all options of a config is what it is exported as."""
    return (
        _llama(), _mistral(), _qwen2(), _qwen3(), _olmo2(), _gemma(), _gemma2(), _gemma3(),
        _gemma3_images(), _mixtral(), _qwen3_moe(), _gpt_oss(), deepseek.v2(),
        deepseek.v3(),
    )  # fmt: skip
