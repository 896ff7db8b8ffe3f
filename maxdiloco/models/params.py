"""Conversion between NNX modules and the plain nested dicts of the other packages.

Outside of `models/` parameters are a nested dict of arrays. Its paths are the paths of the modules,
without the names of the modules' own weights: `layers/attention/query/kernel` of a Decoder is
`layers.attention.query` in the dict, and its bias is `layers.attention.query_bias`.
Checkpoints, fragments and the tables for Hugging Face models use these paths.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from maxdiloco.models.linear import Names

Params = dict[str, Any]  # nested, of arrays

# Names that are part of a path of modules and not of a path of parameters: the weight of a Linear,
# a Router or an Embedding, and the routed experts of a MoE.
LEFT_OUT = ("kernel", "table", "routed")


def path_of(module_path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the path in the nested dict of a parameter at this path of modules."""
    path = tuple(name for name in module_path if name not in LEFT_OUT)
    if path[-1] == "bias":
        path = (*path[:-2], f"{path[-2]}_bias")
    return path


def is_weight(x: Any) -> bool:
    """Tell whether x is a parameter with its metadata."""
    return isinstance(x, nnx.Variable)


def is_names(x: Any) -> bool:
    """Tell whether x is a tuple of logical axis names."""
    return isinstance(x, tuple)


def leaves(names: nnx.State) -> list[Names]:
    """Return the logical axis names in a state of names_of."""
    return jax.tree.leaves(names, is_leaf=is_names)


def names_of(state: nnx.State) -> nnx.State:
    """Return the state with each parameter replaced by its logical axis names."""
    return jax.tree.map(lambda weight: weight.names, state, is_leaf=is_weight)


def map_weights(fn: Callable[[Any, Names], Any], state: nnx.State) -> nnx.State:
    """Apply fn(value, logical axis names) to each parameter of a state."""
    return jax.tree.map(
        lambda weight: weight.replace(fn(weight.get_value(), weight.names)),
        state,
        is_leaf=is_weight,
    )


def to_dict(
    state: nnx.State, entry_of: Callable[[tuple[str, ...], nnx.Variable], Any] | None = None
) -> Params:
    """Turn a state into a nested dict.

    Args:
      state: parameters of a module.
      entry_of: (path of modules, parameter) -> entry of the dict. None: the parameter's value.

    Returns:
      The nested dict.
    """
    params: Params = {}
    for module_path, weight in nnx.to_flat_state(state):
        *folders, name = path_of(module_path)
        here = params
        for folder in folders:
            here = here.setdefault(folder, {})
        here[name] = entry_of(module_path, weight) if entry_of else weight.get_value()
    return params


def with_values(state: nnx.State, params: Params) -> nnx.State:
    """Return the state with the values of a nested dict.

    Args:
      state: parameters of a module.
      params: nested dict with the paths of `to_dict`, and perhaps others.

    Returns:
      A state like the given one.
    """
    flat = []
    for module_path, weight in nnx.to_flat_state(state):
        value = params
        for name in path_of(module_path):
            value = value[name]
        flat.append((module_path, weight.replace(value)))
    return nnx.from_flat_state(flat)
