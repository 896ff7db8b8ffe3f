"""The router by hand: choices within groups, losses and metrics, biases that follow the load.

`l` counts layers; other letters as in models/router.py.
"""

import numpy as np
import pytest
import tiny_model

from maxdiloco.models import router

NO = -9.0  # sigmoid(-9) is 1e-4


def test_a_group_is_worth_its_two_best_experts():
    """Of three each. Sigmoids of 3 and of 0.4, 0.3: 0.95 and 1.17. Of 0.4, 0.3 and of 0.1, 0, -0.1:
    1.17 and, without the third, 1.02."""
    config = tiny_model.build(
        num_experts=6, router=dict(score_function="sigmoid", num_groups=2)
    ).config
    logits_TE = np.float32([[3, NO, NO, 0.4, 0.3, NO], [0.4, 0.3, NO, 0.1, 0, -0.1]])
    assert router.select(config, logits_TE, None).experts_TK.tolist() == [[3], [0]]


def test_losses_and_metrics_are_means_over_the_layers():
    """Six tokens, two choices each of three experts; real shares and normalisers are not needed.

    Balance: 3 (1 * 1/2 + 1 * 1/2) = 3, and 3 (1/2 * 1/6 + 2/3 * 1/3 + 5/6 * 1/2) = 13/6. z: 2, 1.
    Shares of the mean, 4 choices: 6/4 and 5/4 at most, 0 and 3/4 at least. Entropy of a token: 1
    and 0.5.
    """
    config = tiny_model.build(
        num_experts=3, num_experts_per_tok=2,
        load_balance_loss_weight=0.5, router_z_loss_weight=0.1,
    ).config  # fmt: skip
    used = router.Usage(
        counts=np.float32([[6, 6, 0], [3, 4, 5]]),
        share=np.float32([[3, 3, 0], [1, 2, 3]]),
        squared_lse=np.float32([12, 6]),
        entropy=np.float32([6, 3]),
    )
    found = router.losses(config, used)
    assert found["load_balance_loss"] == pytest.approx(0.5 * (3 + 13 / 6) / 2, rel=1e-6)
    assert found["router_z_loss"] == pytest.approx(0.1 * 1.5, rel=1e-6)
    metrics = router.metrics(router.sums(config, used), 2)
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx({
        "moe/max_expert_share": 1.375,
        "moe/min_expert_share": 0.375,
        "moe/router_entropy": 0.75,
    })  # fmt: skip


def test_a_bias_follows_the_load_of_its_own_layer():
    """Means 4 and 2; an expert with the mean keeps its bias."""
    bias_lE = np.zeros((2, 3), np.float32)
    counts_lE = np.float32([[6, 6, 0], [1, 2, 3]])
    params = {"layers": {"moe": {"routed_bias": bias_lE}}}
    moved = tiny_model.build(routed_bias_update_rate=0.5).rebalance(params, counts_lE)
    assert moved["layers"]["moe"]["routed_bias"].tolist() == [[-0.5, -0.5, 0.5], [0.5, 0, -0.5]]
