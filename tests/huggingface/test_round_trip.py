"""An import and an export give back the same tensors, bit for bit."""

import json

import ml_dtypes
import numpy as np
import pytest
import small_models as small
from data.tokenizers_on_disk import byte_level_bpe
from etils import epath
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from maxdiloco.checkpoint import arrays, read
from maxdiloco.config import config, files
from maxdiloco.config.keys import KEYS
from maxdiloco.data import tokenizer
from maxdiloco.engine.trainer import OUTER_PARAMS
from maxdiloco.huggingface import config_json, safetensors_files, tensors
from maxdiloco.huggingface.tensors import Leaf, Tensor
from maxdiloco.models.config import from_keys


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """An import of float32 weights; its source is beside it."""
    folder = tmp_path_factory.mktemp("imported")
    source = small.save(folder / "source", small.weights())
    small.done("import", source, folder / "ours")
    return folder / "ours"


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_an_export_of_an_import_has_the_same_bits(tmp_path, dtype):
    """-0.0 and a denormal number too, which arithmetic on the way would lose."""
    values = small.weights(dtype)
    values["model.norm.weight"][:2] = -0.0, np.float32(1e-40)
    source = small.save(tmp_path / "source", values, shards=3)
    small.there_and_back(source, tmp_path)
    small.assert_weights(tmp_path / "theirs", values)
    name = np.dtype(dtype).name
    theirs = json.loads((tmp_path / "theirs/config.json").read_text())
    assert theirs == small.config() | {"dtype": name}
    assert (tmp_path / "theirs/generation_config.json").read_text() == '{"eos_token_id": 2}'
    # The tensors layer by layer at multiples of 8 bytes.
    content = (tmp_path / "theirs/model.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    names = [name for name in json.loads(content[8 : 8 + size]) if name != "__metadata__"]
    layers = [int(name.split(".")[2]) for name in names if ".layers." in name]
    assert size % 8 == 0 and layers == sorted(layers) and len(layers) == 27
    assert (names[0], names[-1]) == ("model.embed_tokens.weight", "lm_head.weight")


def test_the_model_file_gives_the_very_keys_of_the_checkpoint(imported):
    """Every key of the model but those of training, so that a default of base.yml never counts."""
    group = KEYS["model_name"].group
    keys = {key.name for key in KEYS.values() if key.group == group}
    path = imported / "model.yml"
    assert set(files.read_yml(path)) == keys - set(config_json.OF_TRAINING)
    cfg = config.load([f"model_name={path}", "dataset_type=synthetic"], {})
    saved = read.newest_meta(imported, key="RUN")["config"]
    assert {name: cfg.as_dict()[name] for name in keys} == {name: saved[name] for name in keys}
    assert cfg.use_qk_norm == "false" and cfg.rope_max_timescale == 500000.0


def test_shards_hold_what_fits_and_the_index_names_them(imported, tmp_path):
    """31 * 8 * 4 = 992 bytes is the largest tensor."""
    out = tmp_path / "theirs"
    small.done("export", imported, out, "max_shard_size=1KB")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(out.glob("*.safetensors"))
    assert {path.name for path in files} == set(index["weight_map"].values()) and len(files) > 3
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    for path in files:
        with safe_open(path, "numpy") as opened:
            assert all(index["weight_map"][name] == path.name for name in opened.keys())
        assert sum(value.nbytes for value in load_file(path).values()) <= 1000
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in small.weights().values())
    small.assert_weights(out, small.weights())


def test_a_larger_vocabulary_gets_zero_rows_that_no_export_has(source, tmp_path):
    """31 rows to a multiple of 16: 32."""
    small.there_and_back(source, tmp_path, "vocab_multiple=16")
    keys = read.newest_meta(tmp_path / "ours", key="RUN")["config"]
    assert (keys["vocab_size"], keys["padded_vocab_size"]) == (31, 32)
    checkpoint = epath.Path(tmp_path / "ours/checkpoints/0")
    reader = arrays.Reader(checkpoint, OUTER_PARAMS, ["embedding", "head"])
    for rows in (reader.read("embedding"), reader.read("head").T):
        assert rows.shape == (32, 8) and rows[:31].any(1).all() and not rows[31].any()

    small.assert_weights(tmp_path / "theirs", small.weights())


