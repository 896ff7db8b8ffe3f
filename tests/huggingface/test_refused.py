"""What an import and an export refuse: one line, its exit code, nothing left behind."""

import contextlib
import fcntl
import json

import ml_dtypes
import numpy as np
import pytest
import small_models as small
from data.tokenizers_on_disk import byte_level_bpe
from etils import epath

from maxdiloco import hf
from maxdiloco.checkpoint import by_part
from maxdiloco.errors import CheckpointError, ConfigError
from maxdiloco.flags import config
from maxdiloco.huggingface import config_json, families, folders, safetensors_files

DEEPSEEK = {"model_type": "deepseek_v3"}
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
    ("model_type", "words"),
    [
        ("qwen3_next", "model_type=qwen3_next of config.json is none that maxdiloco has. The "
                       "nearest is qwen3_moe. Use one of llama, mistral,"),
        ("deepseek_v4", "The nearest is deepseek_v3. Use one of llama"),
        ("bert", "is none that maxdiloco has. Use one of llama"),
    ],
)  # fmt: skip
def test_a_model_type_that_is_not_there(tmp_path, refusal, model_type, words):
    assert words in refusal(small.save(tmp_path / "a", small.weights(), model_type=model_type))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act=gelu of config.json has no counterpart"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type=longrope of config.json"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing in config.json"),
        ({"vocab_size": "many"}, "vocab_size=many of config.json is no number"),
        ({"hidden_size": "wide"}, "base_emb_dim=wide"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "says mxfp4: quantised weights"),
        ({"quantization_config": "fp8"}, "says fp8: quantised weights"),
        ({"rope_theta": "x"}, "rope_theta=x of config.json has no counterpart here: it is a "),
        ({"model_type": "gemma3"}, "text_config=None of config.json has no counterpart"),
        ({"model_type": "gemma2", "layer_types": 5}, "layer_types=5 of config.json has no"),
        ({"model_type": "gemma2", "layer_types": [["full_attention"]]}, "it is a list of"),
        ({"model_type": "gemma2", "layer_types": ["full_attention"]},
         "layer_types=['full_attention'] of config.json has no counterpart here: it has "
         "num_hidden_layers=3 entries"),
        (DEEPSEEK | {"qk_nope_head_dim": "a"}, "qk_nope_head_dim=a of config.json has no"),
        (DEEPSEEK | {"rope_scaling": YARN | {"mscale": "a"}}, "mscale=a of config.json has no"),
        (DEEPSEEK | {"rope_scaling": YARN | {"factor": "a"}}, "factor=a of config.json has no"),
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
    ],
)  # fmt: skip
def test_values_of_config_json_that_cannot_be_computed(tmp_path, refusal, changes, words):
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
    source = small.save(tmp_path / "beside", beside)
    assert hf.main(["import", str(source), str(tmp_path / "ours")]) == 0


def test_shapes_and_types_that_differ_from_config_json(tmp_path, refusal):
    line = refusal(small.save(tmp_path / "wide", small.weights(), intermediate_size=13))
    assert "mlp.gate_proj.weight has shape [12, 8] in model.safetensors, but config.json" in line
    assert "says [13, 8]" in line
    line = refusal(small.save(tmp_path / "rows", small.weights(), vocab_size=30))
    assert "model.embed_tokens.weight has shape [31, 8]" in line
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
    (source / "model.safetensors.index.json").write_text("{")
    assert "model.safetensors.index.json is damaged" in refusal(source)
    (source / "model.safetensors.index.json").unlink()
    assert "holds neither" in refusal(source)
    (source / "pytorch_model.bin").write_text("")
    assert "pytorch_model.bin is PyTorch's format: save the model" in refusal(source)
    (source / "config.json").write_text("[]")
    assert "names no model_type" in refusal(source)
    (source / "config.json").write_text("{")
    assert "is not JSON" in refusal(source)
    assert "cannot be read" in refusal(tmp_path / "absent")


