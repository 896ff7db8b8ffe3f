"""What is done with theta: evaluation in the run, and text from its folder."""

import json

import jax
import numpy as np
import pytest
import run_tools as tools

from maxdiloco import generate
from maxdiloco.checkpoint import read
from maxdiloco.data import pipeline, token_text, tokenizer
from maxdiloco.errors import ConfigError
from maxdiloco.flags import config
from maxdiloco.metrics.console import sample_lines
from maxdiloco.models import transformer
from maxdiloco.trainer import stored

pytestmark = pytest.mark.usefixtures("programs")


def generated(capfd, *argv):
    """What `python -m maxdiloco.generate` prints."""
    capfd.readouterr()
    assert generate.main([str(argument) for argument in argv]) == 0
    return capfd.readouterr().out


def refused(capfd, *argv):
    """Its exit code and its one line of error."""
    capfd.readouterr()
    code = generate.main([str(argument) for argument in argv])
    line = capfd.readouterr().err.strip()
    assert "\n" not in line
    return code, line


def test_the_logged_eval_loss_is_that_of_theta_on_the_first_held_out_windows(text_run):
    """Two batches of 2 replicas * 2 rows over the mesh; here sequence by sequence on one device."""
    run, _ = text_run
    assert ["eval/loss" in row for row in tools.rows(run)] == [False, True, False, True]
    cfg = stored.config_of(tools.meta(run, 4))
    model = transformer.build(cfg, backend="cpu")
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    theta = read.restore_parameters(run, shapes)
    loss = jax.jit(model.loss)
    total = tokens = 0.0
    dataset = pipeline.open_dataset(cfg, split="eval")
    with pipeline.eval_batches(dataset, batch_size=1, num_sequences=8) as windows:
        for window in windows:
            _, aux = loss(theta, window)
            total += float(aux["cross_entropy"])
            tokens += float(aux["tokens"])
    assert tokens > 50
    # float32 sums of about 100 losses in another order.
    assert tools.rows(run)[-1]["eval/loss"] == pytest.approx(total / tokens, rel=1e-5)


def test_text_goes_on_from_the_prompt_the_same_way_for_the_same_seed(capfd, text_run):
    run, _ = text_run
    options = ["prompt=in the ", "max_new_tokens=12", "temperature=1", "top_k=0"]
    first = generated(capfd, run, *options)
    assert first.startswith("in the ")
    assert len(first) > len("in the \n")
    assert generated(capfd, run, *options, "seed=0") == first
    assert generated(capfd, run, *options, "seed=1") != first
    # A checkpoint of the run does as well as the run.
    assert generated(capfd, run / "checkpoints" / "4", *options) == first


def test_a_run_writes_samples_at_its_evaluations_and_keeps_its_bits(capfd, text_run, tmp_path):
    """The text that generate draws from the same checkpoint, on two slices here; the state is that
    of the run without samples."""
    run, keys = text_run
    keys = keys | dict(sample_prompt="in the ", enable_tensorboard="true")
    capfd.readouterr()
    assert tools.run(tmp_path, "text", **keys) == 0
    said = capfd.readouterr().out
    assert [f"sample after step {t}:" in said for t in (1, 2, 3, 4)] == [False, True, False, True]
    tools.assert_equal_runs(tmp_path / "text", run, steps=4)
    wanted = generated(capfd, run, "prompt=in the ", "max_new_tokens=100")[:-1]
    assert sample_lines(4, wanted) in said
    (board,) = (tmp_path / "text" / "tensorboard").iterdir()
    content = board.read_bytes()
    assert content.count(b"eval/sample/text_summary") == 2
    assert b"".join(f"    {line}\n".encode() for line in wanted.splitlines()) in content


