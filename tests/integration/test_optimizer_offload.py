"""optimizer_memory_host_offload: the inner optimizer's state lies in host memory between steps."""

import shutil

import jax
import numpy as np
import pytest
import run_tools as tools
from tiers import corner

from maxdiloco.engine.memory import is_on_device
from maxdiloco.flags import config
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.trainer import assemble

pytestmark = pytest.mark.usefixtures("programs")


@pytest.mark.parametrize("diloco", corner(["true", "false"], ["true"]))
def test_a_run_that_moves_the_state_out_and_back_has_the_bits_of_one_on_the_device(
    tmp_path, diloco
):
    keys = dict(enable_diloco=diloco, ici_fsdp_parallelism=2, checkpoint_period=3)
    assert tools.run(tmp_path, "device", steps=7, **keys) == 0
    shutil.copytree(tmp_path / "device", tmp_path / "moved")
    for step in (6, 7):
        shutil.rmtree(tmp_path / "moved" / "checkpoints" / str(step))
    for steps, offload in ((5, "true"), (7, "false")):
        keys["optimizer_memory_host_offload"] = offload
        assert tools.run(tmp_path, "moved", steps=steps, **keys) == 0
    tools.assert_equal_runs(tmp_path / "moved", tmp_path / "device", steps=7)


@pytest.mark.parametrize("diloco", corner(["true", "false"], ["true"]))
def test_the_state_lies_on_the_host_before_and_after_a_step_and_counts_there(diloco):
    """The numbers of a step, which are scalars of a replica, stay on the device."""
    kinds, arguments = {}, {}
    for offload in ("true", "false"):
        keys = dict(enable_diloco=diloco, optimizer_memory_host_offload=offload)
        cfg = config.load(tools.arguments("unused", "unused", **keys), {})
        mesh = mesh_lib.build(cfg)
        parts = assemble.assemble(cfg, mesh, total_steps=1, on_compile=lambda *_: None)
        call = parts.trainer.calls(parts.batch)[0]
        state = assemble.initial_state(parts, 0)
        after = call.program(
            state.params, state.opt_state, jax.tree.map(_zeros, parts.batch)
        )[1]
        kinds[offload] = [
            {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim > 1}
            for tree in (parts.trainer.abstract_state.opt_state, after)
        ]
        arguments[offload] = sum(
            x.size for x in jax.tree.leaves(call.args) if is_on_device(x)
        )
    assert kinds["true"] == [{"pinned_host"}] * 2
    assert "pinned_host" not in set().union(*kinds["false"])
    parameters = sum(x.size for x in jax.tree.leaves(parts.trainer.abstract_state.params))
    assert arguments["false"] - arguments["true"] == 2 * parameters


def _zeros(like):
    return jax.device_put(np.zeros(like.shape, like.dtype), like.sharding)
