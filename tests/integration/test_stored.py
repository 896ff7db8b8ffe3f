"""Evaluation and text generation, in a run and from its folder."""

import json
import sys
from unittest import mock

import jax
import numpy as np
import pytest
from run import (
    Process,
    assert_exit_codes,
    cluster_environs,
    names_key,
    output_of,
    refused,
    start_cluster,
    train,
)
from run_files import (
    assert_equal_runs,
    checkpoint_arrays,
    checkpoint_meta,
    item_arrays,
    metrics_rows,
)

from maxdiloco import evaluate, generate, output
from maxdiloco.checkpoint import arrays
from maxdiloco.config import config
from maxdiloco.errors import ConfigError
from maxdiloco.metrics.console import sample_lines
from maxdiloco.models.build import ModelSettings, build_model
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.run import settings as run_settings
from maxdiloco.run import stored

pytestmark = pytest.mark.usefixtures("programs")

# float32 sums of about 100 losses in another order.
OTHER_ORDER = 1e-6


def test_evaluate_computes_the_losses_that_the_run_has_logged(capfd, text_run, evaluated):
    """On the held-out text, to the bit on the same mesh, and on a named text. A run is found by its
    name and step, too, and a checkpoint by its folder."""
    run, keys = text_run
    logged = metrics_rows(run)[-1]
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
    output = capfd.readouterr().out
    assert f"{held_out['loss']:.6f}" in output and "warning" not in output

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
    assert f"dataset_path={tmp_path / 'other.txt'}" in capfd.readouterr().out


OF_REPLICAS = {
    "outer": lambda x: x,
    "replica_0": lambda x: x[0],
    "replica_1": lambda x: x[1],
    "mean": lambda x: x.mean(0),
}


@pytest.mark.parametrize("parameters", OF_REPLICAS)
def test_only_the_parameters_asked_for_are_read(finished, monkeypatch, parameters):
    """62 steps in rounds of 4: the replicas differ from theta and from each other."""
    read_item = mock.Mock(wraps=arrays.read_item)
    monkeypatch.setattr(arrays, "read_item", read_item)
    cfg = config.from_dict(checkpoint_meta(finished, 62)["config"])
    mesh = mesh_lib.build(run_settings.read_mesh(cfg))
    found = stored.load(finished, lambda meta: (cfg, mesh), parameters)
    (name,) = (call.args[1] for call in read_item.call_args_list)
    assert name == ("outer_params" if parameters == "outer" else "params")
    saved = checkpoint_arrays(finished, 62)
    read = jax.tree_util.tree_leaves_with_path(found.params)
    read = {jax.tree_util.keystr(path): np.asarray(x) for path, x in read}
    wanted = jax.tree.map(OF_REPLICAS[parameters], item_arrays(saved, name))
    assert read.keys() == wanted.keys()
    for path, x in read.items():
        np.testing.assert_allclose(x, wanted[path], rtol=1e-6, atol=1e-7)
    outer = item_arrays(saved, "outer_params")
    differ = any(np.any(x != outer[name]) for name, x in wanted.items())
    assert differ == (parameters != "outer")


@pytest.mark.parametrize("kind, imported", [("text", True), ("synthetic", True), ("text", False)])
def test_an_import_with_a_tokenizer_is_evaluated_on_any_kind_of_text(kind, imported):
    """It has no text of its own. Controls: an import without a tokenizer, and a run."""
    meta = {"config": config.load([f"dataset_type={kind}"], {}).as_dict()}
    meta |= {"imported": True} if imported else {}
    argv = ["dataset_type=parquet", "dataset_path=a.parquet"]
    if kind == "text" and imported:
        assert stored.configure(meta, argv, {}).dataset_type == "parquet"
        with pytest.raises(ConfigError, match="dataset_type=synthetic"):
            stored.configure(meta, ["dataset_type=synthetic"], {})
    else:
        with pytest.raises(ConfigError, match="dataset_type=parquet"):
            stored.configure(meta, argv, {})