@pytest.mark.parametrize("name", ["../other.safetensors", "/other.safetensors", "sub/a"])
def test_an_index_that_names_a_file_outside_its_folder(tmp_path, refusal, name):
    """It was read as if it were the model's, whoever wrote the index."""
    source = small.save(tmp_path / "a", small.weights(), shards=2)
    (source / "model-1.safetensors").rename(tmp_path / "other.safetensors")
    index = source / "model.safetensors.index.json"
    there = str(tmp_path / "other.safetensors") if name.startswith("/") else name
    index.write_text(index.read_text().replace("model-1.safetensors", there))
    assert f"{index} names {there}, which is no file of its folder" in refusal(source)


def test_nesting_without_end_in_a_file_of_the_model(tmp_path, refusal):
    """Each of them ended in a traceback of Python's JSON reader."""
    source = small.save(tmp_path / "a", small.weights(), shards=2)
    (source / "model.safetensors.index.json").write_text("[" * 100_000)
    line = refusal(source)
    assert "index.json is damaged" in line and "its values are nested too deeply" in line
    (source / "config.json").write_text('{"a":' * 100_000)
    assert "config.json is not JSON: its values are nested too deeply" in refusal(source)
    other = small.save(tmp_path / "b", small.weights())
    byte_level_bpe(other, vocab_size=300)
    (other / "tokenizer_config.json").write_text("[" * 100_000)
    assert "tokenizer_config.json is not JSON: its values are nested" in refusal(other, code=3)


def test_a_tokenizer_with_more_tokens_than_the_model_has_rows(tmp_path, refusal):
    """Exit code 3, data; rows enough for it are a remedy."""
    source = small.save(tmp_path / "a", small.weights())
    byte_level_bpe(source, vocab_size=300)
    line = refusal(source, code=3)
    assert "vocab_size=31 is too small for tokenizer_type=huggingface" in line
    assert "it has 300 tokens. Give vocab_multiple=128, which adds rows of zeros" in line
    arguments = ["import", str(source), str(tmp_path / "ours"), "vocab_multiple=300"]
    assert hf.main(arguments) == 0
    assert (tmp_path / "ours/huggingface/tokenizer.json").is_file()
    assert (tmp_path / "ours/checkpoints/0/tokenizer/settings.json").is_file()


