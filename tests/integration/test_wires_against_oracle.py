"""Quantised exchange: the library class against an oracle that quantises the same way.

The wire formats are written here once more, in NumPy, from the table in `diloco/quantize.py`.

    # R replicas  N values of one leaf of a fragment  δ a difference that float32 may make
"""

import dataclasses
import itertools

import numpy as np
import pytest
from oracle import Oracle, Settings
from tiers import corner
from tiny_problem import (
    TREES,
    jax_inner_step,
    layer_axis,
    make_problem,
    numpy_inner_step,
    train,
)

import maxdiloco

pytestmark = pytest.mark.usefixtures("programs")

BLOCK = 256
# float32 rounds by 6e-8 of values of size 1, over 14 steps of about 20 operations.
TOLERANCE = 5e-6
DELTA = 5e-6  # how far an outer gradient of the library may be from the oracle's


def float32_codec(x_N):
    return np.asarray(x_N, np.float32)


def bfloat16_codec(x_N):
    """Eight significant bits, ties to even: np.round does that to x over its last bit's worth."""
    _, exponent_N = np.frexp(x_N)  # |x| = f * 2^exponent, 1/2 <= f < 1
    last_bit_N = np.exp2(exponent_N - 8.0)
    return np.round(x_N / last_bit_N) * last_bit_N


def by_block(quantise):
    """A codec that scales blocks of 256 neighbours, the last one shorter, each by its largest."""

    def codec(x_N):
        x_N = np.asarray(x_N, np.float64)
        blocks = [x_N[i : i + BLOCK] for i in range(0, len(x_N), BLOCK)]
        out = [quantise(x, np.abs(x).max()) if x.any() else 0 * x for x in blocks]
        return np.concatenate(out)

    return codec


@by_block
def int8_codec(x_N, largest):
    """code * scale, scale = a / 127 cut to whole 2^-24ths of the power of two above a."""
    _, exponent = np.frexp(np.float32(largest))
    unit = np.exp2(exponent - 24.0)
    scale = np.floor(largest / unit / 127) * unit
    return np.round(x_N / scale) * scale


def e3m0(x_N, largest):
    """The nearest of ±s, ±s/2 ... ±s/64 and 0, s the power of two nearest to a; ties go up."""
    _, exponent = np.frexp(largest)  # a = f * 2^exponent; the nearest power is above f = 3/4
    s = np.exp2(exponent - (largest / np.exp2(exponent) < 0.75) * 1.0)
    levels = np.array([s / 2**i for i in range(7)] + [0.0])
    distances = np.abs(np.abs(x_N)[:, None] - levels)
    return np.sign(x_N) * levels[distances.argmin(1)]


@by_block
def int2_codec(x_N, largest):
    """±s/2 or ±3/2 s, s 5/4 of the mean magnitude, of bits worth a / 2^22 and more."""
    _, exponent = np.frexp(largest)
    unit = np.exp2(exponent - 22.0)
    total = np.floor(np.floor(np.abs(x_N) / unit).sum() / 64)
    s = bfloat16_codec(np.float32(total) * np.float32(1.25 / len(x_N))) * unit * 64
    return np.where(np.abs(x_N) >= s, 1.5 * s, 0.5 * s) * np.where(x_N < 0, -1, 1)


@by_block
def topk_codec(x_N, largest):
    """Of the eight of largest magnitude, the first of equal ones, what e3m0 makes of them."""
    kept_N = np.zeros_like(x_N)
    places = np.argsort(-np.abs(x_N), kind="stable")[:8]
    kept_N[places] = x_N[places]
    return e3m0(kept_N, largest)


e3m0_codec = by_block(e3m0)
CODECS = {
    "float32": float32_codec,
    "bfloat16": bfloat16_codec,
    "int8": int8_codec,
    "float4_e3m0": e3m0_codec,
    "int2": int2_codec,
    "topk": topk_codec,
}


