"""DeepSeek-V3 (arXiv 2412.19437): latent attention, first dense layers, groups of experts.

And DeepSeek-V2 (arXiv 2405.04434) without groups, as the Lite model is.
"""

import math

from maxdiloco.huggingface import rules
from maxdiloco.huggingface.family import (
    ATTENTION,
    GATED_MLP,
    LAYER,
    OUTSIDE,
    PRE_NORMS,
    Family,
    Field,
    Tensor,
    expert_fields,
    experts,
    sizes,
    unless_null,
)
from maxdiloco.huggingface.rules import Rule

_EPSILON = 1e-6  # of the norms of low rank, whatever rms_norm_eps says: so all norms have it
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


def v2() -> Family:
    """The model type deepseek_v2: a softmax router without a bias."""
    tensors = {leaf: tensor for leaf, tensor in v3().tensors.items() if leaf != "moe.routed_bias"}
    return Family(
        model_type="deepseek_v2",
        fields=_fields(experts=64, per_token=6, width=1407, shared=2, first_dense=0, factor=1.0),
        rules=_rules(),
        fixed={"normalization_layer_epsilon": _EPSILON},
        must={
            "rms_norm_eps": _EPSILON,
            "attention_bias": False,
            "mlp_bias": False,
            "scoring_func": "softmax",
            # group_limited_greedy ranks a group by its best expert, our router by its two best.
            "topk_method": "greedy",
            "norm_topk_prob": False,
            "moe_layer_freq": 1,
        },
        tensors=tensors,
    )


def v3() -> Family:
    """The model type deepseek_v3."""
    return Family(
        model_type="deepseek_v3",
        fields=(
            *_fields(experts=256, per_token=8, width=2048, shared=1, first_dense=3, factor=2.5),
            Field("norm_topk_prob", "router.normalise_weights", True),
            Field("n_group", "router.num_groups", unless_null("n_group", 8, lambda hf: 1)),
            Field(
                "topk_group",
                "router.groups_per_token",
                lambda hf: 4 if hf.get("n_group", 8) not in (1, None) else 1,
            ),
        ),
        rules=_rules(),
        fixed={
            "router.score_function": "sigmoid",
            "router.balance_bias": True,
            "normalization_layer_epsilon": _EPSILON,
        },
        must={
            "rms_norm_eps": _EPSILON,
            "attention_bias": False,
            "rope_interleave": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_layer_freq": 1,
        },
        tensors={
            **OUTSIDE,
            **PRE_NORMS,
            **GATED_MLP,
            **_LATENT,
            **_BESIDE_EXPERTS,
            **experts("mlp", "gate_proj", "up_proj", "down_proj"),
        },
        left_out=("model.layers.{layers}.",),
        left_out_part="the module for the token after the next",
        of_exports={"num_nextn_predict_layers": 0},
    )


def _rules() -> tuple[Rule, ...]:
    """What both types have."""
    rank = rules.or_null("q_lora_rank", "latent_attention.q_lora_rank", _Q_LORA_RANK)
    return (rules.activation("hidden_act", "silu"), rank, _latent_rope())


def _fields(*, experts, per_token, width, shared, first_dense, factor) -> tuple[Field, ...]:
    """Of both types, with the defaults of one."""
    in_rules, width_of_one = ("head_dim", "rms_norm_eps"), ("moe_intermediate_size", width)
    no_shared = unless_null("n_shared_experts", shared, lambda hf: 0)
    return (
        *(field for field in sizes(epsilon=_EPSILON) if field.theirs not in in_rules),
        *expert_fields("n_routed_experts", experts, per_token=per_token, width=width_of_one),
        Field("kv_lora_rank", "latent_attention.kv_lora_rank", 512),
        Field("qk_nope_head_dim", "latent_attention.qk_nope_head_dim", 128),
        Field("qk_rope_head_dim", "latent_attention.qk_rope_head_dim", 64),
        Field("v_head_dim", "latent_attention.v_head_dim", 128),
        Field("first_k_dense_replace", "first_num_dense_layers", first_dense),
        Field("n_shared_experts", "shared_experts", no_shared),
        Field("routed_scaling_factor", "router.scaling_factor", factor),
    )


def _latent_rope() -> Rule:
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
        if scaling.get("rope_type") == "yarn" and scalar and scaling["factor"] > 1:
            factor = (ours["head_dim"] / scalar) ** 0.25
            all_dim = round((factor - 1) / (0.1 * math.log(scaling["factor"])), _DIGITS)
            scaling["mscale_all_dim"] = all_dim
            if scaling.get("attention_factor") == 1:  # as published: the two factors cancel
                scaling["mscale"] = all_dim
                del scaling["attention_factor"]
        return found

    return Rule(read, write)
