"""Text and shards in a bucket are read as files are: the same names, sequences and bits."""

import errno
import gzip
import json
import os
import pickle
import threading
import time

import numpy as np
import obstore
import pytest
from data.same_sequences import KEYS, ROWS, assert_equal, evaluated, sequences
from data.shards_on_disk import make, open_dataset, open_source, texts_of
from faulty_store import from_on
from obstore.exceptions import GenericError

from maxdiloco.data import corpus, order, paths, pipeline, read_ahead, shards
from maxdiloco.errors import DataError
from maxdiloco.storage import store


@pytest.fixture
def opened(settings):
    """The data of a path, all of it to train on."""
    return lambda path: open_dataset(settings(dataset_path=path, eval_dataset_path="x", **KEYS))


@pytest.fixture
def places_of(bucket, source, tmp_path):
    """The folder of a kind on the disk, and its address in a bucket."""

    def make_both(kind):
        letters = np.random.default_rng(0).integers(97, 123, 300_000, np.uint8)
        (source / "c.txt").write_bytes(letters.tobytes())
        folder = source
        if kind == "shards":
            folder = tmp_path / "shards"
            make(source, folder, part_bytes=200_000)
        return str(folder), bucket.upload(folder, f"a/{kind}")

    return make_both


@pytest.mark.parametrize("kind", ["text", "shards"])
@pytest.mark.parametrize("shuffled", [True, False])
def test_the_sequences_of_a_bucket_are_those_of_the_files(places_of, settings, kind, shuffled):
    """Text that is prepared from a bucket, or shards that are read there. In training order,
    resumed in the middle, and in evaluation order; with the same contents, so that a run resumes
    with either."""
    local, remote = (
        settings(dataset_path=path, enable_data_shuffling=shuffled, **KEYS)
        for path in places_of(kind)
    )
    assert_equal(sequences(remote), sequences(local))
    assert_equal(sequences(remote, steps=range(7, 13)), sequences(local, steps=range(7, 13)))
    assert_equal(evaluated(remote), evaluated(local))


def test_the_cache_may_be_in_a_bucket(places_of, settings):
    """The second start finds it there, by two objects, and writes nothing."""
    local, _ = places_of("text")
    cache = "s3://bucket/cache"
    keys = dict(dataset_path=local, **KEYS)
    expected = sequences(settings(**keys))
    said = []
    data = open_dataset(settings(**keys, data_cache_directory=cache), say=said.append)
    assert data.requests == read_ahead.REQUESTS and cache in said[-1]
    assert_equal(sequences(settings(**keys, data_cache_directory=cache)), expected)


def test_any_window_of_shards_is_one_request(places_of, opened, bucket):
    """Also of a copy in another process. A window of 16 tokens is in one part; one that continues
    in the next part costs two."""
    local, remote = (opened(path).windows for path in places_of("shards"))
    copy = pickle.loads(pickle.dumps(remote))
    assert local.num_windows > 18_000
    assert (remote.requests, local.requests) == (read_ahead.REQUESTS, 0)
    some = np.random.default_rng(0).permutation(local.num_windows)[:500]
    expected = local.read(some)
    for windows in (remote, copy):
        bucket.calls.clear()
        for mine, theirs in zip(windows.read(some), expected, strict=True):
            np.testing.assert_array_equal(mine, theirs)
        assert set(bucket.calls) == {"get"} and 500 <= len(bucket.calls) <= 501
    shards.check_contents(remote.documents)


def test_a_damaged_part_of_shards_in_a_bucket_is_named(places_of, opened, bucket):
    """At the start, or where its block is read. Another version is refused, even of the bytes."""
    _, address = places_of("shards")
    name = "a/shards/part-00001.bin"
    whole = bytes(obstore.get(bucket.client, name).bytes())
    for data, named in (
        (whole[:3000] + b"0123" + whole[3004:], "block 0"),
        (whole[1:], f"{len(whole) - 1} bytes"),
    ):
        obstore.put(bucket.client, name, data)
        with pytest.raises(DataError, match=rf"part-00001\.bin .*{named}"):
            opened(address)
    obstore.put(bucket.client, name, whole)
    data = opened(address)
    obstore.put(bucket.client, name, whole)
    with pytest.raises(DataError, match=r"part-00001\.bin "):
        data.windows.read(np.arange(data.num_windows))
    for gone, named in ((name, "00001"), ("a/shards/manifest.json", "a/shards ")):
        obstore.delete(bucket.client, gone)
        with pytest.raises(DataError, match=named):
            opened(address)


