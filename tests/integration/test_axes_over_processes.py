"""Experts, and the tokens of a sequence, on two processes that are joined by the slow link.

Both hold one replica together, and compute what one process with one device computes.
"""

import numpy as np
import process_tools as tools
import pytest
import run_tools

EXPERTS = {
    "num_experts": "4",
    "num_experts_per_tok": "2",
    "norm_topk_prob": "true",
    "load_balance_loss_weight": "0.01",
}
# Keys of both runs, the axis over the two processes, and the sequences of a device: devices that
# share sequences count as one.
AXES = {
    "expert": (EXPERTS, "dcn_expert_parallelism", 1),
    "context": ({}, "dcn_context_parallelism", 2),
}


@pytest.mark.full
@pytest.mark.parametrize("axis", AXES)
def test_an_axis_over_two_processes_equals_one_device(tmp_path, axis):
    """Loss, norm of the gradient and balance of two steps with an exchange; sums in float32 in
    another order. Control: other sequences have another loss by far more."""
    keys, over_slices, sequences = AXES[axis]
    keys = keys | {
        "steps": "2",
        "base_output_directory": tmp_path,
        "enable_checkpointing": "false",
        "dcn_diloco_parallelism": "1",
        "ici_fsdp_parallelism": "1",
    }
    alone = keys | {"run_name": "alone", "per_device_batch_size": "2"}
    shared = {"run_name": "shared", over_slices: "2", "per_device_batch_size": str(sequences)}
    processes = [
        tools.trainer(alone, tmp_path / "alone.log"), *tools.trainers(2, keys | shared, tmp_path)
    ]  # fmt: skip
    try:
        assert [process.end() for process in processes] == [0] * 3, processes[1].text()
    finally:
        for process in processes:
            process.kill()
    assert f"{axis} 2 (over slices: {axis} 2 = 2)" in processes[1].text()
    found, expected = (run_tools.rows(tmp_path / name) for name in ("shared", "alone"))
    compared = [n for n in expected[0] if n.startswith(("learning/loss", "learning/grad", "moe/"))]
    assert len(compared) >= 2
    values, others = ([[row[n] for n in compared] for row in rows] for rows in (found, expected))
    np.testing.assert_allclose(values, others, rtol=1e-5)
    losses = [row["learning/loss"] for row in expected]
    assert abs(losses[0] - losses[1]) > 1e-3