def test_an_export_like_a_model_copies_no_weights_or_index(imported, tmp_path):
    """Or like an import of it; torch_dtype is the older name of dtype."""
    source = small.save(tmp_path / "source", small.weights(), shards=2, torch_dtype="float16")
    small.done("import", source, tmp_path / "ours")
    for like in (source, tmp_path / "ours"):
        out = tmp_path / f"like {like.name}"
        small.done("export", imported, out, f"like={like}")
        names = sorted(path.name for path in out.iterdir())
        assert names == ["config.json", "generation_config.json", "model.safetensors"]
        written = json.loads((out / "config.json").read_text())
        assert written == small.config() | {"dtype": "float32"}


def test_a_weight_of_two_types_is_stored_in_the_wider(tmp_path):
    """bfloat16 and float32 in files; in any order, and no value is rounded."""
    name = "model.layers.{}.mlp.up_proj.weight"
    for i, layer in enumerate((0, 2)):
        values = small.weights()
        values[name.format(layer)] = values[name.format(layer)].astype(ml_dtypes.bfloat16)
        place = tmp_path / str(i)
        place.mkdir()
        small.there_and_back(small.save(place / "source", values), place)
        values[name.format(layer)] = values[name.format(layer)].astype(np.float32)
        small.assert_weights(place / "theirs", values)


@pytest.mark.parametrize("wider", [False, True])
def test_a_tied_head_is_left_out_and_another_head_is_kept(tmp_path, capfd, monkeypatch, wider):
    """As transformers 5 does. The copy counts in a wider type too; one value differs in the last
    row that is compared."""
    monkeypatch.setattr(safetensors_files, "_ROWS", 10)
    values = small.weights(ml_dtypes.bfloat16 if wider else np.float32)
    table = values["model.embed_tokens.weight"]
    copy = values | {"lm_head.weight": table.astype(np.float32)}
    source = small.save(tmp_path / "source", copy, tie_word_embeddings=True)
    small.there_and_back(source, tmp_path)
    expected = {name: value for name, value in copy.items() if name != "lm_head.weight"}
    small.assert_weights(tmp_path / "theirs", expected)
    assert "lm_head.weight" not in capfd.readouterr().out

    copy["lm_head.weight"] = copy["lm_head.weight"].copy()
    copy["lm_head.weight"][-1, -1] += 1
    own = small.save(tmp_path / "own", copy, tie_word_embeddings=True)
    small.there_and_back(own, own)
    assert "lm_head.weight" in capfd.readouterr().out
    small.assert_weights(own / "theirs", copy)
    written = json.loads((own / "theirs/config.json").read_text())
    assert written["tie_word_embeddings"] is False


def test_files_of_the_tokenizer_and_of_the_licence_come_along(source, tmp_path):
    """An import and its export have the same; a file of another kind stays behind."""
    names = ["LICENSE", "LICENSE.txt", "Notice", "USE_POLICY.md", "vocab.txt", "spiece.model",
             "tekken.json", "additional_chat_templates/tool_use.jinja"]  # fmt: skip
    for name in [*names, "README.md", "additional_chat_templates/run.py"]:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(f"content of {name}")
    small.there_and_back(source, tmp_path)
    for folder in (tmp_path / "ours/huggingface", tmp_path / "theirs"):
        assert all((folder / name).read_text() == f"content of {name}" for name in names)
        found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        others = {"config.json", "generation_config.json", "model.safetensors"}
        assert found - others == set(names)


def test_start_yml_names_the_tokenizer_of_the_import(source, tmp_path):
    """test_special_tokens.py has the tokens around a document. add_eos= overrides them."""
    byte_level_bpe(source, vocab_size=300)
    names = {"bos_token": "a", "eos_token": "b"}
    (source / "tokenizer_config.json").write_text(json.dumps(names))
    for name, options, expected in (("ours", [], "false"), ("more", ["add_eos=true"], "true")):
        ours = tmp_path / name
        small.done("import", source, ours, "vocab_multiple=300", *options)
        keys = {name: value for name, (value, _) in files.read_yml(ours / "start.yml").items()}
        assert (keys["add_bos"], keys["add_eos"]) == ("false", expected)
        assert keys["tokenizer_path"] == str(ours / "tokenizer")
        assert tokenizer.read("huggingface", keys["tokenizer_path"]).named_eos == 67  # "b"


