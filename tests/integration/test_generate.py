"""What is done with theta: evaluation in the run, and text from its folder."""

import json

import pytest
import run_tools as tools

from maxdiloco import generate
from maxdiloco.errors import ConfigError
from maxdiloco.evaluation import stored
from maxdiloco.flags import config
from maxdiloco.metrics.console import sample_lines
from maxdiloco.models import transformer

pytestmark = pytest.mark.usefixtures("programs")


def generated(capfd, *argv):
    """What `python -m maxdiloco.generate` prints."""
    capfd.readouterr()
    assert generate.main([str(argument) for argument in argv]) == 0
    return capfd.readouterr().out


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
    for name in ("learning/loss", "eval/loss"):
        alone, spread = (
            [row[name] for row in tools.rows(folder) if name in row]
            for folder in (run, tmp_path / "text")
        )
        assert len(alone) >= 2 and spread == pytest.approx(alone, rel=1e-5)
    wanted = generated(capfd, tmp_path / "text", "prompt=in the ", "max_new_tokens=100")[:-1]
    assert sample_lines(4, wanted) in said


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


@pytest.mark.parametrize(
    "content, words", [(None, "No such file"), (b"", "is empty"), (b"\xff", "it is not UTF-8 text")]
)
def test_a_file_of_prompts_that_does_not_work_is_refused(capfd, text_run, tmp_path, content, words):
    path = tmp_path / "prompts.txt"
    if content is not None:
        path.write_bytes(content)
    code, line = tools.refused(capfd, generate.main, [text_run[0], f"prompts_file={path}"])
    assert code == 2
    assert f"prompts_file={path}" in line and words in line and "one prompt a line" in line


@pytest.mark.parametrize(
    "option, words",
    [
        ("promt=a", "promt=a is not an option of generate. Use key=value with one of prompt,"),
        ("top_k=few", "top_k=few is not int."),
        ("temperature=nan", "temperature=nan is not finite. Use 0 to 1"),
        ("max_new_tokens=0", "max_new_tokens=0 asks for no text. Use 1 or more"),
        ("seed=-1", "seed=-1 is out of range. Use 0 to"),
        (f"seed={2**63}", f"seed={2**63} is out of range. Use 0 to"),
        ("seed=1 seed=2", "seed=2: seed is given twice. Give it once."),
    ],
)
def test_an_option_that_cannot_work_is_refused_with_2(capfd, text_run, option, words):
    code, line = tools.refused(capfd, generate.main, [text_run[0], *option.split()])
    assert code == 2
    assert line.startswith(f"ConfigError: {words}")


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


def test_a_run_that_has_not_learnt_text_is_refused(capfd, finished):
    """Its vocabulary of 32 has no place for bytes."""
    code, line = tools.refused(capfd, generate.main, [finished, "prompt=a"])
    assert code == 3
    assert line.startswith("DataError: vocab_size=32 is too small for tokenizer_type=byte")
