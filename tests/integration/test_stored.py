"""What is done with theta, in the run and from its folder: evaluation and text."""

import json
import sys
from unittest import mock

import jax
import numpy as np
import process_tools
import pytest
import run_tools as tools

from maxdiloco import evaluate, generate
from maxdiloco.checkpoint import arrays as checkpoint_arrays
from maxdiloco.errors import ConfigError
from maxdiloco.evaluation import stored
from maxdiloco.flags import config
from maxdiloco.metrics.console import sample_lines
from maxdiloco.models.spec import from_config
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.processes import output

pytestmark = pytest.mark.usefixtures("programs")

# float32 sums of about 100 losses in another order.
OTHER_ORDER = 1e-6


def test_the_numbers_are_those_that_the_run_has_logged(capfd, text_run, evaluated):
    """The held-out text, to the bit on the same mesh; and beside it a named text. A run
    is found by its name and step too, and a checkpoint by its folder."""
    run, keys = text_run
    logged = tools.rows(run)[-1]
    texts = f"eval_dataset_path={{'': '', same: {keys['dataset_path']}}}"
    capfd.readouterr()
    result = evaluated(run, texts)
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
    assert not any("warning" in line for line in lines)

    by_path = evaluated(run)
    assert by_path["texts"] == [held_out]
    assert evaluated(run / "checkpoints" / "4") == by_path
    assert evaluated("text", f"base_output_directory={run.parent}", "step=4") == by_path


def test_one_device_reads_the_same_sequences_as_two_slices(capfd, text_run, evaluated, tmp_path):
    run, _ = text_run
    (wanted,) = evaluated(run)["texts"]
    for keys in (
        ["dcn_diloco_parallelism=1", "per_device_batch_size=3"],
        ["dcn_diloco_parallelism=2", "ici_fsdp_parallelism=2"],
    ):
        (other,) = evaluated(run, *keys)["texts"]
        assert (other["tokens"], other["bytes"]) == (wanted["tokens"], wanted["bytes"])
        assert other["loss"] == pytest.approx(wanted["loss"], rel=OTHER_ORDER)
    (half,) = evaluated(run, "eval_steps=1")["texts"]
    assert half["tokens"] < wanted["tokens"]
    (tmp_path / "other.txt").write_text("it was in the house " * 200)
    capfd.readouterr()
    evaluated(run, f"dataset_path={tmp_path / 'other.txt'}")
    assert "other.txt is not what the run trained on, so what is held" in capfd.readouterr().out


OF_REPLICAS = {
    "outer": lambda x: x,
    "replica_0": lambda x: x[0],
    "replica_1": lambda x: x[1],
    "mean": lambda x: x.mean(0),
}


@pytest.mark.parametrize("parameters", OF_REPLICAS)
def test_only_the_parameters_asked_for_are_read(finished, monkeypatch, parameters):
    """62 steps in rounds of 4: the replicas differ from theta and from each other."""
    read_item = mock.Mock(wraps=checkpoint_arrays.read_item)
    monkeypatch.setattr(checkpoint_arrays, "read_item", read_item)
    mesh = mesh_lib.build(cfg := config.from_dict(tools.meta(finished, 62)["config"]))
    found = stored.load(finished, lambda meta: (cfg, mesh), parameters)
    (name,) = (call.args[1] for call in read_item.call_args_list)
    assert name == ("outer_params" if parameters == "outer" else "params")
    saved = tools.arrays(finished, 62)
    read = jax.tree_util.tree_leaves_with_path(found.params)
    read = {jax.tree_util.keystr(path): np.asarray(x) for path, x in read}
    wanted = jax.tree.map(OF_REPLICAS[parameters], tools.item(saved, name))
    assert read.keys() == wanted.keys()
    for path, x in read.items():
        np.testing.assert_allclose(x, wanted[path], rtol=1e-6, atol=1e-7)
    outer = tools.item(saved, "outer_params")
    differ = any(np.any(x != outer[name]) for name, x in wanted.items())
    assert differ == (parameters != "outer")


def test_experts_may_be_evaluated_without_the_capacity_of_the_run():
    """As generate takes them; which tokens a capacity drops depends on the batch and the mesh."""
    keys = ["num_experts=4", "num_experts_per_tok=2", "capacity_factor=0.6"]
    meta = {"config": config.load(keys, {}).as_dict()}
    for argv, factor in (([], 0.6), (["capacity_factor=-1"], -1.0)):
        assert stored.configure(meta, argv, {}).capacity_factor == factor


@pytest.mark.parametrize("kind, imported", [("text", True), ("synthetic", True), ("text", False)])
def test_an_import_with_a_tokenizer_is_evaluated_on_any_kind_of_text(kind, imported):
    """It has no text of its own. Controls: an import without a tokenizer, and a run."""
    meta = {"config": config.load([f"dataset_type={kind}"], {}).as_dict()}
    meta |= {"imported": True} if imported else {}
    argv = ["dataset_type=parquet", "dataset_path=a.parquet"]
    if kind == "text" and imported:
        assert stored.configure(meta, argv, {}).dataset_type == "parquet"
        with pytest.raises(ConfigError, match="dataset_type=synthetic has random numbers for tok"):
            stored.configure(meta, ["dataset_type=synthetic"], {})
    else:
        with pytest.raises(ConfigError, match="dataset_type=parquet .* is taken from the run"):
            stored.configure(meta, argv, {})


