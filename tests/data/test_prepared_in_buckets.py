"""Shards in a bucket: the bytes of those on a disk, after any failure of the store."""

import os
import re
import tempfile
import threading
import time

import faulty_store
import pytest
from data.shards_on_disk import make, run_prepare
from fake_gcs import BUCKET

from maxdiloco import prepare as program
from maxdiloco.data import shards
from maxdiloco.data.prepared import prepare
from maxdiloco.errors import CheckpointError, ConfigError, DataError
from maxdiloco.storage import object_lock, store
from maxdiloco.storage.object_lock import ObjectLock
from maxdiloco.storage.run_folder import absolute

FOLDER = "shards/a b"
OUT = f"az://{BUCKET}/{FOLDER}"
FACTS = re.compile(r"part-\d+\.json")


@pytest.fixture(autouse=True)
def times(monkeypatch, tmp_path):
    """A lock goes stale at once; what is written on this machine can be counted."""
    monkeypatch.setattr(object_lock, "STALE_S", 0.1)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))


@pytest.fixture
def whole(source, tmp_path):
    """{name: content} of the folder that a disk has."""
    make(source, tmp_path / "whole")
    paths = (path for path in (tmp_path / "whole").rglob("*") if path.is_file())
    found = {str(path.relative_to(tmp_path / "whole")): path.read_bytes() for path in paths}
    assert found.pop("lock") == b"" and len(found) > 8
    return found


def run(source, out=OUT, **options):
    run_prepare(source, out, **options)


def content(bucket):
    """{name: content} without the lock, which a dead process leaves."""
    names = [entry.name for entry in bucket.list_all(FOLDER) if not entry.name.endswith("/lock")]
    return {name.removeprefix(f"{FOLDER}/"): bucket.get(name) for name in names}


def test_a_folder_in_a_bucket_has_the_bytes_of_one_on_a_disk(cloud, source, whole, tmp_path):
    """A second preparation has nothing to do; nothing is left on this machine."""
    bucket, said = store.connect(cloud, BUCKET), []
    out = f"{cloud}://{BUCKET}/{FOLDER}"
    run(source, out, say=said.append)
    assert content(bucket) == whole
    assert out in said[0] and out in said[-1]
    bucket.put(f"{FOLDER}/part-00001.json", b"{}")  # as a process that was long silent may
    said.clear()
    run(source, out, say=said.append)
    assert len(said) == 1 and out in said[0] and content(bucket) == whole
    assert os.listdir(tmp_path / "tmp") == []


def attempt(source, said):
    """A preparation, whose failure is one line; whether it went well."""
    try:
        run(source, say=said.append)
        return True
    except (ConfigError, DataError) as error:
        said.append(str(error))
    assert said[-1].startswith(f"out={OUT}") and "\n" not in said[-1]
    return False


def with_faults(faulty, source, when, kind, every):
    """Preparations with a fault at every so many of their requests; yields after each the number,
    whether it went well, and its lines."""
    run(source)
    requests = range(len(faulty.calls))
    assert len(requests) > 30
    for number in requests[::every]:
        faulty.connect("az", BUCKET).delete(faulty.names())
        faulty.calls.clear()
        faulty.fault, said = when(number, kind), []
        went_well = attempt(source, said)
        faulty.fault = lambda number, function: None
        yield number, went_well, said


@pytest.mark.parametrize("kind", faulty_store.KINDS)
def test_after_a_fault_at_any_request_the_same_command_resumes(
    faulty, source, whole, tmp_path, kind
):
    """A folder with a manifest is whole; one without is none."""
    bucket = faulty.connect("az", BUCKET)
    every = 9 if kind == "delay" else 1
    for number, went_well, said in with_faults(faulty, source, faulty_store.at, kind, every):
        found = content(bucket)
        found.pop("lock", None)  # its removal may have failed
        half = {name: data for name, data in found.items() if whole.get(name) != data}
        assert all(map(FACTS.fullmatch, half)), (kind, number)
        assert went_well <= (found == whole) or kind == "late"
        assert shards.MANIFEST not in found or whole.items() <= found.items()
        run(source)
        assert content(bucket) == whole, (kind, number, said)
    assert os.listdir(tmp_path / "tmp") == []


def test_a_replaced_part_in_a_bucket_is_refused(faulty, tmp_path):
    """By its ETag while it is read, by the table of checksums at a later start."""
    bucket, name = faulty.connect("az", BUCKET), "part-00001.bin"
    for out, letters in ((OUT, "ab"), (tmp_path / "other", "cd")):
        (tmp_path / "text.txt").write_text(letters * 50_000)
        run(tmp_path / "text.txt", out, part_bytes=50_000)
    begun = shards.open_shards(OUT, "dataset_path")
    assert [len(tokens) for tokens in begun.read([(0, 70_000, 70_010)])] == [10]
    other = (tmp_path / "other" / name).read_bytes()
    assert bucket.head(f"{FOLDER}/{name}").size == len(other)
    bucket.put(f"{FOLDER}/{name}", other)
    for read in (
        lambda: list(begun.read([(0, 70_000, 70_010)])),
        lambda: shards.open_shards(OUT, "dataset_path"),
    ):
        with pytest.raises(DataError, match=f"dataset_path={OUT}.*{name}"):
            read()


