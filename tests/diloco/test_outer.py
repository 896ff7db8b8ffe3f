"""Algorithm 2 lines 7-12 by hand: outer gradient, mean over replicas, outer step, merge."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiloco.diloco import outer

f32 = jnp.float32
bf16 = jnp.bfloat16


def bits(x):
    return np.asarray(x).view(np.uint32).tolist()


def mean_of(terms_R):
    """ordered_mean of arrays [R, ...]."""
    M = jax.tree.leaves(terms_R)[0].shape[0]
    return outer.ordered_mean(lambda r: (jax.tree.map(lambda x: x[r], terms_R), ()), M)[0]


def test_outer_gradient_of_bfloat16_parameters_is_float32():
    """1 + 2^-10 is not a bfloat16: a difference taken in bfloat16 would be 0."""
    g = outer.outer_gradient(jnp.array([1 + 2.0**-10], f32), jnp.array([1.0], bf16))
    assert g.dtype == f32
    assert g.tolist() == [2.0**-10]


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "op by op"])
@pytest.mark.parametrize(
    ("terms", "dtype", "mean"),
    [
        # In replica order: ((1e8 + 1) - 1e8) + 1 = 1; two halves give 0, exact arithmetic 2.
        ([1e8, 1, -1e8, 1], f32, 0.25),
        # Of (1 + 2 + 4) float32(1/3); XLA would rewrite a division by 3 in compiled code only.
        ([1, 2, 4], f32, np.float32(7) * np.float32(1 / 3)),
        # 256 + 1 + 1 + 2 is 256 in bfloat16 and 260 in float32.
        ([256, 1, 1, 2], bf16, 65),
    ],
)
def test_the_mean_is_unweighted_float32_and_has_the_same_bits_in_every_program(
    wrap, terms, dtype, mean
):
    found = wrap(mean_of)({"w": jnp.array(terms, dtype)[:, None]})["w"]
    assert found.dtype == f32 and found.tolist() == [mean]


def test_the_eager_mean_adds_the_own_term_in_its_slot():
    """Replica 2 of 4 in float32: ((1e8 + 1) - 1e8) + 1 = 1; own term first would give 0 or 2. Its
    own stale 7 is unused."""
    stale, own = jnp.array([[1e8], [1.0], [7.0], [1.0]], f32), jnp.array([-1e8], f32)
    mean, _ = outer.ordered_mean(lambda r: (outer.eager_own_term(stale[r], own, r, 2), ()), 4)
    assert mean.tolist() == [0.25]


@pytest.mark.parametrize(
    "terms, expected",
    [
        ([[0.0, 0.0], [0.0, 0.0]], [0.0, 0.0]),  # nothing moved
        ([[1.0, 0.0], [-1.0, 0.0]], [0.0, 0.0]),  # no direction
        ([[2.0, 0.0], [-1.0, 0.0]], [0.5, 0.0]),  # no direction: the mean
        ([[0.0, 0.0], [4.0, 0.0]], [2.0, 0.0]),  # of the one that moved, half its norm
        # Mean norm 8/3 along (1, 1) / sqrt(2); the one that did not move has no direction.
        ([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0]], [32**0.5 / 3] * 2),
        ([[3e30, 0.0], [0.0, 1e30]], [1.5e30, 0.5e30]),  # a norm above float32: the mean
        ([[3e-30, 0.0], [0.0, 1e-30]], [1.5e-30, 0.5e-30]),  # below it, too
        # The largest norm; times seven rounded sevenths it is above float32.
        ([[1.8446743e19, 0.0]] * 7, [1.8446743e19, 0.0]),
    ],
)
def test_rda_without_a_norm_or_a_direction(terms, expected):
    terms_R, M = jnp.array(terms), len(terms)
    options = dict(norm=lambda x: jnp.sqrt(jnp.sum(x * x)), spread=lambda n: jnp.full(2, n))
    found = outer.radial_directional_mean(lambda r: terms_R[r], mean_of(terms_R), M, **options)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "momentum", "expected"),
    [
        # m' = 0.9 m + g; theta' = theta - 0.4 (g + 0.9 m').
        # g = 0.5: m = 0.5, theta = 1 - 0.4 * 0.95. g = -1: m = -0.55, theta = 0.62 + 0.4 * 1.495.
        ("nesterov", 0.9, [0.62, 1.218]),
        # Heavy ball. g = 0.5: m = 0.5, theta = 0.8. g = -1: m = -0.55, theta = 0.8 + 0.22.
        ("sgd", 0.9, [0.8, 1.02]),
        # b1 = momentum, b2 0.95, eps 0.1. g = 0.5: 1 - 0.4 * 0.5 / (0.5 + 0.1).
        # g = -1: m = 0.8 * 0.1 - 0.2 = -0.12, / 0.36 = -0.3333333;
        #   v = 0.95 * 0.0125 + 0.05 = 0.061875, / 0.0975 = 0.6346154, root 0.7966276;
        #   0.6666667 + 0.4 * 0.3333333 / 0.8966276.
        ("adam", 0.8, [0.6666667, 0.8153720]),
    ],
)
def test_outer_optimizers_by_hand(name, momentum, expected):
    optimizer = outer.OPTIMIZERS[name](0.4, momentum)
    theta = {"w": jnp.ones((1,), f32)}
    state = optimizer.init(theta)
    for g, wanted in zip([0.5, -1.0], expected, strict=True):
        theta, state = outer.outer_update(optimizer, theta, state, {"w": jnp.full((1,), g, f32)})
        assert float(theta["w"][0]) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("name", ["nesterov", "sgd"])
def test_momentum_zero_has_no_state(name):
    """Zeros as a trace would waste memory."""
    for momentum, shapes in ((0.0, []), (0.9, [(3,)])):
        state = outer.OPTIMIZERS[name](0.4, momentum).init(jnp.ones(3))
        assert [x.shape for x in jax.tree.leaves(state)] == shapes


def test_merge_weighs_the_own_value_by_alpha_in_float32_and_returns_the_inner_dtype():
    """Algorithm 2, line 12: 0.25 * 4 + 0.75 * 8 = 7. bfloat16 steps near 1 are u = 2^-7: half of 1
    and of 1 + 1.375 u is 1 + 0.6875 u, nearest 1 + u. In bfloat16 throughout, the outer value is
    1 + u first and the mean 1 + 0.5 u, a tie to 1."""
    assert outer.merge(jnp.array([4.0]), jnp.array([8.0]), alpha=0.25).tolist() == [7.0]
    u = 2.0**-7
    mixed = outer.merge(jnp.array([1.0], bf16), jnp.array([1 + 1.375 * u], f32), alpha=0.5)
    assert mixed.dtype == bf16
    assert mixed.astype(f32).tolist() == [1 + u]


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "op by op"])
def test_merge_at_its_ends_is_a_copy(wrap):
    """sec. 2.3: alpha 1 is no communication, alpha 0 discards the own values, bit for bit.

    0 * inf and 0 * nan would be nan, and -0 + 0 is +0.
    """
    odd = jnp.array([jnp.inf, jnp.nan, 1.0, -0.0], f32)
    plain = jnp.array([-0.0, 1.1, jnp.inf, 3e38], f32)
    assert bits(wrap(lambda i, o: outer.merge(i, o, alpha=0.0))(odd, plain)) == bits(plain)
    assert bits(wrap(lambda i, o: outer.merge(i, o, alpha=1.0))(plain, odd)) == bits(plain)
    assert bits(outer.merge(plain, odd, alpha=0.5)) != bits(plain)
