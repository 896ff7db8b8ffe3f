"""Buckets of all three clouds behave alike; one that cannot be used is named."""

import os
import time

import pytest
from fake_gcs import BUCKET

from maxdiloco.config import checks
from maxdiloco.errors import CheckpointError
from maxdiloco.storage import object_store, store
from maxdiloco.storage.run_folder import absolute, open_run_folder

ODD = "a#1~ é%20+b"  # a name that URLs and globs would read otherwise


@pytest.fixture
def bucket(cloud):
    return store.connect(cloud, BUCKET)


@pytest.fixture
def root(cloud):
    return absolute(f"{cloud}://{BUCKET}/runs")


def test_an_object_or_a_file_is_written_read_listed_and_deleted(bucket, monkeypatch, tmp_path):
    monkeypatch.setattr(store, "BLOCK_BYTES", 5 << 20)  # the least of s3://
    large = os.urandom((5 << 20) + 1)  # several requests, in and out
    (tmp_path / "file").write_bytes(large)
    bucket.put("file", tmp_path / "file")
    assert bucket.get("file") == large
    for name, content in {f"a/{ODD}/1": b"one", "a/b": b"", "a/large": large, "ab": b"x"}.items():
        bucket.put(name, content)
        assert bucket.get(name) == content
        assert bucket.head(name).size == len(content)
    assert bucket.get_range("a/large", 7, 1000) == large[7:1000]
    assert bucket.get_part("a/large", 7, 1000) == (large[7:1000], bucket.head("a/large"))
    for name, most, found in ("a/large", 7, large[:7]), (f"a/{ODD}/1", 99, b"one"), ("a/b", 9, b""):
        assert bucket.get_first(name, most) == (found, bucket.head(name))
    listed = {entry.name: entry.size for entry in bucket.list_all("a")}
    assert listed == {f"a/{ODD}/1": 3, "a/b": 0, "a/large": len(large)}
    objects, folders = bucket.list_folder("a")
    assert ([entry.name for entry in objects], folders) == (["a/b", "a/large"], [f"a/{ODD}"])
    bucket.copy("ab", "c")
    bucket.delete(["a/b", "ab", "absent", "c", "file", f"a/{ODD}/1"])
    assert [entry.name for entry in bucket.list_all("")] == ["a/large"]
    assert bucket.head("ab") is None
    with pytest.raises(FileNotFoundError):
        bucket.get("ab")


@pytest.mark.parametrize("cloud", ["gs", "s3"], indirect=True)
def test_a_folder_of_a_bucket_is_one_of_its_own(cloud):
    folder, whole = store.connect(cloud, BUCKET, "a/b"), store.connect(cloud, BUCKET)
    folder.put("c/1", b"one")
    assert whole.get("a/b/c/1") == b"one"
    assert [entry.name for entry in folder.list_all("c")] == ["c/1"]
    assert folder.head("c/1").name == "c/1" and folder.list_folder("")[1] == ["c"]


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_a_local_bucket_creates_once_replaces_lists_and_deletes(kind, tmp_path):
    place = tmp_path / "new" / "log"
    bucket = store.in_memory() if kind == "memory" else store.local_folder(place)
    assert bucket.head("c/0/1") is None and list(bucket.list_all("c")) == []
    assert bucket.put_if("c/0/1", b"12345", None) is not None
    assert bucket.put_if("c/0/1", b"other", None) is None
    assert bucket.get_range("c/0/1", 1, 3) == b"23"
    for content in (b"", b"2"):
        bucket.put("hb/a", content)
        assert bucket.get_first("hb/a", 9) == (content, bucket.head("hb/a"))
    assert {e.name: e.size for e in bucket.list_all("")} == {"c/0/1": 5, "hb/a": 1}
    assert kind == "memory" or (place / "hb/a").read_bytes() == b"2"
    bucket.delete(["c/0/1", "absent"])
    with pytest.raises(FileNotFoundError):
        bucket.get("c/0/1")


def test_a_local_folder_lists_only_whole_regular_files(tmp_path):
    folder = store.local_folder(tmp_path)
    folder.put("u/0/a.1.1", b"x")
    with folder._written("u/0/a.1.2", b"half"):
        assert [entry.name for entry in folder.list_all("u")] == ["u/0/a.1.1"]
        assert len(list((tmp_path / "u/0").iterdir())) == 2
    assert len(list((tmp_path / "u/0").iterdir())) == 1
    os.mkfifo(tmp_path / "run.json")
    assert folder.head("run.json") is None
    with pytest.raises(OSError, match=r"run\.json"):
        folder.get("run.json")
    with pytest.raises(OSError, match="version"):
        folder.put_if("a", b"", {"e_tag": "1"})


def test_a_conditional_put_replaces_only_the_version_it_names(bucket):
    first = bucket.put_if("lock", b"1", None)
    assert first is not None and bucket.put_if("lock", b"2", None) is None
    assert bucket.get_version("lock") == (b"1", first)
    second = bucket.put_if("lock", b"2", first)
    assert second not in (None, first) and bucket.put_if("lock", b"3", first) is None
    assert bucket.get_version("lock") == (b"2", second)


def test_a_page_of_a_listing_is_not_the_whole_of_it(gcs):
    """Of three entries, as the server has it; the real ones have 1000."""
    bucket = store.connect("gs", BUCKET)
    for number in range(10):
        gcs.put(f"a/{number}/x", b"")
        gcs.put(f"a/{number}", b"")
    assert len(list(bucket.list_all("a"))) == 20
    objects, folders = bucket.list_folder("a")
    assert len(objects) == len(folders) == 10


