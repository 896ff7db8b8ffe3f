"""The commands of README's "Your own text", on a little text."""

import json
import pathlib
import re
import shlex

import pytest

from maxdiloco import evaluate, generate, prepare, tokenizer, train

pytestmark = pytest.mark.usefixtures("programs")
README = pathlib.Path(__file__).parents[2] / "README.md"
PROGRAMS = {
    "tokenizer": tokenizer,
    "prepare": prepare,
    "train": train,
    "evaluate": evaluate,
    "generate": generate,
}
# A tiny model, a few steps; the command line wins over these.
SMALL = dict(
    hardware="cpu", steps=2, log_period=1, eval_steps=1, max_target_length=16, base_emb_dim=16,
    base_num_decoder_layers=1, base_mlp_dim=16, base_num_query_heads=2, base_num_kv_heads=1,
    head_dim=8, per_device_batch_size=2, diloco_sync_period=2, dtype="float32",
    ici_fsdp_parallelism=1,
    enable_tensorboard="false", jax_cache_dir="",
)  # fmt: skip


# Words of each program's help besides its usage.
HELP = {
    "prepare SOURCE out=FOLDER": prepare.MEANING,
    "evaluate RUN": ["ici_fsdp_parallelism", "eval_steps"],
    "generate RUN [key=value ...]": [f"  {name}=" for name in generate.Options._fields],
}


@pytest.mark.parametrize("usage", HELP)
def test_help_lists_the_options(capsys, usage):
    """Without arguments too."""
    for arguments in ([], ["--help"]):
        assert PROGRAMS[usage.split()[0]].main(arguments) == 0
        text = capsys.readouterr().out
        assert f"usage: python -m maxdiloco.{usage}" in text
        assert all(word in text for word in HELP[usage])


def commands(data):
    """(module, arguments) of the section's lines, with /data elsewhere and at most 300 tokens."""
    section = README.read_text(encoding="utf-8").split("## Your own text")[1]
    block = re.search(r"```\n(.*?)```", section, re.S)[1]
    for line in block.replace("/data/", f"{data}/").replace("=32000", "=300").splitlines():
        python, flag, module, *arguments = shlex.split(line)
        assert (python, flag) == ("python", "-m")
        if module.endswith("generate"):
            arguments.append("max_new_tokens=3")
        yield module.removeprefix("maxdiloco."), arguments


def write_data(folder):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for name, words in (("text", "the cat and the hat "), ("code", "def f(x): return x ")):
        (folder / name).mkdir()
        for i in range(3):
            (folder / name / f"{i}.txt").write_text(words * 80)
    (folder / "parquet").mkdir()
    table = pyarrow.table({"body": ["a document of its own " * 20] * 20})
    parquet.write_table(table, folder / "parquet" / "0.parquet")


def test_each_command_does_what_it_says(tmp_path, monkeypatch, capsys):
    data = tmp_path / "data"
    data.mkdir()
    write_data(data)
    monkeypatch.chdir(tmp_path)
    for name, value in SMALL.items():
        monkeypatch.setenv(f"M_{name.upper()}", str(value))
    ran = []
    for module, arguments in commands(data):
        if any("eval_interval" in argument for argument in arguments):
            arguments.append("steps=100")
        assert PROGRAMS[module].main(arguments) == 0, (module, capsys.readouterr())
        ran.append(module)
    assert ran == ["tokenizer", "prepare", "prepare", "train", *["evaluate"] * 2, "generate",
                   *["train"] * 3]  # fmt: skip
    (text,) = json.loads((tmp_path / "a.json").read_text())["texts"]
    assert text["tokens"] > 0 and text["bytes"] > text["tokens"]  # a subword has several
    rows = [json.loads(line) for line in open(tmp_path / "runs/c/metrics.jsonl")]
    assert rows[-1]["data/tokens_web"] == 3 * rows[-1]["data/tokens_code"] > 0
    rows = [json.loads(line) for line in open(tmp_path / "runs/d/metrics.jsonl")]
    assert {"eval/loss", "eval/code/loss", "eval/code/bits_per_byte"} <= set(rows[-1])
    assert "Once upon" in capsys.readouterr().out
