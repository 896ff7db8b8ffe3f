"""A run's tokenizer travels with it, and another one is refused."""

import shutil

import numpy as np
import pytest
import run_tools as tools

from maxdiloco import generate
from maxdiloco import tokenizer as program
from maxdiloco.checkpoint import find
from maxdiloco.data import token_text, tokenizer

pytestmark = pytest.mark.usefixtures("programs")


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


def test_the_run_folder_and_every_checkpoint_hold_the_tokenizer(trained):
    """264 tokens; 3 * 128 = 384 rows, of which the last 120 are padding."""
    run, _, _ = trained
    copies = [
        tokenizer.load(path)
        for path in (run, *run.glob("checkpoints/*"))
        for path in [path / "tokenizer"]
    ]
    assert len(copies) == 2 and copies[0] == copies[1]
    assert (copies[0].vocab_size, copies[0].eos) == (264, 1)
    keys = find.newest_meta(run, key="RUN")["config"]
    assert (keys["vocab_size"], keys["padded_vocab_size"]) == (264, 384)


def test_a_checkpoint_copied_elsewhere_generates_alone(trained, tmp_path, capfd):
    copy = tmp_path / "copy"
    shutil.copytree(trained[0] / "checkpoints" / "2", copy)
    assert generate.main([str(copy), "prompt=the cat", "max_new_tokens=5"]) == 0
    assert capfd.readouterr().out.startswith("the cat")
    (copy / "tokenizer" / "tokenizer.json").write_text("{}")
    assert generate.main([str(copy), "prompt=the cat"]) == 2
    assert "no undamaged checkpoint is left" in capfd.readouterr().err


def test_resuming_goes_on_with_the_saved_tokenizer_and_refuses_another(trained, tmp_path, capfd):
    shutil.copytree(trained[0], tmp_path / "run")
    keys = trained[1] | dict(steps=3)
    assert tools.run(tmp_path, "run", **keys, tokenizer_path=trained[2]) == 2
    line = capfd.readouterr().err.strip().splitlines()[-1]
    saved = tmp_path / "run" / "checkpoints" / "2" / "tokenizer"
    assert f"tokenizer_path={trained[2]}: the tokenizer is not that of checkpoint" in line
    assert f"Set tokenizer_path={saved}, or set another run_name" in line
    assert tools.run(tmp_path, "run", **keys, tokenizer_path=saved) == 0
    assert "resumed after step 2" in capfd.readouterr().out
    assert tools.run(tmp_path, "run", **keys, tokenizer_path=saved, add_eos="false") == 2
    assert "add_eos=False (the checkpoint has True)" in capfd.readouterr().err


def test_parameters_of_a_run_with_another_tokenizer_are_loaded_with_a_warning(
    trained, tmp_path, capfd
):
    run, keys, other = trained
    for path, warned in ((run / "tokenizer", False), (other, True)):
        capfd.readouterr()
        loaded = keys | dict(load_parameters_path=run, tokenizer_path=path)
        assert tools.run(tmp_path, f"run-{warned}", **loaded) == 0
        output = capfd.readouterr()
        assert ("is of a run with another tokenizer" in output.out + output.err) == warned


def test_text_ends_with_its_document(trained):
    """The byte tokenizer has no end but the start of the next one."""
    byte, saved = tokenizer.ByteTokenizer(), tokenizer.load(trained[0] / "tokenizer")
    assert token_text.continuation(byte, [256], np.array([104, 1, 256, 104])) == "h\x01"
    prompt = token_text.prompt_tokens(saved, "the")
    assert prompt == [saved.bos, *saved.encode("the")]
    more = [*saved.encode(" hat"), saved.eos, *saved.encode(" and")]
    assert token_text.continuation(saved, prompt, more) == " hat"