@pytest.mark.parametrize(
    ("wire", "values", "expected"),
    [
        # 1.00390625 = 1 + 2^-8 is half way between 1 and 1 + 2^-7: to the even one, 1.
        ("bfloat16", [1.00390625, 1.01171875, -3.0], [1.0, 1.015625, -3.0]),
        # a = 127, scale 1: half way goes to even.
        ("int8", [127.0, 2.5, 3.5, -0.4], [127.0, 2.0, 4.0, 0.0]),
        # a = 0.9: s = 1; 0.8 is nearer to 1 than to 1/2; 0.006 is nearer to 0 than to 1/64.
        ("float4_e3m0", [0.9, -0.8, 0.3, 0.01, 0.006], [1.0, -1.0, 0.25, 0.015625, 0.0]),
        # a = 1.4: s = 1, and nothing above it. Half way goes away from zero: 3/4, 1/128.
        ("float4_e3m0", [1.4, 0.7, -0.75, 0.0078125], [1.0, 0.5, -1.0, 0.015625]),
        # Mean magnitude 1.6, s = 2.
        ("int2", [1.0, -1.0, 4.0, -2.0, 0.0], [1.0, -1.0, 3.0, -3.0, 1.0]),
        ("topk", [1.0] * 4 + [-2.0] * 8, [0.0] * 4 + [-2.0] * 8),
    ],
)
def test_the_codecs_written_here_by_hand(wire, values, expected):
    np.testing.assert_array_equal(CODECS[wire](np.array(values)), expected)


# --- several rounds of a small tree -----------------------------------------------------------

H = 4
MODES = {
    "at once": dict(),
    "overlapped": dict(overlap_steps=1),
    "delayed": dict(outer_overlap="delayed"),
    "eager": dict(outer_overlap="eager"),
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


def clear_of_edges(make, settings, inner_step, steps, codec):
    """The first of the problems make(0), make(1) ... whose run keeps clear of rounding edges.

    Next to an edge, the last bit of float32 decides on a whole step of the wire. Returns the
    problem and what the oracle makes of it."""
    for seed in range(1000):
        problem = make(seed)
        try:
            expected = simulate(settings, problem, inner_step, steps, codec)
        except OnAnEdge:
            continue
        return problem, expected
    raise AssertionError("all problems come near an edge")


def simulate(settings, problem, inner_step, steps, codec):
    """(replicas [leaf][R, ...], theta [leaf]) after each step, float64."""
    zeros = [np.zeros_like(leaf) for leaf in problem.params]
    oracle = Oracle(settings, inner_step, problem.params, zeros, codec)
    seen = []
    for t in range(1, steps + 1):
        oracle.step(problem.targets[t - 1][: settings.num_replicas])
        stacked = [np.stack(leaf_R) for leaf_R in zip(*oracle.replicas, strict=True)]
        seen.append((stacked, oracle.outer_params()))
    return seen


WITHOUT = dict(error_feedback=False)


def both(tree, wire, mode, P, M=2, alpha=0.25, **outer):
    """Settings of the oracle and arguments of the library class."""
    shared = dict(num_replicas=M, sync_period=H, num_fragments=P, alpha=alpha)
    shared |= dict(outer_lr=0.7, outer_momentum=0.9) | MODES[mode] | outer
    shared = WITHOUT | shared
    kinds = tuple(kind for _, kind in tree.values())
    return Settings(kinds=kinds, **shared), dict(
        layer_axis=layer_axis(tree), exchange_dtype=wire, **shared
    )


def compare(algorithm, problem, expected):
    for t, (theirs, ours) in enumerate(
        zip(expected, train(algorithm, problem, len(expected)), strict=True), start=1
    ):
        for got, wanted in zip(itertools.chain(*ours[1:]), itertools.chain(*theirs), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=0, atol=TOLERANCE, err_msg=f"step {t}")


# Each wire once, and each mode.
GRID = list(itertools.product(CODECS, MODES))
CORNER = GRID[::5]


BY_FEEDBACK = [(wire, mode, False) for wire, mode in GRID]
BY_FEEDBACK += itertools.product(["float4_e3m0", "int2", "topk"], MODES, [True])
KEPT = [(wire, mode, False) for wire, mode in CORNER]
KEPT += [("float4_e3m0", "eager", True), ("int2", "overlapped", True), ("topk", "delayed", True)]


@pytest.mark.parametrize(("wire", "mode", "feedback"), corner(BY_FEEDBACK, KEPT))
def test_rounds_on_every_wire_equal_the_oracle(wire, mode, feedback):
    """Every term is what a receiver decodes, the own one of eager too. Four rounds with error
    feedback, which differ from those without by 100 tolerances, or three."""
    tree, steps = TREES["mixed"], (3 + feedback) * H + 2
    settings, arguments = both(
        tree, wire, mode, P=3, outer_lr=0.5, outer_momentum=0.6, error_feedback=feedback
    )
    problem, expected = clear_of_edges(
        lambda seed: make_problem(tree, steps, seed),
        settings,
        numpy_inner_step,
        steps,
        guarded(CODECS[wire], DELTA),
    )
    compare(maxdiloco.DiLoCo(jax_inner_step, **arguments), problem, expected)
    if feedback:
        without = dataclasses.replace(settings, error_feedback=False)
        _, theta = simulate(without, problem, numpy_inner_step, steps, CODECS[wire])[-1]
        apart = [np.abs(a - b).max() for a, b in zip(theta, expected[-1][1], strict=True)]
        assert max(apart) > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("mode", "P"),
    corner(
        itertools.product(["at once", "overlapped", "delayed"], [1, 3]),
        [("at once", 1), ("overlapped", 3)],
    ),
)
def test_the_norm_preserving_merge_equals_the_oracle(mode, P):
    """Three replicas, whatever fragments cut the layers apart; the plain mean is far from it."""
    tree, steps = TREES["mixed"], 3 * H + 2
    settings, arguments = both(tree, "float32", mode, P=P, M=3, merge="rda", outer_lr=0.5)
    problem = make_problem(tree, steps)
    expected = simulate(settings, problem, numpy_inner_step, steps, float32_codec)
    compare(maxdiloco.DiLoCo(jax_inner_step, **arguments), problem, expected)
    plain = dataclasses.replace(settings, merge="mean")
    _, theta = simulate(plain, problem, numpy_inner_step, steps, float32_codec)[-1]
    apart = [np.abs(a - b).max() for a, b in zip(theta, expected[-1][1], strict=True)]
    assert min(apart[1:]) > 100 * TOLERANCE  # kernel and norm; the embedding is averaged


