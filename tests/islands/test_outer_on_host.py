"""The outer step on the host: equal to a float64 oracle and to diloco/outer.py within its bound."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_records import EXAMPLES, RUN
from together import rounding

from maxdiloco.diloco import outer as jax_outer
from maxdiloco.diloco import quantize
from maxdiloco.islands import outer_step
from maxdiloco.islands.outer_step import Term
from maxdiloco.islands.records import Leaf

SIZES = (513, 1)
NAMES = tuple(outer_step.WIRES)
ENCODE = jax.jit(quantize.encode, static_argnums=0)
DECODE = jax.jit(quantize.decode, static_argnums=(0, 2))


def values(seed, n=514, spread=1.0):
    """Values of many magnitudes, and those that no format has."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=n) * 10.0 ** rng.uniform(-4, 2, size=n) * spread
    x[rng.integers(n, size=40)] = rng.choice([0.0, -0.0, 1e-40, 1e-37, 3e38, -2.6e38, 1.5], 40)
    return np.float32(x)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spread", [1.0, 1e-36])
def test_a_wire_has_the_bits_of_the_compiled_codec(name, spread):
    for seed in range(5):
        x = values(seed, spread=np.float32(spread))
        payload = outer_step.encode(name, SIZES, x)
        assert len(payload) == outer_step.payload_size(name, SIZES)
        leaves = np.split(x, np.cumsum(SIZES)[:-1])
        codes = [np.asarray(ENCODE(name, leaf)) for leaf in leaves]
        assert payload == b"".join(code.tobytes() for code in codes)
        back = [
            np.asarray(DECODE(name, code, leaf.size))
            for code, leaf in zip(codes, leaves, strict=True)
        ]
        assert outer_step.decode(name, SIZES, payload).tobytes() == np.concatenate(back).tobytes()


def test_a_payload_of_another_size_is_refused():
    with pytest.raises(ValueError, match="^3 .*int8.* 786"):
        outer_step.decode("int8", (770,), b"abc")


def stepped(run, before, gradient, scale):
    """After a record with one member."""
    record = EXAMPLES["c/0/8"][0]._replace(scale=scale)
    return outer_step.stepped(run, before, record, gradient)


def terms(weights, seed=0, n=7):
    rng = np.random.default_rng(seed)
    return [Term((str(i), 1), w, np.float32(rng.normal(size=n))) for i, w in enumerate(weights)]


@pytest.mark.parametrize("optimizer", ["nesterov", "sgd"])
@pytest.mark.parametrize("weights", [(1.0,), (1.0, 1.0, 1.0), (4096.0, 51.2, 733.0, 8.0)])
def test_a_step_is_the_oracles_and_the_devices_within_the_bound(optimizer, weights):
    run = RUN._replace(aggregation="mean", outer_optimizer=optimizer)
    given = terms(weights)
    before = outer_step.Outer(
        *(np.float32(np.random.default_rng(s).normal(size=7)) for s in (8, 9))
    )
    scale = 1.0 if len(set(weights)) == 1 else 0.75
    after = stepped(run, before, outer_step.aggregate(run, 0, given), scale)
    bound = rounding(run, before, given)
    total = sum(term.weight * term.values.astype(np.float64) for term in given)
    g, b = scale * total / sum(weights), run.outer_momentum
    trace = b * before.trace.astype(np.float64) + g
    exact = before.theta - run.outer_lr * (g + b * trace if optimizer == "nesterov" else trace)
    assert 0 < np.abs(after.theta - exact).max() <= bound.max()
    assert np.all(np.abs(after.theta - exact) <= bound)
    if scale == 1.0:
        rule = jax_outer.OPTIMIZERS[optimizer](run.outer_lr, b)
        stacked = jnp.stack([term.values for term in given])
        mean, _ = jax_outer.ordered_mean(lambda r: (stacked[r], ()), len(given))
        state = rule.init(before.theta)
        state = (state[0]._replace(trace=jnp.asarray(before.trace)), *state[1:])
        theta, _ = jax_outer.outer_update(rule, jnp.asarray(before.theta), state, mean)
        assert np.asarray(mean).tobytes() == outer_step.aggregate(run, 0, given).tobytes()
        assert np.all(np.abs(np.asarray(theta) - after.theta) <= 2 * bound)


def test_two_messages_of_an_island_are_one_progress():
    """A mean over islands of what each has moved: (1 + 2 + 3 * 5) / (1 + 3) with weights 1, 3."""
    run = RUN._replace(aggregation="mean")
    a, b = ("a", 1), ("b", 1)
    one = [Term(a, 1.0, np.float32([1])), Term(a, 1.0, np.float32([2])),
           Term(b, 3.0, np.float32([5]))]  # fmt: skip
    assert outer_step.aggregate(run, 0, one).tolist() == [4.5]


def test_radial_directional_mean_keeps_the_norm_of_each_tensor():
    """Leaf of two tensors of two values: 3-4-5 triangles at right angles have the norm 5, not
    5 / sqrt 2; a vocabulary's leaf has the mean; a tensor of zeros stays."""
    run = RUN._replace(fragments=((Leaf(4, 2), Leaf(2, 0)),))
    given = [Term(("a", 1), 1.0, np.float32([3, 4, 0, 0, 1, 0])),
             Term(("b", 1), 1.0, np.float32([-4, 3, 0, 0, 0, 1]))]  # fmt: skip
    found = outer_step.aggregate(run, 0, given)
    root = 5 / np.sqrt(50)
    np.testing.assert_allclose(found, [-root, 7 * root, 0, 0, 0.5, 0.5], rtol=1e-6)


def test_radial_directional_mean_is_the_devices():
    run = RUN._replace(fragments=((Leaf(12, 3),),))
    given = terms((1.0, 1.0, 1.0), seed=3, n=12)
    stacked = jnp.stack([term.values for term in given])
    mean, _ = jax_outer.ordered_mean(lambda r: (stacked[r], ()), 3)
    norm = lambda x: jnp.sqrt(jnp.sum(x.reshape(3, 4) ** 2, axis=1))  # noqa: E731
    found = jax_outer.radial_directional_mean(
        lambda r: stacked[r], mean, 3, norm=norm, spread=lambda n: jnp.repeat(n, 4)
    )
    np.testing.assert_allclose(outer_step.aggregate(run, 0, given), found, rtol=2e-6)


def test_the_bits_are_the_same_on_every_machine():
    """Golden: seen on x86; elementwise float32 is IEEE's everywhere."""
    sizes = (768, 2)
    run = RUN._replace(wire_down="int8", fragments=((Leaf(768, 3), Leaf(2, 0)),))
    # Whole numbers: a library's logarithm may differ between machines.
    theta, *given = np.float32(np.random.default_rng(1).integers(-999, 999, (4, 770))) / 512
    terms = [Term((str(i), 1), 5.0 - 2 * i, x) for i, x in enumerate(given)]
    payload = outer_step.reduced(run, 0, terms)
    after = stepped(run, outer_step.fresh(theta), outer_step.decode("int8", sizes, payload), 0.75)
    assert hashlib.sha256(payload).hexdigest()[:16] == "44d8c4c95ad52190"
    assert after.digest()[:16] == "4295a10248a28d84"
    assert outer_step.from_bytes(after.to_bytes()).digest() == after.digest()


def test_norm_is_that_of_all_values():
    assert outer_step.norm(np.float32([3, 4, 12])) == 13.0
