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
from maxdiloco.engine.state import FragmentPlan
from maxdiloco.parallel.replicas import broadcast, reduce_mean

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
        values = jax.tree.leaves(state)
        pairs = list(zip(owners, values, strict=True))
        others.append([x for owner, x in pairs if owner is None])
        for owner, x in pairs:
            if owner is None:
                continue
            copy, place = owner
            s, start = plan.slices[place], plan.starts[place]
            key = copy, s.leaf
            if key not in whole:
                whole[key] = jnp.zeros((*x.shape[:lead], *leaves[s.leaf].shape), x.dtype)
            whole[key] = slices.put(whole[key], s, start, x, lead=lead)
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


def of_each_replica(states: Any, num_replicas: int) -> Any:
    """[...] -> [R, ...]: a copy for every replica."""
    return jax.tree.map(lambda x: broadcast(x, num_replicas), states)


def _owners(optimizer, plan, leaves) -> tuple[Any, list[tuple[int, int] | None]]:
    """The abstract state of a fragment, and whom each leaf of it belongs to.

    (copy, place): the copy-th value (momentum; Adam's two) of the fragment's place-th slice.
    None: a leaf of no parameter.
    """
    fragment = [jax.ShapeDtypeStruct(s.shape(leaves[s.leaf].shape), jnp.float32)
                for s in plan.slices]  # fmt: skip
    abstract = jax.eval_shape(optimizer.init, fragment)

    def place_of(leaf, place):
        if isinstance(leaf, optax.MaskedNode):
            return leaf
        return place if leaf.shape == fragment[place].shape else _OF_NO_PARAMETER

    places = optax.tree.map_params(
        optimizer,
        place_of,
        abstract,
        list(range(len(fragment))),
        transform_non_params=lambda _: _OF_NO_PARAMETER,
        is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode),
    )
    owners: list[tuple[int, int] | None] = []
    for place in jax.tree.leaves(places):
        if place == _OF_NO_PARAMETER:
            owners.append(None)
        else:
            copies = sum(owner is not None and owner[1] == place for owner in owners)
            owners.append((copies, place))
    return abstract, owners


def _home(plan: FragmentPlan, old: Sequence[FragmentPlan]) -> int:
    """The old fragment that held the first value of a new one."""
    first = plan.slices[0]
    return next(
        p
        for p, before in enumerate(old)
        for s in before.slices
        if s.leaf == first.leaf and s.holds(first.first)
    )


def _of_shape(x: jax.Array, like: jax.ShapeDtypeStruct, lead: int) -> jax.Array:
    if x.shape[lead:] != like.shape:
        raise ValueError(
            f"the outer optimizer keeps an array of {like.shape} that is not shaped like the "
            f"parameters, so its fragments cannot change. Keep num_fragments as it was."
        )
    return x
