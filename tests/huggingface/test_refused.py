"""What an import and an export refuse: one line, its exit code, nothing left behind."""

import fcntl
import json
import math
import os

import numpy as np
import pytest
import small_models as small
from data.tokenizers_on_disk import byte_level_bpe
from etils import epath

from maxdiloco import hf
from maxdiloco.checkpoint import arrays
from maxdiloco.errors import ConfigError
from maxdiloco.huggingface import folders

DEEPSEEK = {"model_type": "deepseek_v3"}
WINDOWS = {"model_type": "qwen3", "use_sliding_window": True}
YARN = {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}
GROUPED = {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy"}
LOCAL_SCALED = {
    "full_attention": {"rope_type": "default"},
    "sliding_attention": {"rope_type": "linear", "factor": 2.0},
}


@pytest.fixture
def refusal(tmp_path, capfd):
    """(argv of an import, exit code) -> its line, when nothing is left beside the source."""

    def of(source, *options, code=2):
        before = sorted(tmp_path.iterdir())
        capfd.readouterr()
        assert hf.main(["import", str(source), str(tmp_path / "ours"), *options]) == code
        output = capfd.readouterr()
        assert output.err.count("\n") == 1, output.err
        assert sorted(tmp_path.iterdir()) == before
        return output.err

    return of


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "qwen3_next"}, "model_type=qwen3_next"),
        ({"model_type": "bert"}, "model_type=bert"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"hidden_act": ["silu"]}, "hidden_act="),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"vocab_size": "many"}, "vocab_size=many"),
        ({"hidden_size": "8"}, "hidden_size=8"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps=x"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings=no"),
        (WINDOWS | {"num_hidden_layers": "3"}, "num_hidden_layers=3"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
        ({"rope_theta": "x"}, "rope_theta=x"),
        ({"model_type": "gemma3"}, "text_config="),
        (WINDOWS | {"max_window_layers": "1"}, "max_window_layers=1"),
        ({"rope_theta": 10**400}, "rope_theta=1"),
        ({"rope_theta": 1e308}, "rope_theta=1e+308"),
        ({"rope_theta": math.nan}, "rope_theta=nan"),
        ({"rope_theta": -1.0}, "rope_theta=-1.0"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"num_attention_heads": 0}, "config.json"),
        ({"hidden_size": -8}, "hidden_size"),
        ({"rope_scaling": "x"}, "config.json"),
        (WINDOWS | {"sliding_window": "x"}, "sliding_window=x"),
        ({"model_type": "gemma2", "layer_types": 5}, "layer_types=5"),
        ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "num_hidden_layers=3"),
        (DEEPSEEK | {"rope_scaling": YARN | {"mscale": "a"}}, "mscale=a"),
        ({"attention_bias": "no"}, "attention_bias=no"),
        (DEEPSEEK | {"norm_topk_prob": "no"}, "norm_topk_prob=no"),
        (DEEPSEEK | {"kv_lora_rank": "x"}, "kv_lora_rank=x"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [1]}, "mlp_only_layers=[1]"),
        ({"head_dim": 5}, "head_dim=5"),
        (DEEPSEEK | {"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05"),
        (DEEPSEEK | {"rope_interleave": False}, "rope_interleave=False"),
        (DEEPSEEK | {"topk_method": "greedy"}, "topk_method=greedy"),
        (GROUPED, "topk_method=group_limited_greedy"),
        ({"model_type": "deepseek_v2", "norm_topk_prob": True}, "norm_topk_prob=True"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mscale": 0.7}}, "mscale=0.7"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": None}}, "factor"),
        ({"model_type": "gemma3_text", "rope_parameters": LOCAL_SCALED}, "rope_type=linear"),
        ({"model_type": "gemma3_text", "rope_local_base_freq": -1.0}, "rope_theta=-1.0"),
        ({"intermediate_size": 13}, "mlp.gate_proj.weight"),
        ({"vocab_size": 30}, "model.embed_tokens.weight"),
        # Before a list of so many is made.
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000"),
        ({"model_type": "gemma2", "num_hidden_layers": 10**9}, "num_hidden_layers=1000000000"),
        ({"num_hidden_layers": 10_000}, "model_type=llama"),
        ({"model_type": "mixtral", "num_local_experts": 10**9}, "3,000,000,000"),
        ({"hidden_size": 10**15}, "base_emb_dim=1000000000000000"),
    ],
)
def test_a_config_json_that_cannot_be_computed_is_named(tmp_path, refusal, changes, named):
    line = refusal(small.save(tmp_path / "a", small.weights(), **changes))
    assert named in line and (str(tmp_path / "a/config.json") in line or "tensors" in line)