def test_an_export_like_a_model_keeps_the_tokenizer_of_its_run(tmp_path):
    for name, size in (("a", 300), ("b", 290)):
        source = small.save(tmp_path / name, small.weights())
        byte_level_bpe(source, vocab_size=size)
        (source / "LICENSE").write_text(name)
        small.done("import", source, tmp_path / f"ours-{name}", "vocab_multiple=300")
    for name, like in (("own", "a"), ("other", "b")):
        small.done("export", tmp_path / "ours-a", tmp_path / name, f"like={tmp_path / like}")
        found = (tmp_path / name / "tokenizer.json").read_text()
        vocabulary = json.loads((tmp_path / "a/tokenizer.json").read_text())["model"]["vocab"]
        assert json.loads(found)["model"]["vocab"] == vocabulary
        assert (tmp_path / name / "LICENSE").read_text() == like
    assert json.loads((tmp_path / "other/config.json").read_text())["eos_token_id"] is not None


# --- DeepSeek-V3 has what no other type has: pairs of neighbours, a bias, a module more ---------

THEIRS = {
    "model_type": "deepseek_v3", "hidden_size": 8, "intermediate_size": 12, "vocab_size": 31,
    "num_hidden_layers": 2, "first_k_dense_replace": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "q_lora_rank": 5, "kv_lora_rank": 3, "qk_nope_head_dim": 2,
    "qk_rope_head_dim": 4, "v_head_dim": 6, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 7, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
    "num_nextn_predict_layers": 1, "max_position_embeddings": 64,
    "rope_scaling": {
        "type": "yarn", "factor": 4, "original_max_position_embeddings": 16, "mscale": 0.5,
        "mscale_all_dim": 2,
    },
}  # fmt: skip
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def deepseek(**changes):
    """The config of a model like THEIRS."""
    keys = config_json.keys_of(THEIRS, config_json.family_of("deepseek_v3"))
    return config.from_dict(config.load([], {}).as_dict() | keys | changes)


def test_the_next_token_module_is_left_out_and_bias_is_float32(tmp_path, capfd):
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(THEIRS))
    parts = tensors.model_parts(from_keys(deepseek()), config_json.family_of("deepseek_v3"))
    rng = np.random.default_rng(0)
    values = {part.name: rng.normal(size=part.shape).astype("bfloat16") for part in parts}
    values[BIAS] = rng.normal(size=4).astype(np.float32)
    more = {"model.layers.2.eh_proj.weight": np.ones((8, 16), ml_dtypes.bfloat16)}
    save_file(values | more, source / "model.safetensors")
    small.done("import", source, tmp_path / "ours")
    assert " 1 tensors" in capfd.readouterr().out
    small.done("export", tmp_path / "ours", tmp_path / "theirs", "dtype=bfloat16")
    small.assert_weights(tmp_path / "theirs", values)
    written = json.loads((tmp_path / "theirs/config.json").read_text())
    assert written == THEIRS | {"dtype": "bfloat16", "num_nextn_predict_layers": 0}


def test_pairs_of_neighbours_become_pairs_of_two_halves():
    """2 heads of 1 + 4 features: 0 is not rotated, (1, 2) and (3, 4) are pairs."""
    leaf = Leaf("query", (1, 2, 5), None)
    (part,) = tensors.parts_of(leaf, Tensor("q", inputs=1, in_pairs=True), 4)
    theirs = np.arange(10)[:, None]
    ours = tensors.to_part(theirs, part)
    assert ours.tolist() == [[[0, 1, 3, 2, 4], [5, 6, 8, 7, 9]]]
    again = np.zeros_like(theirs)
    for first, last in ((0, 2), (2, 5)):  # in pieces, as a checkpoint may have them
        box = (slice(0, 1), slice(0, 2), slice(first, last))
        tensors.put(again, part, box, ours[:, :, first:last])
    np.testing.assert_array_equal(again, theirs)
    (plain,) = tensors.parts_of(leaf, Tensor("q", inputs=1), 4)
    np.testing.assert_array_equal(tensors.to_part(theirs, plain).reshape(-1), np.arange(10))


@pytest.mark.parametrize(
    ("scalar", "factor"), [("auto", "auto"), (5.0, "auto"), (5.0, 1.0), (7.0, 0.3), ("auto", 1.0)]
)
def test_every_pair_of_factors_has_a_config_json(scalar, factor):
    family = config_json.family_of("deepseek_v3")
    scaling = dict(deepseek().rope_scaling) | {"attention_factor": factor}
    cfg = vars(deepseek(query_pre_attn_scalar=scalar, rope_scaling=scaling))
    written = config_json.config_of(cfg, family)
    assert config_json.differences(cfg, written, family) == {}
    ((ours, theirs),) = config_json.differences(cfg, written | {"q_lora_rank": 4}, family).values()
    assert dict(ours) == dict(theirs) | {"q_lora_rank": 5} and dict(theirs)["q_lora_rank"] == 4