def test_the_wires_are_told_apart():
    """Control of the comparison above: another wire is 100 tolerances away."""
    tree = TREES["mixed"]
    problem = make_problem(tree, 3 * H)
    last = []
    for codec in CODECS.values():
        settings, _ = both(tree, "float32", "eager", P=3)
        _, theta = simulate(settings, problem, numpy_inner_step, 3 * H, codec)[-1]
        last.append(np.concatenate([leaf.ravel() for leaf in theta]))
    for one, other in itertools.combinations(last, 2):
        assert np.abs(one - other).max() > 100 * TOLERANCE


# --- many blocks and several chunks -----------------------------------------------------------

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


@pytest.mark.parametrize(("wire", "mode"), corner(GRID, CORNER))
def test_blocks_run_along_a_fragments_slice_of_each_leaf(wire, mode):
    """1800 and 1200 values of a leaf whose layers lie in the middle dim: 8 and 5 blocks, and in
    float32 two chunks of 1024 in the window of two steps.

    Sent after steps 2, 5, 8, 10, 13 ... Up to the step before the first that uses an outer
    gradient with a rounding in it."""
    steps = {"at once": 9, "overlapped": 12, "delayed": 17, "eager": 9}[mode]
    shared = dict(num_replicas=2, sync_period=8, num_fragments=3, offsets=(0, 2, 5), alpha=0.5)
    shared |= dict(outer_lr=0.7, outer_momentum=0.9) | WITHOUT | MODES[mode]
    shared |= {"overlap_steps": 3} if mode == "overlapped" else {}
    settings = Settings(kinds=tuple(kind for _, kind in WIDE.values()), **shared)
    # A tie of int8 may go either way: its code is x times a rounded inverse.
    codec = guarded(CODECS[wire], 1e-9) if wire == "int8" else CODECS[wire]
    problem, expected = clear_of_edges(
        lambda seed: on_a_grid(make_problem(WIDE, steps, seed)),
        settings,
        numpy_add,
        steps,
        codec,
    )
    moved = np.abs(expected[-1][1][1] - problem.params[1])
    assert moved.max((0, 2)).min() > 0  # every layer was applied
    algorithm = maxdiloco.DiLoCo(
        jax_add, layer_axis=layer_axis(WIDE), exchange_dtype=wire, **shared
    )
    compare(algorithm, problem, expected)