# A program and its arguments; the exit code; the key or option that is named.
REFUSED = [
    (evaluate, "{text} steps=5", 2, "steps"),
    (evaluate, "{text} stepz=5", 2, "stepz"),
    (evaluate, "{text} step=3", 2, "step"),
    (evaluate, "{text} step=1 step=1", 2, "step"),
    (evaluate, "{text} parameters=inner", 2, "parameters"),
    (evaluate, "{text} parameters=replica_2", 2, "parameters"),
    (evaluate, '{text} eval_dataset_path={{"a":"/nowhere"}}', 3, "eval_dataset_path"),
    (evaluate, "absent base_output_directory={tmp}", 2, "RUN"),
    (evaluate, "{tmp}", 2, "RUN"),
    (evaluate, "{text}/checkpoints/4 step=4", 2, "step"),
    (generate, "{text} promt=a", 2, "promt"),
    (generate, "{text} top_k=few", 2, "top_k"),
    (generate, "{text} temperature=nan", 2, "temperature"),
    (generate, "{text} max_new_tokens=0", 2, "max_new_tokens"),
    (generate, f"{{text}} max_new_tokens={10**11}", 2, "max_new_tokens"),
    (generate, "{text} seed=-1", 2, "seed"),
    (generate, f"{{text}} seed={10**400}", 2, "seed"),
    (generate, f"{{text}} seed={2**63}", 2, "seed"),
    (generate, "{text} seed=1 seed=2", 2, "seed"),
    (generate, "r base_output_directory=gs://", 2, "base_output_directory"),
    (generate, "{text} prompts_file={tmp}/no", 2, "prompts_file"),
    (generate, "{text} prompts_file={tmp}/empty", 2, "prompts_file"),
    (generate, "{text} prompts_file={tmp}/not_text", 2, "prompts_file"),
    (generate, "{finished} prompt=a", 2, "dataset_type"),
]


@pytest.mark.parametrize("program, arguments, code, key", REFUSED)
def test_a_refused_reader_names_the_key(
    text_run, finished, tmp_path, program, arguments, code, key
):
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "not_text").write_bytes(b"\xff")
    arguments = arguments.format(text=text_run[0], finished=finished, tmp=tmp_path)
    found, line = refused(program.main, *arguments.split())
    assert found == code and names_key(line, key)


@pytest.mark.full
def test_two_processes_log_samples_and_losses_of_an_eager_run(started, tmp_path, evaluated):
    """Two slices of two devices; the first process prints the sample. The loss of the mean of the
    outer parameters, which is read from the checkpoint on one device, is near the logged one: after
    3 steps the outer parameters of the slices are near each other."""
    (tmp_path / "a.txt").write_text("in the beginning there was a byte. " * 40)
    keys = dict(dataset_type="text", vocab_size=257)
    keys |= dict(dataset_path=tmp_path / "a.txt", diloco_round_overlap="eager", steps=3)
    keys |= dict(eval_interval=3, eval_steps=1, sample_prompt="in the ")
    started += start_cluster(2, tmp_path / "a", **keys)
    assert_exit_codes(started, 0, 0)
    assert "sample after step 3:\n  | in the " in started[0].output
    assert "sample after" not in started[1].output
    one_device = ["dcn_diloco_parallelism=1", "ici_fsdp_parallelism=1"]
    (text,) = evaluated(tmp_path / "a", *one_device)["texts"]
    logged = metrics_rows(tmp_path / "a")[-1]
    assert text["loss"] == pytest.approx(logged["eval/loss"], rel=1e-2)
    assert text["loss"] != pytest.approx(logged["eval/loss"], rel=OTHER_ORDER)


def test_two_processes_evaluate_what_one_has_trained(started, text_run, tmp_path):
    """Two slices, each a process; the first one prints."""
    run, _ = text_run
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "maxdiloco.evaluate", str(run), f"report={report}"]
    started += [Process(command, environ) for environ in cluster_environs(2)]
    assert_exit_codes(started, 0, 0)
    (text,) = json.loads(report.read_text())["texts"]
    assert text["loss"] == pytest.approx(metrics_rows(run)[-1]["eval/loss"], rel=OTHER_ORDER)
    assert "held out" in started[0].output and "held out" not in started[1].output


