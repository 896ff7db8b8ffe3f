"""Tensors of a Hugging Face checkpoint as parts of the leaves of our parameters, and back.

A leaf is stacked over layers, and over experts where it has some; a tensor of theirs is one part
of it. Their matrices are [outputs, inputs], ours [inputs, outputs] with the heads apart.
"""
# V vocabulary

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from maxdiloco.diloco.fragments import Stacked
from maxdiloco.errors import ConfigError
from maxdiloco.flags.config import Config
from maxdiloco.huggingface.family import Family, Tensor
from maxdiloco.models.spec import from_config
from maxdiloco.models.transformer import Model

Shape = tuple[int, ...]

# Leaves whose tensors have a row for each token.
OF_VOCABULARY = EMBEDDING, HEAD = "embedding", "head"


class Leaf(NamedTuple):
    """A leaf of the parameters. layers: the layer of each entry of dim 0; None: of no layer."""

    path: str
    shape: Shape
    layers: tuple[int, ...] | None


class Part(NamedTuple):
    """A tensor, and the part of a leaf that it holds.

    name, shape: of the tensor. leaf: path. index: of the leaf's leading dims. tensor: its entry.
    part_shape: of the part, leaf.shape without the indexed dims. rotated: features of a head that
    are in pairs in the tensor, 0 for none.
    """

    name: str
    shape: Shape
    leaf: str
    index: Shape
    tensor: Tensor
    part_shape: Shape
    rotated: int = 0


def parts_of(leaf: Leaf, tensor: Tensor, rotated: int) -> Iterator[Part]:
    """The tensors that make up a leaf, in the leaf's order. rotated: features of a head."""
    rotated = rotated if tensor.in_pairs else 0
    num_indexed = (leaf.layers is not None) + ("{expert}" in tensor.name)
    part_shape = leaf.shape[num_indexed:]
    for index in np.ndindex(leaf.shape[:num_indexed]):
        layer = leaf.layers[index[0]] if leaf.layers is not None else None
        name = tensor.name.format(layer=layer, expert=index[-1] if index else None)
        yield Part(name, _shape(part_shape, tensor), leaf.path, index, tensor, part_shape, rotated)


def _shape(part_shape: Shape, tensor: Tensor) -> Shape:
    if tensor.inputs:
        inputs, outputs = part_shape[: tensor.inputs], part_shape[tensor.inputs :]
        return (math.prod(outputs), math.prod(inputs))
    if tensor.half is not None:
        return (*part_shape[:-1], 2 * part_shape[-1])
    return (math.prod(part_shape),) if tensor.flat else part_shape


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


def with_rows(values: np.ndarray, rows: int) -> np.ndarray:
    """A table [V, ...] with zeros after its rows, or without its last rows."""
    if rows <= values.shape[0]:
        return values[:rows]
    missing = [(0, rows - values.shape[0]), *[(0, 0)] * (values.ndim - 1)]
    return np.pad(values, missing)


class Layout(NamedTuple):
    """leaves: by path. parts: in the order of the leaves; a leaf's follow each other."""

    leaves: Mapping[str, Leaf]
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(math.prod(leaf.shape) for leaf in self.leaves.values())

    def in_files(self) -> Iterable[Part]:
        """The parts layer by layer, what is outside the layers around them."""

        def place(part):
            layers = self.leaves[part.leaf].layers
            if layers is None:
                return (0 if part.leaf == EMBEDDING else 2, 0)
            return (1, layers[part.index[0]])

        return sorted(self.parts, key=place)

    def by_tensor(self) -> dict[str, list[Part]]:
        """{name of a tensor: the parts that it holds}, in the order of the leaves."""
        found: dict[str, list[Part]] = {}
        for part in self.parts:
            found.setdefault(part.name, []).append(part)
        return found

    def num_indexed(self, leaf: str) -> int:
        """Leading dims of a leaf whose entries are tensors of their own."""
        return next(len(part.index) for part in self.parts if part.leaf == leaf)


def of_model(cfg: Config, family: Family) -> Layout:
    """The layout of a config's model; nothing is allocated. Raises ConfigError."""
    model = Model(from_config(cfg, backend="cpu"))
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    axes, leaves, parts = dict(_named(model.layer_axis)), {}, []
    for path, x in _named(shapes):
        leaves[path] = leaf = Leaf(path, tuple(x.shape), _layers(axes[path], x.shape))
        in_layer = path if leaf.layers is None else path.partition(".")[2]
        tensor = family.tensors.get(in_layer)
        if tensor is None:
            raise ConfigError(
                f"the parameter {path} has no counterpart in model_type={family.model_type}."
            )
        parts += parts_of(leaf, tensor, model.spec.rotated_dim)
    return Layout(leaves, tuple(parts))


def _named(tree):
    """(dotted path, leaf) of nested dicts."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: not isinstance(x, Mapping))
    for path, leaf in leaves:
        yield jax.tree_util.keystr(path, simple=True, separator="."), leaf


def _layers(axis: Any, shape: Shape) -> tuple[int, ...] | None:
    if isinstance(axis, Stacked):
        return axis.layers
    return tuple(range(shape[0])) if isinstance(axis, int) else None
