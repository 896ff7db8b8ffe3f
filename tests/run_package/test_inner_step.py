"""One inner step: accumulation, averages, what a gradient that is not finite does, and of a mixture
of experts the bias that balances, the metrics, the FLOPs.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from models import tiny_model

from maxdiloco.config import config
from maxdiloco.metrics.rows import learning_metrics
from maxdiloco.metrics.speed import active_parameters, flops_per_token
from maxdiloco.models.config import from_keys
from maxdiloco.models.model import Model, count_parameters
from maxdiloco.parallel.sharding import DEFAULT_RULES
from maxdiloco.run import inner_step, optimizer

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


def squares_of_some(params, batch):
    """The squares, whose gradient is NaN if nothing counts."""
    total, aux = squares(params, batch)
    return total + params["w"] * (0 * jnp.log(aux["tokens"])), aux


def run(params, batch, *, loss=squares, accumulation=1, optimizer=None, skips_empty=False):
    """(parameters, metrics) after one step."""
    rule = optimizer or optax.sgd(0.5)
    model = SimpleNamespace(loss=loss, config=SimpleNamespace(rules=DEFAULT_RULES))
    step = inner_step.make(
        model, rule, accumulation=accumulation, nan_policy="stop", skips_empty=skips_empty
    )
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


@pytest.mark.parametrize("filled", [1, 2, 3, 4])
def test_micro_batches_after_the_last_filled_row_are_not_computed(filled):
    """Micro-batches of one row. The first `filled` rows give the bits of a batch that has only
    these. An empty micro-batch that was computed would be NaN."""
    rows = {name: np.concatenate([BATCH[name][:3]] * 2) for name in ("tokens", "segment_ids")}
    rate = {"learning_rate": BATCH["learning_rate"]}
    own = {name: leaf[:filled] for name, leaf in rows.items()}
    empty = {name: np.where(np.arange(6)[:, None] < filled, leaf, 0) for name, leaf in rows.items()}
    options = dict(loss=squares_of_some, accumulation=6, skips_empty=True)
    found, metrics = run(3, empty | rate, **options)
    expected, expected_metrics = run(3, own | rate, loss=squares_of_some, accumulation=filled)
    assert found == expected and np.isfinite(found)
    jax.tree.map(np.testing.assert_array_equal, metrics, expected_metrics)
    assert np.isnan(run(3, empty | rate, loss=squares_of_some, accumulation=6)[0])


def test_an_empty_micro_batch_before_a_filled_one_does_not_end_the_step():
    """Row 3 of BATCH is empty, and comes first here: w + 0.5 as without it."""
    batch = BATCH | {name: BATCH[name][::-1] for name in ("tokens", "segment_ids")}
    assert run(3, batch, accumulation=4, skips_empty=True)[0] == pytest.approx(3.5)


def test_a_batch_of_padding_changes_no_parameter():
    w, metrics = run(3, BATCH | {"segment_ids": np.zeros((4, 2), np.int32)})
    assert w == 3
    assert float(metrics["loss"]) == float(metrics["grad_norm"]) == float(metrics["tokens"]) == 0


def test_the_logged_gradient_norm_is_that_before_clipping():
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
    model = SimpleNamespace(loss=squares, config=SimpleNamespace(rules=DEFAULT_RULES))
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


EXPERTS = dict(
    num_experts=4, num_experts_per_tok=2, base_moe_mlp_dim=8,
    router=dict(normalise_weights=True, score_function="sigmoid", balance_bias=True),
    base_num_decoder_layers=1,
    routed_bias_update_rate=0.25, load_balance_loss_weight=0.1,
)  # fmt: skip


def test_the_routed_bias_moves_by_the_sign_of_the_whole_load():
    """Two micro-batches of two sequences; AdamW with decay moves the bias by nothing itself. Both
    micro-batches balance for themselves, so their loss is the mean of two."""
    model = tiny_model.build(**EXPERTS)
    params = tiny_model.params_of(model)
    batch = tiny_model.batch() | {"learning_rate": np.float32([0.01])}
    rule = optax.chain(
        optax.scale_by_adam(), optax.add_decayed_weights(0.1, mask=optimizer.decays(model)),
        optax.scale(-0.01),
    )  # fmt: skip
    step = inner_step.make(model, rule, accumulation=2, nan_policy="stop")
    new, _, metrics = tiny_model.compiled(step)(params, rule.init(params), batch)

    loss = tiny_model.compiled(model.loss)
    halves = (jax.tree.map(lambda x, at=at: x[at : at + 2], tiny_model.batch()) for at in (0, 2))
    of_halves = [loss(params, half)[1] for half in halves]
    counts_lE = sum(np.asarray(aux["expert_counts"]) for aux in of_halves)
    before, after = (tree["layers"]["moe"]["routed_bias"] for tree in (params, new))
    assert len(set(counts_lE[0])) > 1
    np.testing.assert_allclose(
        after - before, 0.25 * np.sign(counts_lE.mean(axis=1) - counts_lE), atol=1e-6
    )
    assert np.any(new["layers"]["moe"]["router"] != params["layers"]["moe"]["router"])

    share = counts_lE / counts_lE.mean()
    balance = sum(float(aux["load_balance_loss"]) for aux in of_halves) / 26
    expected = {
        "moe/max_expert_share": share.max(),
        "moe/min_expert_share": share.min(),
        "load_balance_loss": balance,
    }
    found = {name: float(metrics[name]) for name in expected}
    assert found == pytest.approx(expected, rel=1e-5)
    assert 0 < float(metrics["moe/router_entropy"]) <= np.log(4) + 1e-6

    # A step that is skipped leaves the bias.
    params["embedding"] = np.full_like(params["embedding"], np.nan)
    rule = optax.sgd(0.1)
    step = inner_step.make(model, rule, accumulation=1, nan_policy="skip")
    new, _, metrics = tiny_model.compiled(step)(params, rule.init(params), batch)
    assert metrics["skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, new, params)


def test_biases_do_not_decay_and_muon_sees_each_expert_as_a_matrix():
    model = tiny_model.build(
        **EXPERTS | dict(mlp_bias=True, router=EXPERTS["router"] | dict(logit_bias=True))
    )
    decays = optimizer.decays(model)["layers"]["moe"]
    assert {name for name, value in decays.items() if value} == {
        "router", "w_gate", "w_up", "w_out"
    }  # fmt: skip
    dims = optimizer.muon_dims(model)["layers"]["moe"]
    assert dims["router"] is None and dims["w_up_bias"] is None
    into, out = dims["w_up"], dims["w_out"]  # [layers, E, D, F], [layers, E, F, D]
    assert (into.reduction_axis, into.output_axis) == ((2,), (3,))
    assert (out.reduction_axis, out.output_axis) == ((2,), (3,))


def test_metrics_of_experts_have_their_own_names_in_a_row():
    metrics = {"loss": np.ones(2), "tokens": np.ones(2), "moe/router_entropy": np.array([0.0, 0.5])}
    row = learning_metrics(metrics | {"load_balance_loss": np.array([1.0, 3.0])}, 0.1)
    assert row["moe/router_entropy"] == 0.25 and row["learning/load_balance_loss"] == 2
    assert "tokens" not in row and "learning/moe/router_entropy" not in row


def test_flops_and_active_parameters_are_those_of_a_tokens_experts():
    """Two layers of eight experts of 3 * 16 * 32 values, of which a token uses two: as a dense
    layer of twice an expert's width beside the router, D E of it a layer."""
    sizes = ["base_num_decoder_layers=2", "base_emb_dim=16", "use_qk_norm=false"]
    moe = ["num_experts=8", "num_experts_per_tok=2", "base_moe_mlp_dim=32"]

    def built(keys):
        model = Model(from_keys(config.load([*sizes, *keys], {})))
        return model, jax.eval_shape(model.init, jax.random.key(0))

    (model, params), (dense, dense_params) = built(moe), built(["base_mlp_dim=64"])
    flops = flops_per_token(model.config, params, 8)
    of_router = flops - flops_per_token(dense.config, dense_params, 8)
    assert of_router == 6 * 2 * 16 * 8
    unused = 2 * 6 * 3 * 16 * 32
    assert active_parameters(model.config, params) == count_parameters(model) - unused
