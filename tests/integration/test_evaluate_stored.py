"""python -m maxdiloco.evaluate: a stored checkpoint has the numbers that its run has logged."""

import json
import sys

import jax
import numpy as np
import process_tools
import pytest
import run_tools as tools

from maxdiloco import evaluate
from maxdiloco.checkpoint import arrays as checkpoint_arrays
from maxdiloco.evaluation import stored
from maxdiloco.parallel import mesh as mesh_lib

pytestmark = pytest.mark.usefixtures("programs")

# float32 sums of about 100 losses in another order.
OTHER_ORDER = 1e-6


def evaluated(report, *argv):
    """The report on an evaluation."""
    assert evaluate.main([*map(str, argv), f"report={report}"]) == 0
    return json.loads(report.read_text())


@pytest.fixture
def report(tmp_path):
    return tmp_path / "report.json"


def test_the_numbers_are_those_that_the_run_has_logged(capfd, text_run, report):
    """The held-out text, to the bit on the same mesh; and beside it a text of another name."""
    run, keys = text_run
    logged = tools.rows(run)[-1]
    sets = f"eval_sets={{same: {keys['dataset_path']}}}"
    capfd.readouterr()
    result = evaluated(report, run, sets)
    held_out, named = result["texts"]
    assert [held_out["name"], named["name"]] == ["", "same"]
    for name in ("loss", "perplexity", "bits_per_byte"):
        assert held_out[name] == logged[f"eval/{name}"]
    # 8 sequences of 16 tokens, of which 15 are predicted, and of one document.
    assert held_out["tokens"] == held_out["bytes"] <= 8 * 15
    assert held_out["bits_per_byte"] == pytest.approx(held_out["loss"] / np.log(2))
    assert named["loss"] != held_out["loss"]
    assert (result["step"], result["num_sequences"]) == (4, 8)
    lines = capfd.readouterr().out.splitlines()
    assert f"step 4 of {run}, parameters: outer" in lines
    assert f"{held_out['loss']:.6f}" in next(line for line in lines if "(held out)" in line)


def test_one_device_reads_the_same_sequences_as_two_slices(text_run, report):
    run, _ = text_run
    two = evaluated(report, run)
    for keys in (
        ["dcn_diloco_parallelism=1", "eval_per_device_batch_size=3"],
        ["dcn_diloco_parallelism=2", "ici_fsdp_parallelism=2"],
    ):
        (other,) = evaluated(report, run, *keys)["texts"]
        (wanted,) = two["texts"]
        assert (other["tokens"], other["bytes"]) == (wanted["tokens"], wanted["bytes"])
        assert other["loss"] == pytest.approx(wanted["loss"], rel=OTHER_ORDER)
    (half,) = evaluated(report, run, "eval_steps=1")["texts"]
    assert half["tokens"] < wanted["tokens"]


def test_a_run_is_found_by_its_name_and_step_and_a_checkpoint_by_its_folder(text_run, report):
    run, _ = text_run
    by_path = evaluated(report, run)
    assert evaluated(report, run / "checkpoints" / "4") == by_path
    assert evaluated(report, "text", f"base_output_directory={run.parent}", "step=4") == by_path


@pytest.mark.parametrize("parameters", ["outer", "replica_0", "replica_1", "mean"])
def test_only_the_parameters_asked_for_are_read(finished, monkeypatch, parameters):
    """62 steps in rounds of 4: the replicas differ from theta and from each other."""
    names = []
    read_item = checkpoint_arrays.read_item

    def recorded(path, name, tree):
        names.append(name)
        return read_item(path, name, tree)

    monkeypatch.setattr(checkpoint_arrays, "read_item", recorded)
    found = stored.load(
        finished,
        key="RUN",
        configure=stored.config_of,
        mesh_of=mesh_lib.build,
        parameters=parameters,
    )
    assert names == ["outer_params" if parameters == "outer" else "params"]
    saved = tools.arrays(finished, 62)
    leaves = tools.item(saved, names[0])
    choose = {
        "outer": lambda x: x,
        "replica_0": lambda x: x[0],
        "replica_1": lambda x: x[1],
        "mean": lambda x: x.mean(0),
    }
    wanted = {name: choose[parameters](x) for name, x in leaves.items()}
    read = dict(jax.tree_util.tree_leaves_with_path(found.params))
    assert {jax.tree_util.keystr(path) for path in read} == wanted.keys()
    for path, x in read.items():
        np.testing.assert_allclose(
            np.asarray(x), wanted[jax.tree_util.keystr(path)], rtol=1e-6, atol=1e-7
        )
    outer = tools.item(saved, "outer_params")
    assert any(
        np.any(x != outer[name]) for name, x in wanted.items()
    ) == (parameters != "outer")  # fmt: skip


