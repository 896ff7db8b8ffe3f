"""Hugging Face's model types: which key of config.json is which of ours, which tensor which leaf.

Tables, not code: a model type is a Family. Rules are for what is more than another name.
"""

import math

from maxdiloco.huggingface import rules
from maxdiloco.huggingface.rules import activation, attention_bias, expert_fields, field, or_null
from maxdiloco.huggingface.tensors import (
    ATTENTION,
    GATED_MLP,
    LAYER,
    OUTSIDE,
    POST_NORMS,
    PRE_NORMS,
    QK_NORMS,
    SANDWICH_NORMS,
    Family,
    Tensor,
    experts,
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
_EPSILON = 1e-6  # of DeepSeek's norms of low rank, whatever rms_norm_eps says: so all norms have it
_Q_LORA_RANK = 1536  # where config.json has no such key; null is a matrix of full rank
_DIGITS = 12  # of mscale_all_dim in config.json: 1.0 rather than 0.9999999999999998
_LATENT = {
    "attention.query": Tensor(LAYER + "self_attn.q_proj.weight", inputs=1, in_pairs=True),
    "attention.query_down": Tensor(LAYER + "self_attn.q_a_proj.weight", inputs=1),
    "attention.query_norm.scale": Tensor(LAYER + "self_attn.q_a_layernorm.weight"),
    "attention.query_up": Tensor(LAYER + "self_attn.q_b_proj.weight", inputs=1, in_pairs=True),
    "attention.kv_down": Tensor(
        LAYER + "self_attn.kv_a_proj_with_mqa.weight", inputs=1, in_pairs=True
    ),
    "attention.kv_norm.scale": Tensor(LAYER + "self_attn.kv_a_layernorm.weight"),
    "attention.kv_up": Tensor(LAYER + "self_attn.kv_b_proj.weight", inputs=1),
    "attention.out": ATTENTION["attention.out"],
}
_BESIDE_EXPERTS = {
    "moe.routed_bias": Tensor(LAYER + "mlp.gate.e_score_correction_bias", float32=True),
    "moe.shared.w_gate": Tensor(LAYER + "mlp.shared_experts.gate_proj.weight", inputs=1),
    "moe.shared.w_up": Tensor(LAYER + "mlp.shared_experts.up_proj.weight", inputs=1),
    "moe.shared.w_out": Tensor(LAYER + "mlp.shared_experts.down_proj.weight", inputs=1),
}


def families() -> tuple[Family, ...]:
    """All model types. The first that has all options of a config is what it is exported as."""
    return (*_dense(), *_gemmas(), *_with_experts(), *_deepseeks())


def _dense() -> tuple[Family, ...]:
    silu, bias, rope = activation("hidden_act", "silu"), attention_bias(False), rules.rope(10000.0)
    llama = Family(
        model_type="llama",
        rules=(*rules.sizes(epsilon=1e-6), field("mlp_bias", "mlp_bias", False), silu, bias, rope),
        tensors={**OUTSIDE, **ATTENTION, **PRE_NORMS, **GATED_MLP},
    )
    window = or_null("sliding_window", "sliding_window_size", 4096)
    mistral = llama._replace(
        model_type="mistral",
        rules=(*rules.sizes(epsilon=1e-6, num_key_value_heads=8), silu, rope, window),
    )
    qwen2 = llama._replace(
        model_type="qwen2",
        rules=(*rules.sizes(epsilon=1e-6), silu, rope, rules.qwen_window()),
        fixed={"attention_bias": "qkv"},
    )
    qwen3 = llama._replace(
        model_type="qwen3",
        rules=(*rules.sizes(epsilon=1e-6, head_dim=128), silu, rope, rules.qwen_window(), bias),
        fixed={"use_qk_norm": "head"},
        tensors={**llama.tensors, **QK_NORMS},
    )
    olmo2 = llama._replace(
        model_type="olmo2",
        rules=(*rules.sizes(epsilon=1e-5), silu, bias, rope),
        fixed={"use_qk_norm": "projection", "norm_placement": "post"},
        tensors={**OUTSIDE, **ATTENTION, **POST_NORMS, **GATED_MLP, **QK_NORMS},
    )
    return llama, mistral, qwen2, qwen3, olmo2


def _gemmas() -> tuple[Family, ...]:
    """The first has norms of the input alone, no soft-caps and no windows. gemma3 is the text model
    of a multimodal checkpoint; older and newer versions name its tensors unlike."""
    bias, rope = attention_bias(False), rules.rope(10000.0)

    def of_heads(queries, keys, **more):
        heads = {"num_attention_heads": queries, "num_key_value_heads": keys, "head_dim": 256}
        return rules.sizes(epsilon=1e-6, tied=True, **heads, **more)

    def with_windows(rope, period, final_cap, **more):
        return (
            *of_heads(8, 4, **more),
            # transformers reads a whole number alone.
            field("query_pre_attn_scalar", "query_pre_attn_scalar", 256.0, write=round),
            activation("hidden_activation", "gelu_pytorch_tanh"),
            bias,
            rope,
            rules.pattern(4096, period),
            or_null("final_logit_softcapping", "final_logits_soft_cap", final_cap),
        )

    # transformers' Gemma 3 reads this key too, and computes nothing with it.
    cap = or_null("attn_logit_softcapping", "attn_logits_soft_cap", 50.0)
    # Files of the first say gelu and mean its tanh form, as transformers reads them.
    gelu = activation("hidden_act", "gelu_pytorch_tanh", gelu="gelu")
    gemma = Family(
        model_type="gemma",
        rules=(*of_heads(16, 16), gelu, bias, rope),
        fixed=_GEMMA | {"norm_placement": "pre"},
        must={"use_bidirectional_attention": False},
        tensors={**OUTSIDE, **ATTENTION, **PRE_NORMS, **GATED_MLP},
    )
    gemma2 = gemma._replace(
        model_type="gemma2",
        rules=(*with_windows(rope, 2, 30.0), cap),
        fixed=_GEMMA,
        tensors={**OUTSIDE, **ATTENTION, **SANDWICH_NORMS, **GATED_MLP},
    )
    text = gemma2._replace(
        model_type="gemma3_text",
        rules=with_windows(rules.rope(1e6, local=1e4), 6, 0.0, vocab_size=262208),
        fixed=_GEMMA | {"use_qk_norm": "head"},
        tensors={**gemma2.tensors, **QK_NORMS},
    )
    images = text._replace(
        model_type="gemma3",
        inner="text_config",
        wrapper="language_model.",
        left_out=("vision_tower.", "multi_modal_projector.", "model.vision_tower.",
                  "model.multi_modal_projector."),
        left_out_part="the part for images",
        of_exports={"model_type": text.model_type, "architectures": [text.architecture]},
    )  # fmt: skip
    return gemma, gemma2, text, images


def _with_experts() -> tuple[Family, ...]:
    silu, outside = activation("hidden_act", "silu"), {**OUTSIDE, **ATTENTION, **PRE_NORMS}
    mixtral = Family(
        model_type="mixtral",
        rules=(
            *rules.sizes(epsilon=1e-5, num_key_value_heads=8),
            *expert_fields("num_local_experts", 8, per_token=2, intermediate_size=14336),
            silu,
            rules.rope(1e6),
            or_null("sliding_window", "sliding_window_size", 0),
        ),
        fixed={"router.normalise_weights": True},
        tensors={**outside, **experts("block_sparse_moe", "w1", "w3", "w2")},
    )
    qwen3_moe = mixtral._replace(
        model_type="qwen3_moe",
        rules=(
            *rules.sizes(epsilon=1e-6, num_key_value_heads=4),
            *expert_fields("num_experts", 128, per_token=8, moe_intermediate_size=768),
            field("norm_topk_prob", "router.normalise_weights", False),
            silu,
            rules.rope(10000.0),
            attention_bias(False),
        ),
        fixed={"use_qk_norm": "head"},
        must={"use_sliding_window": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        tensors={**outside, **QK_NORMS, **experts("mlp", "gate_proj", "up_proj", "down_proj")},
    )
    gpt_oss = mixtral._replace(
        model_type="gpt_oss",
        rules=(
            *rules.sizes(epsilon=1e-5, head_dim=64, num_key_value_heads=8),
            *expert_fields("num_local_experts", 128, per_token=4, intermediate_size=2880),
            field("swiglu_limit", "mlp_activations_limit", 7.0),
            rules.rope(150000.0, _YARN_OF_GPT_OSS),
            rules.pattern(128, 2),
            attention_bias(True),
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


def _deepseeks() -> tuple[Family, ...]:
    """V2 (arXiv 2405.04434) without groups, as the Lite model is; V3 (arXiv 2412.19437)."""

    def used(hf):
        return min(4, hf.get("n_group", 8) or 1)

    of_latent = (
        activation("hidden_act", "silu"),
        or_null("q_lora_rank", "latent_attention.q_lora_rank", _Q_LORA_RANK),
        _latent_rope(),
    )
    of_both = {"rms_norm_eps": _EPSILON, "attention_bias": False, "moe_layer_freq": 1}
    v2 = Family(
        model_type="deepseek_v2",
        rules=(*_latent(64, per_token=6, width=1407, shared=2, dense=0, factor=1.0), *of_latent),
        fixed={"normalization_layer_epsilon": _EPSILON},
        must=of_both
        | {
            "mlp_bias": False,
            "scoring_func": "softmax",
            # group_limited_greedy ranks a group by its best expert, our router by its two best.
            "topk_method": "greedy",
            "norm_topk_prob": False,
        },
        tensors={
            **OUTSIDE,
            **PRE_NORMS,
            **GATED_MLP,
            **_LATENT,
            **_BESIDE_EXPERTS,
            **experts("mlp", "gate_proj", "up_proj", "down_proj"),
        },
    )
    v3 = v2._replace(
        model_type="deepseek_v3",
        rules=(
            *_latent(256, per_token=8, width=2048, shared=1, dense=3, factor=2.5),
            field("norm_topk_prob", "router.normalise_weights", True),
            field("n_group", "router.num_groups", 8, null=1),
            field("topk_group", "router.groups_per_token", used),
            *of_latent,
        ),
        fixed=v2.fixed | {"router.score_function": "sigmoid", "router.balance_bias": True},
        must=of_both
        | {"rope_interleave": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        left_out=("model.layers.{layers}.",),
        left_out_part="the module for the token after the next",
        of_exports={"num_nextn_predict_layers": 0},
    )
    return v2, v3


def _latent(
    num_experts: int, *, per_token: int, width: int, shared: int, dense: int, factor: float
) -> tuple[rules.Rule, ...]:
    """The fields of both types, with the defaults of one. dense: layers without experts."""
    of_experts = {"per_token": per_token, "moe_intermediate_size": width}
    sizes, others = rules.sizes(epsilon=_EPSILON), ("head_dim", "rms_norm_eps")
    return (
        *(size for size in sizes if size.key not in others),
        *expert_fields("n_routed_experts", num_experts, **of_experts),
        field("kv_lora_rank", "latent_attention.kv_lora_rank", 512),
        field("qk_nope_head_dim", "latent_attention.qk_nope_head_dim", 128),
        field("qk_rope_head_dim", "latent_attention.qk_rope_head_dim", 64),
        field("v_head_dim", "latent_attention.v_head_dim", 128),
        field("first_k_dense_replace", "first_num_dense_layers", dense),
        field("n_shared_experts", "shared_experts", shared, null=0),
        field("routed_scaling_factor", "router.scaling_factor", factor),
    )


def _latent_rope() -> rules.Rule:
    """Yarn that makes the logits of attention larger, too: by mscale_all_dim."""
    base = rules.rope(10000.0)

    def read(hf):
        sizes = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
        dim = sum(rules.number(name, hf.get(name, size)) for name, size in sizes.items())
        parameters, found = rules.rope_parameters(hf), base.read(hf) | {"head_dim": dim}
        all_dim = parameters.get("mscale_all_dim")
        if found.get("rope_scaling", {}).get("rope_type") == "yarn" and all_dim:
            number = rules.number("factor", parameters["factor"])
            factor = rules.mscale(number, rules.number("mscale_all_dim", all_dim))
            found["query_pre_attn_scalar"] = dim / factor**4  # of a product of two
        return found

    def write(ours):
        found = base.write(ours)
        scaling, scalar = found["rope_scaling"] or {}, ours["query_pre_attn_scalar"]
        dim = ours["head_dim"]
        if scaling.get("rope_type") == "yarn" and scalar != dim and scaling["factor"] > 1:
            factor = (dim / scalar) ** 0.25
            all_dim = round((factor - 1) / (0.1 * math.log(scaling["factor"])), _DIGITS)
            scaling["mscale_all_dim"] = all_dim
            if scaling.get("attention_factor") == 1:  # as published: the two factors cancel
                scaling["mscale"] = all_dim
                del scaling["attention_factor"]
        return found

    return rules.Rule(read, write)
