"""The library class against the float64 oracle, after every step, with unequal replicas.

120 cases hold every pair of values of the factors below, the first 14 of them every value;
`-m exhaustive` runs all cases that are valid.
"""

import dataclasses
import itertools
from typing import Any, NamedTuple

import numpy as np
import optax
import pytest
from oracle import Oracle, Settings
from tiers import corner
from tiny_problem import (
    TREES,
    Problem,
    jax_inner_step,
    layer_axis,
    numpy_inner_step,
    problem,
    train,
)

import maxdiloco

# Of some 600 small programs, many are equal: the inner step of a tree and M, for one.
pytestmark = pytest.mark.usefixtures("programs")

# Both sides start from the same float32 numbers of size 1. float32 rounds each operation by up to
# 6e-8 of its result; over some 25 steps of about 20 operations most roundings cancel, and the inner
# step shrinks what is left: the largest difference of the 120 cases is 6.2e-7. One setting slightly
# off makes 3e-4 or more (test_a_setting_that_is_slightly_off_shows).
TOLERANCE = 3e-6

NESTEROV = dict(outer_lr=0.5, outer_momentum=0.6)
ADAM = dict(outer_lr=0.2, outer_momentum=0.8, adam_b2=0.9, adam_eps=0.05)
OUTER = {  # name: (settings of the oracle, arguments of the library class)
    "nesterov": (NESTEROV, NESTEROV),
    "sgd": (dict(outer_lr=0.5, outer_momentum=0.0), dict(outer_optimizer=optax.sgd(0.5))),
    "adam": (ADAM, dict(outer_optimizer=optax.adam(0.2, b1=0.8, b2=0.9, eps=0.05))),
}


class Case(NamedTuple):
    """One configuration. tau: -1 stands for H - 1. offsets: 'even' is the default."""

    M: int
    tree: str
    k: int
    P: int
    H: int
    tau: int
    overlap: str
    alpha: float
    outer: str
    offsets: str
    layers: str


FACTORS = {
    "M": (1, 2, 4),
    "tree": tuple(TREES),
    "k": (1, 2),
    "P": (1, 2, 3, 4),
    "H": (1, 4, 7),
    "tau": (0, 1, -1),
    "overlap": ("none", "delayed", "eager"),
    "alpha": (0.0, 0.25, 1.0),
    "outer": tuple(OUTER),
    "offsets": ("even", "given"),
    "layers": ("strided", "sequential"),
}


def is_valid(c: Case) -> bool:
    """What the contract allows, and no two spellings of one case."""
    splits_rows = c.tree in ("mixed", "repeated")
    return (
        c.P <= c.H
        and (c.k == 1 or (splits_rows and c.P > c.k))
        and (c.tau == 0 or (c.overlap == "none" and c.H > 2))
        and (c.layers == "strided" or c.P - (c.k if splits_rows else 0) > 1)
        and (c.offsets == "even" or c.H > 1)
    )


def grid() -> list[Case]:
    """Every valid case."""
    return [c for c in map(Case._make, itertools.product(*FACTORS.values())) if is_valid(c)]


def pairs_of(cases: list[Case]) -> np.ndarray:
    """[cases, pairs of factors]: a number for each pair of values a case holds."""
    places = np.array(
        [[v.index(x) for v, x in zip(FACTORS.values(), c, strict=True)] for c in cases]
    )
    most = max(len(values) for values in FACTORS.values())
    columns = list(itertools.combinations(range(len(FACTORS)), 2))
    return np.stack(
        [(n * most + places[:, a]) * most + places[:, b] for n, (a, b) in enumerate(columns)], 1
    )


def sample(cases: list[Case], count: int) -> list[Case]:
    """`count` cases, the same ones every time, that hold all pairs about equally often. Greedy: the
    next case is the one whose pairs were taken least, where a pair taken n times weighs 4^-n."""
    pairs = pairs_of(cases)
    weight = np.ones(pairs.max() + 1)
    chosen: list[int] = []
    for _ in range(count):
        worth = weight[pairs].sum(1)
        worth[chosen] = -1
        best = int(worth.argmax())
        chosen.append(best)
        weight[pairs[best]] /= 4
    return [cases[i] for i in chosen]


def given_offsets(P: int, H: int) -> tuple[int, ...]:
    """Negative and above H, out of order: mod 4 they are 3, 1, 2, 0, mod 7 they are 6, 1, 2, 0."""
    return (-1, H + 1, 2 - 3 * H, 5 * H)[:P]


def of_both(c: Case) -> dict[str, Any]:
    """Settings of the oracle that the library class takes by the same names."""
    return dict(
        num_replicas=c.M,
        sync_period=c.H,
        num_fragments=c.P,
        overlap_steps=c.tau % c.H,
        alpha=c.alpha,
        round_overlap=c.overlap,
        offsets=None if c.offsets == "even" else given_offsets(c.P, c.H),
    )


