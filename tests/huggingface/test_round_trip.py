"""An import and an export give back the same tensors, bit for bit."""

import json

import ml_dtypes
import numpy as np
import pytest
import small_models as small
from data.tokenizers_on_disk import byte_level_bpe
from etils import epath
from safetensors import safe_open
from safetensors.numpy import load_file

from maxdiloco import hf
from maxdiloco.checkpoint import by_part, find, orbax_io
from maxdiloco.engine.trainer import OUTER_PARAMS
from maxdiloco.flags import base_yml, config
from maxdiloco.huggingface import known_keys, progress, safetensors_files


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """An import of float32 weights; its source is beside it."""
    folder = tmp_path_factory.mktemp("imported")
    source = small.save(folder / "source", small.weights())
    assert hf.main(["import", str(source), str(folder / "ours")]) == 0
    return folder / "ours"


def loaded(folder):
    return {
        name: value
        for path in sorted(folder.glob("*.safetensors"))
        for name, value in load_file(path).items()
    }


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert found[name].tobytes() == value.tobytes(), name


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_an_export_of_an_import_has_the_same_bits(tmp_path, dtype):
    """-0.0 and a denormal number too, which arithmetic on the way would lose."""
    values = small.weights(dtype)
    values["model.norm.weight"][:2] = -0.0, np.float32(1e-40)
    source = small.save(tmp_path / "source", values, shards=3)
    assert hf.main(["import", str(source), str(tmp_path / "ours")]) == 0
    assert hf.main(["export", str(tmp_path / "ours"), str(tmp_path / "theirs")]) == 0
    assert_same_bits(loaded(tmp_path / "theirs"), values)
    name = np.dtype(dtype).name
    theirs = json.loads((tmp_path / "theirs/config.json").read_text())
    assert theirs == small.config() | {"dtype": name}
    assert (tmp_path / "theirs/generation_config.json").read_text() == '{"eos_token_id": 2}'


def test_an_import_of_an_export_is_the_same_checkpoint(imported, tmp_path):
    assert hf.main(["export", str(imported), str(tmp_path / "theirs")]) == 0
    assert hf.main(["import", str(tmp_path / "theirs"), str(tmp_path / "again")]) == 0
    folders = (imported, tmp_path / "again")
    metas = [find.newest_meta(folder, key="RUN") for folder in folders]
    assert metas[0]["config"].pop("model_name") != metas[1]["config"].pop("model_name")
    assert metas[0] == metas[1]
    assert_same_bits(*(leaves(folder) for folder in folders))


def leaves(folder):
    """{path: values} of the checkpoint of an import."""
    checkpoint = epath.Path(folder) / "checkpoints/0"
    names = list(orbax_io.read_note(checkpoint).arrays[OUTER_PARAMS])
    reader = by_part.Reader(checkpoint, OUTER_PARAMS, names)
    return {name: reader.read(name) for name in names}


def test_the_model_file_gives_the_very_keys_of_the_checkpoint(imported):
    """Every key of the model but those of training, so that a default of base.yml never counts."""
    group = base_yml.declared()["model_name"].group
    keys = {key.name for key in base_yml.declared().values() if key.group == group}
    path = imported / "model.yml"
    assert {name for name, _, _ in base_yml.read_yml(path)} == keys - set(known_keys.OF_TRAINING)
    cfg = config.load([f"model_name={path}", "dataset_type=synthetic"], {})
    saved = find.newest_meta(imported, key="RUN")["config"]
    assert {name: cfg.as_dict()[name] for name in keys} == {name: saved[name] for name in keys}
    assert cfg.use_qk_norm is False and cfg.rope_max_timescale == 500000.0


def test_shards_hold_what_fits_and_the_index_names_them(imported, tmp_path):
    """31 * 8 * 4 = 992 bytes is the largest tensor."""
    out = tmp_path / "theirs"
    assert hf.main(["export", str(imported), str(out), "max_shard_size=1KB"]) == 0
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(out.glob("*.safetensors"))
    assert {path.name for path in files} == set(index["weight_map"].values()) and len(files) > 3
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    for path in files:
        with safe_open(path, "numpy") as opened:
            assert all(index["weight_map"][name] == path.name for name in opened.keys())
        assert sum(value.nbytes for value in load_file(path).values()) <= 1000
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in small.weights().values())
    assert_same_bits(loaded(out), small.weights())


