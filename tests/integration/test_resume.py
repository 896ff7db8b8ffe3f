"""A run that was killed goes on as if nothing had happened; what it says and does when its command
line has changed.
"""

import shutil

import numpy as np
import pytest
import run_tools as tools
from tiers import full

from maxdiloco import train
from maxdiloco.data import order
from maxdiloco.data.order import Position

pytestmark = pytest.mark.usefixtures("programs")

AT_THE_END = dict(checkpoint_period=10**6)  # the only save of a run that nobody interrupts
STREAMING = dict(
    enable_streaming_diloco="true",
    num_diloco_fragments=3,
    diloco_sync_period=6,
    num_communication_overlapping_steps=2,
    communication_overlapping_alpha=0.5,
)

# Two replicas, each over two devices.
SHARDED = {
    # Its state has gaps where a parameter has none.
    "muon": dict(opt_type="muon", ici_fsdp_parallelism=2, checkpoint_period=5),
    "experts": dict(
        num_experts=4, num_experts_per_tok=2, base_moe_mlp_dim=16,
        first_num_dense_layers=1, router="{normalise_weights: true, balance_bias: true}",
        load_balance_loss_weight=0.01,
        ici_expert_parallelism=2, per_device_batch_size=1,
        enable_streaming_diloco="true", num_diloco_fragments=3,
        num_communication_overlapping_steps=1, diloco_exchange_dtype="int8",
    ),
}  # fmt: skip


OWNERS = dict(diloco_exchange="owners", diloco_exchange_dtype="float4_e3m0")


@pytest.mark.parametrize(
    "keys",
    [STREAMING, *map(full, [dict(diloco_outer_overlap="eager"), STREAMING | OWNERS])],
)
def test_a_run_killed_between_send_and_apply_resumes_to_the_same_bits(tmp_path, capfd, keys):
    """Offsets 0, 2, 4 and tau 2, or eager updates: after every step something is in flight. With
    owners the means of step 4 are where they were reduced after step 5, which is saved."""
    assert tools.run(tmp_path, "whole", **keys, **AT_THE_END) == 0
    tools.killed(tmp_path, "killed", "step 8/", **keys)
    newest = tools.saved_steps(tmp_path / "killed")[-1]
    flying = tools.item(tools.arrays(tmp_path / "killed", newest), "flight")
    assert any(np.any(x != 0) for x in flying.values())

    told = tools.told(capfd, tmp_path, "killed", **keys, **AT_THE_END)
    assert f"resumed after step {newest};" in told
    tools.assert_equal_runs(tmp_path / "killed", tmp_path / "whole", steps=tools.STEPS)


@pytest.mark.full
@pytest.mark.parametrize("name", SHARDED)
def test_sharded_replicas_resume_to_the_same_bits(tmp_path, name):
    """Experts: a device holds two of four; the routed bias is saved, exchanged with its layer's
    fragment and goes on, and rows have the experts' metrics."""
    keys, whole = SHARDED[name], tmp_path / "whole"
    assert tools.run(tmp_path, "whole", **keys, steps=9) == 0
    shutil.copytree(whole, tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "9")
    assert tools.run(tmp_path, "resumed", **keys, steps=9) == 0
    tools.assert_equal_runs(tmp_path / "resumed", whole, steps=9)
    first, *_, last = tools.rows(whole)
    if name == "muon":
        assert last["learning/loss"] < first["learning/loss"] - 0.5
        return
    assert last["moe/max_expert_share"] >= 1 >= last["moe/min_expert_share"] >= 0
    assert last["learning/load_balance_loss"] > 0
    biases = {n: x for n, x in tools.arrays(whole, 9).items() if n.endswith("['routed_bias']")}
    (theta,) = tools.item(biases, "outer_params").values()
    assert len(biases) > 1 and np.any(theta != 0)


