"""Quantised exchange: the library class against an oracle that quantises the same way.

# R replicas  N values of one leaf of a fragment  δ a difference that float32 may make
"""

import dataclasses
import itertools

import numpy as np
import pytest
from oracle import Settings
from test_against_oracle import simulate
from tiers import corner
from tiny_problem import TREES, jax_inner_step, layer_axis, make_problem, train
from wire_codecs import CODECS

import maxdiloco

pytestmark = pytest.mark.usefixtures("programs")

# float32 rounds by 6e-8 of values of size 1, over 14 steps of about 20 operations.
TOLERANCE = 5e-6
FAR = 100 * TOLERANCE  # what is not the same
DELTA = 5e-6  # how far an outer gradient of the library may be from the oracle's

H, MIXED = 4, TREES["mixed"]
MODES = {
    "at once": dict(),
    "overlapped": dict(overlap_steps=1),
    "delayed": dict(round_overlap="delayed"),
    "eager": dict(round_overlap="eager"),
}


class OnAnEdge(Exception):
    """A value so near to a rounding edge that float32 may come down on the other side."""


def guarded(codec, delta):
    """The codec; raises OnAnEdge if differences of delta change what it gives by more than 5."""
    signs = np.random.default_rng(0)

    def checked(x_N):
        out_N = codec(x_N)
        for _ in range(6):
            moved_N = codec(x_N + delta * signs.choice([-1, 1], size=x_N.shape))
            if np.abs(moved_N - out_N).max() > 5 * delta:
                raise OnAnEdge
        return out_N

    return checked


def clear_of_edges(settings, steps, codec, tree=MIXED, change=lambda problem: problem, **inner):
    """The first of the tree's problems, changed, whose run keeps clear of rounding edges. Next to
    an edge, the last bit of float32 decides on a whole step of the wire. Returns the problem and
    what the oracle makes of it."""
    for seed in range(1000):
        problem = change(make_problem(tree, steps, seed))
        try:
            expected = list(simulate(settings, problem, steps, codec, **inner))
        except OnAnEdge:
            continue
        return problem, expected
    raise AssertionError("all problems come near an edge")


WITHOUT = dict(error_feedback=False)


def both(wire, mode, P, M=2, alpha=0.25, **outer):
    """Settings of the oracle and arguments of the library class, for the mixed tree."""
    shared = WITHOUT | dict(num_replicas=M, sync_period=H, num_fragments=P, alpha=alpha)
    shared |= dict(outer_lr=0.7, outer_momentum=0.9) | MODES[mode] | outer
    kinds = tuple(kind for _, kind in MIXED.values())
    arguments = dict(layer_axis=layer_axis(MIXED), exchange_dtype=wire)
    return Settings(kinds=kinds, **shared), arguments | shared


def compare(algorithm, problem, expected):
    for t, (theirs, ours) in enumerate(
        zip(expected, train(algorithm, problem, len(expected)), strict=True), start=1
    ):
        pairs = zip(itertools.chain(*ours[1:]), itertools.chain(*theirs[1:]), strict=True)
        for got, wanted in pairs:
            np.testing.assert_allclose(got, wanted, rtol=0, atol=TOLERANCE, err_msg=f"step {t}")


def distances(run, other):
    """Of each leaf of theta at the end of two runs of the oracle."""
    last, others = (list(each)[-1][2] for each in (run, other))
    return [np.abs(a - b).max() for a, b in zip(last, others, strict=True)]


# Each wire once, and each mode.
GRID = list(itertools.product(CODECS, MODES))
CORNER = GRID[::5]
BY_FEEDBACK_TOO = ("float4_e3m0", "int2", "topk")
BY_FEEDBACK = [(wire, mode, False) for wire, mode in GRID]
BY_FEEDBACK += itertools.product(BY_FEEDBACK_TOO, MODES, [True])
KEPT = [(wire, mode, False) for wire, mode in CORNER if wire not in BY_FEEDBACK_TOO]
KEPT += [("float4_e3m0", "eager", True), ("int2", "overlapped", True), ("topk", "delayed", True)]


