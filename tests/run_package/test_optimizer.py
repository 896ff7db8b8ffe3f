"""The inner optimizer: its schedule, what decays, what muon takes, how it lies on a mesh."""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiloco.config import config as base
from maxdiloco.config.keys import KEYS
from maxdiloco.parallel.mesh import AXES
from maxdiloco.parallel.sharding import DEFAULT_RULES, optimizer_shardings, parameter_shardings
from maxdiloco.run import optimizer

AXIS_NAMES = {
    "embedding": ("vocab", "embed"),
    "layers": {
        "norm": ("layers", "norm"),
        "out": ("layers", "heads", "head_dim", "embed"),
        "query": ("layers", "embed", "heads", "head_dim"),
    },
    "norm": ("norm",),
}
SHAPES = {
    "embedding": (6, 4),
    "layers": {"norm": (2, 4), "out": (2, 2, 3, 4), "query": (2, 4, 2, 3)},
    "norm": (4,),
}
OPT_TYPES = KEYS["opt_type"].choices
# Only the axis names of a model, all the optimizer looks at.
MODEL = SimpleNamespace(logical_axes=AXIS_NAMES)


def config(**changes):
    """As in base.yml, but a constant rate of 0.1, no decay and no clipping."""
    keys = dict(
        learning_rate=0.1, warmup_steps_fraction=0.0, learning_rate_final_fraction=1.0,
        adam_weight_decay=0.0, gradient_clipping_threshold=0.0,
    )  # fmt: skip
    return SimpleNamespace(**base.from_dict({}).as_dict() | keys | changes)


def tree(make):
    shaped = lambda shape: np.float32(make(shape))  # noqa: E731
    return jax.tree.map(shaped, SHAPES, is_leaf=lambda leaf: isinstance(leaf, tuple))


def random(seed):
    return tree(np.random.default_rng(seed).standard_normal)


def run(cfg, params, gradients):
    """Parameters after one step for each gradient."""
    rule = optimizer.build(cfg, model=MODEL)
    state, schedule = rule.init(params), optimizer.learning_rate_schedule(cfg, 10)
    for count, gradient in enumerate(gradients):
        updates, state = rule.update(gradient, state, params, learning_rate=schedule(count))
        params = optax.apply_updates(params, updates)
    return params


def half_a_cosine(progress, last):
    return last + (1 - last) * 0.5 * (1 + math.cos(math.pi * progress))