def test_one_file_where_all_fits(tmp_path):
    written = {"a": safetensors_files.Written((2,), np.dtype(np.float32))}
    writer = safetensors_files.Writer(tmp_path, written, 8)
    writer.write("a", np.array([1, 2], np.float32))
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert_same_bits(loaded(tmp_path), {"a": np.array([1, 2], np.float32)})


def test_a_larger_vocabulary_gets_rows_of_zeros_that_an_export_leaves_out(tmp_path, capfd):
    """31 rows to a multiple of 16: 32."""
    source = small.save(tmp_path / "source", small.weights())
    arguments = ["import", str(source), str(tmp_path / "ours"), "vocab_multiple=16"]
    assert hf.main(arguments) == 0
    keys = find.newest_meta(tmp_path / "ours", key="RUN")["config"]
    assert (keys["vocab_size"], keys["padded_vocab_size"]) == (31, 32)
    found = leaves(tmp_path / "ours")
    for rows in (found["embedding"], found["head"].T):
        assert rows.shape == (32, 8) and rows[:31].any(1).all() and not rows[31].any()
    assert hf.main(["export", str(tmp_path / "ours"), str(tmp_path / "theirs")]) == 0
    assert "the last 1 of 32 rows for tokens are padding, left out" in capfd.readouterr().out
    assert_same_bits(loaded(tmp_path / "theirs"), small.weights())


def test_the_type_of_an_export_is_on_request(imported, tmp_path):
    out = tmp_path / "theirs"
    assert hf.main(["export", str(imported), str(out), "dtype=bfloat16"]) == 0
    rounded = {name: value.astype(ml_dtypes.bfloat16) for name, value in small.weights().items()}
    assert_same_bits(loaded(out), rounded)
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_an_export_like_a_model_takes_no_weights_and_no_index_of_it(imported, tmp_path):
    source = small.save(tmp_path / "source", small.weights(), shards=2)
    out = tmp_path / "theirs"
    assert hf.main(["export", str(imported), str(out), f"like={source}"]) == 0
    names = sorted(path.name for path in out.iterdir())
    assert names == ["config.json", "generation_config.json", "model.safetensors"]


def test_a_weight_whose_layers_have_two_types_is_stored_in_the_wider(tmp_path):
    """bfloat16 and float32 in files; in any order, and no value is rounded."""
    name = "model.layers.{}.mlp.up_proj.weight"
    for i, layer in enumerate((0, 2)):
        values = small.weights()
        values[name.format(layer)] = values[name.format(layer)].astype(ml_dtypes.bfloat16)
        source = small.save(tmp_path / f"source{i}", values)
        assert hf.main(["import", str(source), str(tmp_path / f"ours{i}")]) == 0
        assert hf.main(["export", str(tmp_path / f"ours{i}"), str(tmp_path / f"theirs{i}")]) == 0
        values[name.format(layer)] = values[name.format(layer)].astype(np.float32)
        assert_same_bits(loaded(tmp_path / f"theirs{i}"), values)


