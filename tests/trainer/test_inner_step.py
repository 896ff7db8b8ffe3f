"""One inner step: accumulation, averages, and what a gradient that is not finite does."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

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


def run(params, batch, *, loss=squares, accumulation=1, optimizer=None):
    """(parameters, metrics) after one step."""
    rule = optimizer or optax.sgd(0.5)
    model = SimpleNamespace(loss=loss, spec=SimpleNamespace(rules=DEFAULT_RULES))
    step = inner_step.make(model, rule, accumulation=accumulation, nan_policy="stop")
    params = {"w": jnp.float32(params)}
    params, _, metrics = jax.jit(step)(params, rule.init(params), batch)
    return float(params["w"]), metrics


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
    w, metrics = run(3, BATCH, accumulation=accumulation)
    assert w == pytest.approx(3.5)
    expected = {"loss": 0.9 * 5.5, "z_loss": 0.1 * 5.5, "grad_norm": 1.0, "tokens": 4.0}
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(expected)
    assert {value.dtype.name for value in metrics.values()} == {"float32"}


def test_a_micro_batch_holds_consecutive_rows():
    """Rows 1, 2, 3, 4 in two micro-batches: (1 + 2)^2 + (3 + 4)^2 = 58 over 2 tokens; rows 1, 3
    and 2, 4 would make 52."""
    batch = BATCH | {"tokens": np.array([[1], [2], [3], [4]], np.int32)}
    assert float(run(1, batch, loss=squared_sum, accumulation=2)[1]["loss"]) == 58 / 2


def test_a_batch_of_padding_changes_nothing():
    w, metrics = run(3, BATCH | {"segment_ids": np.zeros((4, 2), np.int32)})
    assert w == 3
    assert float(metrics["loss"]) == float(metrics["grad_norm"]) == float(metrics["tokens"]) == 0


def test_the_norm_shown_is_that_before_clipping():
    clipped = optax.chain(optax.clip_by_global_norm(0.25), optax.sgd(0.5))
    w, metrics = run(3, BATCH, optimizer=clipped)
    assert float(metrics["grad_norm"]) == pytest.approx(1.0)
    assert w == pytest.approx(3 + 0.5 * 0.25)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_skip_leaves_a_bad_replica_as_it_was_and_no_other(bad):
    """Two replicas under a vmap, one of them with a weight that is not finite; Adam's moments and
    count stay too. With stop the step is taken."""
    batch_R = jax.tree.map(lambda x: np.stack([x, x]), BATCH)
    params_R = {"w": jnp.array([3.0, bad])}
    model = SimpleNamespace(loss=squares, spec=SimpleNamespace(rules=DEFAULT_RULES))
    for policy in ("skip", "stop"):
        rule = optax.adam(0.5)
        step = jax.jit(inner_step.make(model, rule, accumulation=1, nan_policy=policy))
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