def test_a_store_that_fails_costs_only_the_unfinished_parts(faulty, source, whole):
    """At every other request: those that are there are kept."""
    bucket = faulty.connect("az", BUCKET)
    for _, went_well, said in with_faults(faulty, source, faulty_store.from_on, "503", 2):
        if went_well:  # what failed is the removal of the lock
            continue
        assert said[-1].startswith(f"out={OUT}") and "(503)" in said[-1]
        done = len([name for name in content(bucket) if FACTS.fullmatch(name)])
        said.clear()
        run(source, say=said.append)
        (line,) = [line for line in said if "to do" in line or line.startswith("tokenising ")]
        kept = re.search(r"; (\d+) parts were done before", line)
        assert int(kept[1] if kept else 0) == done or "nothing to do" in line
        assert content(bucket) == whole


def test_a_part_of_another_size_than_its_facts_say_is_made_anew(faulty, source, whole, monkeypatch):
    """As of a copy that was cut. Without its facts it is none at all."""
    bucket, names = faulty.connect("az", BUCKET), ["part-00001.bin", "part-00002.json"]

    def fails(self):
        raise OSError(5, "no manifest today")

    with monkeypatch.context() as patch:
        patch.setattr(shards.Manifest, "to_bytes", fails)
        assert not attempt(source, [])
    assert shards.MANIFEST not in content(bucket)
    bucket.put(f"{FOLDER}/{names[0]}", whole[names[0]][:-1])
    bucket.delete([f"{FOLDER}/{names[1]}"])
    before = len([name for name in content(bucket) if FACTS.fullmatch(name)])
    said = []
    run(source, say=said.append)
    assert f"; {before - 1} parts were done before" in said[0]
    assert content(bucket) == whole


def test_a_second_preparation_of_a_folder_names_the_first(faulty, source, monkeypatch):
    monkeypatch.setattr(object_lock, "RENEW_S", 0.02)
    words = {"key": "out=x", "otherwise": "wait", "say": lambda line: None}
    with ObjectLock(absolute(f"{OUT}/lock"), **words):
        with pytest.raises(ConfigError) as error:
            run(source)
        (name,) = faulty.names()
    assert f"out={OUT} " in str(error.value) and f"process {os.getpid()}" in str(error.value)
    assert name == f"{FOLDER}/lock"


def test_a_preparation_that_loses_its_lock_makes_no_more_parts(faulty, source, monkeypatch):
    """As one that was suspended for long. Nor does it write a manifest."""
    bucket, made = faulty.connect("az", BUCKET), prepare.part.make_part
    monkeypatch.setattr(object_lock, "RENEW_S", 0.02)

    def make_part(*arguments):
        bucket.put(f"{FOLDER}/lock", b'{"holder": "process 7 on x", "nonce": "7"}')
        while any(thread.name == "maxdiloco-lock" for thread in threading.enumerate()):
            time.sleep(0.01)  # its thread ends when it sees that
        return made(*arguments)

    monkeypatch.setattr(prepare.part, "make_part", make_part)
    with pytest.raises(CheckpointError, match=f"^out={OUT}: {OUT}/lock "):
        run(source)
    names = content(bucket).keys()
    parts = sorted(filter(FACTS.fullmatch, names))
    assert parts[0] == "part-00000.json" and len(parts) <= 3  # two are made ahead of the check
    assert shards.MANIFEST not in names
    assert b'"nonce": "7"' in bucket.get(f"{FOLDER}/lock")


def test_a_folder_of_others_is_left_alone(gcs, source):
    """But the empty object that a console makes for a folder is nobody's."""
    out = f"gs://{BUCKET}/{FOLDER}"
    gcs.put(f"{FOLDER}/sub/readme", b"mine")
    with pytest.raises(ConfigError, match=f"^out={out} "):
        run(source, out)
    assert gcs.names() == [f"{FOLDER}/sub/readme"]
    gcs.objects[BUCKET].clear()
    gcs.put(f"{FOLDER}/", b"")
    run(source, out)
    assert f"{FOLDER}/manifest.json" in gcs.names()
    with pytest.raises(ConfigError, match=f"^out={out} .*source"):
        run(source / "0.txt", out)


@pytest.mark.parametrize(("out", "code"), [("hdfs://a/b", 2), ("s3://", 2), ("gs://absent/a", 3)])
def test_an_output_that_cannot_be_written_is_named(gcs, source, capsys, out, code):
    assert program.main([str(source), f"out={out}"]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert f"out={out}" in line