@pytest.mark.parametrize(
    "argv, words",
    [
        (["steps=5"], ["steps=5", "is taken from the run and cannot be changed here", "Leave it"]),
        (["stepz=5"], ["stepz=5", "is no key"]),
        (["step=3"], ["step=3: RUN=", "has checkpoints of the steps 4. Give one of these"]),
        (["step=1", "step=1"], ["step is given twice"]),
        (["parameters=inner"], ["parameters=inner must be outer, mean, or replica_0 to replica_1"]),
        (["parameters=replica_2"], ["replica_2: the run had 2 replicas. Use 0 to 1"]),
        (["eval_sets={a: /nowhere}"], ["eval_sets.a=/nowhere does not exist"]),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(capfd, text_run, argv, words):
    code, line = tools.refused(capfd, evaluate.main, [text_run[0], *argv])
    assert code == (3 if "eval_sets" in argv[0] else 2)
    for word in words:
        assert word in line


def test_a_run_that_is_not_there_is_refused(capfd, tmp_path, text_run):
    for argv, words in (
        (["absent", f"base_output_directory={tmp_path}"], f"and {tmp_path / 'absent'}. Give"),
        ([tmp_path], f"CheckpointError: RUN={tmp_path} holds no checkpoint: give the folder"),
        ([text_run[0] / "checkpoints" / "4", "step=4"], "one checkpoint already. Leave step out"),
    ):
        code, line = tools.refused(capfd, evaluate.main, argv)
        assert code == 2 and words in line


@pytest.mark.full
def test_two_processes_log_samples_and_losses_of_the_eager_theta_of_each_slice(tmp_path, report):
    """Two slices of two devices; the first process prints the sample. The loss of the mean of the
    thetas, which is read from the checkpoint on one device, is near the one that they have logged:
    after 3 steps the thetas are near each other."""
    (tmp_path / "a.txt").write_text("in the beginning there was a byte. " * 40)
    keys = {
        "run_name": "a",
        "base_output_directory": str(tmp_path),
        "dataset_type": "text",
        "dataset_path": str(tmp_path / "a.txt"),
        "vocab_size": "257",
        "diloco_outer_overlap": "eager",
        "steps": "3",
        "eval_interval": "3",
        "eval_steps": "1",
        "sample_prompt": "in the ",
    }
    both = process_tools.trainers(2, keys, tmp_path)
    for process in both:
        assert process.end() == 0, process.text()
    assert "sample after step 3:\n  | in the " in both[0].text()
    assert "sample after" not in both[1].text()
    one_device = ["dcn_diloco_parallelism=1", "ici_fsdp_parallelism=1"]
    (text,) = evaluated(report, tmp_path / "a", *one_device)["texts"]
    logged = tools.rows(tmp_path / "a")[-1]
    assert text["loss"] == pytest.approx(logged["eval/loss"], rel=1e-2)
    assert text["loss"] != pytest.approx(logged["eval/loss"], rel=OTHER_ORDER)


def test_two_processes_evaluate_what_one_has_trained(text_run, tmp_path):
    """Two slices, each a process; the first one prints."""
    run, _ = text_run
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "maxdiloco.evaluate", str(run), f"report={report}"]
    both = [
        process_tools.Process(command, tmp_path / f"{index}.log", environ)
        for index, environ in enumerate(process_tools.variables(2))
    ]
    for process in both:
        assert process.end() == 0, process.text()
    (text,) = json.loads(report.read_text())["texts"]
    assert text["loss"] == pytest.approx(tools.rows(run)[-1]["eval/loss"], rel=OTHER_ORDER)
    assert "held out" in both[0].text() and "held out" not in both[1].text()