def test_a_place_that_is_taken(tmp_path, refusal, capfd):
    source = small.save(tmp_path / "a", small.weights())
    (tmp_path / "ours").mkdir()
    assert "ours exists already. Give another folder" in refusal(source)
    (tmp_path / "ours").rmdir()
    assert hf.main(["import", str(source), str(tmp_path / "ours")]) == 0
    assert hf.main(["export", str(tmp_path / "ours"), str(source)]) == 2
    assert f"DST={source} exists already" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fetch", "a", "b"], "fetch is neither import nor export"),
        (["import", "a"], "import needs two places. Write import SRC DST"),
        (["export", "a", "dtype=float32"], "export needs two places. Write export RUN DST"),
        (["import", "a", "b", "dtype=float32"], "dtype=float32 is not an option of import"),
        (["import", "a", "b", "vocab_multiple=0"], "vocab_multiple=0 is below 1"),
        (["import", "a", "b", "vocab_multiple=x"], "vocab_multiple=x is not a whole number"),
        (["export", "a", "b", "step=1", "step=2"], "step is given twice"),
        (["export", "a", "b", "dtype=int8"], "dtype=int8 is none of stored, float32, bfloat16"),
        (["export", "a", "b", "max_shard_size=5"], "max_shard_size=5 is no size of a file"),
        (["export", "absent", "b"], "RUN=absent: there is no"),
        (["import", "a", "gs://b/c"], "DST=gs://b/c is no folder of this machine"),
        (["import", "gs://b/c", "a"], "SRC=gs://b/c is no folder of this machine"),
    ],
)
def test_a_command_line_that_cannot_work(tmp_path, monkeypatch, capfd, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert hf.main(arguments) == 2
    line = capfd.readouterr().err
    assert words in line and line.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_failure_while_writing_leaves_nothing(tmp_path, refusal, monkeypatch):
    """Both the disk's refusals and what nobody expected."""
    source = small.save(tmp_path / "a", small.weights())

    def full(self):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(by_part.Writer, "commit", full)
    assert "cannot be written: No space left on device" in refusal(source)
    monkeypatch.setattr(by_part.Writer, "commit", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hf.main(["import", str(source), str(tmp_path / "ours")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def test_what_a_killed_program_left_is_removed(tmp_path):
    left = tmp_path / ("ours" + folders.UNFINISHED)
    left.mkdir()
    (left / folders.MARK).write_text("")
    (left / "old").write_text("")
    with folders.appearing(tmp_path / "ours") as folder:
        assert [path.name for path in epath.Path(folder).iterdir()] == [folders.MARK]
        (folder / "new").write_text("")
    assert [path.name for path in (tmp_path / "ours").iterdir()] == ["new"]
    assert not left.exists()


@pytest.mark.parametrize("mine", [True, False])
def test_an_unfinished_folder_of_others_stays(tmp_path, mine):
    """One that the program did not make, and one that another program fills right now."""
    left = tmp_path / ("ours" + folders.UNFINISHED)
    left.mkdir()
    (left / "thesis").write_text("years")
    words = "exists and is not of an import or export that was ended. Move it"
    with contextlib.ExitStack() as stack:
        if mine:
            (left / folders.MARK).write_text("")
            other = stack.enter_context(open(left / folders.MARK))
            fcntl.flock(other, fcntl.LOCK_EX)
            words = "is being written by another process. Wait for it"
        with pytest.raises(ConfigError, match=f"DST={tmp_path}/ours .*{words}"):
            folders.appearing(tmp_path / "ours").__enter__()
    assert (left / "thesis").read_text() == "years" and not (tmp_path / "ours").exists()


def test_a_model_that_no_type_covers_is_refused_with_its_keys():
    """A plain feed-forward layer; a soft-cap of the output beside norms of the input alone."""
    plain = config.load(["mlp_activations=[gelu]", "use_qk_norm=false"], {})
    with pytest.raises(ConfigError, match=r"nearest, llama: mlp_activations=\[gelu\] is not"):
        config_json.family_for(plain)
    capped = config.load(["final_logits_soft_cap=30"], {})
    words = r"The nearest, qwen3: final_logits_soft_cap=30.0 is not 0.0\."
    with pytest.raises(ConfigError, match=words):
        config_json.family_for(capped)


def test_an_export_like_another_model_is_refused(tmp_path, capfd):
    for name, changes in (("a", {}), ("b", {"rms_norm_eps": 1e-3})):
        source = small.save(tmp_path / name, small.weights(), **changes)
    assert hf.main(["import", str(tmp_path / "a"), str(tmp_path / "ours")]) == 0
    arguments = ["export", str(tmp_path / "ours"), str(tmp_path / "out"), f"like={source}"]
    assert hf.main(arguments) == 2
    line = capfd.readouterr().err
    assert "normalization_layer_epsilon=1e-06 is not 0.001 of" in line and "like=" in line
    assert not (tmp_path / "out").exists()


def test_parameters_that_an_import_has_not(tmp_path, capfd):
    source = small.save(tmp_path / "a", small.weights())
    assert hf.main(["import", str(source), str(tmp_path / "ours")]) == 0
    arguments = ["export", str(tmp_path / "ours"), str(tmp_path / "out"), "parameters=replica_0"]
    assert hf.main(arguments) == 2
    assert "parameters=replica_0: the checkpoint has no replicas" in capfd.readouterr().err


def test_types_of_weights():
    assert safetensors_files.numpy_dtype("a", "BF16") == np.dtype(ml_dtypes.bfloat16)
    for dtype in ("F8_E4M3", "U8", "F64"):
        with pytest.raises(CheckpointError, match=f"a has type {dtype}"):
            safetensors_files.numpy_dtype("a", dtype)


def test_every_family_has_a_tensor_for_each_of_its_leaves_and_no_name_twice():
    for family in families.families():
        whole = [tensor.name for tensor in family.tensors.values() if tensor.half is None]
        halves = [tensor.name for tensor in family.tensors.values() if tensor.half is not None]
        assert len(set(whole)) == len(whole)
        assert sorted(halves) == sorted(2 * list(set(halves)))


def test_notes_of_keys_that_are_not_known(tmp_path, capfd):
    source = small.save(tmp_path / "a", small.weights(), new_idea=3)
    assert hf.main(["import", str(source), str(tmp_path / "ours")]) == 0
    assert "note: new_idea of config.json is not known here" in capfd.readouterr().out
    assert json.loads((tmp_path / "ours/huggingface/config.json").read_text())["new_idea"] == 3
