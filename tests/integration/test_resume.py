"""A run that was killed goes on as if nothing had happened; what it says and does when its command
line has changed.
"""

import re
import shutil

import numpy as np
import pytest
from run import STEPS, kill_train_at, names_key, output_of, train, train_arguments
from run_files import (
    assert_equal_bits,
    assert_equal_runs,
    checkpoint_arrays,
    checkpoint_meta,
    item_arrays,
    logged_steps,
    metrics_rows,
    saved_steps,
)
from tiers import full

from maxdiloco import train as train_program
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


OWNERS = dict(diloco_collective="reduce_scatter", diloco_exchange_dtype="float4_e3m0")


@pytest.mark.parametrize(
    "keys",
    [STREAMING, *map(full, [dict(diloco_round_overlap="eager"), STREAMING | OWNERS])],
)
def test_a_run_killed_with_an_exchange_in_flight_keeps_its_bits(tmp_path, keys):
    """Offsets 0, 2, 4 and tau 2, or eager updates: after every step something is in flight. With
    reduce-scatter the means of step 4 are where they were reduced after step 5, which is saved."""
    assert train(tmp_path / "whole", **keys, **AT_THE_END).code == 0
    kill_train_at(tmp_path / "killed", "step 8/", **keys)
    newest = saved_steps(tmp_path / "killed")[-1]
    flying = item_arrays(checkpoint_arrays(tmp_path / "killed", newest), "flight")
    assert any(np.any(x != 0) for x in flying.values())

    run = train(tmp_path / "killed", **keys, **AT_THE_END)
    assert f"resumed after step {newest};" in run.output
    assert_equal_runs(tmp_path / "killed", tmp_path / "whole", steps=STEPS)


@pytest.mark.full
@pytest.mark.parametrize("name", SHARDED)
def test_sharded_replicas_resume_to_the_same_bits(tmp_path, name):
    """Experts: a device holds two of four; the routed bias is saved, exchanged with its layer's
    fragment and continues, and rows have the experts' metrics."""
    keys, whole = SHARDED[name], tmp_path / "whole"
    assert train(tmp_path / "whole", **keys, steps=9).code == 0
    shutil.copytree(whole, tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "9")
    assert train(tmp_path / "resumed", **keys, steps=9).code == 0
    assert_equal_runs(tmp_path / "resumed", whole, steps=9)
    first, *_, last = metrics_rows(whole)
    if name == "muon":
        assert last["learning/loss"] < first["learning/loss"] - 0.5
        return
    assert last["moe/max_expert_share"] >= 1 >= last["moe/min_expert_share"] >= 0
    assert last["learning/load_balance_loss"] > 0
    biases = {n: x for n, x in checkpoint_arrays(whole, 9).items() if n.endswith("['routed_bias']")}
    (theta,) = item_arrays(biases, "outer_params").values()
    assert len(biases) > 1 and np.any(theta != 0)


@pytest.mark.parametrize("M, slots", [(4, 2), full(1, 1)])
def test_another_number_of_replicas_keeps_parameters_and_data_order(finished, tmp_path, M, slots):
    """Replica r starts from what was r mod 2; no sequence is read twice. lr 0 keeps the start."""
    shutil.copytree(finished, tmp_path / "finished")
    keys = dict(num_diloco_replicas=M, dcn_diloco_parallelism=slots, learning_rate=0.0)
    keys |= dict(checkpoint_period=1, steps=STEPS + 2)
    assert train(tmp_path / "finished", **keys).code == 0
    before = checkpoint_arrays(finished, STEPS)
    after = checkpoint_arrays(tmp_path / "finished", STEPS + 1)
    assert_equal_bits(item_arrays(after, "outer_params"), item_arrays(before, "outer_params"))
    old = item_arrays(before, "params")
    assert any(np.any(x[0] != x[1]) for x in old.values())
    assert_equal_bits(
        item_arrays(after, "params"), {name: x[np.arange(M) % 2] for name, x in old.items()}
    )

    # Steps 1 to 62 of 2 replicas with 2 rows have read the sequences 0 to 247.
    position = Position(**checkpoint_meta(tmp_path / "finished", STEPS + 1)["position"])
    read = order.indices(position, STEPS + 1, *np.ix_(range(M), range(2)))
    np.testing.assert_array_equal(read.reshape(-1), 248 + np.arange(2 * M))
    # 64 is the end of a round: the new replicas have exchanged, and theta has moved.
    moved = item_arrays(checkpoint_arrays(tmp_path / "finished", STEPS + 2), "outer_params")
    assert any(np.any(x != moved[name]) for name, x in item_arrays(after, "outer_params").items())


def test_load_parameters_path_loads_only_the_outer_parameters(finished, tmp_path):
    """The run starts at step 0 with a new optimizer and the first sequences. A learning rate of 0
    keeps the start. The program that makes the state is compiled with the others, once."""
    keys = dict(load_parameters_path=finished, learning_rate=0.0, steps=1)
    run = train(tmp_path / "new", **keys)
    assert run.code == 0
    before, after = run.output.split(" programs ready after ")
    assert (before.count("compiled init in "), after.count("compiled init in ")) == (1, 0)
    theta = item_arrays(checkpoint_arrays(finished, STEPS), "outer_params")
    after = checkpoint_arrays(tmp_path / "new", 1)
    assert_equal_bits(item_arrays(after, "outer_params"), theta)
    assert_equal_bits(
        item_arrays(after, "params"), {name: np.stack([x, x]) for name, x in theta.items()}
    )
    counts = [x for name, x in item_arrays(after, "opt_state").items() if "count" in name]
    assert counts and all(np.all(x == 1) for x in counts)
    assert checkpoint_meta(tmp_path / "new", 1)["position"] == {"base": 0, "s0": 1, "M": 2, "B": 2}


