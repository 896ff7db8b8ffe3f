"""Small parameter trees with unequal replicas, for the library class and for the oracle.

    # R replicas  T inner steps

Trees are flat dicts whose names are in tree order. The inner step is heavy-ball SGD on the sum of
|d| - log(1 + |d|), d = x - target, whose gradient d / (1 + |d|) is not linear and compiles fast,
plus a term that ties all values to the first leaf's mean. Targets differ by replica and step.
`xp` is numpy (float64) or jax.numpy (float32).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxdiloco.diloco.fragments import Stacked, Vocabulary

# name: (shape, kind as in oracle.py). Five layers do not divide by two or three fragments.
Tree = dict[str, tuple[tuple[int, ...], tuple | None]]
FIVE, SEVEN = tuple(range(5)), tuple(range(7))
TREES: dict[str, Tree] = {
    "mixed": {
        "embed": ((7, 2), ("vocabulary", 0)),
        "kernel": ((2, 5, 2), ("layers", 1, FIVE)),
        "norm": ((3,), None),
    },
    "repeated": {
        "attention": ((3, 2), ("layers", 0, (0, 3, 6))),
        "embed": ((2, 5), ("vocabulary", 1)),
        "mixer": ((2, 4), ("layers", 1, (1, 2, 4, 5))),
        "norm": ((7, 2), ("layers", 0, SEVEN)),
    },
    "layers": {
        "bias": ((5,), ("layers", 0, FIVE)),
        "kernel": ((5, 2, 2), ("layers", 0, FIVE)),
    },
    "leaves": {
        "a": ((3,), None),
        "b": ((), None),
        "c": ((2, 2), None),
        "d": ((4,), None),
        "e": ((2,), None),
    },
}


class Problem(NamedTuple):
    """One tree with start values, and targets [T][R][leaf] for four replicas."""

    tree: Tree
    params: list[np.ndarray]
    targets: list[list[list[np.ndarray]]]

    def named(self, leaves) -> dict[str, Any]:
        return dict(zip(self.tree, leaves, strict=True))

    def batch(self, t: int, num_replicas: int) -> dict[str, np.ndarray]:
        """Of inner step t, 1-based: leaves [R, ...], as the library class takes it."""
        per_replica = self.targets[t - 1][:num_replicas]
        return self.named([np.stack(leaf_R) for leaf_R in zip(*per_replica, strict=True)])


@functools.cache
def problem(name: str, steps: int = 32, seed: int = 0) -> Problem:
    """float32 values, so that both sides start from the same numbers."""
    return make_problem(TREES[name], steps, seed)


def make_problem(tree: Tree, steps: int, seed: int = 0) -> Problem:
    assert list(tree) == sorted(tree)
    rng = np.random.default_rng(seed)

    def values(spread, centre=0.0):
        shapes = (shape for shape, _ in tree.values())
        return [np.float32(centre + spread * rng.normal(size=shape)) for shape in shapes]

    targets = [[values(1.5, m - 1.0) for m in range(4)] for _ in range(steps)]
    return Problem(tree, values(0.5), targets)


def layer_axis(tree: Tree) -> dict[str, Any] | None:
    """The declaration the library class takes: Stacked for repeated blocks, an int where it says
    the same, Vocabulary; no pytree at all for a tree without layers."""
    if not any(kind and kind[0] == "layers" for _, kind in tree.values()):
        return None

    def declared(shape, kind):
        if kind is None:
            return None
        if kind[0] == "vocabulary":
            return Vocabulary(kind[1])
        if kind[2] == tuple(range(shape[kind[1]])):
            return kind[1]
        return Stacked(kind[1], kind[2])

    return {name: declared(shape, kind) for name, (shape, kind) in tree.items()}


LR, MOMENTUM, TIE = 0.2, 0.5, 0.1


def _inner_step(xp, leaves, velocity, targets):
    tie = TIE * leaves[0].mean()
    apart = [x - b for x, b in zip(leaves, targets, strict=True)]
    moved = [MOMENTUM * v + d / (1 + xp.abs(d)) + tie for v, d in zip(velocity, apart, strict=True)]
    leaves = [x - LR * v for x, v in zip(leaves, moved, strict=True)]
    return leaves, moved, xp.abs(apart[-1]).mean()


def numpy_inner_step(leaves, velocity, targets):
    """One replica, float64, lists of leaves."""
    return _inner_step(np, leaves, velocity, [np.float64(b) for b in targets])


def jax_inner_step(params, velocity, batch):
    """One replica, float32, dicts: the inner step given to the library class."""
    leaves, structure = jax.tree.flatten(params)
    trees = jax.tree.leaves(velocity), jax.tree.leaves(batch)
    leaves, moved, distance = _inner_step(jnp, leaves, *trees)
    return structure.unflatten(leaves), structure.unflatten(moved), {"distance": distance}


def train(algorithm, problem: Problem, steps: int):
    """Yield (distances [R], replicas [leaf][R, ...], theta [leaf]) after each step of the class."""
    params = problem.named(problem.params)
    state = algorithm.init(params, jax.tree.map(np.zeros_like, params))
    for t in range(1, steps + 1):
        state, metrics = algorithm.step(state, problem.batch(t, algorithm.num_replicas))
        trees = algorithm.replica_params(state), algorithm.outer_params(state)
        copies = [[np.array(leaf) for leaf in jax.tree.leaves(tree)] for tree in trees]
        yield np.array(metrics["distance"]), *copies