WARMUP = dict(warmup_steps_fraction=0.1)
WSD = WARMUP | dict(
    lr_schedule_type="wsd", wsd_decay_steps_fraction=0.2, learning_rate_final_fraction=0.1
)
HOLDS = {5: 0.5, 10: 1.0, 50: 1.0, 80: 1.0, 100: 0.1, 999: 0.1}
# Keys, steps of the run, and by step, which counts from 1, the part of the peak.
SCHEDULES = {
    "a tenth of warmup, a cosine to a twentieth": (
        WARMUP | dict(learning_rate_final_fraction=0.05),
        100,
        {1: 0.1, 5: 0.5, 10: 1.0, 30: half_a_cosine(20 / 90, 0.05), 55: 0.525, 100: 0.05}
        | {101: 0.05, 1000: 0.05},
    ),
    "shorter than the run": (
        dict(learning_rate_final_fraction=0.2, learning_rate_schedule_steps=4),
        100,
        {t: half_a_cosine(t / 4, 0.2) for t in (1, 2, 3)} | {4: 0.2, 5: 0.2, 6: 0.2},
    ),
    "a warmup that fills the run": (
        dict(warmup_steps_fraction=1.0), 4, {1: 0.25, 2: 0.5, 3: 0.75, 4: 1.0},
    ),
    "wsd, whose last 20 steps fall": (WSD, 100, HOLDS | {85: 0.775, 90: 0.55}),
    "wsd that falls as a cosine": (
        WSD | dict(wsd_decay_style="cosine"), 100, HOLDS | {85: half_a_cosine(0.25, 0.1), 90: 0.55},
    ),
    "wsd whose warmup and fall overlap": (
        WSD
        | dict(warmup_steps_fraction=0.8, wsd_decay_steps_fraction=0.5)
        | dict(learning_rate_final_fraction=0.0),
        10,
        {8: 1.0, 9: 0.5, 10: 0.0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_learning_rate_follows_its_schedule(name):
    changes, steps, fractions = SCHEDULES[name]
    schedule = optimizer.learning_rate_schedule(config(**changes), steps)
    found = {t: schedule(t - 1) / 0.1 for t in fractions}
    assert found == pytest.approx(fractions, rel=1e-6)


def test_adamw_is_adam_with_decoupled_decay_of_all_but_norm_scales():
    """arXiv 1711.05101, algorithm 2, in NumPy, three steps. Under muon too: with a gradient of 0,
    what is left is the decay, 1 - 0.1 * 0.3."""
    cfg = config(adam_weight_decay=0.3)
    start, gradients = random(0), [random(seed) for seed in (1, 2, 3)]
    end = run(cfg, start, gradients)

    def by_hand(x, names, *gradients):
        x, m, v = np.float64(x), 0.0, 0.0
        decay = 0.0 if "norm" in names else 0.3
        for t, g in enumerate(map(np.float64, gradients), 1):
            m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
            step = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.99**t)) + 1e-8)
            x = x - 0.1 * (step + decay * x)
        return x

    def check(x, expected):
        np.testing.assert_allclose(x, expected, rtol=1e-5, atol=1e-6)

    jax.tree.map(check, end, jax.tree.map(by_hand, start, AXIS_NAMES, *gradients))
    muon = config(opt_type="muon", adam_weight_decay=0.3)
    end = run(muon, tree(np.ones), [tree(np.zeros)])
    jax.tree.map(lambda x, names: check(x, 1.0 if "norm" in names else 0.97), end, AXIS_NAMES)


def test_muon_orthogonalises_layers_matrices_with_heads_side_by_side():
    """The update of a layer's query, [embed 4, heads * head_dim 6], and out, [6, 4], has nearly
    equal singular values (Newton-Schulz brings them to 0.7 ... 1.2) and AdamW's size: 0.2 * lr
    * sqrt(6) each, lr 0.1. A gradient's own spread is larger; embedding and norms get Adam's
    first step, +-lr."""
    gradient = random(1)
    end = run(config(opt_type="muon"), tree(np.zeros), [gradient])
    for name, shape in (("query", (4, 6)), ("out", (6, 4))):
        for layer in range(2):
            update = np.asarray(end["layers"][name][layer]).reshape(shape)
            raw = gradient["layers"][name][layer].reshape(shape)
            singular, of_raw = np.linalg.svd(np.stack([update, raw]), compute_uv=False)
            assert singular[0] / singular[-1] < 2 < of_raw[0] / of_raw[-1]
            assert singular == pytest.approx(0.1 * 0.2 * math.sqrt(6), rel=0.4)
            assert np.vdot(update, raw) < 0
    for leaf, g in ((end["embedding"], gradient["embedding"]), (end["norm"], gradient["norm"])):
        np.testing.assert_allclose(leaf, -0.1 * np.sign(g), rtol=1e-4)


def test_muon_beta_is_how_long_muon_remembers_gradients():
    """With 0 an update is that of the last gradient alone; the default keeps the first one's."""
    first, second = random(1), random(2)

    def last_update(**keys):
        cfg = config(opt_type="muon", adam_weight_decay=0.0, **keys)
        after = [run(cfg, tree(np.zeros), given) for given in ([first], [first, second])]
        alone = run(cfg, tree(np.zeros), [second])
        return jax.tree.map(np.subtract, *reversed(after))["layers"], alone["layers"]

    found, alone = last_update(muon_beta=0.0)
    for name in ("query", "out"):
        np.testing.assert_allclose(found[name], alone[name], rtol=1e-4, atol=1e-5)
    found, alone = last_update()
    assert np.abs(found["query"] - alone["query"]).max() > 0.01


