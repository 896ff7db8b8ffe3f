"""What needs no oracle: Algorithm 1, data parallelism, and replicas that never talk, are alike, or
are alone.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiers import corner, full
from tiny_problem import jax_inner_step, layer_axis, numpy_inner_step, problem, train

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


def assert_close(got, expected):
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE)


def test_a_period_of_one_with_sgd_is_data_parallel():
    """H=1, inner SGD lr 0.2, outer SGD lr 1: a step along the mean gradient of all replicas.
    tanh(x - target) is the gradient of log cosh."""

    def sgd_step(params, opt_state, batch):
        moved = jax.tree.map(lambda x, b: x - 0.2 * jnp.tanh(x - b), params, batch)
        return moved, opt_state, {"distance": jnp.zeros(())}

    tiny = problem("mixed")
    seen = run(sgd_step, sync_period=1, outer_lr=1.0, outer_momentum=0.0)
    leaves = [np.float64(leaf) for leaf in tiny.params]
    for targets, (replicas, theta) in zip(tiny.targets, seen, strict=False):
        gradients = [
            np.mean([np.tanh(x - targets[m][i]) for m in range(M)], axis=0)
            for i, x in enumerate(leaves)
        ]
        leaves = [x - 0.2 * g for x, g in zip(leaves, gradients, strict=True)]
        for found in (theta, *(of_replica(m, replicas) for m in range(M))):
            assert_close(found, leaves)


def test_one_fragment_is_diloco():
    """Algorithm 1 of DiLoCo (arXiv 2311.08105) as it stands there, with optax for OuterOpt."""
    tiny = problem("mixed")
    seen = run(num_fragments=1, outer_lr=0.7, outer_momentum=0.9)
    optimizer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    theta = [jnp.asarray(leaf) for leaf in tiny.params]
    outer_state = optimizer.init(theta)
    replicas = [(tiny.params, [np.zeros_like(leaf) for leaf in tiny.params])] * M
    for t in range(1, STEPS + 1):
        replicas = [
            numpy_inner_step(x, velocity, tiny.targets[t - 1][m])[:2]
            for m, (x, velocity) in enumerate(replicas)
        ]
        if t % H == 0:
            stacked = zip(theta, *(x for x, _ in replicas), strict=True)
            mean = [sum(old - np.float32(x) for x in xs) / M for old, *xs in stacked]
            updates, outer_state = optimizer.update(mean, outer_state, theta)
            theta = optax.apply_updates(theta, updates)
            replicas = [([np.float64(leaf) for leaf in theta], v) for _, v in replicas]
        assert_close(seen[t - 1][1], theta)
        for m in range(M):
            assert_close(of_replica(m, seen[t - 1][0]), replicas[m][0])


@pytest.mark.parametrize("overlap", ["none", full("delayed"), "eager"])
def test_alpha_one_is_no_communication(overlap):
    """Streaming DiLoCo sec. 2.3. theta moves, but no bit of replica 0 depends on the others.
    Positive control: with alpha = 0.25 it does."""
    tiny = problem("mixed")
    moved = [[own, *([b + 1 for b in leaves] for leaves in rest)] for own, *rest in tiny.targets]
    others = tiny._replace(targets=moved)
    for alpha in (1.0, 0.25):
        settings = dict(num_fragments=3, alpha=alpha, round_overlap=overlap)
        (replicas, theta), (after, theta_after) = (
            run(tiny=data, **settings)[-1] for data in (tiny, others)
        )
        same = bits(of_replica(0, replicas)) == bits(of_replica(0, after))
        assert same == (alpha == 1.0)
        assert bits(theta) != bits(theta_after)


@pytest.mark.parametrize(
    ("wire", "P", "alpha"),
    corner(
        itertools.product(WIRES, [1, 3], [0.0, 0.25]),
        [("float32", 3, 0.0), ("float4_e3m0", 1, 0.25)],
    ),
)
def test_eager_with_one_replica_equals_diloco_bit_for_bit(wire, P, alpha):
    """Eager updates (arXiv 2502.12996): with no others there is nothing one round late. Control:
    delayed is another trajectory."""
    settings = dict(num_replicas=1, num_fragments=P, alpha=alpha, exchange_dtype=wire)
    diloco, eager, delayed = (
        run(round_overlap=overlap, **settings) for overlap in ("none", "eager", "delayed")
    )
    assert bits(diloco[-1][1]) != bits(delayed[-1][1])
    for (x, theta), (eager_x, eager_theta) in zip(diloco, eager, strict=True):
        if wire == "int2":  # XLA:CPU's older emitters round the two outer steps apart by one bit
            assert_close(x + theta, eager_x + eager_theta)
            continue
        assert bits(x) == bits(eager_x)
        assert bits(theta) == bits(eager_theta)
