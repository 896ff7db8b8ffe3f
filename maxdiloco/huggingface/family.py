"""What a model type of Hugging Face is, a Family, and the tensors that several types share."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from maxdiloco.huggingface.rules import Rule


class Tensor(NamedTuple):
    """Where a leaf's parts are in a Hugging Face checkpoint.

    name: of a tensor, with {layer} and {expert} where there is one for each.
    inputs: leading dims of the part that are inputs of a matrix, which is transposed; 0: no matrix.
    flat: whether the tensor has one dim for all of the part's. half: 0 or 1 where its last dim has
    the values of two parts in turns; None: it is one part's. in_pairs: whether the rotated features
    of its outputs, the last of a head, are pairs of neighbours; ours are the pairs of two halves.
    float32: whether an export has it so whatever dtype is asked for.
    """

    name: str
    inputs: int = 0
    flat: bool = False
    half: int | None = None
    in_pairs: bool = False
    float32: bool = False


class Family(NamedTuple):
    """A model type.

    tensors: by path of our leaf. fixed: our keys that it always has so. must: keys of config.json
    that may have this value only; the default too. inner: key of config.json that holds the text
    model's keys. prefixes: (theirs, ours) of tensor names in other files of the type. left_out:
    beginnings of names of tensors that the text model does without, {layers} its number of layers;
    left_out_part: what they are. of_exports: keys of config.json whatever an import's says.
    """

    model_type: str
    rules: tuple[Rule, ...]
    tensors: Mapping[str, Tensor]
    fixed: Mapping[str, Any] = MappingProxyType({})
    must: Mapping[str, Any] = MappingProxyType({})
    inner: str = ""
    prefixes: tuple[tuple[str, str], ...] = ()
    left_out: tuple[str, ...] = ()
    left_out_part: str = ""
    of_exports: Mapping[str, Any] = MappingProxyType({})

    @property
    def architecture(self) -> str:
        """The class of transformers, as config.json names it."""
        words = self.model_type.removesuffix("_text").split("_")
        return "".join(map(str.title, words)) + "ForCausalLM"


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
