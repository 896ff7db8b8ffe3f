"""The start of a run as far as the compile of its programs, which fails here or is not reached."""

import gc

import pytest
import run_tools

from maxdiloco.errors import ConfigError
from maxdiloco.metrics.compiles import CompileLog

STREAMING = dict(
    enable_streaming_diloco="true", num_diloco_fragments=2, num_communication_overlapping_steps=1
)
ONE_DEVICE = dict(dcn_diloco_parallelism=1, enable_checkpointing="false")


@pytest.fixture
def compiles(monkeypatch):
    """What a run would have compiled when its compile fails: the names, and whether garbage is
    collected then."""
    found = []

    def all_of(self, calls, *, room):
        found.append(([call.program.name for call in calls], gc.isenabled()))
        raise ConfigError(room)

    monkeypatch.setattr(CompileLog, "all_of", all_of)
    return found


@pytest.mark.usefixtures("compiles")
def test_the_remedy_is_of_the_policy_that_was_chosen(tmp_path, capsys):
    """remat_policy=auto is `save_context` on a CPU."""
    keys = dict(enable_checkpointing="false", optimizer_memory_host_offload="true")
    to_full = ", remat_policy=full"
    for policy, remedy in (("auto", to_full), ("minimal", to_full), ("full", "")):
        assert run_tools.run(tmp_path, policy, remat_policy=policy, **keys) == 2
        assert capsys.readouterr().err == (
            "ConfigError: Use more devices in a slice, a smaller per_device_batch_size"
            f"{remedy} or diloco_outer_memory=pinned_host.\n"
        )


def test_inner_is_lowered_first_and_then_the_program_of_the_state(tmp_path, compiles):
    """inner compiles longest, and the state is made while it compiles. Garbage is collected again
    after the error, and after one before the compile; control: it is not collected until then."""
    keys = dict(eval_interval=4, eval_steps=1, **STREAMING)
    assert run_tools.run(tmp_path, "run", **keys) == 2
    assert gc.isenabled()
    assert run_tools.run(tmp_path, "run", dataset_type="none") == 2
    assert gc.isenabled()
    ((names, collected),) = compiles
    assert not collected
    assert names[:2] == ["inner", "init"]
    assert "inner + exchange" in names[2:] and "evaluate" in names[2:]


@pytest.mark.usefixtures("programs")
def test_another_seed_is_another_first_loss(tmp_path):
    """Control: the same seed has the same one."""
    losses = []
    for n, seed in enumerate((0, 1, 1)):
        keys = dict(init_weights_seed=seed, steps=1, enable_diloco="false", **ONE_DEVICE)
        assert run_tools.run(tmp_path, f"run{n}", **keys) == 0
        losses.append(run_tools.rows(tmp_path / f"run{n}")[0]["learning/loss"])
    assert losses[0] != losses[1] == losses[2]