@pytest.mark.parametrize(("wire", "mode", "feedback"), corner(BY_FEEDBACK, KEPT))
def test_rounds_on_every_wire_equal_the_oracle(wire, mode, feedback):
    """Every term is what a receiver decodes, the own one of eager too. Four rounds with error
    feedback, which differ from those without by 100 tolerances, or three."""
    steps, outer = (3 + feedback) * H + 2, dict(outer_lr=0.5, outer_momentum=0.6)
    settings, arguments = both(wire, mode, P=3, error_feedback=feedback, **outer)
    problem, expected = clear_of_edges(settings, steps, guarded(CODECS[wire], DELTA))
    compare(maxdiloco.DiLoCo(jax_inner_step, **arguments), problem, expected)
    if feedback:
        without = dataclasses.replace(settings, error_feedback=False)
        assert max(distances(simulate(without, problem, steps, CODECS[wire]), expected)) > FAR


@pytest.mark.parametrize(
    ("mode", "P"),
    corner(
        itertools.product(["at once", "overlapped", "delayed"], [1, 3]),
        [("at once", 1), ("overlapped", 3)],
    ),
)
def test_the_norm_preserving_merge_equals_the_oracle(mode, P):
    """Three replicas, whatever fragments cut the layers apart; the plain mean is far from it."""
    steps = 3 * H + 2
    radial = dict(aggregation="radial_directional_mean", outer_lr=0.5)
    settings, arguments = both("float32", mode, P=P, M=3, **radial)
    problem = make_problem(MIXED, steps)
    expected = list(simulate(settings, problem, steps))
    compare(maxdiloco.DiLoCo(jax_inner_step, **arguments), problem, expected)
    plain = dataclasses.replace(settings, aggregation="mean")
    _, *apart = distances(simulate(plain, problem, steps), expected)
    assert min(apart) > FAR  # kernel and norm; the embedding is averaged


def test_the_wires_are_told_apart():
    """Control of the comparison above: another wire is 100 tolerances away."""
    problem = make_problem(MIXED, 3 * H)
    settings, _ = both("float32", "eager", P=3)
    runs = [list(simulate(settings, problem, 3 * H, codec)) for codec in CODECS.values()]
    for one, other in itertools.combinations(runs, 2):
        assert max(distances(one, other)) > FAR


WIDE = {  # a fragment's slice of the kernel has 3 * 3 * 200 or 3 * 2 * 200 values
    "embed": ((9, 40), ("vocabulary", 0)),
    "kernel": ((3, 5, 200), ("layers", 1, tuple(range(5)))),
}


def numpy_add(leaves, velocity, targets):
    leaves = [x + b for x, b in zip(leaves, targets, strict=True)]
    return leaves, velocity, 0.0


def jax_add(params, opt_state, batch):
    added = {name: x + batch[name] for name, x in params.items()}
    return added, opt_state, {"distance": added["embed"][0, 0]}


def on_a_grid(problem):
    """All numbers multiples of 2^-19 and below 1, so that float32 adds them without rounding."""

    def rounded(leaves):
        return [np.float32(np.round(leaf * 2**16) / 2**19) for leaf in leaves]

    targets = [[rounded(leaves) for leaves in targets_R] for targets_R in problem.targets]
    return problem._replace(params=rounded(problem.params), targets=targets)


@pytest.mark.parametrize(("wire", "mode"), corner(GRID, CORNER[1::2]))
def test_blocks_run_along_a_fragments_slice_of_each_leaf(wire, mode):
    """1800 and 1200 values of a leaf whose layers lie in the middle dim: 8 and 5 blocks, and in
    float32 two chunks of 1024 in the window of two steps. Sent after steps 2, 5, 8, 10, 13 ... Up
    to the step before the first that uses an outer gradient with a rounding in it."""
    steps = {"at once": 9, "overlapped": 12, "delayed": 17, "eager": 9}[mode]
    shared = dict(num_replicas=2, sync_period=8, num_fragments=3, offsets=(0, 2, 5), alpha=0.5)
    shared |= dict(outer_lr=0.7, outer_momentum=0.9) | WITHOUT | MODES[mode]
    shared |= {"overlap_steps": 3} if mode == "overlapped" else {}
    settings = Settings(kinds=tuple(kind for _, kind in WIDE.values()), **shared)
    # A tie of int8 may go either way: its code is x times a rounded inverse.
    codec = guarded(CODECS[wire], 1e-9) if wire == "int8" else CODECS[wire]
    problem, expected = clear_of_edges(
        settings, steps, codec, tree=WIDE, change=on_a_grid, inner_step=numpy_add
    )
    moved = np.abs(expected[-1][2][1] - problem.params[1])
    assert moved.max((0, 2)).min() > 0  # every layer was applied
    algorithm = maxdiloco.DiLoCo(
        jax_add, layer_axis=layer_axis(WIDE), exchange_dtype=wire, **shared
    )
    compare(algorithm, problem, expected)