def test_tensors_that_are_missing_or_too_many_are_listed(tmp_path, refusal):
    values = small.weights()
    missing = [f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 2)]
    some = {name: value for name, value in values.items() if name not in missing}
    line = refusal(small.save(tmp_path / "less", some))
    assert all(name in line for name in missing)
    more = values | {f"model.extra.{i}": np.zeros(2, np.float32) for i in range(10)}
    line = refusal(small.save(tmp_path / "more", more))
    assert "model.extra.0," in line and " 10 " in f" {line}"
    beside = values | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(2, np.float32)}
    small.done("import", small.save(tmp_path / "beside", beside), tmp_path / "ours")


def test_tensors_of_8_bits_are_quantised(tmp_path, refusal):
    values = small.weights()
    name = "model.layers.0.mlp.up_proj.weight"
    values[name] = values[name].astype(np.int8)
    line = refusal(small.save(tmp_path / "int8", values))
    assert name in line and "I8" in line


def test_truncated_and_absent_files(tmp_path, refusal):
    source = small.save(tmp_path / "cut", small.weights(), shards=2)
    path = source / "model-1.safetensors"
    whole = path.read_bytes()
    for content in (whole[:-1], whole[:200], whole[:4], b"", whole + b"x", b"<html>" * 99):
        path.write_bytes(content)
        assert str(path) in refusal(source)
    path.unlink()
    assert "model-1.safetensors" in refusal(source)
    for text in ("{", "[" * 100_000):
        (source / "model.safetensors.index.json").write_text(text)
        assert "model.safetensors.index.json" in refusal(source)
    (source / "model.safetensors.index.json").unlink()
    assert str(source) in refusal(source)
    for text, named in (("[]", "model_type"), ("{", "config.json"), ('{"a":' * 100_000, "config.")):
        (source / "config.json").write_text(text)
        assert named in refusal(source)
    assert str(tmp_path / "absent") in refusal(tmp_path / "absent")


def test_an_index_that_names_a_file_outside_its_folder(tmp_path, refusal):
    source = small.save(tmp_path / "a", small.weights(), shards=2)
    (source / "model-1.safetensors").rename(tmp_path / "other.safetensors")
    index = source / "model.safetensors.index.json"
    text = index.read_text()
    for there in ("../other.safetensors", str(tmp_path / "other.safetensors"), "sub/a"):
        index.write_text(text.replace("model-1.safetensors", there))
        line = refusal(source)
        assert str(index) in line and there in line


def test_a_pipe_in_place_of_a_file_is_refused_at_once(tmp_path, refusal):
    source = small.save(tmp_path / "a", small.weights(), shards=2)
    for name in ("model.safetensors.index.json", "config.json"):
        (source / name).unlink()
        os.mkfifo(source / name)
        assert name in refusal(source)


def test_control_characters_of_config_json_are_printed_escaped(tmp_path, capfd):
    """In a note."""
    name = "idea\x1b]0;title\x07"
    source = small.save(tmp_path / "a", small.weights(), **{name: 1})
    small.done("import", source, tmp_path / "ours")
    said = capfd.readouterr().out
    assert "idea\\x1b]0;title\\x07" in said and "\x1b" not in said