def test_a_run_spread_over_lengths_evaluates_and_samples(capfd, text_run, tmp_path):
    """The evaluations of the run on one device a replica, and the text that generate draws; the
    prompt of 7 tokens and the one token of a step could not be shared by two devices."""
    run, keys = text_run
    keys = keys | dict(sample_prompt="in the ", ici_context_parallelism=2)
    assert tools.run(tmp_path, "text", **keys) == 0
    said = capfd.readouterr().out
    losses = [[row["eval/loss"] for row in tools.rows(r) if "eval/loss" in row] for r in
              (run, tmp_path / "text")]  # fmt: skip
    assert len(losses[0]) == 2 and losses[1] == pytest.approx(losses[0], rel=1e-5)
    wanted = generated(capfd, tmp_path / "text", "prompt=in the ", "max_new_tokens=100")[:-1]
    assert sample_lines(4, wanted) in said
    found = [["learning/loss" in row and row["learning/loss"] for row in tools.rows(r)] for r in
             (run, tmp_path / "text")]  # fmt: skip
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_prompts_of_a_file_are_continued_into_a_file(capfd, text_run, tmp_path):
    """One JSON object a prompt; the same text as for the prompt alone."""
    run, _ = text_run
    (tmp_path / "prompts.txt").write_text("in the \nit was")
    options = ["max_new_tokens=12", f"base_output_directory={run.parent}", "step=4"]
    out = tmp_path / "out" / "texts.jsonl"
    arguments = [f"prompts_file={tmp_path / 'prompts.txt'}", f"output={out}"]
    assert generated(capfd, "text", *options, *arguments) == ""
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["in the ", "it was"]
    capfd.readouterr()
    assert generate.main([str(run), "prompt=it was", "max_new_tokens=12"]) == 0
    captured = capfd.readouterr()
    assert captured.out == rows[1]["text"] + "\n"
    assert captured.err == f"step 4 of {run}\n"


def test_a_continuation_ends_with_its_document():
    byte = tokenizer.ByteTokenizer()
    assert token_text.continuation(byte, [256], [104, 105, 256, 104]) == "hi"
    assert token_text.continuation(byte, [256], np.array([104, 105])) == "hi"
    assert token_text.prompt_tokens(byte, "hi") == [256, 104, 105]


@pytest.mark.parametrize(
    "content, words", [(None, "No such file"), (b"", "is empty"), (b"\xff", "it is not UTF-8 text")]
)
def test_a_file_of_prompts_that_does_not_work_is_refused(
    capfd, text_run, tmp_path, content, words
):
    path = tmp_path / "prompts.txt"
    if content is not None:
        path.write_bytes(content)
    code, line = refused(capfd, text_run[0], f"prompts_file={path}")
    assert code == 2
    assert f"prompts_file={path}" in line and words in line and "one prompt a line" in line


def test_help_lists_every_option(capfd):
    for argv in ([], ["--help"]):
        text = generated(capfd, *argv)
        assert "usage: python -m maxdiloco.generate RUN [key=value ...]" in text
        for name in generate.Options._fields:
            assert f"  {name}=" in text


@pytest.mark.parametrize(
    "option, words",
    [
        ("promt=a", "promt=a is not an option of generate. Use key=value with one of prompt,"),
        ("prompt", "prompt is not an option of generate. Use key=value"),
        ("top_k=few", "top_k=few is not int."),
        ("temperature=nan", "temperature=nan is not finite. Use 0 to 1"),
        ("temperature=-1", "temperature=-1.0 is negative. Use 0 for greedy"),
        ("max_new_tokens=0", "max_new_tokens=0 asks for no text. Use 1 or more"),
        ("seed=-1", "seed=-1 is out of range. Use 0 to"),
        (f"seed={2**63}", f"seed={2**63} is out of range. Use 0 to"),
    ],
)
def test_an_option_that_cannot_work_is_refused_with_2(capfd, text_run, option, words):
    code, line = refused(capfd, text_run[0], option)
    assert code == 2
    assert line.startswith(f"ConfigError: {words}")


def test_an_option_given_twice_is_refused(capfd, text_run):
    code, line = refused(capfd, text_run[0], "seed=1", "seed=2")
    assert code == 2
    assert line == "ConfigError: seed=2: seed is given twice. Give it once."


def test_a_run_trained_with_flash_attention_is_sampled_where_there_is_none(
    capfd, text_run, monkeypatch
):
    """attention=flash names kernels of TPU and GPU; here is a CPU."""
    run, _ = text_run
    wanted = generated(capfd, run, "max_new_tokens=4")
    cfg = config.from_dict(tools.meta(run, 4)["config"] | {"attention": "flash"})
    with pytest.raises(ConfigError, match="attention=flash"):
        transformer.build(cfg, backend="cpu")
    monkeypatch.setattr(stored, "config_of", lambda meta: cfg)
    assert generated(capfd, run, "max_new_tokens=4") == wanted


def test_a_folder_without_a_checkpoint_is_refused_with_2(capfd, tmp_path):
    code, line = refused(capfd, tmp_path)
    assert code == 2
    assert f"CheckpointError: RUN={tmp_path} holds no checkpoint: give the folder" in line


def test_a_run_that_has_not_learnt_text_is_refused(capfd, finished):
    """Its vocabulary of 32 has no place for bytes."""
    code, line = refused(capfd, finished, "prompt=a")
    assert code == 3
    assert line.startswith("DataError: vocab_size=32 is too small for tokenizer_type=byte")
