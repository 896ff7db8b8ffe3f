"""A model type of Hugging Face, and its tensors as parts of the leaves of our parameters, and back.

A leaf is stacked over layers, and over experts where it has some; a tensor of theirs is one part
of it. Their matrices are [outputs, inputs], ours [inputs, outputs] with the heads apart.
"""

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from maxdiloco.diloco.fragments import Stacked
from maxdiloco.errors import ConfigError
from maxdiloco.huggingface.rules import Rule
from maxdiloco.models.config import ModelConfig
from maxdiloco.models.model import Model

Shape = tuple[int, ...]

# Leaves whose tensors have a row for each token.
OF_VOCABULARY = EMBEDDING, HEAD = "embedding", "head"


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
    model's keys. wrapper: what names of its tensors have more, somewhere. left_out: beginnings of
    names of tensors that the text model does without, {layers} its number of layers; left_out_part:
    what they are. of_exports: keys of config.json whatever an import's says.
    """

    model_type: str
    rules: tuple[Rule, ...]
    tensors: Mapping[str, Tensor]
    fixed: Mapping[str, Any] = MappingProxyType({})
    must: Mapping[str, Any] = MappingProxyType({})
    inner: str = ""
    wrapper: str = ""
    left_out: tuple[str, ...] = ()
    left_out_part: str = ""
    of_exports: Mapping[str, Any] = MappingProxyType({})

    @property
    def architecture(self) -> str:
        """The class of transformers, as config.json names it."""
        words = self.model_type.removesuffix("_text").split("_")
        return "".join(map(str.title, words)) + "ForCausalLM"


class Leaf(NamedTuple):
    """A leaf of the parameters. layers: the layer of each entry of dim 0; None: of no layer."""

    path: str
    shape: Shape
    layers: tuple[int, ...] | None


class Part(NamedTuple):
    """A tensor, and the part of a leaf that it holds.

    name, shape: of the tensor. index: of the leaf's leading dims whose entries are tensors of their
    own. tensor: its entry. rotated: features of a head that are in pairs in the tensor, 0 for none.
    """

    name: str
    shape: Shape
    leaf: Leaf
    index: Shape
    tensor: Tensor
    rotated: int

    @property
    def part_shape(self) -> Shape:
        """Of the part: without the indexed dims of the leaf."""
        return self.leaf.shape[len(self.index) :]


def parts_of(leaf: Leaf, tensor: Tensor, rotated: int) -> Iterator[Part]:
    """The tensors that make up a leaf, in the leaf's order. rotated: features of a head."""
    rotated = rotated if tensor.in_pairs else 0
    num_indexed = _num_indexed(leaf, tensor)
    shape = leaf.shape[num_indexed:]
    if tensor.inputs:
        shape = (math.prod(shape[tensor.inputs :]), math.prod(shape[: tensor.inputs]))
    elif tensor.half is not None:
        shape = (*shape[:-1], 2 * shape[-1])
    elif tensor.flat:
        shape = (math.prod(shape),)
    for index in np.ndindex(leaf.shape[:num_indexed]):
        layer = leaf.layers[index[0]] if leaf.layers is not None else None
        name = tensor.name.format(layer=layer, expert=index[-1] if index else None)
        yield Part(name, shape, leaf, index, tensor, rotated)


def to_part(values: np.ndarray, part: Part) -> np.ndarray:
    """The part of our leaf from the values of their tensor."""
    seen = _as_part(values, part)
    return seen[..., _order(part)] if part.rotated else seen


def put(target: np.ndarray, part: Part, box: tuple[slice, ...], values: np.ndarray) -> None:
    """Put a box of the part into their tensor, or into its first rows. box: of the part."""
    seen = _as_part(target, part)
    box = tuple(slice(s.start, min(s.stop, n)) for s, n in zip(box, seen.shape, strict=True))
    if part.rotated:
        box = (*box[:-1], _order(part)[box[-1]])
    there = seen[box].shape
    seen[box] = values[tuple(map(slice, there))]


def _as_part(values: np.ndarray, part: Part) -> np.ndarray:
    """Their tensor, or its first rows, in the shape of the part: another view of its memory."""
    if part.tensor.half is not None:
        return values[..., part.tensor.half :: 2]
    if not part.tensor.inputs:
        return values.reshape(-1, *part.part_shape[1:])
    inputs, outputs = part.part_shape[: part.tensor.inputs], part.part_shape[part.tensor.inputs :]
    return np.moveaxis(
        values.reshape(-1, *outputs[1:], *inputs), range(len(outputs)), range(-len(outputs), 0)
    )


def _order(part: Part) -> np.ndarray:
    """Of each of our features of a head, the number of theirs."""
    rest, pairs = np.split(np.arange(part.part_shape[-1]), [-part.rotated])
    return np.concatenate([rest, pairs[::2], pairs[1::2]])


def of_model(sizes: ModelConfig, family: Family, most: float = math.inf) -> list[Part]:
    """All parts of a model in the order of the leaves, without values.

    most: parts that a leaf may have: config.json may ask for more experts than fit a list. Raises
    ConfigError.
    """
    model, parts = Model(sizes), []
    shapes = _named(model.shapes)
    for (path, x), (_, axis) in zip(shapes, _named(model.layer_axis), strict=True):
        layers = axis.layers if isinstance(axis, Stacked) else None
        if isinstance(axis, int):
            layers = tuple(range(x.shape[0]))
        in_layer = path if layers is None else path.partition(".")[2]
        tensor = family.tensors.get(in_layer)
        if tensor is None:
            raise ConfigError(
                f"the parameter {path} has no counterpart in model_type={family.model_type}."
            )
        leaf = Leaf(path, tuple(x.shape), layers)
        if (needed := math.prod(leaf.shape[: _num_indexed(leaf, tensor)])) > most:
            raise ConfigError(
                f"config.json asks for {needed:,} tensors of {in_layer}, far more than the files "
                "have. Give the config.json that belongs to them."
            )
        parts += parts_of(leaf, tensor, sizes.rotated_dim)
    return parts


def _num_indexed(leaf: Leaf, tensor: Tensor) -> int:
    """Leading dims of the leaf whose entries are tensors of their own."""
    return (leaf.layers is not None) + ("{expert}" in tensor.name)


def _named(tree):
    """(dotted path, leaf) of nested dicts."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: not isinstance(x, Mapping))
    for path, leaf in leaves:
        yield jax.tree_util.keystr(path, simple=True, separator="."), leaf


# -- tensors that several types share -----------------------------------------------------------

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
