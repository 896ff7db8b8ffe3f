"""Checks of the arguments of class DiLoCo, before anything is compiled. All raise ValueError.

Messages name the arguments of the class, not keys of the trainer's configuration.
"""

import functools
import math
from collections.abc import Callable
from numbers import Number, Real
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from maxdiloco.diloco import outer, outer_rate, schedule
from maxdiloco.diloco.quantize import WireFormat
from maxdiloco.engine import exchanges
from maxdiloco.parallel import offload


def check(
    num_replicas: int,
    mesh: Mesh,
    alpha: float,
    num_nonlayer: int,
    outer_overlap: str,
    choices: dict[str, str],
) -> None:
    """Refuse values outside the contract. choices: values by name."""
    known = {
        "merge": outer.MERGES,
        "outer_memory": ("device", offload.HOST),
        "exchange_carrier": exchanges.CARRIERS,
        "exchange": (schedule.GATHER, schedule.OWNERS),
    }
    for name, values in known.items():
        if choices[name] not in values:
            raise ValueError(
                f"{name}={choices[name]!r} is unknown. Use one of {', '.join(values)}."
            )
    if choices["exchange"] == schedule.OWNERS:
        _check_owners(choices)
    if choices["merge"] == "rda" and outer_overlap == "eager":
        raise ValueError(
            "merge=rda does not go with outer_overlap=eager: a replica's own terms of two rounds "
            "cancel in a plain mean alone, and the replicas would drift apart. Use merge=mean."
        )
    if not schedule.is_count(num_nonlayer) or num_nonlayer < 1:
        raise ValueError(
            f"num_nonlayer_fragments={num_nonlayer} must be a positive integer: it counts the "
            "fragments of what belongs to no layer. Use 1 or more."
        )
    if not (isinstance(alpha, Real) and 0.0 <= alpha <= 1.0):
        raise ValueError(
            f"alpha={alpha!r} must be in [0, 1]: it is the weight of a replica's own values. Use 0 "
            f"to take the outer ones."
        )
    if "diloco" not in mesh.axis_names:
        raise ValueError(
            f"mesh axes {mesh.axis_names} lack 'diloco', the axis of the replicas. Add it, "
            f"with size 1 if all replicas share the devices."
        )
    slots, name = mesh.shape["diloco"], "the mesh's diloco size"
    schedule.check_replicas(num_replicas, slots, name="num_replicas", slots_name=name)


# What slots that own parts of a fragment cannot do, and why.
NOT_OF_OWNERS = MappingProxyType({
    ("merge", "rda"): "an owner has parts of tensors, not their norms",
    ("exchange_dtype", "topk"): "a mean of sparse values is not sparse",
})  # fmt: skip


def refuses_owners(merge: str, wire: str) -> bool:
    """Whether slots that own parts cannot have this merge, or this wire."""
    return not NOT_OF_OWNERS.keys().isdisjoint({("merge", merge), ("exchange_dtype", wire)})


def _check_owners(choices: dict[str, str]) -> None:
    for (name, value), reason in NOT_OF_OWNERS.items():
        if choices[name] == value:
            raise ValueError(
                f"exchange=owners does not go with {name}={value}: {reason}. Use exchange=gather "
                f"or another {name}."
            )


def feedback(error_feedback: bool | None, wire: WireFormat) -> bool:
    """Whether the replicas keep residuals; None: as the wire needs it."""
    if error_feedback and wire.error == 0:
        raise ValueError(
            f"error_feedback=True does nothing with exchange_dtype={wire.name}, which leaves "
            "nothing over. Leave it out, or use another wire."
        )
    return wire.feedback if error_feedback is None else error_feedback


def outer_optimizer(
    given: optax.GradientTransformation | None,
    lr: float | None,
    momentum: float | None,
    default_lr: float,
) -> tuple[optax.GradientTransformation, dict[str, float | None]]:
    """The outer optimizer, and its numbers for a checkpoint's note; None: unknown."""
    if given is not None:
        if (lr, momentum) != (None, None):
            raise ValueError(
                f"outer_lr={lr} and outer_momentum={momentum} do nothing beside outer_optimizer, "
                "which has its own. Leave them out."
            )
        return given, {"outer_lr": None, "outer_momentum": None}
    lr = default_lr if lr is None else lr
    momentum = outer_rate.MOMENTUM if momentum is None else momentum
    if not (isinstance(lr, Real) and 0 <= lr < math.inf):
        raise ValueError(
            f"outer_lr={lr!r} must be a number from 0: theta would move away from the replicas, or "
            "be no number. Leave it out for the trainer's default."
        )
    if not (isinstance(momentum, Real) and 0 <= momentum < 1):
        raise ValueError(
            f"outer_momentum={momentum!r} must be from 0 to below 1: what it adds up would grow "
            "without end. Leave it out for the trainer's default."
        )
    numbers = {"outer_lr": float(lr), "outer_momentum": float(momentum)}
    return outer.outer_optimizer("nesterov", lr=lr, momentum=momentum), numbers


def check_trees(params: Any, opt_state: Any) -> None:
    """Refuse leaves of one replica that are no arrays, and parameters that have no mean."""
    if not jax.tree.leaves(params):
        raise ValueError("params has no leaves: there is nothing to train. Give a tree of arrays.")
    both = {"params": params, "opt_state": opt_state}
    for path, x in jax.tree_util.tree_leaves_with_path(both):
        name = f"{path[0].key}{jax.tree_util.keystr(path[1:])}"
        if not isinstance(x, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
            raise ValueError(f"{name} is no array but {type(x).__name__}. Give jnp.asarray of it.")
        if path[0].key == "params" and not math.prod(x.shape):
            raise ValueError(f"{name} has no elements, shape {x.shape}. Leave it out.")
        if path[0].key == "params" and not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(
                f"{name} is {x.dtype}, which cannot be averaged. "
                f"Keep what is not floating point in opt_state."
            )


def checked_step(inner_step: Callable[[Any, Any, Any], tuple[Any, Any, Any]]) -> Callable:
    """The same step, which raises ValueError when it is traced unless it keeps its trees.

    The parameters and the optimizer state that a step returns are those of the next one: a leaf of
    another dtype would silently be that of the whole run.
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
            "containers that were given."
        )


def _leaves(name: str, tree: Any) -> dict[str, str]:
    """{path: dtype and shape} of what an inner step is given or returns."""
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
    """Refuse a batch whose leaves are not [R, ...]."""
    for path, x in jax.tree_util.tree_leaves_with_path(batch):
        shape = np.shape(x)
        if shape[:1] != (num_replicas,):
            lead = f"leading dim {shape[0]}" if shape else "no dim"
            raise ValueError(
                f"batch{jax.tree_util.keystr(path)} has {lead}, num_replicas={num_replicas}. Stack "
                f"one batch for each replica: its shape is [{num_replicas}, ...]."
            )
