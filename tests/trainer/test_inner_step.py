"""One inner step: accumulation, averages, and what a gradient that is not finite does."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from models import tiny_model

from maxdiloco.parallel.replicas import map_fn
from maxdiloco.parallel.sharding import DEFAULT_RULES
from maxdiloco.trainer import inner_step

# R replicas  B sequences  L tokens


def squares(params, batch):
    """Sum of (w - token)^2 over what counts, of which a tenth is called z-loss."""
    counts_BL = batch["segment_ids"] != 0
    total = jnp.sum(jnp.where(counts_BL, jnp.square(params["w"] - batch["tokens"]), 0))
    tokens = jnp.sum(counts_BL, dtype=jnp.float32)
    return total, {"tokens": tokens, "cross_entropy": 0.9 * total, "z_loss": 0.1 * total}


def squared_sum(params, batch):
    """The square of a batch's sum, so that it matters which rows come together."""
    total = params["w"] * jnp.sum(batch["tokens"]).astype(jnp.float32) ** 2
    return total, {"tokens": jnp.float32(1), "cross_entropy": total, "z_loss": jnp.float32(0)}


def make(loss=squares, *, accumulation=1, nan_policy="stop", optimizer=None):
    model = SimpleNamespace(loss=loss, spec=SimpleNamespace(rules=DEFAULT_RULES))
    rule = optax.sgd(0.5) if optimizer is None else optimizer
    return rule, jax.jit(
        inner_step.make(model, rule, accumulation=accumulation, nan_policy=nan_policy)
    )


# Row 0 has two tokens that count, rows 1 and 2 one, row 3 none.
BATCH = {
    "tokens": np.array([[1, 2], [4, 9], [7, 9], [9, 9]], np.int32),
    "segment_ids": np.array([[1, 1], [1, 0], [1, 0], [0, 0]], np.int32),
    "learning_rate": np.array([0.5], np.float32),
}


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_token_losses_are_summed_and_divided_by_all_tokens(accumulation):
    """w = 3, tokens 1, 2, 4, 7: squares 4 + 1 + 1 + 16 = 22 over 4 tokens; gradient
    2 (2 + 1 - 1 - 4) / 4 = -1, and w + 0.5. Micro-batches hold 4, 3 + 1 or 2, 1, 1, 0 tokens."""
    rule, step = make(accumulation=accumulation)
    params = {"w": jnp.float32(3)}
    params, _, metrics = step(params, rule.init(params), BATCH)
    assert float(params["w"]) == pytest.approx(3.5)
    expected = {"loss": 0.9 * 5.5, "z_loss": 0.1 * 5.5, "grad_norm": 1.0, "tokens": 4.0}
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(expected)
    assert {value.dtype.name for value in metrics.values()} == {"float32"}


def test_a_micro_batch_holds_consecutive_rows():
    """Rows 1, 2, 3, 4 in two micro-batches: (1 + 2)^2 + (3 + 4)^2 = 58 over 2 tokens; rows 1, 3
    and 2, 4 would make 52."""
    rule, step = make(squared_sum, accumulation=2)
    params = {"w": jnp.float32(1)}
    batch = BATCH | {"tokens": np.array([[1], [2], [3], [4]], np.int32)}
    assert float(step(params, rule.init(params), batch)[2]["loss"]) == 58 / 2


def test_a_batch_of_padding_changes_nothing():
    rule, step = make()
    params = {"w": jnp.float32(3)}
    padding = BATCH | {"segment_ids": np.zeros((4, 2), np.int32)}
    params, _, metrics = step(params, rule.init(params), padding)
    assert float(params["w"]) == 3
    assert float(metrics["loss"]) == float(metrics["grad_norm"]) == float(metrics["tokens"]) == 0


def test_the_norm_shown_is_that_before_clipping():
    rule, step = make(optimizer=optax.chain(optax.clip_by_global_norm(0.25), optax.sgd(0.5)))
    params = {"w": jnp.float32(3)}
    params, _, metrics = step(params, rule.init(params), BATCH)
    assert float(metrics["grad_norm"]) == pytest.approx(1.0)
    assert float(params["w"]) == pytest.approx(3 + 0.5 * 0.25)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_skip_leaves_a_bad_replica_as_it_was_and_no_other(bad):
    """Two replicas under a vmap, one of them with a weight that is not finite; Adam's moments and
    count stay too. With stop the step is taken."""
    batch_R = jax.tree.map(lambda x: np.stack([x, x]), BATCH)
    params_R = {"w": jnp.array([3.0, bad])}
    for policy in ("skip", "stop"):
        rule, step = make(nan_policy=policy, optimizer=optax.adam(0.5))
        state_R = jax.vmap(rule.init)(params_R)
        new_R, new_state_R, metrics_R = jax.vmap(step)(params_R, state_R, batch_R)
        assert float(new_R["w"][0]) == pytest.approx(3.5, rel=1e-5)
        assert not np.isfinite(metrics_R["grad_norm"][1])
        count_R, mean_R = new_state_R[0].count, new_state_R[0].mu["w"]
        if policy == "skip":
            np.testing.assert_array_equal(metrics_R["skipped"], [0, 1])
            np.testing.assert_array_equal(new_R["w"][1], bad)
            np.testing.assert_array_equal(count_R, [1, 0])
            assert float(mean_R[1]) == 0
        else:
            assert "skipped" not in metrics_R
            np.testing.assert_array_equal(count_R, [1, 1])
            assert not np.isfinite(new_R["w"][1]) and not np.isfinite(mean_R[1])


def test_accumulation_on_a_mesh_is_one_batch_on_one_device(devices):
    """The transformer, two micro-batches of two sequences, rows over fsdp, heads over tensor, two
    replicas; float32 sums in another order."""
    model = tiny_model.build()
    rule = optax.sgd(0.1)
    mesh = tiny_model.mesh_of(devices, diloco=2, fsdp=2, tensor=2)
    params = [tiny_model.params_of(model, seed=m) for m in range(2)]
    rate = {"learning_rate": np.float32([0.1])}
    batches = [tiny_model.batch(seed=m) | rate for m in range(2)]
    params_R, batch_R = (
        jax.tree.map(lambda *x: np.stack(x), *trees) for trees in (params, batches)
    )
    rows = NamedSharding(mesh, P("diloco", "fsdp"))
    rates_R1 = batch_R.pop("learning_rate")
    batch_R = jax.device_put(batch_R, rows) | {"learning_rate": rates_R1}
    state_R = jax.tree.map(jnp.zeros_like, jax.vmap(rule.init)(params_R))
    cut = inner_step.make(model, rule, accumulation=2, nan_policy="stop")
    whole = tiny_model.compiled(inner_step.make(model, rule, accumulation=1, nan_policy="stop"))
    on_mesh = tiny_model.compiled(map_fn(cut, mesh=mesh, num_replicas=2))
    new_R, _, metrics_R = jax.device_get(on_mesh(params_R, state_R, batch_R))
    for m in range(2):
        expected, _, metrics = whole(params[m], rule.init(params[m]), batches[m])
        one = jax.tree.map(lambda x_R, m=m: x_R[m], (new_R, metrics_R))
        tiny_model.assert_close(one, (expected, metrics), rtol=1e-4, atol=1e-5)