def oracle_settings(c: Case) -> Settings:
    return Settings(
        sequential=c.layers == "sequential",
        num_nonlayer=c.k,
        kinds=tuple(kind for _, kind in TREES[c.tree].values()),
        outer=c.outer,
        **of_both(c) | OUTER[c.outer][0],
    )


def library(c: Case, problem: Problem, **more: Any):
    return maxdiloco.DiLoCo(
        jax_inner_step,
        sequential_layers=c.layers == "sequential",
        num_nonlayer_fragments=c.k,
        layer_axis=layer_axis(problem.tree),
        **of_both(c) | OUTER[c.outer][1] | more,
    )


def simulate(settings, problem, steps, codec=np.asarray, inner_step=numpy_inner_step, reduced=None):
    """As `tiny_problem.train`, of the oracle: float64."""
    zeros = [np.zeros_like(leaf) for leaf in problem.params]
    oracle = Oracle(settings, inner_step, problem.params, zeros, codec, reduced)
    for t in range(1, steps + 1):
        distances = oracle.step(problem.targets[t - 1][: settings.num_replicas])
        stacked = [np.stack(leaf_R) for leaf_R in zip(*oracle.replicas, strict=True)]
        yield np.array(distances), stacked, oracle.outer_params()


def first_difference(c: Case, tolerance: float = TOLERANCE) -> str | None:
    """None, or where the library class leaves the oracle first, with both values."""
    tiny, steps = problem(c.tree), 3 * c.H + 2
    both = zip(
        train(library(c, tiny), tiny, steps), simulate(oracle_settings(c), tiny, steps), strict=True
    )
    for t, (ours, theirs) in enumerate(both, start=1):
        what = ["distance", *(f"{of}.{n}" for of in ("replicas", "theta") for n in tiny.tree)]
        flat = [[distances, *replicas, *theta] for distances, replicas, theta in (ours, theirs)]
        for name, got, expected in zip(what, *flat, strict=True):
            assert got.shape == expected.shape, f"{name}: {got.shape}, not {expected.shape}"
            off = ~(np.abs(got - expected) <= tolerance)
            if off.any():
                at = tuple(int(i) for i in np.argwhere(off)[0])
                return f"{c}: step {t}, {name}{at} is {got[at]}, not {expected[at]}"
    return None


CASES = sample(grid(), 120)
CORNER = CASES[:14]


def test_every_pair_of_values_is_in_the_sample():
    """Of the pairs that any valid case holds; and the default tier has every single value."""
    assert set(pairs_of(CASES).flat) == set(pairs_of(grid()).flat)
    for values, held in zip(FACTORS.values(), zip(*CORNER, strict=True), strict=True):
        assert set(held) == set(values)


@pytest.mark.parametrize("case", corner(CASES, CORNER), ids=str)
def test_every_step_equals_the_oracle(case):
    """Replicas, theta and distances after every inner step of three rounds."""
    assert first_difference(case) is None


BASE = Case(4, "mixed", 2, 4, 7, 1, "none", 0.25, "nesterov", "even", "strided")


AT_ONCE = dict(overlap_steps=0)
CHANGED = dict(num_replicas=3, sync_period=8, num_fragments=3, num_nonlayer=1, overlap_steps=2)
CHANGED |= dict(alpha=0.3, outer="sgd", outer_lr=0.55, outer_momentum=0.55, sequential=True)
CHANGED |= dict(offsets=(0, 1, 3, 6))
ONE_OFF = [AT_ONCE, *({name: value} for name, value in CHANGED.items())]
ONE_OFF += [AT_ONCE | dict(round_overlap=overlap) for overlap in ("delayed", "eager")]


@pytest.mark.parametrize("changed", ONE_OFF, ids=str)
def test_a_setting_that_is_slightly_off_shows(changed):
    """Control of the comparison: two oracles one setting apart differ by 100 tolerances."""
    settings, tiny = oracle_settings(BASE), problem(BASE.tree)
    one, other = (
        list(simulate(s, tiny, 23))[-1]
        for s in (settings, dataclasses.replace(settings, **changed))
    )
    apart = [np.abs(a - b).max() for a, b in zip(one[2], other[2], strict=True)]
    assert max(apart) > 100 * TOLERANCE


@pytest.mark.exhaustive
@pytest.mark.timeout(0)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("M", FACTORS["M"])
@pytest.mark.parametrize("H", FACTORS["H"])
def test_the_full_grid_equals_the_oracle(tree, M, H):
    chosen = [c for c in grid() if (c.tree, c.M, c.H) == (tree, M, H)]
    differences = filter(None, map(first_difference, chosen))
    assert not list(differences)