def test_clipping_scales_the_whole_gradient_to_the_threshold():
    """Global norm 10 and threshold 2: a fifth of it; a norm below the threshold stays."""
    ones = tree(np.ones)
    norm = float(optax.tree.norm(ones))
    cfg = config(opt_type="sgd", gradient_clipping_threshold=2.0)
    for size, kept in ((10.0, 2.0), (1.5, 1.5)):
        gradient = jax.tree.map(lambda x, size=size: x * size / norm, ones)
        end = run(cfg, tree(np.zeros), [gradient])
        assert float(optax.tree.norm(end)) == pytest.approx(0.1 * kept, rel=1e-5)
    unclipped = run(config(opt_type="sgd"), tree(np.zeros), [ones])
    assert float(optax.tree.norm(unclipped)) == pytest.approx(0.1 * norm, rel=1e-5)


@pytest.mark.parametrize("opt_type", ["adamw", "muon"])
def test_the_mean_of_gradients_alone_is_kept_in_mu_dtype(opt_type):
    """In bfloat16 a half of its bytes, and the first update is the same."""
    rules = [
        optimizer.build(config(opt_type=opt_type, mu_dtype=mu_dtype), model=MODEL)
        for mu_dtype in ("float32", "bfloat16")
    ]
    whole, half = (rule.init(random(0)) for rule in rules)
    sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves(state)) for state in (whole, half)]
    means = [mean for _, mean in optax.tree.get_all_with_path(whole, "mu")]
    of_mu = sum(leaf.nbytes for leaf in jax.tree.leaves(means))
    assert of_mu > 0.4 * sizes[0] and sizes[1] == sizes[0] - of_mu // 2
    once = [rule.update(random(1), rule.init(random(0)), random(0), learning_rate=0.1)
            for rule in rules]  # fmt: skip
    jax.tree.map(np.testing.assert_array_equal, *(updates for updates, _ in once))
    assert jax.tree.map(lambda x: x.dtype, once[1][1]) == jax.tree.map(lambda x: x.dtype, half)


@pytest.mark.parametrize("opt_type", ["adamw", "muon", "sgd"])
def test_state_is_float32_and_keeps_its_types_under_bfloat16_weights(opt_type):
    rule = optimizer.build(config(opt_type=opt_type), model=MODEL)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random(0))
    before = rule.init(params)
    updates, after = rule.update(random(1), before, params, learning_rate=0.1)
    assert jax.tree.map(lambda x: x.dtype, before) == jax.tree.map(lambda x: x.dtype, after)
    assert jnp.bfloat16 not in {leaf.dtype for leaf in jax.tree.leaves(before)}
    moved = optax.apply_updates(params, updates)
    assert {leaf.dtype for leaf in jax.tree.leaves(moved)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("opt_type", OPT_TYPES)
def test_state_lies_like_the_parameters(opt_type, devices):
    """Moments of query over fsdp (embed) and tensor (heads); muon has one, and none of its Adam."""
    mesh = Mesh(np.array(devices[:4]).reshape(1, 1, 2, 1, 1, 2), AXES)
    rule = optimizer.build(config(opt_type=opt_type), model=MODEL)
    params = random(0)
    lies = parameter_shardings(AXIS_NAMES, params, mesh, DEFAULT_RULES)
    state = jax.eval_shape(rule.init, params)
    found = optimizer_shardings(rule, params, lies, mesh)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    moments = 0
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(found), strict=True):
        if leaf.shape == SHAPES["layers"]["query"]:
            moments += 1
            assert sharding == NamedSharding(mesh, P(None, "fsdp", "tensor", None))
        if leaf.shape == ():
            assert sharding == NamedSharding(mesh, P())
    assert moments == {"adamw": 2, "muon": 1, "sgd": 0}[opt_type]
