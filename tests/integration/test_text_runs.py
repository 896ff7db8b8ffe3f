"""Runs on text, on a mixture and with a user's tokenizer: resumes, and refusals of other data."""

import json
import shutil

import numpy as np
import pytest
from run import names_key, output_of, refused, train
from run_files import assert_equal_runs, checkpoint_meta, metrics_rows

from maxdiloco import generate
from maxdiloco import tokenizer as program
from maxdiloco.checkpoint import read
from maxdiloco.data import tokenizer

pytestmark = pytest.mark.usefixtures("programs")


def test_a_text_is_prepared_once_and_a_changed_one_again(tmp_path):
    """In the folder `prepared` next to the run. The text that has changed is refused with 2."""
    line = json.dumps({"text": "in the beginning there was a byte, and it was even."}) + "\n"
    text = tmp_path / "text.jsonl"
    text.write_text(line * 60)
    keys = dict(dataset_type="text", dataset_path=text, vocab_size=257)
    keys |= dict(eval_interval=2, eval_steps=2, opt_type="sgd")

    run = train(tmp_path / "run", steps=1, **keys)
    assert run.output.count(f"tokenising dataset_path={text}") == 1
    assert len(list((tmp_path / "prepared").iterdir())) == 1

    output = train(tmp_path / "run", steps=2, **keys).output
    assert "resumed after step 1" in output and "tokenising" not in output

    text.write_text(line.replace("even", "odd.") * 60)
    run = train(tmp_path / "run", steps=3, **keys)
    assert run.code == 2 and f"dataset_path={text}" in run.error
    assert len(list((tmp_path / "prepared").iterdir())) == 2


def test_the_text_may_move_on_resume_but_not_change(text_run, tmp_path):
    run, keys = text_run
    shutil.copytree(run, tmp_path / "text")
    moved = tmp_path / "moved.txt"
    moved.write_bytes(keys["dataset_path"].read_bytes())
    keys = keys | dict(dataset_path=moved)
    output = train(tmp_path / "text", **keys | dict(steps=5)).output
    assert "resumed after step 4" in output and "dataset_path /" in output
    moved.write_bytes(moved.read_bytes()[::-1])
    run = train(tmp_path / "text", **keys | dict(steps=6))
    assert run.code == 2 and f"dataset_path={moved}" in run.error
    assert f"load_parameters_path={tmp_path}/text/checkpoints/5" in run.error


def test_a_resumed_mixture_equals_one_that_was_not_interrupted(tmp_path):
    """Steps 1 to 3, then to 6; a step reads 4 sequences of 16, best-fit packed. Other weights then
    continue from the position of each source, and another text is refused by its source."""
    for name, size in (("web", 400), ("code", 90)):
        (tmp_path / name).mkdir()
        for number in range(21):
            text = bytes(97 + (number * 7 + i) % 26 for i in range(size + number))
            (tmp_path / name / f"{number:02}.txt").write_bytes(text)
    folder = tmp_path / "parts"

    def run(name, steps, web=3):
        entries = [
            {"path": str(tmp_path / "web"), "weight": str(web), "name": "web"},
            {"path": str(tmp_path / "code"), "weight": "1", "name": "code"},
        ]
        keys = dict(dataset_type="text", vocab_size=257, grain_packing_type="best_fit")
        keys |= dict(opt_type="sgd")
        keys |= dict(dataset_mixture=json.dumps(entries), steps=steps)
        return train(tmp_path / name, **keys)

    def tokens_read():
        row = metrics_rows(folder)[-1]
        return row["data/tokens_web"] / 16, row["data/tokens_code"] / 16

    assert "; 75.0000% " in run("whole", 6).output
    assert run("parts", 3).code == run("parts", 6).code == 0
    assert_equal_runs(folder, tmp_path / "whole", steps=6)
    assert tokens_read() == (18, 6)
    assert 0 <= metrics_rows(folder)[-1]["data/padding"] < 0.5

    assert run("parts", 8, web=1).code == 0
    assert checkpoint_meta(folder, 8)["position"]["sources"] == {
        "begun": 24,
        "read": {"web": 18, "code": 6},
        "shares": {"web": 1, "code": 1},
        "order": ["code", "web"],
    }
    assert tokens_read() == (22, 10)

    (tmp_path / "code" / "01.txt").write_bytes(b"another text")
    changed = run("parts", 9, web=1)
    assert changed.code == 2
    assert names_key(changed.error, "dataset_mixture") and names_key(changed.error, "code")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folder of a run whose tokenizer's file is gone, its keys, and another tokenizer."""
    folder = tmp_path_factory.mktemp("trained")
    for name, text in (("mine", "the cat and the hat "), ("other", "one two three four ")):
        (folder / f"{name}.txt").write_text(text * 100)
        arguments = [f"{folder / name}.txt", f"out={folder / name}.json", "vocab_size=264"]
        assert program.main(arguments) == 0
    keys = dict(tokenizer_type="huggingface", vocab_size="auto", steps=2)
    mine = keys | dict(tokenizer_path=folder / "mine.json")
    assert train(folder / "run", **mine).code == 0
    (folder / "mine.json").unlink()
    return folder / "run", keys, folder / "other.json"


