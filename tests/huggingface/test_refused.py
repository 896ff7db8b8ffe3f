"""What an import and an export refuse: one line, its exit code, nothing left behind."""

import fcntl
import json
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
    ("changes", "words"),
    [
        ({"model_type": "qwen3_next"},
         "model_type=qwen3_next of config.json is none that maxdiloco has. The nearest is "
         "qwen3_moe. Use one of llama, mistral,"),
        ({"model_type": "deepseek_v4"}, "The nearest is deepseek_v3. Use one of llama"),
        ({"model_type": "bert"}, "is none that maxdiloco has. Use one of llama"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu of config.json has no counterpart"),
        ({"hidden_act": ["silu"]}, "hidden_act=['silu'] of config.json has no counterpart"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type=longrope of config.json"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing in config.json"),
        ({"vocab_size": "many"}, "vocab_size=many of config.json has no counterpart here: it"),
        ({"hidden_size": "8"}, "hidden_size=8 of config.json has no counterpart here: it is a w"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps=x of config.json has no counterpart here: it is a "),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings=no of config.json has no counterpart "
                                        "here: it is true or false. Use another model."),
        (WINDOWS | {"num_hidden_layers": "3"}, "num_hidden_layers=3 of config.json has no"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "says mxfp4: quantised weights"),
        ({"rope_theta": "x"}, "rope_theta=x of config.json has no counterpart here: it is a "),
        ({"model_type": "gemma3"}, "text_config=None of config.json has no counterpart"),
        (WINDOWS | {"max_window_layers": "1"}, "max_window_layers=1 of config.json has no"),
        ({"rope_theta": 10**400}, "00 of config.json has no counterpart here: it is a number."),
        ({"model_type": "gemma2", "sliding_window_pattern": "x"}, "sliding_window_pattern=x of co"),
        (WINDOWS | {"sliding_window": "x"}, "sliding_window=x of config.json has no"),
        ({"model_type": "gemma2", "layer_types": 5}, "layer_types=5 of config.json has no"),
        ({"model_type": "gemma2", "layer_types": ["full_attention"]},
         "layer_types=['full_attention'] of config.json has no counterpart here: it has "
         "num_hidden_layers=3 entries"),
        (DEEPSEEK | {"rope_scaling": YARN | {"mscale": "a"}}, "mscale=a of config.json has no"),
        ({"attention_bias": "no"}, "attention_bias=no of config.json has no counter"),
        (DEEPSEEK | {"norm_topk_prob": "no"}, "norm_topk_prob=no of config.json has no counter"),
        (DEEPSEEK | {"kv_lora_rank": "x"}, "kv_lora_rank=x of config.json has no counterpart"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [1]}, "mlp_only_layers=[1] of config.json"),
        ({"head_dim": 5}, "head_dim=5 is odd"),
        (DEEPSEEK | {"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05 of config.json has no counterpart "
                                            "here: deepseek_v3 has rms_norm_eps=1e-06"),
        (DEEPSEEK | {"rope_interleave": False}, "deepseek_v3 has rope_interleave=True"),
        (DEEPSEEK | {"topk_method": "greedy"}, "deepseek_v3 has topk_method=noaux_tc"),
        ({"model_type": "deepseek_v2", "topk_method": "group_limited_greedy"},
         "topk_method=group_limited_greedy of config.json has no counterpart here: deepseek_v2 has "
         "topk_method=greedy. Use another model."),
        ({"model_type": "deepseek_v2", "norm_topk_prob": True}, "has norm_topk_prob=False"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mscale": 0.7}},
         "mscale=0.7 of config.json has no counterpart here: no model type here has it with"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": None}}, "factor is missing, which yarn"),
        ({"model_type": "gemma3_text", "rope_parameters": {
            "full_attention": {"rope_type": "default"},
            "sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
         "rope_type=linear of config.json has no counterpart here: local layers have default"),
        ({"model_type": "gemma3_text", "rope_local_base_freq": -1.0},
         "rope_local_base_freq=-1.0 of config.json has no counterpart here: a wavelength is above"),
        ({"intermediate_size": 13}, "mlp.gate_proj.weight has shape [12, 8] in model.safetensors, "
                                    "but config.json says [13, 8]"),
        ({"vocab_size": 30}, "model.embed_tokens.weight has shape [31, 8]"),
        # Before a list of so many is made.
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 of config.json"),
        ({"model_type": "gemma2", "num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 of"),
        ({"num_hidden_layers": 10_000}, "tensors of model_type=llama are missing"),
        ({"model_type": "mixtral", "num_local_experts": 10**9}, "asks for 3,000,000,000 tensors"),
        ({"hidden_size": 10**15}, "base_emb_dim=1000000000000000 is too large"),
    ],
)  # fmt: skip
def test_values_of_config_json_that_cannot_be_computed_or_do_not_fit_the_tensors(
    tmp_path, refusal, changes, words
):
    assert words in refusal(small.save(tmp_path / "a", small.weights(), **changes))


def test_tensors_that_are_missing_or_too_many_are_listed(tmp_path, refusal):
    values = small.weights()
    missing = [f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 2)]
    some = {name: value for name, value in values.items() if name not in missing}
    line = refusal(small.save(tmp_path / "less", some))
    assert f"2 tensors of model_type=llama are missing in the files: {', '.join(missing)}." in line
    more = values | {f"model.extra.{i}": np.zeros(2, np.float32) for i in range(10)}
    line = refusal(small.save(tmp_path / "more", more))
    assert "10 tensors of the files are none of model_type=llama" in line
    assert "model.extra.0," in line and "and 2 more" in line
    beside = values | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(2, np.float32)}
    small.done("import", small.save(tmp_path / "beside", beside), tmp_path / "ours")


def test_tensors_of_8_bits_are_quantised(tmp_path, refusal):
    values = small.weights()
    name = "model.layers.0.mlp.up_proj.weight"
    values[name] = values[name].astype(np.int8)
    assert f"{name} has type I8: quantised" in refusal(small.save(tmp_path / "int8", values))


def test_truncated_and_absent_files(tmp_path, refusal):
    source = small.save(tmp_path / "cut", small.weights(), shards=2)
    path = source / "model-1.safetensors"
    whole = path.read_bytes()
    for content in (whole[:-1], whole[:200], whole[:4], b"", whole + b"x", b"<html>" * 99):
        path.write_bytes(content)
        assert f"{path} is no whole file of safetensors" in refusal(source)
    path.unlink()
    assert "lacks model-1.safetensors, which model.safetensors.index.json names" in refusal(source)
    for text, why in (("{", ""), ("[" * 100_000, "its values are nested too deeply")):
        (source / "model.safetensors.index.json").write_text(text)
        line = refusal(source)
        assert "model.safetensors.index.json is damaged" in line and why in line
    (source / "model.safetensors.index.json").unlink()
    assert "holds neither" in refusal(source)
    (source / "pytorch_model.bin").write_text("")
    assert "pytorch_model.bin is PyTorch's format: save the model" in refusal(source)
    (source / "config.json").write_text("[]")
    assert "names no model_type" in refusal(source)
    for text in ("{", '{"a":' * 100_000):
        (source / "config.json").write_text(text)
        assert "config.json is not JSON: " in refusal(source)
    assert "cannot be read" in refusal(tmp_path / "absent")


def test_an_index_that_names_a_file_outside_its_folder(tmp_path, refusal):
    """It was read as if it were the model's, whoever wrote the index."""
    source = small.save(tmp_path / "a", small.weights(), shards=2)
    (source / "model-1.safetensors").rename(tmp_path / "other.safetensors")
    index = source / "model.safetensors.index.json"
    text = index.read_text()
    for there in ("../other.safetensors", str(tmp_path / "other.safetensors"), "sub/a"):
        index.write_text(text.replace("model-1.safetensors", there))
        assert f"{index} names {there}, which is no file of its folder" in refusal(source)


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
    """Exit code 3, data; rows enough for it are a remedy."""
    byte_level_bpe(source, vocab_size=300)
    line = refusal(source, code=3)
    assert "vocab_size=31 is too small for tokenizer_type=huggingface" in line
    assert "it has 300 tokens. Give vocab_multiple=128, which adds rows of zeros" in line
    small.done("import", source, tmp_path / "ours", "vocab_multiple=300")
    assert (tmp_path / "ours/huggingface/tokenizer.json").is_file()
    assert (tmp_path / "ours/checkpoints/0/tokenizer/settings.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fetch", "a", "b"], "fetch is neither import nor export"),
        (["import", "a"], "import needs two places. Write import SRC DST"),
        (["export", "a", "dtype=float32"], "export needs two places. Write export RUN DST"),
        (["import", "a", "b", "dtype=float32"], "dtype=float32 is not an option of import"),
        (["import", "a", "b", "vocab_multiple=0"], "vocab_multiple=0 is no whole number of 1"),
        (["import", "a", "b", "vocab_multiple=x"], "vocab_multiple=x is no whole number"),
        (["export", "a", "b", "step=1", "step=2"], "step is given twice"),
        (["export", "a", "b", "dtype=int8"], "dtype=int8 is none of stored, float32, bfloat16"),
        (["export", "a", "b", "max_shard_size=5"], "max_shard_size=5 is no size of a file"),
        (["export", "absent", "b"], "RUN=absent: there is no"),
        (["import", "a", "gs://b/c"], "DST=gs://b/c is no folder of this machine"),
        (["import", "hdfs://b/c", "a"], "SRC=hdfs://b/c is on hdfs://"),
        (["export", "a", "b", "base_output_directory=foo://x"], "base_output_directory=foo://x is"),
    ],
)
def test_a_command_line_that_cannot_work(tmp_path, monkeypatch, capfd, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert hf.main(arguments) == 2
    line = capfd.readouterr().err
    assert words in line and line.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_failure_while_writing_leaves_nothing(source, tmp_path, refusal, monkeypatch):
    """Both the disk's refusals and what nobody expected."""

    def full(self):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(arrays.Writer, "commit", full)
    assert "cannot be written: No space left on device" in refusal(source)
    monkeypatch.setattr(arrays.Writer, "commit", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hf.main(["import", str(source), str(tmp_path / "ours")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_what_a_killed_program_left_is_removed_and_a_folder_of_others_stays(tmp_path):
    """One that the program did not make, and one that another program fills right now."""
    left, ours = tmp_path / ("ours" + folders.UNFINISHED), tmp_path / "ours"
    left.mkdir()
    (left / "thesis").write_text("years")
    words = "exists and is not of an import or export that was ended. Move it"
    with pytest.raises(ConfigError, match=f"DST={ours} .*{words}"):
        folders.appearing(ours).__enter__()
    (left / folders.MARK).write_text("")
    with open(left / folders.MARK) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        words = "is being written by another process. Wait for it"
        with pytest.raises(ConfigError, match=f"DST={ours} .*{words}"):
            folders.appearing(ours).__enter__()
    assert (left / "thesis").read_text() == "years" and not ours.exists()
    with folders.appearing(ours) as folder:
        assert [path.name for path in epath.Path(folder).iterdir()] == [folders.MARK]
        (folder / "new").write_text("")
    assert [path.name for path in ours.iterdir()] == ["new"] and not left.exists()


def test_what_an_export_refuses_and_a_key_that_an_import_does_not_know(tmp_path, refusal, capfd):
    """A place that is taken, one of an import too; another model; parameters that are not there."""
    source = small.save(tmp_path / "a", small.weights(), new_idea=3)
    other = small.save(tmp_path / "b", small.weights(), rms_norm_eps=1e-3)
    small.done("import", source, tmp_path / "ours")
    assert "note: new_idea of config.json is not known here" in capfd.readouterr().out
    assert json.loads((tmp_path / "ours/huggingface/config.json").read_text())["new_idea"] == 3
    assert "ours exists already. Give another folder" in refusal(source)
    for target, option, words in (
        (source, "step=0", f"DST={source} exists already"),
        (tmp_path / "out", f"like={other}", "normalization_layer_epsilon=1e-06 is not 0.001 of"),
        (tmp_path / "out", "parameters=replica_0", "replica_0: the checkpoint has no replicas"),
    ):
        assert hf.main(["export", str(tmp_path / "ours"), str(target), option]) == 2
        assert words in capfd.readouterr().err
        assert not (tmp_path / "out").exists()
