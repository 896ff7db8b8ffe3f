"""A prepared text as it ages: read-only, cut, replaced, removed; on odd file systems."""

import errno
import fcntl
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from data.shards_on_disk import make, open_dataset, run_prepare

from maxdiloco.data import shards
from maxdiloco.data.prepared import prepare
from maxdiloco.errors import DataError


@pytest.fixture
def read_only(monkeypatch):
    """Makes all that would be written fail, as on a file system that is mounted read-only."""

    def refuse(*arguments, **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def mount():
        for module, name in (
            (os, "remove"),
            (prepare.durable, "make_folder"),
            (prepare.durable, "atomic_write"),
            (fcntl, "flock"),
        ):
            monkeypatch.setattr(module, name, refuse)

    return mount


def test_a_prepared_text_is_read_from_a_read_only_file_system(settings, source, read_only):
    """With the leftovers of a kill in it, too. A text that has to be prepared is one line."""
    cfg = settings(dataset_path=str(source))
    before = open_dataset(cfg)
    (folder,) = (
        os.path.join(cfg.data_cache_directory, n) for n in os.listdir(cfg.data_cache_directory)
    )
    with open(f"{folder}/part-00000.json", "w") as file:
        file.write("{}")
    read_only()
    assert open_dataset(cfg).contents == before.contents
    (source / "0.txt").write_text("another text")
    with pytest.raises(
        DataError, match=f"^data_cache_directory={cfg.data_cache_directory}/"
    ) as error:
        open_dataset(cfg)
    assert os.strerror(errno.EROFS) in str(error.value) and "\n" not in str(error.value)


def test_names_are_distinct_on_a_file_system_without_case(source, tmp_path):
    make(source, tmp_path / "out")
    names = [path.name for path in (tmp_path / "out").rglob("*")]
    assert len({name.lower() for name in names}) == len(names) > 8
    assert names == [name.lower() for name in names]


@pytest.mark.parametrize("size", [0, 100, 16384])
def test_a_part_that_is_truncated_while_it_is_read_is_named(source, tmp_path, size):
    """Of two blocks. No signal ends the process, as it would with a memory map."""
    (source / "long.txt").write_text("x" * 20_000)
    documents = make(source, tmp_path / "out", part_bytes=1 << 20)
    last = len(documents.lengths) - 1
    everything = [(number, 0, int(documents.lengths[number])) for number in range(last + 1)]
    assert sum(map(len, documents.read(everything))) == documents.lengths.sum()
    os.truncate(tmp_path / "out" / "part-00000.bin", size)
    with pytest.raises(DataError, match=r"part-00000\.bin .*"):
        list(documents.read(everything))


def test_a_folder_that_is_removed_while_it_is_read_is_named(source, tmp_path):
    """A process that holds the file reads on; one that opens it later is refused."""
    documents = make(source, tmp_path / "out", part_bytes=1 << 20)
    copy = pickle.loads(pickle.dumps(documents))
    (before,) = documents.read([(0, 0, 5)])
    shutil.rmtree(tmp_path / "out")
    (after,) = documents.read([(0, 0, 5)])
    np.testing.assert_array_equal(before, after)
    with pytest.raises(DataError, match=r"part-00000\.bin "):
        list(copy.read([(0, 0, 5)]))


def test_a_cache_that_allowed_more_damaged_records_is_refused(source, tmp_path):
    """It was prepared by a start with another max_corrupted_records."""
    (source / "b.txt").write_bytes(b"abc\xff")
    run_prepare(source, tmp_path / "out", allowed=1)
    run_prepare(source, tmp_path / "out", allowed=1)
    with pytest.raises(DataError, match=r"b\.txt byte 3: .*max_corrupted_records=0"):
        run_prepare(source, tmp_path / "out", allowed=0)


def test_no_more_files_are_open_than_allowed(source, tmp_path, monkeypatch):
    """A file is closed when another is opened in its place, and opened again when it is needed."""
    monkeypatch.setattr(shards, "_MOST_OPEN", 2)
    documents = make(source, tmp_path / "out", part_bytes=100)
    everything = [(number, 0, int(n)) for number, n in enumerate(documents.lengths)]
    for _ in range(2):
        assert sum(map(len, documents.read(everything))) == documents.lengths.sum()
        links = [Path("/proc/self/fd", number) for number in os.listdir("/proc/self/fd")]
        opened = [link for link in links if str(tmp_path / "out") in os.path.realpath(link)]
        assert 1 <= len(opened) <= 2