def test_a_tokenizer_with_more_tokens_than_the_model_has_rows(source, tmp_path, refusal):
    """Enough rows of padding are the remedy."""
    byte_level_bpe(source, vocab_size=300)
    line = refusal(source, code=3)
    assert "vocab_size=31 " in line and "vocab_multiple=" in line
    small.done("import", source, tmp_path / "ours", "vocab_multiple=300")
    assert (tmp_path / "ours/huggingface/tokenizer.json").is_file()
    assert (tmp_path / "ours/checkpoints/0/tokenizer/settings.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["fetch", "a", "b"], "fetch"),
        (["import", "a"], "SRC DST"),
        (["export", "a", "dtype=float32"], "RUN DST"),
        (["import", "a", "b", "dtype=float32"], "dtype=float32"),
        (["import", "a", "b", "vocab_multiple=0"], "vocab_multiple=0"),
        (["import", "a", "b", "vocab_multiple=x"], "vocab_multiple=x"),
        (["export", "a", "b", "step=1", "step=2"], "step=2"),
        (["export", "a", "b", "dtype=int8"], "dtype=int8"),
        (["export", "a", "b", "max_shard_size=5"], "max_shard_size=5"),
        (["export", "absent", "b"], "RUN=absent"),
        (["import", "a", "gs://b/c"], "DST=gs://b/c"),
        (["import", "hdfs://b/c", "a"], "SRC=hdfs://b/c"),
        (["export", "a", "b", "base_output_directory=foo://x"], "base_output_directory=foo://x"),
    ],
)
def test_a_command_line_that_cannot_work_is_named(tmp_path, monkeypatch, capfd, arguments, named):
    monkeypatch.chdir(tmp_path)
    assert hf.main(arguments) == 2
    line = capfd.readouterr().err
    assert named in line and line.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_failure_while_writing_leaves_nothing(source, tmp_path, refusal, monkeypatch):
    """Both the disk's refusals and what nobody expected."""

    def full(self):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(arrays.Writer, "commit", full)
    assert str(tmp_path / "ours") in refusal(source)
    monkeypatch.setattr(arrays.Writer, "commit", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hf.main(["import", str(source), str(tmp_path / "ours")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_the_remains_of_a_killed_program_are_removed(tmp_path):
    """But not a folder that another program is writing."""
    left, ours = tmp_path / ("ours" + folders.UNFINISHED), tmp_path / "ours"
    (left / "checkpoints").mkdir(parents=True)
    (left / "start.yml").write_text("half")
    descriptor = os.open(left, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(ConfigError, match=f"DST={ours} "):
        folders.atomic_folder(ours).__enter__()
    assert (left / "start.yml").read_text() == "half" and not ours.exists()
    os.close(descriptor)
    with folders.atomic_folder(ours) as folder:
        assert list(epath.Path(folder).iterdir()) == []
        (folder / "new").write_text("")
    assert [path.name for path in ours.iterdir()] == ["new"] and not left.exists()


def test_an_export_that_cannot_be_written_is_named(tmp_path, refusal, capfd):
    """A path that exists, for an import too; another model; parameters that are not there."""
    source = small.save(tmp_path / "a", small.weights(), new_idea=3)
    other = small.save(tmp_path / "b", small.weights(), rms_norm_eps=1e-3)
    small.done("import", source, tmp_path / "ours")
    assert "new_idea" in capfd.readouterr().out
    assert json.loads((tmp_path / "ours/huggingface/config.json").read_text())["new_idea"] == 3
    assert f"DST={tmp_path / 'ours'}" in refusal(source)
    for target, option, named in (
        (source, "step=0", f"DST={source} "),
        (tmp_path / "out", f"like={other}", "normalization_layer_epsilon=1e-06"),
        (tmp_path / "out", "parameters=replica_0", "replica_0"),
    ):
        assert hf.main(["export", str(tmp_path / "ours"), str(target), option]) == 2
        assert named in capfd.readouterr().err
        assert not (tmp_path / "out").exists()
