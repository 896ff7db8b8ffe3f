"""Tensors of a Hugging Face checkpoint as parts of the leaves of our parameters, and back.

A leaf is stacked over layers, and over experts where it has some; a tensor of theirs is one part
of it. Their matrices are [outputs, inputs], ours [inputs, outputs] with the heads apart.
"""
# V vocabulary

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from maxdiloco.diloco.fragments import Stacked

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


def leaves_of(shapes: Any, layer_axis: Any) -> dict[str, Leaf]:
    """{path: leaf} of parameters. shapes: tree of them; layer_axis: of models.transformer.Model."""
    import jax

    axes = dict(_flat(layer_axis, is_leaf=lambda x: not isinstance(x, Mapping)))
    return {
        path: Leaf(path, tuple(x.shape), _layers(axes[path], x.shape))
        for path, x in _flat(shapes, is_leaf=lambda x: isinstance(x, jax.ShapeDtypeStruct))
    }


def _flat(tree, is_leaf):
    import jax

    for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]:
        yield ".".join(jax.tree_util.keystr((key,), simple=True) for key in path), leaf


def _layers(axis: Any, shape: Shape) -> tuple[int, ...] | None:
    if isinstance(axis, Stacked):
        return axis.layers
    return tuple(range(shape[0])) if isinstance(axis, int) else None