def test_equal_seeds_generate_equal_text(text_run, tmp_path, monkeypatch):
    """Prompts of a file are continued into a file, an object each, as for the prompt by itself. A
    run trained with attention=flash, kernels of TPU and GPU, is sampled on a CPU."""
    run, _ = text_run
    options = ["prompt=in the ", "max_new_tokens=12", "temperature=1", "top_k=0"]
    first = output_of(generate.main, run, *options)
    assert first.startswith("in the ")
    assert len(first) > len("in the \n")
    assert output_of(generate.main, run, *options, "seed=0") == first
    assert output_of(generate.main, run, *options, "seed=1") != first
    # A checkpoint of the run does as well as the run.
    assert output_of(generate.main, run / "checkpoints" / "4", *options) == first

    (tmp_path / "prompts.txt").write_text("in the \nit was")
    out = tmp_path / "out" / "texts.jsonl"
    arguments = [f"prompts_file={tmp_path / 'prompts.txt'}", f"output={out}", "max_new_tokens=12"]
    where = [f"base_output_directory={run.parent}", "step=4"]
    assert output_of(generate.main, "text", *where, *arguments) == ""
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["in the ", "it was"]
    printed = output.escape_controls(rows[1]["text"], keep="\n\t")
    assert output_of(generate.main, run, "prompt=it was", "max_new_tokens=12") == printed + "\n"

    cfg = config.from_dict(checkpoint_meta(run, 4)["config"] | {"attention": "flash"})
    with pytest.raises(ConfigError, match="attention=flash"):
        build_model(ModelSettings.from_keys(cfg, backend="cpu"), backend="cpu")
    load = stored.load

    def of_flash(folder, configure):
        return load(folder, lambda meta: configure(meta | {"config": cfg.as_dict()}))

    monkeypatch.setattr(stored, "load", of_flash)
    assert output_of(generate.main, run, *options) == first


def continued(run, path):
    """Return the text that generate writes to a file."""
    keys = ["prompt=in the ", "max_new_tokens=100", f"output={path}"]
    assert generate.main([str(run), *keys]) == 0
    return json.loads(path.read_text())["text"]


def test_samples_at_evaluations_change_no_bit_of_the_run(text_run, tmp_path):
    """The text that generate draws from the same checkpoint, on two slices here; the state is that
    of the run without samples."""
    run, keys = text_run
    keys = keys | dict(sample_prompt="in the ", enable_tensorboard="true")
    said = train(tmp_path / "text", **keys).output
    assert [f"sample after step {t}:" in said for t in (1, 2, 3, 4)] == [False, True, False, True]
    assert_equal_runs(tmp_path / "text", run, steps=4)
    wanted = continued(run, tmp_path / "texts.jsonl")
    assert output.escape_controls(sample_lines(4, wanted), keep="\n\t") in said
    (board,) = (tmp_path / "text" / "tensorboard").iterdir()
    content = board.read_bytes()
    assert content.count(b"eval/sample/text_summary") == 2
    assert b"".join(f"    {line}\n".encode() for line in wanted.splitlines()) in content


@pytest.mark.full
def test_a_context_parallel_run_evaluates_and_samples(text_run, tmp_path):
    """The evaluations of the run on one device a replica, and the text that generate draws; the
    prompt of 7 tokens and the one token of a step could not be shared by two devices."""
    run, keys = text_run
    keys = keys | dict(sample_prompt="in the ", ici_context_parallelism=2)
    said = train(tmp_path / "text", **keys).output
    for name in ("learning/loss", "eval/loss"):
        alone, spread = (
            [row[name] for row in metrics_rows(folder) if name in row]
            for folder in (run, tmp_path / "text")
        )
        assert len(alone) >= 2 and spread == pytest.approx(alone, rel=1e-5)
    wanted = continued(tmp_path / "text", tmp_path / "texts.jsonl")
    assert output.escape_controls(sample_lines(4, wanted), keep="\n\t") in said