@pytest.mark.parametrize("M, slots", [(4, 2), full(1, 1)])
def test_another_number_of_replicas_takes_over_parameters_and_place(
    finished, tmp_path, capfd, M, slots
):
    """Replica r starts from what was r mod 2; no sequence is read twice. lr 0 keeps the start."""
    shutil.copytree(finished, tmp_path / "finished")
    keys = dict(num_diloco_replicas=M, dcn_diloco_parallelism=slots, learning_rate=0.0)
    keys |= dict(checkpoint_period=1, steps=tools.STEPS + 2)
    out = tools.told(capfd, tmp_path, "finished", **keys)
    assert f"\nreplicas 2 -> {M}: replica r goes on from what was replica r mod 2." in out

    before = tools.arrays(finished, tools.STEPS)
    after = tools.arrays(tmp_path / "finished", tools.STEPS + 1)
    tools.assert_equal_bits(tools.item(after, "outer_params"), tools.item(before, "outer_params"))
    old = tools.item(before, "params")
    assert any(np.any(x[0] != x[1]) for x in old.values())
    tools.assert_equal_bits(
        tools.item(after, "params"), {name: x[np.arange(M) % 2] for name, x in old.items()}
    )

    # Steps 1 to 62 of 2 replicas with 2 rows have read the sequences 0 to 247.
    position = Position(**tools.meta(tmp_path / "finished", tools.STEPS + 1)["position"])
    read = order.indices(position, tools.STEPS + 1, *np.ix_(range(M), range(2)))
    np.testing.assert_array_equal(read.reshape(-1), 248 + np.arange(2 * M))
    # 64 is the end of a round: the new replicas have exchanged, and theta has moved.
    moved = tools.item(tools.arrays(tmp_path / "finished", tools.STEPS + 2), "outer_params")
    assert any(np.any(x != moved[name]) for name, x in tools.item(after, "outer_params").items())


def test_load_parameters_path_takes_theta_and_nothing_else(finished, tmp_path, capfd):
    """Step 0, a fresh optimizer, the first sequences. lr 0 keeps the start. The program that makes
    the state is compiled with the others, once."""
    keys = dict(load_parameters_path=finished, learning_rate=0.0, steps=1)
    out = tools.told(capfd, tmp_path, "new", **keys)
    assert f"a fresh start with the outer parameters of {finished};" in out
    before, after = out.split(" programs ready after ")
    assert (before.count("compiled init in "), after.count("compiled init in ")) == (1, 0)
    theta = tools.item(tools.arrays(finished, tools.STEPS), "outer_params")
    after = tools.arrays(tmp_path / "new", 1)
    tools.assert_equal_bits(tools.item(after, "outer_params"), theta)
    tools.assert_equal_bits(
        tools.item(after, "params"), {name: np.stack([x, x]) for name, x in theta.items()}
    )
    counts = [x for name, x in tools.item(after, "opt_state").items() if "count" in name]
    assert counts and all(np.all(x == 1) for x in counts)
    assert tools.meta(tmp_path / "new", 1)["position"] == {"base": 0, "s0": 1, "M": 2, "B": 2}


def test_load_full_state_path_goes_on_in_a_folder_of_its_own(finished, tmp_path):
    """From the state of step 60, steps 61 and 62 are those of the run that wrote it."""
    source = finished / "checkpoints" / "60"
    assert tools.run(tmp_path, "branch", load_full_state_path=source) == 0
    assert tools.logged_steps(tmp_path / "branch") == [61, 62]
    assert tools.rows(tmp_path / "branch") == tools.rows(finished)[-2:]
    tools.assert_equal_bits(
        tools.arrays(tmp_path / "branch", tools.STEPS), tools.arrays(finished, tools.STEPS)
    )


def test_a_run_from_the_whole_state_of_another_may_read_another_batch(finished, tmp_path, capfd):
    """It goes on in the text where that one stopped, and its own resume may not change it."""
    source = finished / "checkpoints" / "60"
    assert tools.run(tmp_path, "branch", load_full_state_path=source, per_device_batch_size=4) == 0
    before = tools.meta(finished, 60)["position"]
    base = before["base"] + (61 - before["s0"]) * before["M"] * before["B"]
    found = tools.meta(tmp_path / "branch", 62)["position"]
    assert found == {"base": base, "s0": 61, "M": before["M"], "B": 4}
    rows = tools.rows(tmp_path / "branch")
    assert [row["learning/tokens"] for row in rows] == [
        (base + steps * before["M"] * 4) * 16 for steps in (1, 2)
    ]
    assert tools.run(tmp_path, "branch", steps=63) == 2
    assert "sequences_per_replica=2 (the checkpoint has 4)" in capfd.readouterr().err


def test_a_finished_run_has_nothing_to_do(finished, tmp_path, capfd):
    """Nothing is built for it, where remat_policy=auto may compile the inner step; and the path
    that it has started from is not asked for."""
    shutil.copytree(finished, tmp_path / "finished")
    keys = dict(remat_policy="auto", load_parameters_path=tmp_path / "absent")
    out = tools.told(capfd, tmp_path, "finished", **keys)
    assert "nothing to do: step 62 of 62 is done. Raise steps to go on." in out
    assert "remat_policy=auto: " not in out
    tools.assert_equal_runs(tmp_path / "finished", finished, steps=tools.STEPS)