@pytest.mark.parametrize("wider", [False, True])
def test_a_copy_of_a_tied_embedding_is_left_out_and_another_head_is_kept(
    tmp_path, capfd, monkeypatch, wider
):
    """As transformers 5 does. The copy counts in a wider type too; one value differs in the last
    row that is compared."""
    monkeypatch.setattr(safetensors_files, "_COMPARED_ROWS", 10)
    values = small.weights(ml_dtypes.bfloat16 if wider else np.float32)
    table = values["model.embed_tokens.weight"]
    copy = values | {"lm_head.weight": table.astype(np.float32)}
    source = small.save(tmp_path / "source", copy, tie_word_embeddings=True)
    assert hf.main(["import", str(source), str(tmp_path / "ours")]) == 0
    assert hf.main(["export", str(tmp_path / "ours"), str(tmp_path / "theirs")]) == 0
    expected = {name: value for name, value in copy.items() if name != "lm_head.weight"}
    assert_same_bits(loaded(tmp_path / "theirs"), expected)
    assert "tie_word_embeddings" not in capfd.readouterr().out

    copy["lm_head.weight"] = copy["lm_head.weight"].copy()
    copy["lm_head.weight"][-1, -1] += 1
    source = small.save(tmp_path / "own", copy, tie_word_embeddings=True)
    assert hf.main(["import", str(source), str(tmp_path / "ours, own")]) == 0
    assert "note: lm_head.weight is not model.embed_tokens.weight" in capfd.readouterr().out
    assert hf.main(["export", str(tmp_path / "ours, own"), str(tmp_path / "theirs, own")]) == 0
    assert_same_bits(loaded(tmp_path / "theirs, own"), copy)
    config_json = json.loads((tmp_path / "theirs, own/config.json").read_text())
    assert config_json["tie_word_embeddings"] is False


def test_files_of_the_tokenizer_and_of_the_licence_come_along(tmp_path):
    """An import and its export have the same; a file of another kind stays behind."""
    source = small.save(tmp_path / "source", small.weights())
    names = ["LICENSE", "LICENSE.txt", "Notice", "USE_POLICY.md", "vocab.txt", "spiece.model",
             "tekken.json", "additional_chat_templates/tool_use.jinja"]  # fmt: skip
    for name in [*names, "README.md", "additional_chat_templates/run.py"]:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(f"content of {name}")
    assert hf.main(["import", str(source), str(tmp_path / "ours")]) == 0
    assert hf.main(["export", str(tmp_path / "ours"), str(tmp_path / "theirs")]) == 0
    for folder in (tmp_path / "ours/huggingface", tmp_path / "theirs"):
        assert all((folder / name).read_text() == f"content of {name}" for name in names)
        found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        others = {"config.json", "generation_config.json", "model.safetensors"}
        assert found - others == set(names)


@pytest.mark.parametrize("tokens", [{"bos_token": "a", "eos_token": "b"}, {"eos_token": "b"}])
def test_start_yml_adds_the_tokens_that_the_tokenizer_names(tmp_path, tokens):
    source = small.save(tmp_path / "source", small.weights())
    byte_level_bpe(source, vocab_size=300)
    names = {"bos_token": None, "eos_token": None} | tokens
    (source / "tokenizer_config.json").write_text(json.dumps(names))
    arguments = ["import", str(source), str(tmp_path / "ours"), "vocab_multiple=300"]
    assert hf.main(arguments) == 0
    keys = {name: value for name, value, _ in base_yml.read_yml(tmp_path / "ours/start.yml")}
    add_bos = "true" if "bos_token" in tokens else "false"
    assert (keys["add_bos"], keys["add_eos"]) == (add_bos, "true")
    assert keys["tokenizer_path"] == str(tmp_path / "ours/huggingface")


def test_start_yml_has_the_defaults_where_the_tokenizer_says_nothing_else(tmp_path, capfd):
    """transformers 5 writes a tokenizer_config.json without bos_token and eos_token for a bare
    tokenizer.json; shards that were prepared with the defaults were then refused. null is none."""
    source = small.save(tmp_path / "source", small.weights())
    byte_level_bpe(source, vocab_size=300)
    for i, names in enumerate(({"model_max_length": 9}, {"bos_token": None, "eos_token": None})):
        (source / "tokenizer_config.json").write_text(json.dumps(names))
        capfd.readouterr()
        arguments = [str(source), str(tmp_path / str(i)), "vocab_multiple=300"]
        assert hf.main(["import", *arguments]) == 0
        start = {name: v for name, v, _ in base_yml.read_yml(tmp_path / f"{i}/start.yml")}
        wanted = "false" if i else "true"
        assert (start["add_bos"], start["add_eos"]) == (wanted, wanted)
        assert ("names no token that ends a document" in capfd.readouterr().out) == bool(i)