def test_a_run_and_each_checkpoint_hold_the_tokenizer(trained, tmp_path):
    """264 tokens; 3 * 128 = 384 rows, of which the last 120 are padding. The copy generates alone.
    Text ends with its document; the byte tokenizer has no end but the start of the next one."""
    run, copy = trained[0], tmp_path / "copy"
    shutil.copytree(run / "checkpoints" / "2", copy)
    saved, copied = (tokenizer.load(folder / "tokenizer") for folder in (run, copy))
    assert saved == copied and (saved.vocab_size, saved.eos) == (264, 1)
    keys = read.newest_meta(run, key="RUN")["config"]
    assert (keys["vocab_size"], keys["padded_vocab_size"]) == (264, 384)
    prompt = saved.prompt("the")
    assert prompt == [saved.bos, *saved.encode("the")]
    more = [*saved.encode(" hat"), saved.eos, *saved.encode(" and")]
    assert saved.continuation(prompt, more) == " hat"
    byte = tokenizer.ByteTokenizer()
    assert byte.continuation([256], np.array([104, 1, 256, 104])) == "h\x01"

    argv = [copy, "prompt=the cat", "max_new_tokens=5"]
    assert output_of(generate.main, *argv).startswith("the cat")
    (copy / "tokenizer" / "tokenizer.json").write_text("{}")
    assert refused(generate.main, *argv)[0] == 2


def test_another_tokenizer_is_refused_on_resume_and_logged_on_load(trained, tmp_path):
    """A run resumes with the saved tokenizer, and loads parameters with it without a warning."""
    run, keys, other = trained
    shutil.copytree(run, tmp_path / "run")
    more = keys | dict(steps=3)
    refusal = train(tmp_path / "run", **more, tokenizer_path=other)
    saved = tmp_path / "run" / "checkpoints" / "2" / "tokenizer"
    assert refusal.code == 2
    assert f"tokenizer_path={other}" in refusal.error and f"tokenizer_path={saved}" in refusal.error
    resumed = train(tmp_path / "run", **more, tokenizer_path=saved)
    assert "resumed after step 2" in resumed.output
    refusal = train(tmp_path / "run", **more, tokenizer_path=saved, add_eos="false")
    assert refusal.code == 2 and names_key(refusal.error, "add_eos")
    for path, warned in ((saved, False), (other, True)):
        loaded = keys | dict(load_parameters_path=run, tokenizer_path=path)
        new = train(tmp_path / f"run-{warned}", **loaded)
        assert new.code == 0
        assert ("another tokenizer" in new.output + new.errors) == warned
