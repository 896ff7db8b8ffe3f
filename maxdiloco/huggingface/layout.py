"""The tensors of a model: every leaf of its parameters beside its counterpart in a family."""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import jax

from maxdiloco.errors import ConfigError
from maxdiloco.flags.config import Config
from maxdiloco.huggingface import tensors
from maxdiloco.huggingface.family import Family
from maxdiloco.huggingface.tensors import Leaf, Part
from maxdiloco.models.spec import from_config
from maxdiloco.models.transformer import Model


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
        return sorted(self.parts, key=self._place)

    def by_tensor(self) -> dict[str, list[Part]]:
        """{name of a tensor: the parts that it holds}, in the order of the leaves."""
        found: dict[str, list[Part]] = {}
        for part in self.parts:
            found.setdefault(part.name, []).append(part)
        return found

    def _place(self, part: Part) -> tuple[int, int]:
        layers = self.leaves[part.leaf].layers
        if layers is None:
            return (0 if part.leaf == "embedding" else 2, 0)
        return (1, layers[part.index[0]])

    def num_indexed(self, leaf: str) -> int:
        """Leading dims of a leaf whose entries are tensors of their own."""
        return next(len(part.index) for part in self.parts if part.leaf == leaf)


def of_model(cfg: Config, family: Family) -> Layout:
    """The layout of a config's model; nothing is allocated. Raises ConfigError."""
    model = Model(from_config(cfg, backend="cpu"))
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    leaves = tensors.leaves_of(shapes, model.layer_axis)
    parts = []
    for path, leaf in leaves.items():
        in_layer = path if leaf.layers is None else path.partition(".")[2]
        tensor = family.tensors.get(in_layer)
        if tensor is None:
            raise ConfigError(
                f"the parameter {path} has no counterpart in model_type={family.model_type}."
            )
        parts += tensors.parts_of(leaf, tensor, model.spec.rotated_dim)
    return Layout(leaves, tuple(parts))
