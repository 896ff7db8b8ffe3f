"""Files behind https are read by their names, as on a disk."""

import gzip
import re

import numpy as np
import pytest
from data.same_sequences import KEYS, assert_equal, sequences
from data.shards_on_disk import make, texts_of

from maxdiloco.data import corpus
from maxdiloco.data.sources import files
from maxdiloco.errors import DataError
from maxdiloco.storage import object_store


def test_text_and_shards_behind_https_are_read_as_on_a_disk(https, settings, source, tmp_path):
    """By their names, with a blank among them. Each kind of file that is one; nothing is listed."""
    pytest.importorskip("pyarrow")
    letters = np.random.default_rng(0).integers(97, 123, 200_000, np.uint8)
    (source / "a b.txt").write_bytes(letters.tobytes())
    (source / "b.jsonl.gz").write_bytes(gzip.compress((source / "9.jsonl").read_bytes()))
    make(source, tmp_path / "shards", part_bytes=50_000)
    for path in tmp_path.rglob("*"):
        if path.is_file():
            https.files[str(path.relative_to(tmp_path))] = path.read_bytes()
    for name in ("source/a%20b.txt", "source/9.jsonl", "shards"):
        path = tmp_path / name.replace("%20", " ")
        local, remote = (
            settings(dataset_path=where, eval_dataset_path=where, **KEYS)
            for where in (str(path), f"{https.url}/{name}")
        )
        assert_equal(sequences(remote), sequences(local))
    here, there = (texts_of(f"{at}/b.jsonl.gz") for at in (source, f"{https.url}/source"))
    assert here == there and len(here) > 3
    assert {command for command, _ in https.requests} == {"HEAD", "GET"}


def test_an_address_that_cannot_be_read_is_named(https, monkeypatch):
    https.files |= {"a.txt": b"text", "b.txt": b"text"}
    https.status |= {"closed.txt": 403, "away.txt": 503}
    for path in ("dir", "*.md?", "c.txt", "closed.txt", "away.txt"):
        with pytest.raises(DataError, match=f"^dataset_path={https.url}/{re.escape(path)} "):
            corpus.find(f"{https.url}/{path}", "dataset_path")
    source = files.open_files("text", f"{https.url}/a.txt", "key", "text")
    https.ranges = False
    with pytest.raises(DataError, match=r"a\.txt .*Range"):
        list(source.read(next(source.spans(100)), None))
    monkeypatch.delenv("SSL_CERT_FILE")
    object_store.BucketPath._buckets.clear()
    with pytest.raises(DataError, match=r"a\.txt "):  # the certificate is not trusted
        corpus.find(f"{https.url}/a.txt", "key")
