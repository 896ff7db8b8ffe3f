"""Data that a run cannot train on: the class of the error, and the key, file or value it names."""

import gzip
import sys

import obstore
import pytest
from data.shards_on_disk import open_dataset, texts_of
from data.test_mixture import mixed

from maxdiloco.data import corpus, order, pipeline
from maxdiloco.errors import ConfigError, DataError

LONG = b"a" * 9000


def second_line(line):
    """A .jsonl file whose second line is this one."""
    return {"a.jsonl": b'{"text": "good"}\n' + line + b"\n"}


@pytest.mark.parametrize(
    ("files", "path", "keys", "named"),
    [
        # Paths. No file system has a name with a NUL.
        ({}, "/none", {}, ["dataset_path={path} "]),
        ({}, "/\0/*.txt", {}, ["dataset_path="]),
        ({"a.c": b"1"}, "/*.txt", {}, ["dataset_path={path} "]),
        ({"a.c": b"1"}, "", {}, ["dataset_path={path} "]),
        # Files that are not text, by their suffix and by their bytes.
        ({"a.gz": LONG}, "/a.gz", {}, ["{path} "]),
        ({"a.zip": LONG}, "/a.zip", {}, ["{path} "]),
        ({"a.parquet": LONG}, "/a.parquet", {}, ["{path} ", "dataset_type=text"]),
        ({"a.txt": b"plain \xe4 latin-1"}, "/a.txt", {}, ["{path} byte 6:"]),
        ({"a.txt": "UTF-16".encode("utf-16")}, "/a.txt", {}, ["{path} byte 0:"]),
        ({"a.txt": b"text\0"}, "/a.txt", {}, ["{path} byte 4:"]),
        ({"a.txt": gzip.compress(b"text" * 99)}, "/a.txt", {}, ["{path} byte "]),
        ({"a.txt": LONG + b"\xff" + LONG}, "/a.txt", {}, ["{path} byte 9000:"]),
        ({"a.txt": b"cut off \xc3"}, "/a.txt", {}, ["{path} byte 8:"]),
        ({"a.txt": b"a" * (1 << 20) + b"\xff" * 8}, "/a.txt", {}, ["{path} byte 1048576:"]),
        # Lines of JSON without the text.
        (second_line(b'{"text": ' + b"[" * 100_000), "", {}, ["a.jsonl byte 17"]),
        (second_line(b"\0" * 50), "", {}, ["a.jsonl byte 17"]),
        (second_line(b"{text}"), "", {}, ["a.jsonl byte 17"]),
        (second_line(b'{"text": "\xff"}'), "", {}, ["a.jsonl byte 17"]),
        (second_line(b'"text"'), "", {}, ["text_column=text", "a.jsonl byte 17"]),
        (second_line(b"{}"), "", {}, ["text_column=text", "a.jsonl byte 17"]),
        (second_line(b'{"id": 1, "body": "x"}'), "", {}, ["text_column=text", "id, body"]),
        (second_line(b'{"text": 7}'), "", {}, ["text_column=text", "a.jsonl byte 17"]),
        # Texts without a sequence of four tokens for each split: 7 tokens have one.
        ({"a.txt": b"x" * 6}, "", {}, ["dataset_path={path} ", "max_target_length=4"]),
        ({"a.txt": b"x" * 2}, "", {}, ["dataset_path={path} ", "max_target_length=4"]),
        ({"a.txt": b"x" * 99}, "", {"eval_fraction": 0.0}, ["eval_fraction=0"]),
        # Sources of a mixture.
        ({}, "/absent", {"dataset_mixture": "x"}, ["source x", "{path} "]),
        ({"none/1.txt": b""}, "/none", {"dataset_mixture": "x"}, ["source x", "{path} "]),
    ],
)  # fmt: skip
def test_a_text_that_cannot_be_trained_on_is_named(settings, folder, files, path, keys, named):
    path = folder(files) + path
    source = {"dataset_path": path}
    if "dataset_mixture" in keys:
        source = {"dataset_mixture": ({"path": path, "name": "x"},)}
    cfg = settings(**keys | source)
    with pytest.raises(DataError) as caught:
        _ = [open_dataset(cfg, split=split) for split in ("train", "eval")]
    line = str(caught.value)
    assert all(name.format(path=path) in line for name in named) and "\n" not in line


@pytest.mark.parametrize(
    ("kind", "path", "missing", "error", "named"),
    [
        ("text", "/a.txt.gz", None, DataError, "dataset_type=text: {path} "),
        ("parquet", "/b.txt", None, DataError, "dataset_type=parquet: {path} "),
        ("hf", "s3://bucket/a", None, DataError, "dataset_type=hf"),
        ("arrayrecord", "/b.txt", None, DataError, "dataset_type=arrayrecord: {path} "),
        ("arrayrecord", "s3://bucket/a/b.arrayrecord", None, DataError, "dataset_type=arrayrecord"),
        ("synthetic", "", None, ConfigError, "dataset_type=synthetic"),
        ("tfds", "", None, ConfigError, "dataset_type=tfds"),
        ("text", "/c.jsonl.gz", "pyarrow", ConfigError, "pyarrow"),
        ("text", "s3://bucket/a", "obstore", ConfigError, "s3://bucket/a"),
    ],
)
def test_a_kind_that_cannot_read_a_path_is_named(
    folder, bucket, monkeypatch, kind, path, missing, error, named
):
    """Before anything is read. None in sys.modules makes an import fail."""
    if missing:
        monkeypatch.setitem(sys.modules, missing, None)
    root = folder({"a.txt.gz": b"x", "b.txt": b"x", "c.jsonl.gz": b"x"})
    obstore.put(bucket.client, "a/b.arrayrecord", b"x")
    path = path if path.startswith("s3") else root + path
    with pytest.raises(error) as caught:
        texts_of(path, kind)
    assert named.format(path=path) in str(caught.value)


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("s3://bucket/none", "s3://bucket/none"),
        ("s3://bucket/a", r"s3://bucket/a"),
        ("s3://bucket/a/*.txt", r"s3://bucket/a/\*\.txt"),
    ],
)
def test_a_text_that_a_bucket_lacks_is_named(bucket, tmp_path, path, named):
    (tmp_path / "a.rst").write_text("x")
    bucket.upload(tmp_path, "a")
    with pytest.raises(DataError, match=f"^eval_dataset_path={named} "):
        corpus.find(path, "eval_dataset_path")


def test_data_too_short_for_a_step_or_without_an_end_are_named(settings, folder):
    text = open_dataset(settings(dataset_path=folder({"a.txt": b"x" * 199}), eval_fraction=0.2))
    assert text.windows.num_windows == 40
    text.check_size(order.first_position(5, 8))
    for read in (text.check_size, text.last_step_of_epoch):
        with pytest.raises(DataError, match="dataset_path=.*max_target_length=4"):
            read(order.first_position(5, 9))
    endless = open_dataset(settings(dataset_type="synthetic"))
    with pytest.raises(DataError, match="^steps=all"):
        endless.last_step_of_epoch(order.first_position(1, 1))
    with pytest.raises(DataError, match="^eval_steps=-1"):
        pipeline.eval_batches(endless, batch_size=1, num_sequences=-1)


def test_a_source_that_is_too_small_or_has_no_replica_is_named():
    data = mixed({"a": 2, "b": 1, "c": 1})
    with pytest.raises(DataError, match="^c "):
        data.check_size(data.first_position(2, 16))
    with pytest.raises(ConfigError, match="source c "):
        mixed({}).check_size(mixed({}).first_position(2, 1))
