"""Which tensor of a Hugging Face checkpoint is which leaf, for what several model types share."""

from maxdiloco.huggingface.tensors import Tensor

LAYER = "model.layers.{layer}."


OUTSIDE = {
    "embedding": Tensor("model.embed_tokens.weight"),
    "final_norm.scale": Tensor("model.norm.weight"),
    "head": Tensor("lm_head.weight", inputs=1),
}
ATTENTION = {
    "attention.query": Tensor(LAYER + "self_attn.q_proj.weight", inputs=1),
    "attention.key": Tensor(LAYER + "self_attn.k_proj.weight", inputs=1),
    "attention.value": Tensor(LAYER + "self_attn.v_proj.weight", inputs=1),
    "attention.out": Tensor(LAYER + "self_attn.o_proj.weight", inputs=2),
    "attention.query_bias": Tensor(LAYER + "self_attn.q_proj.bias", flat=True),
    "attention.key_bias": Tensor(LAYER + "self_attn.k_proj.bias", flat=True),
    "attention.value_bias": Tensor(LAYER + "self_attn.v_proj.bias", flat=True),
    "attention.out_bias": Tensor(LAYER + "self_attn.o_proj.bias"),
}
QK_NORMS = {
    "attention.query_norm.scale": Tensor(LAYER + "self_attn.q_norm.weight", flat=True),
    "attention.key_norm.scale": Tensor(LAYER + "self_attn.k_norm.weight", flat=True),
}
PRE_NORMS = {
    "attention_norm.scale": Tensor(LAYER + "input_layernorm.weight"),
    "mlp_norm.scale": Tensor(LAYER + "post_attention_layernorm.weight"),
}
POST_NORMS = {
    "post_attention_norm.scale": Tensor(LAYER + "post_attention_layernorm.weight"),
    "post_mlp_norm.scale": Tensor(LAYER + "post_feedforward_layernorm.weight"),
}
SANDWICH_NORMS = {
    **POST_NORMS,
    "attention_norm.scale": Tensor(LAYER + "input_layernorm.weight"),
    "mlp_norm.scale": Tensor(LAYER + "pre_feedforward_layernorm.weight"),
}
GATED_MLP = {
    "mlp.w_gate": Tensor(LAYER + "mlp.gate_proj.weight", inputs=1),
    "mlp.w_up": Tensor(LAYER + "mlp.up_proj.weight", inputs=1),
    "mlp.w_out": Tensor(LAYER + "mlp.down_proj.weight", inputs=1),
    "mlp.w_gate_bias": Tensor(LAYER + "mlp.gate_proj.bias"),
    "mlp.w_up_bias": Tensor(LAYER + "mlp.up_proj.bias"),
    "mlp.w_out_bias": Tensor(LAYER + "mlp.down_proj.bias"),
}


def experts(block: str, gate: str, up: str, out: str) -> dict[str, Tensor]:
    """A router and experts with a tensor each. block: of a layer."""
    names = {"w_gate": gate, "w_up": up, "w_out": out}
    found = {"moe.router": Tensor(f"{LAYER}{block}.gate.weight", inputs=1)}
    for leaf, name in names.items():
        tensor = f"{LAYER}{block}.experts.{{expert}}.{name}.weight"
        found[f"moe.{leaf}"] = Tensor(tensor, inputs=1)
    return found