NO_RUN = [
    (evaluate, ["{text}", "steps=5"], 2, "is taken from the run and cannot be changed here"),
    (evaluate, ["{text}", "stepz=5"], 2, "is no key"),
    (evaluate, ["{text}", "step=3"], 2, "has checkpoints of the steps 4. Give one of these"),
    (evaluate, ["{text}", "step=1", "step=1"], 2, "step is given twice"),
    (evaluate, ["{text}", "parameters=inner"], 2, "must be outer, mean, or replica_0 to replica_1"),
    (evaluate, ["{text}", "parameters=replica_2"], 2, "mean, or replica_0 to replica_1."),
    (evaluate, ["{text}", "eval_dataset_path={{a: /nowhere}}"], 3, "_path.a=/nowhere does not"),
    (evaluate, ["absent", "base_output_directory={tmp}"], 2, "and {tmp}/absent. Give"),
    (evaluate, ["{tmp}"], 2, "CheckpointError: RUN={tmp} holds no checkpoint: give the folder"),
    (evaluate, ["{text}/checkpoints/4", "step=4"], 2, "one checkpoint already. Leave step out"),
    (generate, ["{text}", "promt=a"], 2, "ConfigError: promt=a is not an option of generate. Use "),
    (generate, ["{text}", "top_k=few"], 2, "ConfigError: top_k=few is no whole number: sample"),
    (generate, ["{text}", "temperature=nan"], 2, "temperature=nan is no number: 0 takes"),
    (generate, ["{text}", "max_new_tokens=0"], 2, "max_new_tokens=0 asks for no text. Use 1 or "),
    (generate, ["{text}", f"max_new_tokens={10**11}"], 2, "00 is no whole number of 1048576 or le"),
    (generate, ["{text}", "seed=-1"], 2, "seed=-1 is no whole number of 0 or more"),
    (generate, ["{text}", f"seed={10**400}"], 2, f"00 is no whole number of {2**63 - 1} or less"),
    (generate, ["{text}", f"seed={2**63}"], 2, f"seed={2**63} is no whole number of {2**63 - 1}"),
    (generate, ["r", "base_output_directory=gs://"], 2, "base_output_directory=gs:// names no bu"),
    (generate, ["{text}", "seed=1", "seed=2"], 2, "seed=2: seed is given twice. Give it once."),
    (generate, ["{text}", "prompts_file={tmp}/no"], 2, "prompts_file={tmp}/no cannot be read"),
    (generate, ["{text}", "prompts_file={tmp}/empty"], 2, "prompts_file={tmp}/empty is empty"),
    (generate, ["{text}", "prompts_file={tmp}/bad"], 2, "it is not UTF-8 text"),
    (generate, ["{finished}", "prompt=a"], 2, "dataset_type=synthetic of RUN={finished}: its tok"),
]


@pytest.mark.parametrize("program, argv, code, words", NO_RUN)
def test_what_cannot_work_is_refused_in_one_line(
    capfd, text_run, finished, tmp_path, program, argv, code, words
):
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "bad").write_bytes(b"\xff")
    places = dict(text=text_run[0], finished=finished, tmp=tmp_path)
    argv = [argument.format(**places) for argument in argv]
    found, line = tools.refused(capfd, program.main, argv)
    assert found == code
    assert words.format(**places) in line
    assert ("one prompt a line" in line) == ("prompts_file=" in line)


@pytest.mark.full
def test_two_processes_log_samples_and_losses_of_the_eager_theta_of_each_slice(
    started, tmp_path, evaluated
):
    """Two slices of two devices; the first process prints the sample. The loss of the mean of the
    thetas, which is read from the checkpoint on one device, is near the one that they have logged:
    after 3 steps the thetas are near each other."""
    (tmp_path / "a.txt").write_text("in the beginning there was a byte. " * 40)
    keys = dict(run_name="a", base_output_directory=tmp_path, dataset_type="text", vocab_size=257)
    keys |= dict(dataset_path=tmp_path / "a.txt", diloco_outer_overlap="eager", steps=3)
    keys |= dict(eval_interval=3, eval_steps=1, sample_prompt="in the ")
    started += process_tools.trainers(2, keys, tmp_path)
    process_tools.ends(started, 0, 0)
    assert "sample after step 3:\n  | in the " in started[0].text()
    assert "sample after" not in started[1].text()
    one_device = ["dcn_diloco_parallelism=1", "ici_fsdp_parallelism=1"]
    (text,) = evaluated(tmp_path / "a", *one_device)["texts"]
    logged = tools.rows(tmp_path / "a")[-1]
    assert text["loss"] == pytest.approx(logged["eval/loss"], rel=1e-2)
    assert text["loss"] != pytest.approx(logged["eval/loss"], rel=OTHER_ORDER)