def test_each_kind_of_source_gives_the_texts_of_the_files(bucket, source, tmp_path):
    """Also compressed and parquet, wherever they are cut; and the folder of shards is the same to
    the byte except for its plan, which names what it was made from."""
    pyarrow = pytest.importorskip("pyarrow")
    tables = pytest.importorskip("pyarrow.parquet")
    lines = b"".join(json.dumps({"text": f"packed {i} " * 99}).encode() + b"\n" for i in range(300))
    (source / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (source / "b.jsonl.zst").write_bytes(bytes(pyarrow.compress(lines, "zstd")))
    (source / "c.txt").write_text("a line of text\n" * 30_000)  # several requests
    table = pyarrow.table({"text": [f"row {i} " * 50 for i in range(900)]})
    tables.write_table(table, source / "d.parquet", row_group_size=300)
    address = bucket.upload(source, "a")
    for kind in ("text", "parquet"):
        for limit in (1000, 70_000, 1 << 30):
            here, there = (texts_of(path, kind, limit) for path in (source, address))
            assert here == there and len(here) > 3
    for name, path in (("one", source), ("two", address)):
        make(path, tmp_path / name, part_bytes=100_000)
    names = {path.name for path in (tmp_path / "one").iterdir()}
    assert names == {path.name for path in (tmp_path / "two").iterdir()}
    assert names > {"part-00004.bin"}
    for name in names - {"source.json", "tokenizer"}:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


@pytest.mark.parametrize(
    "path",
    ["", "/", "/sub", "/0.txt", "/*.txt", "/**", "/**/*.txt", "/s*/**/*.txt", "/sub/**/d/*",
     "/**/.hid*/*", "/.hidden/*.txt", "/*/*", "/[01].txt", "/**/d/**/*.md", "/sub/d/e.md"],
)  # fmt: skip
def test_a_path_in_a_bucket_names_the_files_it_names_on_a_disk(bucket, tmp_path, path):
    """In the same order. Hidden files and folders stay out, unless a pattern names them."""
    for name in ("0.txt", "1.txt", "10.txt", "a.rst", ".hidden/a.txt", ".b.txt", "sub/a.txt",
                 "sub/.c.txt", "sub/d/e.md", "sub/d/f/g.txt", "sub/.h/i.txt", "s-a/x"):  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    address = bucket.upload(tmp_path, "a")
    expected = list(corpus.find(f"{tmp_path}{path}", "dataset_path"))
    found = corpus.find(f"{address}{path}", "dataset_path")
    assert list(found) == [
        name.replace(f"{tmp_path}/", f"{address}/").replace("//0", "/0") for name in expected
    ]
    assert [stamp.size for stamp in found.values()] == [os.path.getsize(n) for n in expected]


@pytest.mark.parametrize("change", ["replaced", "deleted", "cut", "503"])
def test_an_object_that_changes_while_it_is_prepared_is_named(bucket, source, change):
    """An object that was replaced is another version of it, even with the same bytes."""
    address = bucket.upload(source, "a")
    listed = open_source(address)
    span = [span for span in listed.spans(1 << 20) if listed.names[span.file].endswith("3.txt")]
    if change == "replaced":
        obstore.put(bucket.client, "a/3.txt", (source / "3.txt").read_bytes())
    elif change == "deleted":
        obstore.delete(bucket.client, "a/3.txt")
    else:
        bucket.fault = from_on(0, change)
    with pytest.raises(DataError) as error:
        list(listed.read(span[0], None))
    assert str(error.value).startswith(f"{address}/3.txt ") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("status", "number"), [(401, errno.EACCES), (403, errno.EACCES), (404, errno.ENOENT)]
)
def test_a_refusal_of_a_store_has_the_errno_of_a_disk(status, number):
    with pytest.raises(OSError, match=rf"^\[Errno {number}\]"), store._as_os_errors():
        raise GenericError(f"Server returned non-2xx status code: {status} x: <a/>")


def test_a_reader_makes_one_request_for_a_block(bucket, tmp_path, monkeypatch):
    """Also where it goes back to the end of a line. All of a large object needs several."""
    monkeypatch.setattr(paths, "_REQUEST", 1 << 20)
    monkeypatch.setattr(store, "BLOCK_BYTES", 2 << 20)
    data = os.urandom(3_000_000)
    (tmp_path / "a").write_bytes(data)
    path = f"{bucket.upload(tmp_path, 'x')}/a"
    with paths.open_file(path) as file:
        assert file.read() == data and file.read() == b""
    assert bucket.calls == ["head"] + ["get"] * 2
    assert paths.read_whole(path, len(data)) == data
    with pytest.raises(OSError, match="2,999,999"):
        paths.read_whole(path, len(data) - 1)
    stamp = paths.find(path)
    bucket.calls.clear()
    with paths.open_file(path, stamp) as file:
        for place in (5, 64_000, 63_990, 2_999_990):
            file.seek(place)
            assert file.read(10) == data[place : place + 10]
        assert file.read(1) == b"" and file.seek(-1, os.SEEK_END) == 2_999_999
        assert paths.Stamp.of_file(file) == stamp
    assert bucket.calls == ["get"] * 2


def test_requests_of_one_batch_and_the_next_run_at_once(bucket, opened, tmp_path):
    """30 steps of 6 sequences, 20 ms a request. Neighbours in the shards are one request."""
    (tmp_path / "a.txt").write_bytes(bytes(range(65, 91)) * 200)
    make(tmp_path / "a.txt", tmp_path / "shards", part_bytes=1 << 20)
    data = opened(bucket.upload(tmp_path / "shards", "a"))
    assert data.num_windows > 300
    under_way, most, get = [], [], bucket.get

    def slow(*arguments, **options):
        under_way.append(1)
        most.append(len(under_way))
        time.sleep(0.02)
        under_way.pop()
        return get(*arguments, **options)

    bucket.get = slow
    bucket.calls.clear()
    with pipeline.batches(data, order.first_position(2, 3), steps=range(1, 31), **ROWS) as batches:
        assert len(list(batches)) == 30
    assert 12 < max(most) <= 11 * 6 and bucket.calls == ["get"] * 180
    bucket.calls.clear()
    data.windows.read(np.arange(4))
    assert bucket.calls == ["get"]


def test_threads_keep_the_order_raise_in_place_and_end():
    """As many items are asked for as there are threads, and one more for each result taken."""
    begun = []

    def read(number):
        begun.append(number)
        if number == 5:
            raise DataError("five")
        return number

    found = read_ahead.in_threads(read, range(100), 4)
    assert [next(found) for _ in range(5)] == list(range(5))
    with pytest.raises(DataError, match="five"):
        next(found)
    assert {*range(6)} <= {*begun} <= {*range(9)}
    assert not [t for t in threading.enumerate() if t.name.startswith("ThreadPool")]
    lazy = read_ahead.in_threads(begun.append, range(3), 0)
    begun.clear()
    next(lazy)
    assert begun == [0]