def test_a_path_in_a_bucket_is_a_path(root):
    (root / ODD / "text").write_text("é\n")
    (root / "bytes").write_bytes(b"\0")
    assert (root / ODD / "text").read_text() == "é\n" and (root / "bytes").read_bytes() == b"\0"
    assert sorted(path.name for path in root.iterdir()) == sorted([ODD, "bytes"])
    assert [path.name for path in root.glob("b*s")] == ["bytes"]
    assert (root / ODD).is_dir() and not (root / ODD).is_file() and (root / "bytes").is_file()
    assert (root / "bytes").stat().length == 1 and (root / ODD).stat().is_directory
    assert object_store.sizes(root) == {root / ODD / "text": 3, root / "bytes": 1}
    (root / ODD).rename(root / "moved")
    assert not (root / ODD).exists() and (root / "moved" / "text").exists()
    with (root / "moved" / "text").open() as file:
        assert file.read(5) == "é\n"
    root.rmtree()
    root.rmtree(missing_ok=True)
    (root / "bytes").unlink(missing_ok=True)
    assert not root.exists()
    for absent in (lambda: list(root.iterdir()), root.rmtree, root.stat, root.read_bytes):
        with pytest.raises(FileNotFoundError):
            absent()
    with pytest.raises(FileNotFoundError):
        (root / "bytes").unlink()


@pytest.mark.parametrize("mode", ["w", "wb", "a"])
def test_an_object_is_written_whole(faulty, mode):
    with pytest.raises(OSError, match=f"mode {mode} of az://"):
        absolute(f"az://{BUCKET}/a").open(mode)


def test_an_answer_that_python_has_no_name_for_is_an_os_error(gcs):
    gcs.fault = lambda request: 499
    with pytest.raises(OSError, match=r"the store answers \(499\)"):
        store.connect("gs", BUCKET).get("a")


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_refusal_that_passes_is_not_seen(gcs, status):
    """obstore asks again."""
    left = [3]

    def fault(request):
        left[0] -= 1
        return status if left[0] >= 0 else None

    gcs.fault = fault
    bucket = store.connect("gs", BUCKET)
    assert bucket.put_if("a", b"1", None) is not None
    assert [status for _, status in gcs.requests] == [status] * 3 + [200]


def test_a_store_that_is_out_of_reach_ends_the_wait(gcs, monkeypatch):
    monkeypatch.setattr(store, "RETRY_S", 0.5)
    monkeypatch.setenv("GOOGLE_BASE_URL", "http://127.0.0.1:9")  # where nothing listens
    began = time.monotonic()
    with pytest.raises(CheckpointError, match=f"=gs://{BUCKET}/b .*run_name=a"):
        open_run_folder(f"gs://{BUCKET}/b", "a").__enter__()
    assert time.monotonic() - began < 10


def test_a_setting_that_is_missing_is_named(monkeypatch, no_clients):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(CheckpointError, match="=az://bucket/runs .*(?i:account)"):
        absolute("az://bucket/runs")


def test_keys_of_aws_configure_apply_where_no_variable_is_set(tmp_path):
    (tmp_path / "config").write_text("[profile b]\nregion = there\n[default]\nregion = here\n")
    keys = {"aws_access_key_id": "1", "aws_secret_access_key": "2"}
    lines = [f"{key} = {value}\n" for key, value in keys.items()]
    (tmp_path / "credentials").write_text("[default]\n" + "".join(lines))
    files = {
        "AWS_CONFIG_FILE": str(tmp_path / "config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"),
    }
    assert store.aws_profile(files) == {"region": "here"} | keys
    assert store.aws_profile(files | {"AWS_PROFILE": "b"}) == {"region": "there"}
    assert store.aws_profile(files | {"AWS_ACCESS_KEY_ID": "3"}) == {"region": "here"}
    assert store.aws_profile(files | {"AWS_REGION": "x"}) == keys
    assert store.aws_profile(dict.fromkeys(files, "/absent")) == {}


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"region = here\n[default]\n", 1),
        (b"[default]\nregion\n", 2),
        (b"# caf\xe9\n[default]\nregion = here\n", 1),
        (None, None),  # a FIFO
    ],
)
def test_an_aws_file_of_another_format_is_named(monkeypatch, tmp_path, content, line):
    path = tmp_path / "config"
    if content is None:
        os.mkfifo(path)
    else:
        path.write_bytes(content)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(path))
    monkeypatch.setattr(object_store.BucketPath, "_buckets", {})
    named = f" .*line {line} " if line else " "
    with pytest.raises(CheckpointError, match=f"=s3://bucket/runs .*{path}{named}"):
        absolute("s3://bucket/runs")


def test_doubled_sections_of_an_aws_file_are_read_as_one(tmp_path):
    path = tmp_path / "config"
    environ = {"AWS_SHARED_CREDENTIALS_FILE": os.devnull}
    path.write_text("[default]\nregion = old\noutput = json\n[default]\nregion = new\n")
    assert store.aws_profile(environ | {"AWS_CONFIG_FILE": str(path)}) == {"region": "new"}
    assert store.aws_profile(environ | {"AWS_CONFIG_FILE": os.devnull}) == {}


def test_the_configuration_accepts_the_clouds_that_exist():
    assert checks.BUCKETS == store.SCHEMES
