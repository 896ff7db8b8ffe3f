"""Models of Hugging Face in buckets: read by ranges, the same as from a disk."""

import json

import faulty_store
import ml_dtypes
import pytest
import small_models as small
from data.tokenizers_on_disk import byte_level_bpe
from etils import epath
from fake_gcs import BUCKET
from tiers import full

from maxdiloco import hf
from maxdiloco.checkpoint import staging
from maxdiloco.huggingface import folders, safetensors_files


def contents(folder):
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_a_model_in_a_bucket_is_imported_as_from_a_disk(cloud, tmp_path, monkeypatch):
    """Tensor by tensor, in blocks, and some rows at a time, by which a tied embedding is compared.
    The tokenizer and the files beside the weights come along; it has more tokens than the model."""
    monkeypatch.setattr(safetensors_files, "_ROWS", 10)
    monkeypatch.setattr(staging, "BLOCK_BYTES", 100)
    values = small.weights(ml_dtypes.bfloat16)
    values["lm_head.weight"] = values["model.embed_tokens.weight"].copy()
    values["lm_head.weight"][-1, -1] += 1
    source = small.save(tmp_path / "source", values, shards=3, tie_word_embeddings=True)
    byte_level_bpe(source, vocab_size=260)
    (source / "LICENSE").write_text("mine")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates/a.jinja").write_text("x")
    small.there_and_back(source, tmp_path, "vocab_multiple=16")
    there = folders.folder_at(f"{cloud}://{BUCKET}/models/a b", "SRC")
    staging.upload(epath.Path(source), there)
    (tmp_path / "of bucket").mkdir()
    small.there_and_back(there, tmp_path / "of bucket", "vocab_multiple=16")
    for folder in ("ours/huggingface", "theirs"):
        found = contents(tmp_path / "of bucket" / folder)
        assert found == contents(tmp_path / folder) and len(found) > 4
    assert "additional_chat_templates/a.jinja" in found


def test_an_export_from_a_bucket_has_all_files_of_the_import(faulty, tmp_path):
    """The same as from a disk: by RUN, and by like=."""
    source = small.save(tmp_path / "source", small.weights(), torch_dtype="float16")
    small.there_and_back(source, tmp_path)
    there = folders.folder_at(f"az://{BUCKET}/ours", "RUN")
    staging.upload(epath.Path(tmp_path / "ours"), there)
    small.done("export", there, tmp_path / "by run")
    small.done("export", tmp_path / "ours", tmp_path / "by like", f"like={there}")
    wanted = contents(tmp_path / "theirs")
    assert json.loads(wanted["generation_config.json"]) == {"eos_token_id": 2}
    assert contents(tmp_path / "by run") == wanted == contents(tmp_path / "by like")


@pytest.mark.parametrize("content", [b"\7", b"\xff" * 99, None])
def test_a_damaged_file_in_a_bucket_is_named(faulty, source, tmp_path, capfd, content):
    there = folders.folder_at(f"az://{BUCKET}/a", "SRC")
    staging.upload(epath.Path(source), there)
    (there / "model.safetensors").unlink()
    if content is not None:
        (there / "model.safetensors").write_bytes(content)
    assert hf.main(["import", str(there), str(tmp_path / "ours")]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert f"az://{BUCKET}/a" in line and "model.safetensors" in line
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("kind", ["cut", full("503"), full("429"), full("lost")])
def test_a_fault_during_an_import_from_a_bucket_leaves_nothing(
    faulty, source, tmp_path, capfd, kind
):
    """At every request except for most of the tensors'."""
    there, target = folders.folder_at(f"az://{BUCKET}/a", "SRC"), tmp_path / "ours"
    staging.upload(epath.Path(source), there)
    faulty.calls.clear()
    small.done("import", there, tmp_path / "whole")
    numbers = [n for n, call in enumerate(faulty.calls) if call != "get" or n < 12 or n % 9 == 0]
    for number in numbers:
        faulty.calls.clear()
        faulty.fault = faulty_store.at(number, kind)
        capfd.readouterr()
        if hf.main(["import", str(there), str(target)]) == 0:
            assert kind == "cut" and len(list((target / "huggingface").iterdir())) == 2
            target.rename(tmp_path / f"of a body that was none {number}")
            continue
        (line,) = capfd.readouterr().err.splitlines()
        assert f"az://{BUCKET}/a" in line
        assert not target.exists()
