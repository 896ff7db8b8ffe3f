"""A run that was killed goes on as if nothing had happened; so does one with another M."""

import shutil

import numpy as np
import pytest
import run_tools as tools
from tiers import full

from maxdiloco.data import order
from maxdiloco.data.order import Position

pytestmark = pytest.mark.usefixtures("programs")

STEPS = tools.TINY["steps"]
AT_THE_END = dict(checkpoint_period=10**6)  # the only save of a run that nobody interrupts
STREAMING = dict(
    enable_streaming_diloco="true",
    num_diloco_fragments=3,
    diloco_sync_period=6,
    num_communication_overlapping_steps=2,
    communication_overlapping_alpha=0.5,
)


@pytest.mark.parametrize("keys", [STREAMING, full(dict(diloco_outer_overlap="eager"))])
def test_a_run_killed_between_send_and_apply_resumes_to_the_same_bits(tmp_path, capfd, keys):
    """Offsets 0, 2, 4 and tau 2, or eager updates: after every step something is in flight."""
    assert tools.run(tmp_path, "whole", **keys, **AT_THE_END) == 0
    with tools.Child(tmp_path, "killed", **keys) as child:
        child.until("step 8/")
        child.kill()
    newest = tools.saved_steps(tmp_path / "killed")[-1]
    flying = tools.item(tools.arrays(tmp_path / "killed", newest), "flight")
    assert any(np.any(x != 0) for x in flying.values())

    capfd.readouterr()
    assert tools.run(tmp_path, "killed", **keys, **AT_THE_END) == 0
    assert f"resumed after step {newest};" in capfd.readouterr().out
    tools.assert_equal_runs(tmp_path / "killed", tmp_path / "whole", steps=STEPS)


@pytest.mark.full
def test_muon_trains_sharded_replicas_and_resumes_to_the_same_bits(tmp_path):
    """Its state has gaps where a parameter has none; two replicas, each over two devices."""
    keys = dict(opt_type="muon", ici_fsdp_parallelism=2, checkpoint_period=5, steps=9)
    assert tools.run(tmp_path, "whole", **keys) == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "9")
    assert tools.run(tmp_path, "resumed", **keys) == 0
    tools.assert_equal_runs(tmp_path / "resumed", tmp_path / "whole", steps=9)
    losses = [row["learning/loss"] for row in tools.rows(tmp_path / "whole")]
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("M, slots", [(4, 2), full(1, 1)])
def test_another_number_of_replicas_takes_over_parameters_and_place(
    finished, tmp_path, capfd, M, slots
):
    """Replica r starts from what was r mod 2; no sequence is read twice. lr 0 keeps the start."""
    shutil.copytree(finished, tmp_path / "finished")
    keys = dict(num_diloco_replicas=M, dcn_diloco_parallelism=slots, learning_rate=0.0)
    code = tools.run(tmp_path, "finished", **keys, checkpoint_period=1, steps=STEPS + 2)
    assert code == 0
    out = capfd.readouterr().out
    assert f"\nreplicas 2 -> {M}: replica r goes on from what was replica r mod 2." in out

    before = tools.arrays(finished, STEPS)
    after = tools.arrays(tmp_path / "finished", STEPS + 1)
    tools.assert_equal_bits(tools.item(after, "outer_params"), tools.item(before, "outer_params"))
    old = tools.item(before, "params")
    assert any(np.any(x[0] != x[1]) for x in old.values())
    tools.assert_equal_bits(
        tools.item(after, "params"),
        {name: x[np.arange(M) % 2] for name, x in old.items()},
    )

    # Steps 1 to 62 of 2 replicas with 2 rows have read the sequences 0 to 247.
    position = Position.from_dict(tools.meta(tmp_path / "finished", STEPS + 1)["position"])
    read = order.indices(position, STEPS + 1, *np.ix_(range(M), range(2)))
    np.testing.assert_array_equal(read.reshape(-1), 248 + np.arange(2 * M))
    # 64 is the end of a round: the new replicas have exchanged, and theta has moved.
    moved = tools.item(tools.arrays(tmp_path / "finished", STEPS + 2), "outer_params")
    assert any(np.any(x != moved[name]) for name, x in tools.item(after, "outer_params").items())


def test_load_parameters_path_takes_theta_and_nothing_else(finished, tmp_path, capfd):
    """Step 0, a fresh optimizer, the first sequences. lr 0 keeps the start. The program that makes
    the state is compiled with the others, once."""
    keys = dict(load_parameters_path=finished, learning_rate=0.0, steps=1)
    assert tools.run(tmp_path, "new", **keys) == 0
    out = capfd.readouterr().out
    assert f"a fresh start with the outer parameters of {finished};" in out
    before, after = out.split(" programs ready after ")
    assert (before.count("compiled init in "), after.count("compiled init in ")) == (1, 0)
    theta = tools.item(tools.arrays(finished, STEPS), "outer_params")
    after = tools.arrays(tmp_path / "new", 1)
    tools.assert_equal_bits(tools.item(after, "outer_params"), theta)
    tools.assert_equal_bits(
        tools.item(after, "params"), {name: np.stack([x, x]) for name, x in theta.items()}
    )
    counts = [x for name, x in tools.item(after, "opt_state").items() if "count" in name]
    assert counts
    assert all(np.all(x == 1) for x in counts)
    assert tools.meta(tmp_path / "new", 1)["position"] == {"base": 0, "s0": 1, "M": 2, "B": 2}


def test_load_full_state_path_goes_on_in_a_folder_of_its_own(finished, tmp_path):
    """From the state of step 60, steps 61 and 62 are those of the run that wrote it."""
    source = finished / "checkpoints" / "60"
    assert tools.run(tmp_path, "branch", load_full_state_path=source) == 0
    assert [row["step"] for row in tools.rows(tmp_path / "branch")] == [61, 62]
    assert tools.rows(tmp_path / "branch") == tools.rows(finished)[-2:]
    tools.assert_equal_bits(tools.arrays(tmp_path / "branch", STEPS), tools.arrays(finished, STEPS))


def test_a_finished_run_has_nothing_to_do(finished, tmp_path, capfd):
    """Nothing is built for it: remat_policy=auto may compile the inner step."""
    shutil.copytree(finished, tmp_path / "finished")
    assert tools.run(tmp_path, "finished", remat_policy="auto") == 0
    out = capfd.readouterr().out
    assert "nothing to do: step 62 of 62 is done. Raise steps to go on." in out
    assert "remat_policy=auto: " not in out
    tools.assert_equal_runs(tmp_path / "finished", finished, steps=STEPS)
