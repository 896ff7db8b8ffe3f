"""Settings and small texts for the tests of the data."""

import json
import pathlib

import obstore
import pytest
from cloud_fixtures import cloud, faulty, gcs, https, no_clients, s3, s3_server  # noqa: F401
from data.shards_on_disk import TEXTS

from maxdiloco.config import config


@pytest.fixture
def settings(tmp_path_factory):
    """A config of windows of four tokens; keywords replace its values, which nothing checks."""
    cache = f"data_cache_directory={tmp_path_factory.mktemp('cache')}"
    defaults = config.load(["max_target_length=4", "vocab_size=257", cache], {})

    def make(**changed):
        assert changed.keys() <= vars(defaults).keys()
        return defaults.model_copy(update=changed)

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
def source(tmp_path):
    """Five text files and a file of lines, in a folder."""
    folder = tmp_path / "source"
    folder.mkdir()
    for number, content in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(content, encoding="utf-8")
    (folder / "9.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    return folder


@pytest.fixture
def bucket(faulty):  # noqa: F811
    """A bucket in memory, whose requests a test may let go wrong, with a copy of a folder in it."""

    def copy(root, name):
        """The address of the copy."""
        for path in pathlib.Path(root).rglob("*"):
            if path.is_file():
                key = f"{name}/{path.relative_to(root)}"
                obstore.put(faulty.client, key, path.read_bytes())
        return f"s3://bucket/{name}"

    faulty.upload = copy
    return faulty
