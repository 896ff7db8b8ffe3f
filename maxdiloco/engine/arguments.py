"""Checks of the arguments of class DiLoCo, before anything is compiled. All raise ValueError."""

import math
from numbers import Real
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
