"""Settings in which the algorithm becomes a simpler one that needs no oracle.

# R replicas
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiers import corner
from tiny_problem import Problem, jax_inner_step, layer_axis, numpy_inner_step, problem, train

import maxdiloco

pytestmark = pytest.mark.usefixtures("programs")  # many runs differ in numbers alone

M, H, STEPS = 4, 3, 8
WIRES = ("float32", "bfloat16", "int8", "float4_e3m0", "int2", "topk")
# float32 rounds by 6e-8 of values of size 1; what is compared took 8 steps of about 20 roundings.
TOLERANCE = 5e-6


def run(inner_step=jax_inner_step, tiny=None, steps=STEPS, **settings):
    """[(replicas, theta)] after each step: leaves [R, ...] and [...]."""
    tiny = tiny or problem("mixed")
    settings = dict(num_replicas=M, sync_period=H, layer_axis=layer_axis(tiny.tree)) | settings
    algorithm = maxdiloco.DiLoCo(inner_step, **settings)
    return [(replicas, theta) for _, replicas, theta in train(algorithm, tiny, steps)]


def bits(leaves) -> list[bytes]:
    return [np.ascontiguousarray(leaf).tobytes() for leaf in leaves]


def of_replica(m, leaves_R):
    return [leaf_R[m] for leaf_R in leaves_R]


def close(got, expected):
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE)


def with_other_data_for_the_others() -> Problem:
    """Replica 0 keeps its targets."""
    tiny = problem("mixed")
    moved = [[own, *([b + 1 for b in leaves] for leaves in rest)] for own, *rest in tiny.targets]
    return tiny._replace(targets=moved)


def inner_steps(leaves, velocity, tiny, m, steps):
    """Replica m alone, float64, over the given steps."""
    for t in steps:
        leaves, velocity, _ = numpy_inner_step(leaves, velocity, tiny.targets[t - 1][m])
    return leaves, velocity


def zeros_like(leaves):
    return [np.zeros_like(leaf) for leaf in leaves]


@pytest.mark.parametrize("P", [1, 3])
def test_with_alpha_one_and_no_outer_step_replicas_never_talk(P):
    """alpha=1, tau=0, outer lr 0: M runs alone, and theta as at the start."""
    tiny = problem("mixed")
    seen = run(num_fragments=P, alpha=1.0, outer_lr=0.0)
    for m in range(M):
        alone, _ = inner_steps(tiny.params, zeros_like(tiny.params), tiny, m, range(1, STEPS + 1))
        close(of_replica(m, seen[-1][0]), alone)
    assert bits(seen[-1][1]) == bits(tiny.params)


@pytest.mark.parametrize("overlap", ["none", "delayed", "eager"])
def test_alpha_one_is_no_communication(overlap):
    """Streaming DiLoCo sec. 2.3. theta moves, but no bit of replica 0 depends on the others.

    Positive control: with alpha = 0.25 it does."""
    others = with_other_data_for_the_others()
    for alpha in (1.0, 0.25):
        settings = dict(num_fragments=3, alpha=alpha, outer_overlap=overlap)
        (replicas, theta), (after, theta_after) = (
            run(tiny=tiny, **settings)[-1] for tiny in (problem("mixed"), others)
        )
        same = bits(of_replica(0, replicas)) == bits(of_replica(0, after))
        assert same == (alpha == 1.0)
        assert bits(theta) != bits(theta_after)


def test_outer_sgd_with_lr_one_is_parameter_averaging():
    """alpha=0, tau=0, momentum 0: after every H-th step all hold the mean of where they went."""
    tiny = problem("mixed")
    seen = run(outer_lr=1.0, outer_momentum=0.0)
    replicas = [(tiny.params, zeros_like(tiny.params))] * M
    for start in range(0, STEPS - H + 1, H):
        steps = range(start + 1, start + H + 1)
        replicas = [inner_steps(*state, tiny, m, steps) for m, state in enumerate(replicas)]
        mean = [np.mean(leaf_R, axis=0) for leaf_R in zip(*(x for x, _ in replicas), strict=True)]
        replicas = [(mean, velocity) for _, velocity in replicas]
        got, theta = seen[start + H - 1]
        close(theta, mean)
        for m in range(M):
            close(of_replica(m, got), mean)


def sgd_step(params, opt_state, batch):
    """Inner SGD, lr 0.2; tanh(x - target) is the gradient of log cosh."""
    moved = jax.tree.map(lambda x, b: x - 0.2 * jnp.tanh(x - b), params, batch)
    return moved, opt_state, {"distance": jnp.zeros(())}


def test_a_period_of_one_with_sgd_is_data_parallel():
    """H=1, inner SGD, outer SGD lr 1: a step along the mean gradient of all replicas."""
    tiny = problem("mixed")
    seen = run(sgd_step, sync_period=1, outer_lr=1.0, outer_momentum=0.0)
    leaves = [np.float64(leaf) for leaf in tiny.params]
    for targets, (replicas, theta) in zip(tiny.targets, seen, strict=False):
        gradients = [
            np.mean([np.tanh(x - targets[m][i]) for m in range(M)], axis=0)
            for i, x in enumerate(leaves)
        ]
        leaves = [x - 0.2 * g for x, g in zip(leaves, gradients, strict=True)]
        close(theta, leaves)
        for m in range(M):
            close(of_replica(m, replicas), leaves)


def test_one_fragment_is_diloco():
    """Algorithm 1 of DiLoCo (arXiv 2311.08105) as it stands there, with optax for OuterOpt."""
    tiny = problem("mixed")
    seen = run(num_fragments=1, outer_lr=0.7, outer_momentum=0.9)
    optimizer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    theta = [jnp.asarray(leaf) for leaf in tiny.params]
    outer_state = optimizer.init(theta)
    replicas = [(tiny.params, zeros_like(tiny.params))] * M
    for t in range(1, STEPS + 1):
        replicas = [inner_steps(*state, tiny, m, [t]) for m, state in enumerate(replicas)]
        if t % H == 0:
            stacked = zip(theta, *(x for x, _ in replicas), strict=True)
            mean = [sum(old - np.float32(x) for x in xs) / M for old, *xs in stacked]
            updates, outer_state = optimizer.update(mean, outer_state, theta)
            theta = optax.apply_updates(theta, updates)
            replicas = [([np.float64(leaf) for leaf in theta], v) for _, v in replicas]
        close(seen[t - 1][1], theta)
        for m in range(M):
            close(of_replica(m, seen[t - 1][0]), replicas[m][0])


def test_offsets_a_multiple_of_the_period_away_are_the_same_schedule():
    """Integers taken mod H: bit for bit."""
    ours = run(num_fragments=2, offsets=(0, 1), overlap_steps=1)
    other = run(num_fragments=2, offsets=(-2 * H, 1 + 5 * H), overlap_steps=1)
    assert [bits(x + theta) for x, theta in ours] == [bits(x + theta) for x, theta in other]


MODES = {
    "at once": dict(alpha=0.25),
    "overlapped": dict(alpha=0.25, overlap_steps=1),
    "delayed": dict(alpha=0.25, outer_overlap="delayed"),
    "eager": dict(alpha=0.25, outer_overlap="eager"),
}


def run_with_equal_data(**settings):
    tiny = problem("mixed")
    return run(tiny=tiny._replace(targets=[[first] * M for first, *_ in tiny.targets]), **settings)


IDENTICAL = list(itertools.product(WIRES, MODES))


@pytest.mark.parametrize(("wire", "mode"), corner(IDENTICAL, IDENTICAL[::5]))
def test_identical_replicas_stay_identical_for_ever(wire, mode):
    """Equal data, no other source of differences: equal bits after every step, on every wire.

    Eager with two replicas: with more, the fresh term has another place in each replica's sum,
    and float32 sums depend on the order."""
    replicas = 2 if mode == "eager" else M
    settings = dict(num_replicas=replicas, num_fragments=3, exchange_dtype=wire, **MODES[mode])
    for x, _ in run_with_equal_data(**settings):
        assert len({tuple(bits(of_replica(m, x))) for m in range(replicas)}) == 1


def test_identical_replicas_stay_equal_to_rounding_when_eager():
    """Four of them, in float32: see above."""
    for x, _ in run_with_equal_data(num_fragments=3, **MODES["eager"]):
        for m in range(1, M):
            close(of_replica(m, x), of_replica(0, x))


def test_replicas_with_unequal_data_differ():
    """Control of the comparison above."""
    replicas, _ = run(steps=1)[0]
    assert len({tuple(bits(of_replica(m, replicas))) for m in range(M)}) == M


@pytest.mark.parametrize(
    ("wire", "P", "alpha"),
    corner(
        itertools.product(WIRES, [1, 3], [0.0, 0.25]),
        [("float32", 3, 0.0), ("float4_e3m0", 1, 0.25), ("topk", 3, 0.25)],
    ),
)
def test_eager_with_one_replica_equals_diloco_bit_for_bit(wire, P, alpha):
    """Eager updates (arXiv 2502.12996): with no others there is nothing one round late."""
    settings = dict(num_replicas=1, num_fragments=P, alpha=alpha, exchange_dtype=wire)
    diloco, eager = (run(outer_overlap=overlap, **settings) for overlap in ("none", "eager"))
    for (x, theta), (eager_x, eager_theta) in zip(diloco, eager, strict=True):
        if wire == "int2":  # XLA:CPU's older emitters round the two outer steps apart by one bit
            close(x + theta, eager_x + eager_theta)
            continue
        assert bits(x) == bits(eager_x)
        assert bits(theta) == bits(eager_theta)


def test_delayed_with_one_replica_is_not_diloco():
    """Control of the comparison above: one round late is another trajectory."""
    diloco, delayed = (run(num_replicas=1, outer_overlap=o)[-1] for o in ("none", "delayed"))
    assert bits(diloco[1]) != bits(delayed[1])