EAGER = dict(diloco_outer_overlap="eager", diloco_exchange_dtype="int8", diloco_sync_period=9)
# Sends at 2, 4, 6, ..., each applied three steps later.
ALWAYS = dict(enable_streaming_diloco="true", num_diloco_fragments=2, diloco_sync_period=4)
ALWAYS |= dict(num_communication_overlapping_steps=3)


@pytest.mark.full
def test_a_mode_changed_before_the_first_exchange_is_as_if_it_had_always_been(
    finished, tmp_path, capfd
):
    """To the bit; then H changes with a fragment in flight, and theta waits for the new schedule:
    H=6 and two fragments send at 12, 15, 18, and what is sent after 12 is applied first, at 15."""
    # The programs that draw weights differ between the modes, and may round differently.
    begin = dict(checkpoint_period=3, max_num_checkpoints_to_keep=20, log_period=100)
    begin["load_parameters_path"] = finished
    assert tools.run(tmp_path, "whole", **ALWAYS, **begin, steps=9) == 0
    assert tools.run(tmp_path, "run", **EAGER, **begin, steps=1) == 0
    said = tools.told(capfd, tmp_path, "run", **ALWAYS, **begin, steps=9)
    assert max(len(line) for line in said.splitlines() if "->" in line) <= 100
    said = said.replace("\n  ", " ")  # a line goes on
    for words in (
        "\nchanged since the checkpoint: diloco_exchange_dtype int8 -> float32, "
        "diloco_outer_overlap eager -> none, diloco_sync_period 9 -> 4, ",
        "\ntheta and its momentum are the means of those of the replicas.\n",
    ):
        assert words in said
    assert "dropped:" not in said
    run, whole = tmp_path / "run", tmp_path / "whole"
    tools.assert_equal_bits(tools.arrays(run, 9), tools.arrays(whole, 9))

    longer = ALWAYS | dict(diloco_sync_period=6, exchange_carrier="host")
    said = tools.told(capfd, tmp_path, "run", **longer, **begin, steps=15).replace("\n  ", " ")
    assert "changed since the checkpoint: diloco_sync_period 4 -> 6, " in said
    assert "exchange_carrier auto -> host, steps 9 -> 15\n" in said
    assert "\ndropped: fragments in flight, 0 (sent after step 8). theta and the replicas " in said
    assert "age of each fragment of theta [steps]: 3, 6 or more" in said
    at_9, at_12, at_15 = (tools.item(tools.arrays(run, t), "outer_params") for t in (9, 12, 15))
    tools.assert_equal_bits(at_12, at_9)
    assert any(np.any(x != at_9[name]) for name, x in at_15.items())

    said = tools.told(capfd, tmp_path, "run", **longer, **begin, steps=16)  # as since step 9
    assert "age of each fragment of theta [steps]: 4, 7 or more" in said


def test_config_yml_and_the_command_line_resume_the_same_run(tmp_path, capfd):
    """With four replicas in place of two, for which diloco_outer_lr=-1 stands for another rate."""
    keys = dict(steps=4, opt_type="sgd", diloco_outer_momentum=-1, checkpoint_period=4)
    assert tools.run(tmp_path, "a", **keys) == 0
    shutil.copytree(tmp_path / "a", tmp_path / "other" / "a")
    written = (tmp_path / "a" / "config.yml").read_text()
    assert "\ndiloco_outer_lr: -1.0\n" in written and "\ndiloco_outer_momentum: -1.0\n" in written

    more = ["steps=8", "dcn_diloco_parallelism=4", "ici_fsdp_parallelism=1"]
    of_file = [tmp_path / "a" / "config.yml", *more]
    of_keys = tools.arguments(tmp_path / "other", "a", **keys) + more
    for argv in (of_file, of_keys):
        told = tools.printed(capfd, train.main, argv)
        assert "diloco_outer_lr=1.0 (default -1.0)" in told
        assert "diloco_outer_lr 0.7 -> 1.0" in told
    tools.assert_equal_runs(tmp_path / "a", tmp_path / "other" / "a", steps=8)
    assert tools.meta(tmp_path / "a", 8)["config"]["diloco_outer_lr"] == 1.0
