"""The inner step of a mixture of experts: the bias that balances, the metrics, the FLOPs."""

import jax
import numpy as np
import optax
import pytest
from models import tiny_model

from maxdiloco.flags import config
from maxdiloco.metrics.monitor import learning_metrics
from maxdiloco.models import transformer
from maxdiloco.trainer import flops, inner_step, optimizer

EXPERTS = dict(
    num_experts=4, num_experts_per_tok=2, base_moe_mlp_dim=8, norm_topk_prob=True,
    base_num_decoder_layers=1, routed_score_func="sigmoid", routed_bias=True,
    routed_bias_update_rate=0.25, capacity_factor=1.0, load_balance_loss_weight=0.1,
)  # fmt: skip


def test_a_step_moves_the_routed_bias_by_the_sign_of_the_load_of_all_micro_batches():
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
    dropped = sum(float(aux["dropped_tokens"]) for aux in of_halves)
    balance = sum(float(aux["load_balance_loss"]) for aux in of_halves) / 26
    expected = {
        "moe/max_expert_share": share.max(),
        "moe/min_expert_share": share.min(),
        "moe/dropped_tokens": dropped / counts_lE.sum(),
        "load_balance_loss": balance,
    }
    assert dropped > 0
    found = {name: float(metrics[name]) for name in expected}
    assert found == pytest.approx(expected, rel=1e-5)
    assert 0 < float(metrics["moe/router_entropy"]) <= np.log(4) + 1e-6


def test_a_step_that_is_skipped_leaves_the_bias():
    model = tiny_model.build(**EXPERTS)
    params = tiny_model.params_of(model)
    params["embedding"] = np.full_like(params["embedding"], np.nan)
    rule = optax.sgd(0.1)
    step = inner_step.make(model, rule, accumulation=1, nan_policy="skip")
    batch = tiny_model.batch() | {"learning_rate": np.float32([0.1])}
    new, _, metrics = tiny_model.compiled(step)(params, rule.init(params), batch)
    assert metrics["skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, new, params)


def test_biases_do_not_decay_and_muon_sees_each_expert_as_a_matrix():
    model = tiny_model.build(**EXPERTS, mlp_bias=True, router_bias=True)
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
    metrics = {"loss": np.ones(2), "tokens": np.ones(2), "moe/dropped_tokens": np.array([0.0, 0.5])}
    row = learning_metrics(metrics | {"load_balance_loss": np.array([1.0, 3.0])}, 0.1)
    assert row["moe/dropped_tokens"] == 0.25 and row["learning/load_balance_loss"] == 2
    assert "tokens" not in row and "learning/moe/dropped_tokens" not in row


def test_flops_and_active_parameters_are_those_of_a_tokens_experts():
    """Two layers of eight experts of 3 * 16 * 32 values, of which a token uses two: as a dense
    layer of twice an expert's width beside the router, D E of it a layer."""
    sizes = ["base_num_decoder_layers=2", "base_emb_dim=16", "use_qk_norm=false"]
    moe = ["num_experts=8", "num_experts_per_tok=2", "base_moe_mlp_dim=32"]

    def built(keys):
        cfg = config.load([*sizes, *keys], {})
        model = transformer.build(cfg, backend="cpu")
        return cfg, model, jax.eval_shape(model.init, jax.random.key(0))

    (cfg, model, params), (dense, _, dense_params) = built(moe), built(["base_mlp_dim=64"])
    of_router = flops.flops_per_token(cfg, params) - flops.flops_per_token(dense, dense_params)
    assert of_router == 6 * 2 * 16 * 8
    unused = 2 * 6 * 3 * 16 * 32
    assert flops.active_parameters(cfg, params) == transformer.count_parameters(model) - unused
