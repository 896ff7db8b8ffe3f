"""Checks of the arguments of class DiLoCo other than its settings.

All raise ValueError before anything is compiled. Messages name the arguments of the class.
"""

import functools
import math
from collections.abc import Callable
from numbers import Number
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding


def check_mesh(mesh: Mesh) -> None:
    """Raise ValueError for a mesh without the axis of the replicas."""
    if "diloco" not in mesh.axis_names:
        raise ValueError(
            f"mesh axes {mesh.axis_names} lack 'diloco', the axis of the replicas. Add it, "
            "with size 1 if all replicas share the devices."
        )


def check_trees(params: Any, opt_state: Any, mesh: Mesh) -> None:
    """Raise ValueError for leaves that are not arrays, on another mesh, or cannot be averaged."""
    if not jax.tree.leaves(params):
        raise ValueError("params has no leaves: there is nothing to train. Use a pytree of arrays.")
    both = {"params": params, "opt_state": opt_state}
    for path, x in jax.tree_util.tree_leaves_with_path(both):
        name = f"{path[0].key}{jax.tree_util.keystr(path[1:])}"
        if not isinstance(x, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
            raise ValueError(
                f"{name} is not an array but {type(x).__name__}. Use jnp.asarray of it."
            )
        if _is_sharded_elsewhere(x, mesh):
            raise ValueError(
                f"{name} is sharded as {x.sharding}, but not over the axes {mesh.axis_names} of "
                "DiLoCo's mesh. Use jax.device_put with a NamedSharding of that mesh."
            )
        if path[0].key == "params" and not math.prod(x.shape):
            raise ValueError(f"{name} has no elements, shape {x.shape}. Leave it out.")
        if path[0].key == "params" and not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(
                f"{name} is {x.dtype}, which cannot be averaged. Keep leaves that are not floating "
                f"point in opt_state."
            )


def _is_sharded_elsewhere(x: Any, mesh: Mesh) -> bool:
    """Tell whether an array is divided over devices in a way that DiLoCo's mesh cannot express."""
    sharding = x.sharding if isinstance(x, jax.Array | jax.ShapeDtypeStruct) else None
    if sharding is None or sharding.is_fully_replicated:
        return False
    return not isinstance(sharding, NamedSharding) or sharding.mesh.axis_names != mesh.axis_names


def with_structure_check(inner_step: Callable[[Any, Any, Any], tuple[Any, Any, Any]]) -> Callable:
    """Return the step with a check, when it is traced, that it keeps structure, shapes and dtypes.

    The parameters and the optimizer state that a step returns are the inputs of the next step. A
    leaf of another dtype would silently change the whole run. The check raises ValueError.
    """

    @functools.wraps(inner_step)
    def checked(params, opt_state, batch):
        returned = inner_step(params, opt_state, batch)
        if not isinstance(returned, tuple) or len(returned) != 3:
            count = f"a tuple of {len(returned)}" if isinstance(returned, tuple) else "one value"
            raise ValueError(f"inner_step returned {count}. Return (params, opt_state, metrics).")
        _check_kept("params", params, returned[0])
        _check_kept("opt_state", opt_state, returned[1])
        _leaves("metrics", returned[2])
        return returned

    return checked


def _check_kept(name: str, before: Any, after: Any) -> None:
    """Refuse a tree that came back from the inner step with another structure, shape or dtype."""
    was, came = _leaves(name, before), _leaves(name, after)
    for path in [*was, *came]:
        if was.get(path) != came.get(path):
            raise ValueError(
                f"{path} was {was.get(path, 'absent')} but inner_step returned it "
                f"{came.get(path, 'absent')}. Return every leaf with the shape and dtype it had."
            )
    structures = jax.tree.structure(before), jax.tree.structure(after)
    if structures[0] != structures[1]:
        raise ValueError(
            f"{name} was {structures[0]} but inner_step returned {structures[1]}. Return the "
            "containers that it received."
        )


def _leaves(name: str, tree: Any) -> dict[str, str]:
    """Return {path: dtype and shape} of a tree that an inner step accepts or returns."""
    found = {}
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        leaf = f"{name}{jax.tree_util.keystr(path)}"
        if not isinstance(x, jax.Array | np.ndarray | np.generic | Number):
            raise ValueError(
                f"inner_step returned {leaf}, which is not an array but {type(x).__name__}. Return "
                "arrays."
            )
        kind = jax.typeof(x)
        found[leaf] = f"{kind.dtype}{list(kind.shape)}"
    return found


def check_batch(batch: Any, num_replicas: int) -> None:
    """Raise ValueError for a batch whose leaves are not [R, ...]."""
    for path, x in jax.tree_util.tree_leaves_with_path(batch):
        shape = np.shape(x)
        if shape[:1] != (num_replicas,):
            lead = f"leading dim {shape[0]}" if shape else "no dim"
            raise ValueError(
                f"batch{jax.tree_util.keystr(path)} has {lead}, num_replicas={num_replicas}. Stack "
                f"one batch for each replica: its shape is [{num_replicas}, ...]."
            )