def test_a_long_import_or_export_says_how_far_it_is():
    """3 GB in parts of 1 GB: at 4 s nothing, at 12 s 2 of 3 GB with 6 s left, then what follows."""
    lines, now = [], iter([0.0, 4.0, 12.0, 18.0, 18.0])
    done = progress.Progress("imported", 3 * 10**9, lines.append, clock=lambda: next(now))
    for _ in range(3):
        done.more(10**9)
    done.last("the checkpoint is sealed")
    assert lines == [
        "imported 2.0 of 3.0 GB (67%), about 6 s left",
        "imported 3.0 GB; the checkpoint is sealed",
    ]


def test_import_and_export_report_all_of_their_bytes(tmp_path, capfd, monkeypatch):
    """A line for each part when none is too early; the last one is of all bytes."""
    monkeypatch.setattr(progress, "_PERIOD_S", 0.0)
    source = small.save(tmp_path / "source", small.weights())
    assert hf.main(["import", str(source), str(tmp_path / "ours"), "vocab_multiple=64"]) == 0
    assert hf.main(["export", str(tmp_path / "ours"), str(tmp_path / "theirs")]) == 0
    out = capfd.readouterr().out
    for verb in ("imported", "exported"):
        found = [line for line in out.splitlines() if line.startswith(f"{verb} ")]
        assert len(found) > 10 and "(100%)" in found[-2] and "(99%)" not in found[-2], found[-3:]
        assert sum("(100%)" in line for line in found) < 4


def test_an_export_has_the_tokenizer_of_its_run_not_that_of_the_model_it_is_like(tmp_path, capfd):
    """A run from an import, with a tokenizer of its own, gave the text of the import's tokens."""
    for name, size in (("a", 300), ("b", 290)):
        source = small.save(tmp_path / name, small.weights())
        byte_level_bpe(source, vocab_size=size)
        (source / "LICENSE").write_text(name)
        arguments = [str(source), str(tmp_path / f"ours-{name}"), "vocab_multiple=300"]
        assert hf.main(["import", *arguments]) == 0
    for name, like in (("own", "a"), ("other", "b")):
        arguments = [str(tmp_path / "ours-a"), str(tmp_path / name), f"like={tmp_path / like}"]
        assert hf.main(["export", *arguments]) == 0
        found = (tmp_path / name / "tokenizer.json").read_text()
        vocabulary = json.loads((tmp_path / "a/tokenizer.json").read_text())["model"]["vocab"]
        assert json.loads(found)["model"]["vocab"] == vocabulary
        assert (tmp_path / name / "LICENSE").read_text() == like
    told = capfd.readouterr().out
    assert told.count("the tokenizer is the run's, which is another") == 1
    assert json.loads((tmp_path / "other/config.json").read_text())["eos_token_id"] is not None


def test_an_export_like_an_import_and_of_older_files_names_its_type_once(imported, tmp_path):
    """torch_dtype is the older name of dtype."""
    source = small.save(tmp_path / "source", small.weights(), torch_dtype="float16")
    assert hf.main(["import", str(source), str(tmp_path / "ours")]) == 0
    out = tmp_path / "theirs"
    assert hf.main(["export", str(imported), str(out), f"like={tmp_path / 'ours'}"]) == 0
    assert json.loads((out / "config.json").read_text()) == small.config() | {"dtype": "float32"}


def test_a_file_has_its_tensors_layer_by_layer_at_multiples_of_8_bytes(imported, tmp_path):
    assert hf.main(["export", str(imported), str(tmp_path / "theirs")]) == 0
    content = (tmp_path / "theirs/model.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    names = [name for name in json.loads(content[8 : 8 + size]) if name != "__metadata__"]
    layers = [int(name.split(".")[2]) for name in names if ".layers." in name]
    assert size % 8 == 0 and layers == sorted(layers) and len(layers) == 27
    assert (names[0], names[-1]) == ("model.embed_tokens.weight", "lm_head.weight")
