"""A run whose command line changes between two starts: what it does then, and what it says."""

import shutil

import numpy as np
import pytest
import run_tools as tools

pytestmark = pytest.mark.usefixtures("programs")

EAGER = dict(diloco_outer_overlap="eager", diloco_exchange_dtype="int8", diloco_sync_period=9)
# Sends at 2, 4, 6, ..., each applied three steps later.
STREAMING = dict(
    enable_streaming_diloco="true",
    num_diloco_fragments=2,
    diloco_sync_period=4,
    num_communication_overlapping_steps=3,
)
EVERY = dict(checkpoint_period=3, max_num_checkpoints_to_keep=20, log_period=100)


def theta(folder, step):
    return tools.item(tools.arrays(folder, step), "outer_params")


@pytest.mark.full
def test_a_mode_changed_before_the_first_exchange_is_as_if_it_had_always_been(
    finished, tmp_path, capfd
):
    """To the bit; then H changes with a fragment in flight, and theta waits for the new schedule.

    H=6 and two fragments send at 12, 15, 18: what is sent after 12 is the first to be applied, at
    15.
    """
    # The programs that draw weights differ between the modes, and may round differently.
    begin = EVERY | dict(load_parameters_path=finished)
    assert tools.run(tmp_path, "whole", **STREAMING, **begin, steps=9) == 0
    assert tools.run(tmp_path, "run", **EAGER, **begin, steps=1) == 0
    capfd.readouterr()
    assert tools.run(tmp_path, "run", **STREAMING, **begin, steps=9) == 0
    said = capfd.readouterr().out
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

    longer = STREAMING | dict(diloco_sync_period=6, exchange_carrier="host")
    assert tools.run(tmp_path, "run", **longer, **begin, steps=15) == 0
    said = capfd.readouterr().out
    said = said.replace("\n  ", " ")
    assert "changed since the checkpoint: diloco_sync_period 4 -> 6, " in said
    assert "exchange_carrier auto -> host, steps 9 -> 15\n" in said
    assert "\ndropped: fragments in flight, 0 (sent after step 8). theta and the replicas " in said
    assert "age of each fragment of theta [steps]: 3, 6 or more" in said
    before = theta(run, 9)
    tools.assert_equal_bits(theta(run, 12), before)
    assert any(np.any(x != before[name]) for name, x in theta(run, 15).items())

    assert tools.run(tmp_path, "run", **longer, **begin, steps=16) == 0  # the same schedule since 9
    assert "age of each fragment of theta [steps]: 4, 7 or more" in capfd.readouterr().out


def test_the_same_text_by_another_path_resumes_and_other_text_in_its_place_does_not(
    text_run, tmp_path, capfd
):
    run, keys = text_run
    shutil.copytree(run, tmp_path / "text")
    moved = tmp_path / "moved.txt"
    moved.write_bytes(keys["dataset_path"].read_bytes())
    keys = keys | dict(dataset_path=moved, steps=5)
    capfd.readouterr()
    assert tools.run(tmp_path, "text", **keys) == 0
    out = capfd.readouterr().out
    assert "resumed after step 4" in out and "dataset_path /" in out
    moved.write_bytes(moved.read_bytes()[::-1])
    assert tools.run(tmp_path, "text", **keys | dict(steps=6)) == 2
    line = capfd.readouterr().err
    assert f"dataset_path={moved}: the text is not that of the checkpoint of step 5" in line
    assert f"load_parameters_path={tmp_path}/text/checkpoints/5" in line