def test_two_processes_evaluate_what_one_has_trained(started, text_run, tmp_path):
    """Two slices, each a process; the first one prints."""
    run, _ = text_run
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "maxdiloco.evaluate", str(run), f"report={report}"]
    for index, environ in enumerate(process_tools.variables(2)):
        started.append(process_tools.Process(command, tmp_path / f"{index}.log", environ))
    process_tools.ends(started, 0, 0)
    (text,) = json.loads(report.read_text())["texts"]
    assert text["loss"] == pytest.approx(tools.rows(run)[-1]["eval/loss"], rel=OTHER_ORDER)
    assert "held out" in started[0].text() and "held out" not in started[1].text()


def test_text_goes_on_from_the_prompt_the_same_way_for_the_same_seed(
    capfd, text_run, tmp_path, monkeypatch
):
    """Prompts of a file are continued into a file, an object each, as for the prompt alone. A run
    trained with attention=flash, kernels of TPU and GPU, is sampled on a CPU."""
    run, _ = text_run
    options = ["prompt=in the ", "max_new_tokens=12", "temperature=1", "top_k=0"]
    first = tools.generated(capfd, run, *options)
    assert first.startswith("in the ")
    assert len(first) > len("in the \n")
    assert tools.generated(capfd, run, *options, "seed=0") == first
    assert tools.generated(capfd, run, *options, "seed=1") != first
    # A checkpoint of the run does as well as the run.
    assert tools.generated(capfd, run / "checkpoints" / "4", *options) == first

    (tmp_path / "prompts.txt").write_text("in the \nit was")
    out = tmp_path / "out" / "texts.jsonl"
    arguments = [f"prompts_file={tmp_path / 'prompts.txt'}", f"output={out}", "max_new_tokens=12"]
    where = [f"base_output_directory={run.parent}", "step=4"]
    assert tools.generated(capfd, "text", *where, *arguments) == ""
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["in the ", "it was"]
    capfd.readouterr()
    assert generate.main([str(run), "prompt=it was", "max_new_tokens=12"]) == 0
    printed = output.escaped(rows[1]["text"], keep="\n\t")
    assert capfd.readouterr() == (printed + "\n", f"step 4 of {run}\n")

    cfg = config.from_dict(tools.meta(run, 4)["config"] | {"attention": "flash"})
    with pytest.raises(ConfigError, match="attention=flash"):
        from_config(cfg, backend="cpu")
    load = stored.load

    def of_flash(folder, configure):
        return load(folder, lambda meta: configure(meta | {"config": cfg.as_dict()}))

    monkeypatch.setattr(stored, "load", of_flash)
    assert tools.generated(capfd, run, *options) == first


def continued(run, path):
    """The text of generate, with the control characters that it prints escaped."""
    keys = ["prompt=in the ", "max_new_tokens=100", f"output={path}"]
    assert generate.main([str(run), *keys]) == 0
    return json.loads(path.read_text())["text"]


def test_a_run_writes_samples_at_its_evaluations_and_keeps_its_bits(capfd, text_run, tmp_path):
    """The text that generate draws from the same checkpoint, on two slices here; the state is that
    of the run without samples."""
    run, keys = text_run
    keys = keys | dict(sample_prompt="in the ", enable_tensorboard="true")
    said = tools.told(capfd, tmp_path, "text", **keys)
    assert [f"sample after step {t}:" in said for t in (1, 2, 3, 4)] == [False, True, False, True]
    tools.assert_equal_runs(tmp_path / "text", run, steps=4)
    wanted = continued(run, tmp_path / "texts.jsonl")
    assert output.escaped(sample_lines(4, wanted), keep="\n\t") in said
    (board,) = (tmp_path / "text" / "tensorboard").iterdir()
    content = board.read_bytes()
    assert content.count(b"eval/sample/text_summary") == 2
    assert b"".join(f"    {line}\n".encode() for line in wanted.splitlines()) in content


@pytest.mark.full
def test_a_run_spread_over_lengths_evaluates_and_samples(capfd, text_run, tmp_path):
    """The evaluations of the run on one device a replica, and the text that generate draws; the
    prompt of 7 tokens and the one token of a step could not be shared by two devices."""
    run, keys = text_run
    keys = keys | dict(sample_prompt="in the ", ici_context_parallelism=2)
    said = tools.told(capfd, tmp_path, "text", **keys)
    for name in ("learning/loss", "eval/loss"):
        alone, spread = (
            [row[name] for row in tools.rows(folder) if name in row]
            for folder in (run, tmp_path / "text")
        )
        assert len(alone) >= 2 and spread == pytest.approx(alone, rel=1e-5)
    wanted = continued(tmp_path / "text", tmp_path / "texts.jsonl")
    assert output.escaped(sample_lines(4, wanted), keep="\n\t") in said
