"""The mesh says where the numbers are computed, not which."""

import numpy as np
import pytest
import run_tools as tools
from tiers import corner

pytestmark = pytest.mark.usefixtures("programs")

STEPS = 6  # a round of four and half of the next
# Plain SGD: Adam divides a gradient by its own size, and so makes rounding large where it is small.
KEYS = dict(opt_type="sgd", learning_rate=0.5, steps=STEPS, checkpoint_period=10**6)
BASE = KEYS | dict(per_device_batch_size=4)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Two replicas of four rows, each on one device."""
    folder = tmp_path_factory.mktemp("base")
    assert tools.run(folder, "base", **BASE) == 0
    return folder / "base"


def assert_close_runs(run, other, *, items):
    """Losses and parameters agree up to float32 rounding: sums in another order, six steps long."""
    losses, others = ([row["learning/loss"] for row in tools.rows(r)] for r in (run, other))
    assert len(losses) == STEPS
    np.testing.assert_allclose(losses, others, rtol=2e-6)
    found, wanted = tools.arrays(run, STEPS), tools.arrays(other, STEPS)
    for name in items:
        for path, x in tools.item(wanted, name).items():
            np.testing.assert_allclose(
                tools.item(found, name)[path], x, rtol=1e-5, atol=1e-6, err_msg=name + path
            )


@pytest.mark.parametrize("axis", corner(["data", "fsdp", "tensor"], ["tensor"]))
def test_two_devices_of_a_slice_compute_what_one_does(base, tmp_path, axis):
    """The same four rows a replica: two a device, or with tensor two on each device of the pair."""
    keys = KEYS | {f"ici_{axis}_parallelism": 2, "per_device_batch_size": 2}
    assert tools.run(tmp_path, axis, **keys) == 0
    assert_close_runs(tmp_path / axis, base, items=["outer_params", "params"])


@pytest.mark.full
def test_a_run_spread_over_lengths_computes_what_one_device_does_and_goes_on_without(
    base, tmp_path
):
    """Both devices of a slice have half of the tokens of the four rows for three steps, then two of
    the rows."""
    assert tools.run(tmp_path, "context", **BASE | dict(ici_context_parallelism=2, steps=3)) == 0
    rows = KEYS | dict(ici_fsdp_parallelism=2, per_device_batch_size=2)
    assert tools.run(tmp_path, "context", **rows) == 0
    assert_close_runs(tmp_path / "context", base, items=["outer_params", "params"])


def test_replicas_on_one_device_compute_what_replicas_on_slices_do(base, tmp_path):
    """Two replicas under one vmap."""
    keys = BASE | dict(dcn_diloco_parallelism=1, num_diloco_replicas=2)
    assert tools.run(tmp_path, "one", **keys) == 0
    assert_close_runs(tmp_path / "one", base, items=["outer_params", "params"])


def test_accumulated_gradients_are_those_of_the_whole_batch(base, tmp_path):
    """Two micro-batches of two rows are one batch of four."""
    keys = KEYS | dict(gradient_accumulation_steps=2, per_device_batch_size=2)
    assert tools.run(tmp_path, "accumulated", **keys) == 0
    assert_close_runs(tmp_path / "accumulated", base, items=["outer_params", "params"])


def test_data_parallel_over_slices_computes_what_one_device_does(base, tmp_path):
    """Two slices of four rows, one device of eight; and it is not what DiLoCo computes."""
    keys = BASE | dict(enable_diloco="false")
    assert tools.run(tmp_path, "slices", **keys) == 0
    one = keys | dict(dcn_diloco_parallelism=1, per_device_batch_size=8)
    assert tools.run(tmp_path, "one", **one) == 0
    assert_close_runs(tmp_path / "slices", tmp_path / "one", items=["outer_params"])
    with pytest.raises(AssertionError):
        assert_close_runs(tmp_path / "slices", base, items=["outer_params"])
