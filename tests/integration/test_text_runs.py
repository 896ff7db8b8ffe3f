"""Runs on text, on a mixture and with a tokenizer of one's own: what a restart reads, goes on with
to the bit, and refuses by name.
"""

import json
import os
import shutil

import numpy as np
import pytest
import run_tools as tools

from maxdiloco import generate, train
from maxdiloco import tokenizer as program
from maxdiloco.checkpoint import read
from maxdiloco.data import tokenizer

pytestmark = pytest.mark.usefixtures("programs")


def test_a_restart_reads_no_jsonl_file_through_and_trusts_no_changed_line(capfd, tmp_path):
    """The index is in the run's folder. Lines changed behind it end the run with 3, in one line."""
    line = json.dumps({"text": "in the beginning there was a byte, and it was even."}) + "\n"
    text = tmp_path / "text.jsonl"
    text.write_text(line * 60)
    keys = dict(dataset_type="text", dataset_path=text, vocab_size=257)
    keys |= dict(eval_interval=2, eval_steps=2, opt_type="sgd")

    told = tools.told(capfd, tmp_path, "run", steps=1, **keys)
    assert told.count("reading 1 .jsonl files through") == 1
    assert (tmp_path / "run" / "line_index").exists()

    told = tools.told(capfd, tmp_path, "run", steps=2, **keys)
    assert "resumed after step 1" in told and ".jsonl" not in told.replace(str(text), "")

    before = os.stat(text)
    text.write_text(("x" * (len(line) - 1) + "\n") * 60)
    os.utime(text, ns=(before.st_atime_ns, before.st_mtime_ns))
    code, error = tools.refused_run(capfd, tmp_path, "run", steps=3, **keys)
    assert code == 3 and error.startswith(f"DataError: {text} has changed since the run began")


def test_the_same_text_by_another_path_resumes_and_other_text_in_its_place_does_not(
    text_run, tmp_path, capfd
):
    run, keys = text_run
    shutil.copytree(run, tmp_path / "text")
    moved = tmp_path / "moved.txt"
    moved.write_bytes(keys["dataset_path"].read_bytes())
    keys = keys | dict(dataset_path=moved)
    told = tools.told(capfd, tmp_path, "text", **keys | dict(steps=5))
    assert "resumed after step 4" in told and "dataset_path /" in told
    moved.write_bytes(moved.read_bytes()[::-1])
    code, line = tools.refused_run(capfd, tmp_path, "text", **keys | dict(steps=6))
    assert code == 2
    assert f"dataset_path={moved}: the text is not that of the checkpoint of step 5" in line
    assert f"load_parameters_path={tmp_path}/text/checkpoints/5" in line


def test_a_resumed_mixture_equals_one_that_was_not_interrupted(capfd, tmp_path):
    """Steps 1 to 3, then to 6; a step reads 4 sequences of 16, best-fit packed. Then other weights
    go on where the sources are, and another text is refused with its name."""
    for name, size in (("web", 400), ("code", 90)):
        (tmp_path / name).mkdir()
        for number in range(21):
            text = bytes(97 + (number * 7 + i) % 26 for i in range(size + number))
            (tmp_path / name / f"{number:02}.txt").write_bytes(text)
    folder = tmp_path / "parts"

    def argv(name, steps, web=3):
        entries = [
            {"path": str(tmp_path / "web"), "weight": str(web), "name": "web"},
            {"path": str(tmp_path / "code"), "weight": "1", "name": "code"},
        ]
        keys = dict(dataset_type="text", vocab_size=257, grain_packing_type="best_fit")
        keys |= dict(opt_type="sgd")
        keys |= dict(dataset_mixture=json.dumps(entries), steps=steps)
        return tools.arguments(tmp_path, name, **keys)

    def tokens_read():
        row = tools.rows(folder)[-1]
        return row["data/tokens_web"] / 16, row["data/tokens_code"] / 16

    told = tools.printed(capfd, train.main, argv("whole", 6))
    assert "source web:" in told and "; 75.0000% of what is read" in told
    assert "of them padding" in told
    assert train.main(argv("parts", 3)) == train.main(argv("parts", 6)) == 0
    tools.assert_equal_runs(folder, tmp_path / "whole", steps=6)
    assert tokens_read() == (18, 6)
    assert 0 <= tools.rows(folder)[-1]["data/padding"] < 0.5

    assert train.main(argv("parts", 8, web=1)) == 0
    assert tools.meta(folder, 8)["position"]["sources"] == {
        "begun": 24,
        "read": {"web": 18, "code": 6},
        "shares": {"web": 1, "code": 1},
        "order": ["code", "web"],
    }
    assert tokens_read() == (22, 10)

    (tmp_path / "code" / "01.txt").write_bytes(b"another text")
    code, line = tools.refused(capfd, train.main, argv("parts", 9, web=1))
    words = "CheckpointError: dataset_mixture, sources code: the text is not that"
    assert code == 2 and line.startswith(words)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folder of a run whose tokenizer's file is gone, its keys, and another tokenizer."""
    folder = tmp_path_factory.mktemp("trained")
    for name, text in (("mine", "the cat and the hat "), ("other", "one two three four ")):
        (folder / f"{name}.txt").write_text(text * 100)
        arguments = [f"{folder / name}.txt", f"out={folder / name}.json", "vocab_size=264"]
        assert program.main(arguments) == 0
    keys = dict(tokenizer_type="huggingface", vocab_size=-1, steps=2)
    mine = keys | dict(tokenizer_path=folder / "mine.json")
    assert tools.run(folder, "run", **mine) == 0
    (folder / "mine.json").unlink()
    return folder / "run", keys, folder / "other.json"


def test_the_run_folder_and_a_checkpoint_copied_elsewhere_have_the_tokenizer(
    trained, tmp_path, capfd
):
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
    assert tools.printed(capfd, generate.main, argv).startswith("the cat")
    (copy / "tokenizer" / "tokenizer.json").write_text("{}")
    assert generate.main([str(copy), "prompt=the cat"]) == 2
    assert "no undamaged checkpoint is left" in capfd.readouterr().err


def test_another_tokenizer_is_refused_where_a_run_goes_on_and_told_where_parameters_are_loaded(
    trained, tmp_path, capfd
):
    """It goes on with the saved one, of which nothing is told either."""
    run, keys, other = trained
    shutil.copytree(run, tmp_path / "run")
    more = keys | dict(steps=3)
    code, line = tools.refused_run(capfd, tmp_path, "run", **more, tokenizer_path=other)
    saved = tmp_path / "run" / "checkpoints" / "2" / "tokenizer"
    assert code == 2 and f"tokenizer_path={other}: the tokenizer is not that of checkpoint" in line
    assert f"Set tokenizer_path={saved}, or set another run_name" in line
    told = tools.told(capfd, tmp_path, "run", **more, tokenizer_path=saved)
    assert "resumed after step 2" in told
    assert tools.run(tmp_path, "run", **more, tokenizer_path=saved, add_eos="false") == 2
    assert "add_eos=False (the checkpoint has True)" in capfd.readouterr().err
    for path, warned in ((saved, False), (other, True)):
        loaded = keys | dict(load_parameters_path=run, tokenizer_path=path)
        assert tools.run(tmp_path, f"run-{warned}", **loaded) == 0
        output = capfd.readouterr()
        assert ("is of a run with another tokenizer" in output.out + output.err) == warned
