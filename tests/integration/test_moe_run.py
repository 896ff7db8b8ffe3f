"""A mixture of experts through the trainer: replicas on the axis `expert`, streaming, resumed."""

import shutil

import numpy as np
import pytest
import run_tools as tools

pytestmark = pytest.mark.usefixtures("programs")

EXPERTS = dict(
    num_experts=4, num_experts_per_tok=2, norm_topk_prob="true", base_moe_mlp_dim=16,
    first_num_dense_layers=1, routed_bias="true", load_balance_loss_weight=0.01,
    ici_expert_parallelism=2, per_device_batch_size=1,
    enable_streaming_diloco="true", num_diloco_fragments=3, num_communication_overlapping_steps=1,
    diloco_exchange_dtype="int8",
)  # fmt: skip


@pytest.mark.full
def test_a_run_with_experts_over_devices_resumes_to_the_same_bits(tmp_path):
    """Two replicas of two devices, which hold two of four experts each; the routed bias is saved,
    exchanged with its layer's fragment and goes on. Rows have the experts' metrics."""
    assert tools.run(tmp_path, "whole", **EXPERTS, steps=9) == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "9")
    assert tools.run(tmp_path, "resumed", **EXPERTS, steps=9) == 0
    tools.assert_equal_runs(tmp_path / "resumed", tmp_path / "whole", steps=9)
    last = tools.rows(tmp_path / "whole")[-1]
    assert last["moe/max_expert_share"] >= 1 >= last["moe/min_expert_share"] >= 0
    assert last["learning/load_balance_loss"] > 0
    found = tools.arrays(tmp_path / "whole", 9)
    biases = [x for name, x in found.items() if name.endswith("['routed_bias']")]
    theta = [x for name, x in found.items()
             if name.startswith("outer_params") and name.endswith("['routed_bias']")]  # fmt: skip
    assert len(biases) > len(theta) == 1
    assert np.any(theta[0] != 0)
