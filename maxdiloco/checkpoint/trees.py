"""Pytrees as nested dicts of named leaves, so that files do not depend on their containers."""

from typing import Any

import jax
import numpy as np


def named_leaves(tree: Any) -> list[tuple[tuple[str, ...], Any]]:
    """Return (path, leaf) of each leaf. If the tree is one array, its leaf is named `array`."""
    return [
        (tuple(jax.tree_util.keystr((key,), simple=True) for key in path) or ("array",), leaf)
        for path, leaf in jax.tree.leaves_with_path(tree)
    ]


def to_nested_dicts(tree: Any) -> dict[str, Any]:
    """Return any pytree as nested dicts of its leaves, as Orbax writes them.

    Typed PRNG keys become the integers of jax.random.key_data, because files have no dtype for
    them. Arrays without elements are left out, because Orbax refuses them.
    """
    root: dict[str, Any] = {}
    for path, leaf in named_leaves(tree):
        if leaf.size:
            node = root
            for key in path[:-1]:
                node = node.setdefault(key, {})
            node[path[-1]] = jax.random.key_data(leaf) if is_key(leaf.dtype) else leaf
    return root


def shapes(tree: Any) -> dict[str, list[Any]]:
    """Return {leaf name: [shape, dtype name]} of a tree of arrays or ShapeDtypeStructs."""
    return {
        ".".join(path): [list(leaf.shape), _dtype_name(leaf.dtype)]
        for path, leaf in named_leaves(tree)
    }


def is_key(dtype: Any) -> bool:
    """Tell whether a dtype is a dtype of typed PRNG keys (jax.random.key)."""
    return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def _dtype_name(dtype: Any) -> str:
    # The name for a typed PRNG key, such as key<fry>, contains its implementation.
    return str(dtype) if is_key(dtype) else np.dtype(dtype).name