def test_load_full_state_path_continues_in_another_folder(finished, tmp_path):
    """From the state of step 60, steps 61 and 62 are those of the run that wrote it."""
    source = finished / "checkpoints" / "60"
    assert train(tmp_path / "branch", load_full_state_path=source).code == 0
    assert logged_steps(tmp_path / "branch") == [61, 62]
    assert metrics_rows(tmp_path / "branch") == metrics_rows(finished)[-2:]
    assert_equal_bits(
        checkpoint_arrays(tmp_path / "branch", STEPS), checkpoint_arrays(finished, STEPS)
    )


def test_a_run_from_another_full_state_may_change_the_batch_size(finished, tmp_path):
    """It reads on where the other run stopped; its own resume may not change the size again."""
    keys = dict(load_full_state_path=finished / "checkpoints" / "60", per_device_batch_size=4)
    assert train(tmp_path / "branch", **keys).code == 0
    before = checkpoint_meta(finished, 60)["position"]
    base = before["base"] + (61 - before["s0"]) * before["M"] * before["B"]
    found = checkpoint_meta(tmp_path / "branch", 62)["position"]
    assert found == {"base": base, "s0": 61, "M": before["M"], "B": 4}
    rows = metrics_rows(tmp_path / "branch")
    assert [row["learning/tokens"] for row in rows] == [
        (base + steps * before["M"] * 4) * 16 for steps in (1, 2)
    ]
    run = train(tmp_path / "branch", steps=63)
    assert run.code == 2 and names_key(run.error, "per_device_batch_size")


def test_a_finished_run_has_nothing_to_do(finished, tmp_path):
    """Nothing is built for it, where remat_policy=auto may compile the inner step; and the path
    that it has started from is not asked for."""
    shutil.copytree(finished, tmp_path / "finished")
    keys = dict(remat_policy="auto", load_parameters_path=tmp_path / "absent")
    run = train(tmp_path / "finished", **keys)
    assert run.code == 0
    assert "nothing to do" in run.output and "remat_policy=auto: " not in run.output
    assert_equal_runs(tmp_path / "finished", finished, steps=STEPS)


EAGER = dict(diloco_round_overlap="eager", diloco_exchange_dtype="int8", diloco_sync_period=9)
# Sends at 2, 4, 6, ..., each applied three steps later.
ALWAYS = dict(enable_streaming_diloco="true", num_diloco_fragments=2, diloco_sync_period=4)
ALWAYS |= dict(num_communication_overlapping_steps=3)


@pytest.mark.full
def test_a_mode_changed_before_the_first_exchange_changes_no_bit(finished, tmp_path):
    """Then H changes with a fragment in flight, and the outer parameters wait for the new schedule:
    H=6 and two fragments send at 12, 15, 18, and what is sent after 12 is applied first, at 15."""
    # The programs that draw weights differ between the modes, and may round differently.
    begin = dict(checkpoint_period=3, max_num_checkpoints_to_keep=20, log_period=100)
    begin["load_parameters_path"] = finished
    assert train(tmp_path / "whole", **ALWAYS, **begin, steps=9).code == 0
    assert train(tmp_path / "run", **EAGER, **begin, steps=1).code == 0
    said = train(tmp_path / "run", **ALWAYS, **begin, steps=9).output
    assert max(len(line) for line in said.splitlines() if "->" in line) <= 100
    for key in ("diloco_exchange_dtype", "diloco_round_overlap", "diloco_sync_period"):
        assert f"{key} " in said
    assert "dropped:" not in said
    run, whole = tmp_path / "run", tmp_path / "whole"
    assert_equal_bits(checkpoint_arrays(run, 9), checkpoint_arrays(whole, 9))

    longer = ALWAYS | dict(diloco_sync_period=6, diloco_transport="host")
    said = train(tmp_path / "run", **longer, **begin, steps=15).output
    assert "\ndropped: " in said
    assert re.search("age of each fragment .*: 3, 6 or more", said)
    arrays = [checkpoint_arrays(run, t) for t in (9, 12, 15)]
    at_9, at_12, at_15 = (item_arrays(each, "outer_params") for each in arrays)
    assert_equal_bits(at_12, at_9)
    assert any(np.any(x != at_9[name]) for name, x in at_15.items())

    said = train(tmp_path / "run", **longer, **begin, steps=16).output  # as since step 9
    assert re.search("age of each fragment .*: 4, 7 or more", said)


def test_config_yml_and_the_command_line_resume_the_same_run(tmp_path):
    """With four replicas instead of two, for which diloco_outer_lr=auto is another rate."""
    keys = dict(steps=4, opt_type="sgd", diloco_outer_momentum="auto", checkpoint_period=4)
    keys |= dict(vocab_size="auto")
    assert train(tmp_path / "a", **keys).code == 0
    shutil.copytree(tmp_path / "a", tmp_path / "other" / "a")
    written = (tmp_path / "a" / "config.yml").read_text()
    for key in ("diloco_outer_lr", "diloco_outer_momentum", "vocab_size", "padded_vocab_size"):
        assert f'\n{key}: "auto"\n' in written

    more = ["steps=8", "dcn_diloco_parallelism=4", "ici_fsdp_parallelism=1"]
    of_file = [tmp_path / "a" / "config.yml", *more]
    of_keys = train_arguments(tmp_path / "other" / "a", **keys) + more
    for argv in (of_file, of_keys):
        assert "diloco_outer_lr 0.7 -> 1.0" in output_of(train_program.main, *argv)
    assert_equal_runs(tmp_path / "a", tmp_path / "other" / "a", steps=8)
    assert checkpoint_meta(tmp_path / "a", 8)["config"]["diloco_outer_lr"] == 1.0
