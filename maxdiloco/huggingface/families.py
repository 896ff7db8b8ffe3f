"""The table of the Hugging Face model types that can be imported and exported."""

from maxdiloco.huggingface.fields import Field
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
_EXPERT_WIDTH = Field("intermediate_size", "base_moe_mlp_dim")
_OUTSIDE_EXPERTS = {**OUTSIDE, **ATTENTION, **PRE_NORMS}
_NAMED_LIKE_MLP = experts("mlp", "gate_proj", "up_proj", "down_proj")
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
_SHARED_EXPERTS = {
    "moe.routed_bias": Tensor(LAYER + "mlp.gate.e_score_correction_bias", float32=True),
    "moe.shared.w_gate": Tensor(LAYER + "mlp.shared_experts.gate_proj.weight", inputs=1),
    "moe.shared.w_up": Tensor(LAYER + "mlp.shared_experts.up_proj.weight", inputs=1),
    "moe.shared.w_out": Tensor(LAYER + "mlp.shared_experts.down_proj.weight", inputs=1),
}
# DeepSeek's norms of low rank have this epsilon for any rms_norm_eps, so all norms must have it.
_EPSILON = 1e-6

_LLAMA = Family("llama", {**OUTSIDE, **ATTENTION, **PRE_NORMS, **GATED_MLP})
_QWEN3 = Family("qwen3", {**_LLAMA.tensors, **QK_NORMS}, fixed={"use_qk_norm": "head"})
_GEMMA2 = Family(
    "gemma2",
    {**OUTSIDE, **ATTENTION, **SANDWICH_NORMS, **GATED_MLP},
    fixed=_GEMMA,
    must={"use_bidirectional_attention": False},
)
_GEMMA3 = _GEMMA2._replace(
    model_type="gemma3_text",
    tensors={**_GEMMA2.tensors, **QK_NORMS},
    fixed=_GEMMA | {"use_qk_norm": "head"},
    unused=("attn_logit_softcapping",),  # not used by transformers
    local_rope=True,
)
_DEEPSEEK2 = Family(  # arXiv 2405.04434, without groups, as the Lite model is
    "deepseek_v2",
    {**OUTSIDE, **PRE_NORMS, **GATED_MLP, **_LATENT, **_SHARED_EXPERTS, **_NAMED_LIKE_MLP},
    fixed={"normalization_layer_epsilon": _EPSILON},
    must={
        "rms_norm_eps": _EPSILON,
        "attention_bias": False,
        "moe_layer_freq": 1,
        "mlp_bias": False,
        "scoring_func": "softmax",
        # group_limited_greedy ranks a group by its best expert, our router by its two best.
        "topk_method": "greedy",
        "norm_topk_prob": False,
    },
    unused=("head_dim", "rms_norm_eps", "n_group", "topk_group", "norm_topk_prob"),
    latent=True,
)

# A run is exported as the first model type that has all options of the run.
FAMILIES = (
    _LLAMA,
    _LLAMA._replace(model_type="mistral"),
    _LLAMA._replace(model_type="qwen2", fixed={"attention_bias": "qkv"}),
    _QWEN3,
    Family(
        "olmo2",
        {**OUTSIDE, **ATTENTION, **POST_NORMS, **GATED_MLP, **QK_NORMS},
        fixed={"use_qk_norm": "projection", "norm_placement": "post"},
    ),
    _LLAMA._replace(
        model_type="gemma",
        fixed=_GEMMA | {"norm_placement": "pre"},
        must={"use_bidirectional_attention": False},
    ),
    _GEMMA2,
    _GEMMA3,
    _GEMMA3._replace(  # the text model of files with images
        model_type="gemma3",
        inner="text_config",
        wrapper="language_model.",
        left_out=("vision_tower.", "multi_modal_projector.", "model.vision_tower.",
                  "model.multi_modal_projector."),
        left_out_part="the part for images",
        of_exports={"model_type": "gemma3_text", "architectures": [_GEMMA3.architecture]},
    ),
    Family(
        "mixtral",
        {**_OUTSIDE_EXPERTS, **experts("block_sparse_moe", "w1", "w3", "w2")},
        fixed={"router.normalise_weights": True},
        fields=(_EXPERT_WIDTH,),
    ),
    Family(
        "qwen3_moe",
        {**_OUTSIDE_EXPERTS, **QK_NORMS, **_NAMED_LIKE_MLP},
        fixed={"use_qk_norm": "head"},
        must={"use_sliding_window": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    Family(
        "gpt_oss",
        {**_OUTSIDE_EXPERTS, **_EXPERTS_OF_GPT_OSS},
        fixed={
            "router.normalise_weights": True,
            "mlp_activations": ("quick_gelu", "plus_one"),
            "mlp_bias": True,
            "router.logit_bias": True,
            "attention_sink": True,
        },
        must={"swiglu_alpha": 1.702},
        fields=(_EXPERT_WIDTH,),
    ),
    _DEEPSEEK2,
    _DEEPSEEK2._replace(  # arXiv 2412.19437
        model_type="deepseek_v3",
        fixed=_DEEPSEEK2.fixed | {"router.score_function": "sigmoid", "router.balance_bias": True},
        must={
            "rms_norm_eps": _EPSILON,
            "attention_bias": False,
            "moe_layer_freq": 1,
            "rope_interleave": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        },
        unused=("head_dim", "rms_norm_eps"),
        left_out=("model.layers.{layers}.",),
        left_out_part="the module for the token after the next",
        of_exports={"num_nextn_predict_layers": 0},
    ),
)  # fmt: skip
