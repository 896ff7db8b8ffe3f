"""The mesh, and the memory of the optimizer's state, say where numbers are computed, not which."""

import shutil

import jax
import numpy as np
import pytest
from run import train, train_arguments
from run_files import assert_equal_runs, checkpoint_arrays, item_arrays, metrics_rows
from tiers import corner, full

from maxdiloco.config import config
from maxdiloco.engine.calls import is_on_device
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.run import assemble
from maxdiloco.run import settings as run_settings

pytestmark = pytest.mark.usefixtures("programs")

STEPS = 6  # a round of four and half of the next
# Plain SGD: Adam divides a gradient by its own size, and so makes rounding large where it is small.
KEYS = dict(opt_type="sgd", learning_rate=0.5, steps=STEPS, checkpoint_period=10**6)
BASE = KEYS | dict(per_device_batch_size=4)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Two replicas of four rows, each on one device."""
    folder = tmp_path_factory.mktemp("base")
    assert train(folder / "base", **BASE).code == 0
    return folder / "base"


def assert_close_runs(run, other, items=("outer_params", "params")):
    """Losses and parameters agree up to float32 rounding: sums in another order, six steps long."""
    losses, others = ([row["learning/loss"] for row in metrics_rows(r)] for r in (run, other))
    assert len(losses) == STEPS
    np.testing.assert_allclose(losses, others, rtol=2e-6)
    found, wanted = checkpoint_arrays(run, STEPS), checkpoint_arrays(other, STEPS)
    for name in items:
        for path, x in item_arrays(wanted, name).items():
            np.testing.assert_allclose(
                item_arrays(found, name)[path], x, rtol=1e-5, atol=1e-6, err_msg=name + path
            )


# The four rows of a replica in another way.
OTHER_WAYS = {
    # The same rows on two devices, two each, or with tensor two on each device of the pair.
    **{axis: {f"ici_{axis}_parallelism": 2} for axis in ("data", "fsdp", "tensor")},
    # Half of the tokens of the four rows on each.
    "lengths": dict(ici_context_parallelism=2, per_device_batch_size=4),
    "one vmap": dict(dcn_diloco_parallelism=1, num_diloco_replicas=2, per_device_batch_size=4),
    "micro-batches": dict(gradient_accumulation_steps=2),  # two of two rows
}


@pytest.mark.parametrize("way", corner(OTHER_WAYS, ["tensor"]))
def test_another_way_computes_what_one_device_for_each_replica_does(base, tmp_path, way):
    keys = KEYS | dict(per_device_batch_size=2) | OTHER_WAYS[way]
    assert train(tmp_path / "way", **keys).code == 0
    assert_close_runs(tmp_path / "way", base)


def test_data_parallel_over_slices_computes_what_one_device_does(base, tmp_path):
    """Two slices of four rows, one device of eight; and it is not what DiLoCo computes."""
    keys = BASE | dict(enable_diloco="false")
    assert train(tmp_path / "slices", **keys).code == 0
    one = keys | dict(dcn_diloco_parallelism=1, per_device_batch_size=8)
    assert train(tmp_path / "one", **one).code == 0
    assert_close_runs(tmp_path / "slices", tmp_path / "one", items=["outer_params"])
    with pytest.raises(AssertionError):
        assert_close_runs(tmp_path / "slices", base, items=["outer_params"])


@pytest.mark.parametrize("diloco, fsdp", [("true", 1), full("true", 2), full("false", 2)])
def test_an_offloaded_optimizer_state_changes_no_bit(tmp_path, diloco, fsdp):
    """One device for each replica: the run without offload then shares its programs with others."""
    keys = dict(enable_diloco=diloco, ici_fsdp_parallelism=fsdp, checkpoint_period=3)
    assert train(tmp_path / "device", steps=7, **keys).code == 0
    shutil.copytree(tmp_path / "device", tmp_path / "moved")
    for step in (6, 7):
        shutil.rmtree(tmp_path / "moved" / "checkpoints" / str(step))
    for steps, offload in ((5, "true"), (7, "false")):
        keys["optimizer_memory_host_offload"] = offload
        assert train(tmp_path / "moved", steps=steps, **keys).code == 0
    assert_equal_runs(tmp_path / "moved", tmp_path / "device", steps=7)


@pytest.mark.full
@pytest.mark.parametrize("diloco", ["true", "false"])
def test_an_offloaded_state_is_in_host_memory_around_a_step(diloco):
    """The numbers of a step, which are scalars of a replica, stay on the device."""
    kinds, arguments = {}, {}
    for offload in ("true", "false"):
        keys = dict(enable_diloco=diloco, optimizer_memory_host_offload=offload)
        cfg = config.load(train_arguments("unused" / "unused", **keys), {})
        mesh = mesh_lib.build(run_settings.read_mesh(cfg))
        parts = assemble.assemble(
            run_settings.read(cfg, mesh), mesh, total_steps=1, on_compile=lambda *_: None
        )
        call = parts.trainer.calls(parts.batch)[0]
        state = parts.init(np.uint32(0))
        batch = jax.tree.map(
            lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), parts.batch
        )
        after = call.program(state.params, state.opt_state, batch)[1]
        kinds[offload] = [
            {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim > 1}
            for tree in (parts.trainer.abstract_state.opt_state, after)
        ]
        arguments[offload] = sum(x.size for x in jax.tree.leaves(call.args) if is_on_device(x))
    assert kinds["true"] == [{"pinned_host"}] * 2
    assert "pinned_host" not in set().union(*kinds["false"])
    parameters = sum(x.size for x in jax.tree.leaves(parts.trainer.abstract_state.params))
    assert arguments["false"] - arguments["true"] == 2 * parameters
