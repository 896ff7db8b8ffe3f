"""Map the tensors of a Hugging Face model to parts of the leaves of our parameters, and back.

A leaf is stacked over layers and, in a mixture of experts, over experts. A tensor of Hugging Face
holds one part of a leaf. Matrices of Hugging Face are [outputs, inputs]. Our matrices are [inputs,
outputs], with a separate dimension for the heads.
"""

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from maxdiloco.diloco.fragments import Stacked
from maxdiloco.errors import ConfigError
from maxdiloco.huggingface.fields import Field
from maxdiloco.models.config import ModelConfig
from maxdiloco.models.model import Model

Shape = tuple[int, ...]

# Leaves that have a row for each token.
OF_VOCABULARY = EMBEDDING, HEAD = "embedding", "head"


class Tensor(NamedTuple):
    """The tensors that hold the parts of a leaf.

    Attributes:
      name: name of the tensors, with {layer} or {expert} if each has its own tensor.
      inputs: number of leading dims of the part that are inputs of a matrix, which is transposed.
        0: the tensor is not a matrix.
      flat: whether the tensor has a single dim for all dims of the part.
      half: 0 or 1 if the last dim of the tensor interleaves two parts. None: it holds one part.
      in_pairs: whether the rotated features, the last features of a head, are in adjacent pairs. In
        our leaves they are in two halves.
      float32: whether an export stores the tensor in float32 for any value of dtype.
    """

    name: str
    inputs: int = 0
    flat: bool = False
    half: int | None = None
    in_pairs: bool = False
    float32: bool = False


class Family(NamedTuple):
    """A model type.

    Attributes:
      model_type: name of the model type in config.json.
      tensors: {path of our leaf: tensors that hold its parts}.
      fixed: values that our keys have for every model of this type.
      must: values that keys of config.json must have, unless they are null or absent.
      fields: rows of this model type in addition to FIELDS.
      unused: keys of FIELDS that this model type neither reads nor writes.
      local_rope: whether local layers have their own wavelength.
      latent: whether its attention is latent; YaRN then also scales the logits.
      inner: key of config.json that holds the config of the text model; empty: the whole file.
      wrapper: part of tensor names that only this model type has.
      left_out: prefixes of names of tensors that are not imported; {layers}: the number of layers.
      left_out_part: description of the tensors in left_out, for messages.
      of_exports: entries that config.json of an export gets, even if an import had other values.
    """

    model_type: str
    tensors: Mapping[str, Tensor]
    fixed: Mapping[str, Any] = MappingProxyType({})
    must: Mapping[str, Any] = MappingProxyType({})
    fields: tuple[Field, ...] = ()
    unused: tuple[str, ...] = ()
    local_rope: bool = False
    latent: bool = False
    inner: str = ""
    wrapper: str = ""
    left_out: tuple[str, ...] = ()
    left_out_part: str = ""
    of_exports: Mapping[str, Any] = MappingProxyType({})

    @property
    def text_type(self) -> str:
        """The model type of the text model."""
        return self.of_exports["model_type"] if self.inner else self.model_type

    @property
    def architecture(self) -> str:
        """The name of transformers' class in config.json."""
        words = self.model_type.removesuffix("_text").split("_")
        return "".join(map(str.title, words)) + "ForCausalLM"


class Leaf(NamedTuple):
    """A leaf of the parameters.

    Attributes:
      path: names in the nested parameters, joined by dots.
      shape: shape of the leaf.
      layers: the layer of each entry of dim 0. None: the leaf is outside the layers.
    """

    path: str
    shape: Shape
    layers: tuple[int, ...] | None


class Part(NamedTuple):
    """A tensor of Hugging Face, and the part of a leaf that it holds.

    Attributes:
      name: name of the tensor.
      shape: shape of the tensor.
      leaf: the leaf.
      index: index of the part in the leading dims of the leaf.
      tensor: the entry of Family.tensors for the leaf.
      rotated: number of features of a head that are in pairs in the tensor.
    """

    name: str
    shape: Shape
    leaf: Leaf
    index: Shape
    tensor: Tensor
    rotated: int

    @property
    def part_shape(self) -> Shape:
        """The shape of the leaf without the dims that `index` selects."""
        return self.leaf.shape[len(self.index) :]


def parts_of(leaf: Leaf, tensor: Tensor, rotated: int) -> Iterator[Part]:
    """Yield the parts of a leaf in order. rotated: number of rotated features of a head."""
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
    """Convert the values of a tensor to the part of our leaf that it holds."""
    seen = _as_part(values, part)
    return seen[..., _order(part)] if part.rotated else seen


def put(target: np.ndarray, part: Part, box: tuple[slice, ...], values: np.ndarray) -> None:
    """Write a box of a part into a tensor.

    Args:
      target: the tensor, or its first rows; written in place.
      part: the part that the tensor holds.
      box: slices of the part.
      values: values of the box.
    """
    seen = _as_part(target, part)
    box = tuple(slice(s.start, min(s.stop, n)) for s, n in zip(box, seen.shape, strict=True))
    if part.rotated:
        box = (*box[:-1], _order(part)[box[-1]])
    there = seen[box].shape
    seen[box] = values[tuple(map(slice, there))]


def _as_part(values: np.ndarray, part: Part) -> np.ndarray:
    """Return a view of a tensor, or of its first rows, in the shape of the part."""
    if part.tensor.half is not None:
        return values[..., part.tensor.half :: 2]
    if not part.tensor.inputs:
        return values.reshape(-1, *part.part_shape[1:])
    inputs, outputs = part.part_shape[: part.tensor.inputs], part.part_shape[part.tensor.inputs :]
    return np.moveaxis(
        values.reshape(-1, *outputs[1:], *inputs), range(len(outputs)), range(-len(outputs), 0)
    )


def _order(part: Part) -> np.ndarray:
    """Return the index in a head of the tensor for each feature of a head of our leaf."""
    rest, pairs = np.split(np.arange(part.part_shape[-1]), [-part.rotated])
    return np.concatenate([rest, pairs[::2], pairs[1::2]])


def model_parts(sizes: ModelConfig, family: Family, most: float = math.inf) -> list[Part]:
    """Return all parts of a model in the order of the leaves, without values.

    Args:
      sizes: sizes of the model.
      family: the family of its model type.
      most: limit of the parts of a leaf, since config.json may have any number of experts.

    Raises:
      ConfigError: the model type lacks a parameter, or the limit is exceeded.
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
    """Return the number of leading dims of a leaf that `Part.index` selects."""
    return (leaf.layers is not None) + ("{expert}" in tensor.name)


def _named(tree):
    """Yield (dotted path, leaf) of nested dicts."""
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
    """Return the tensors of a router and its experts, one tensor for each expert.

    Args:
      block: name of the block in a layer.
      gate: name of the gate's matrix of an expert.
      up: name of the up projection of an expert.
      out: name of the down projection of an expert.
    """
    names = {"w_gate": gate, "w_up": up, "w_out": out}
    found = {"moe.router": Tensor(f"{LAYER}{block}.gate.weight", inputs=1)}
    for leaf, name in names.items():
        tensor = f"{LAYER}{block}.experts.{{expert}}.{name}.weight"
        found[f"moe.{leaf}"] = Tensor(tensor, inputs=1)
    return found
