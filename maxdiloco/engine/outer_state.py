"""The state of the outer optimizer, from the fragments of one run to those of another.

It is per value: what belongs to a parameter moves with it, whatever fragment that is in.

    # R replicas
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from maxdiloco.diloco import slices
from maxdiloco.engine.state import FragmentPlan, fragment_structs
from maxdiloco.parallel.replicas import reduce_mean
from maxdiloco.parallel.sharding import of_parameters

_OF_NO_PARAMETER = -1


def resliced(
    states: tuple[Any, ...],
    old: Sequence[FragmentPlan],
    new: Sequence[FragmentPlan],
    theta: Any,
    optimizer: optax.GradientTransformation,
    *,
    lead: int,
) -> tuple[Any, ...]:
    """One state for each new fragment from those of the old ones; call it under jit.

    theta: one replica's, arrays or ShapeDtypeStructs. lead: dims (R) before those of a value.
    What belongs to no parameter, such as Adam's count, is that of the old fragment that held the
    first value of the new one. Raises ValueError where that is not of one shape.
    """
    leaves = jax.tree.leaves(theta)
    whole: dict[tuple[int, int], jax.Array] = {}
    others = []  # of each old fragment: leaves that belong to no parameter
    for plan, state in zip(old, states, strict=True):
        _, owners = _owners(optimizer, plan, leaves)
        pairs = list(zip(owners, jax.tree.leaves(state), strict=True))
        others.append([x for owner, x in pairs if owner is None])
        for (copy, place), x in (pair for pair in pairs if pair[0] is not None):
            s, key = plan.slices[place], (copy, plan.slices[place].leaf)
            if key not in whole:
                whole[key] = jnp.zeros((*x.shape[:lead], *leaves[s.leaf].shape), x.dtype)
            whole[key] = slices.put(whole[key], s, plan.starts[place], x, lead=lead)
    out = []
    for plan in new:
        abstract, owners = _owners(optimizer, plan, leaves)
        given = iter(others[_home(plan, old)])
        found = []
        for owner, like in zip(owners, jax.tree.leaves(abstract), strict=True):
            if owner is None:
                found.append(_of_shape(next(given), like, lead))
                continue
            copy, place = owner
            s = plan.slices[place]
            found.append(slices.take(whole[copy, s.leaf], s, plan.starts[place], lead=lead))
        out.append(jax.tree.unflatten(jax.tree.structure(abstract), found))
    return tuple(out)


def mean_of_replicas(states: Any) -> Any:
    """[R, ...] -> [...]: counts are alike in all replicas."""
    return jax.tree.map(
        lambda x: reduce_mean(x) if jnp.issubdtype(x.dtype, jnp.floating) else x[0], states
    )


def _owners(optimizer, plan, leaves) -> tuple[Any, list[tuple[int, int] | None]]:
    """The abstract state of a fragment, and whom each leaf of it belongs to.

    (copy, place): the copy-th value (momentum; Adam's two) of the fragment's place-th slice.
    None: a leaf of no parameter.
    """
    fragment = fragment_structs(plan, leaves)
    abstract = jax.eval_shape(optimizer.init, fragment)

    def place_of(leaf, place):
        return place if leaf.shape == fragment[place].shape else _OF_NO_PARAMETER

    places = of_parameters(
        optimizer, place_of, abstract, list(range(len(fragment))), other=_OF_NO_PARAMETER
    )
    owners: list[tuple[int, int] | None] = []
    for place in jax.tree.leaves(places):
        copies = sum(owner is not None and owner[1] == place for owner in owners)
        owners.append(None if place == _OF_NO_PARAMETER else (copies, place))
    return abstract, owners


def _home(plan: FragmentPlan, old: Sequence[FragmentPlan]) -> int:
    """The old fragment that held the first value of a new one."""
    leaf, entry = plan.slices[0].leaf, plan.slices[0].first
    return next(
        p
        for p, before in enumerate(old)
        if any(s.leaf == leaf and s.holds(entry) for s in before.slices)
    )


def _of_shape(x: jax.Array, like: jax.ShapeDtypeStruct, lead: int) -> jax.Array:
    if x.shape[lead:] != like.shape:
        raise ValueError(
            f"the outer optimizer keeps an array of {like.shape} that is not shaped like the "
            f"parameters, so its fragments cannot change. Keep num_fragments as it was."
        )
    return x
