"""Settings and small texts for the tests of the data."""

import json
import types

import pytest
from data.shards_on_disk import TEXTS, prepare_in_this_process


@pytest.fixture
def settings():
    """The keys the data read, on a small text; keywords replace them."""

    def make(**changed):
        keys = {
            "dataset_type": "text",
            "dataset_path": "",
            "dataset_mixture": (),
            "dataset_per_replica": False,
            "eval_dataset_path": "",
            "eval_fraction": 0.05,
            "text_column": "text",
            "max_corrupted_records": 0,
            "tokenizer_type": "byte",
            "packing": True,
            "grain_packing_type": "concat_then_split",
            "enable_data_shuffling": True,
            "data_shuffle_seed": 0,
            "max_target_length": 4,
            "vocab_size": 257,
        }
        assert changed.keys() <= keys.keys()
        return types.SimpleNamespace(**keys | changed)

    return make


@pytest.fixture
def folder(tmp_path):
    """A folder with the files given as name=text; returns its path."""

    def make(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text)
        return str(tmp_path)

    return make


@pytest.fixture
def parts_here(monkeypatch):
    """Those tests that are about processes start the program."""
    prepare_in_this_process(monkeypatch)


@pytest.fixture
def source(tmp_path):
    """Five text files and a file of lines, in a folder."""
    folder = tmp_path / "source"
    folder.mkdir()
    for number, content in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(content, encoding="utf-8")
    (folder / "9.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    return folder
