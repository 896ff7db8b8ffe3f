"""The commands of docs/huggingface.md run as they stand, but for their places and their size."""

import pathlib
import re
import shlex

import pytest
from data.tokenizers_on_disk import byte_level_bpe
from huggingface import small_models as small

from maxdiloco import hf, prepare, train

PAGE = pathlib.Path(__file__).parents[2] / "docs/huggingface.md"
SMALLER = (
    "hardware=cpu dcn_diloco_parallelism=2 ici_fsdp_parallelism=1 max_target_length=16 steps=1 "
    "per_device_batch_size=1 remat_policy=none enable_tensorboard=false"
)
PROGRAMS = {
    "maxdiloco.hf": hf.main,
    "maxdiloco.train": train.main,
    "maxdiloco.prepare": prepare.main,
}


@pytest.mark.usefixtures("programs")
def test_the_commands_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = small.save(tmp_path / "Qwen3-0.6B", small.weights())
    byte_level_bpe(source, vocab_size=300)
    (tmp_path / "text.txt").write_text("one two three four\n" * 200)
    commands = re.findall(r"^python -m (maxdiloco\.\w+) (.+)$", PAGE.read_text(), re.M)
    names = [name.removeprefix("maxdiloco.") for name, _ in commands]
    assert names == ["hf", "train", "prepare", "train", "hf"]
    for name, text in commands:
        text = text.replace("/data/text", str(tmp_path / "text.txt"))
        arguments = shlex.split(text.replace("/data/", f"{tmp_path}/"))
        if name == "maxdiloco.train":
            arguments += SMALLER.split()
        elif arguments[0] == "import":
            arguments.append("vocab_multiple=300")  # the test's model has 31 rows
        assert PROGRAMS[name](arguments) == 0, text
    assert (tmp_path / "qwen3-more/tokenizer.json").is_file()
