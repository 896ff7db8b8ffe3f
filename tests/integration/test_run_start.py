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


def test_the_remedy_is_of_the_policy_that_was_chosen(tmp_path, monkeypatch, capsys):
    """remat_policy=auto is `save_context` on a CPU."""

    def all_of(self, calls, *, room):
        raise ConfigError(room)

    monkeypatch.setattr(CompileLog, "all_of", all_of)
    keys = dict(enable_checkpointing="false", optimizer_memory_host_offload="true")
    to_full = ", remat_policy=full"
    for policy, remedy in (("auto", to_full), ("minimal", to_full), ("full", "")):
        assert run_tools.run(tmp_path, policy, remat_policy=policy, **keys) == 2
        assert capsys.readouterr().err == (
            "ConfigError: Use more devices in a slice, a smaller per_device_batch_size"
            f"{remedy} or diloco_outer_memory=pinned_host.\n"
        )


def test_inner_is_lowered_first_and_then_the_program_of_the_state(tmp_path, monkeypatch):
    """inner compiles longest, and the state is made while it compiles."""
    names = []

    def all_of(self, calls, *, room):
        names.extend(call.program.name for call in calls)
        raise ConfigError(room)

    monkeypatch.setattr(CompileLog, "all_of", all_of)
    keys = dict(eval_interval=4, eval_steps=1, **STREAMING)
    assert run_tools.run(tmp_path, "run", **keys) == 2
    assert names[:2] == ["inner", "init"]
    assert "inner + exchange" in names[2:] and "evaluate" in names[2:]


def test_garbage_is_collected_again_after_an_error(tmp_path, monkeypatch):
    """At the compile, and before it. Control: it is not collected until then."""
    during = []

    def all_of(self, calls, *, room):
        during.append(gc.isenabled())
        raise ConfigError(room)

    monkeypatch.setattr(CompileLog, "all_of", all_of)
    for keys, reached in ((STREAMING, [False]), ({"dataset_type": "none"}, [])):
        del during[:]
        assert run_tools.run(tmp_path, "run", **keys) == 2
        assert (during, gc.isenabled()) == (reached, True)


@pytest.mark.usefixtures("programs")
def test_another_seed_is_another_first_loss(tmp_path):
    """Control: the same seed has the same one."""
    losses = []
    for n, seed in enumerate((0, 1, 1)):
        keys = dict(init_weights_seed=seed, steps=1, enable_diloco="false", **ONE_DEVICE)
        assert run_tools.run(tmp_path, f"run{n}", **keys) == 0
        losses.append(run_tools.rows(tmp_path / f"run{n}")[0]["learning/loss"])
    assert losses[0] != losses[1] == losses[2]
