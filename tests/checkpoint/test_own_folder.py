"""What a Checkpointer does to its folder: files of others stay, old ones of its own make room.

Others are people, other runs, a process that saves right now. Most saves here have no arrays: what
a Checkpointer does to its folder does not depend on them.
"""

import json
import os
import pathlib
import tempfile

import jax
import numpy as np
import pytest
from checkpoint_tools import save_and_wait
from etils import epath
from hypothesis import example, given, settings
from hypothesis import strategies as st

from maxdiloco.checkpoint import files, metadata, own_folder, seal, write
from maxdiloco.checkpoint.checkpointer import Checkpointer
from maxdiloco.checkpoint.own_folder import DELETED, UNFINISHED
from maxdiloco.errors import CheckpointError
from maxdiloco.storage import run_folder

NUMBERS = ["0", "3", "007", "42", "2024", "123456789", "²"]
SUFFIXES = [
    "", ".photos", ".tar.gz", ".keep", ".11-env", ".damaged", ".deleted", " copy",
    ".orbax-checkpoint-tmp", ".orbax-checkpoint-tmp-1700000000",
]  # fmt: skip
OTHER = ["notes", "lock", "start", "metrics.jsonl", ".hidden", "seal.json"]
KINDS = ["file", "empty folder", "folder", "other run", "unfinished"]
names = st.builds("".join, st.tuples(st.sampled_from(NUMBERS), st.sampled_from(SUFFIXES)))
folders = st.dictionaries(
    names | st.sampled_from(OTHER), st.sampled_from(KINDS), min_size=1, max_size=6
)


def put(path, kind):
    if kind == "file":
        path.write_text("a file")
        return
    path.mkdir()
    if kind == "folder":
        (path / "2024").mkdir()
        (path / "2024" / "a.jpg").write_text("a picture")
    if kind in ("other run", "unfinished"):
        (path / "meta").mkdir()
        step = int(path.name) if path.name.isdecimal() else 0
        note = metadata.note_of(step, {}, {}, run="another")
        (path / "meta" / "metadata").write_text(json.dumps(note))
    if kind == "other run":
        (path / "seal.json").write_text(json.dumps({"files": {}}))
        (path / "commit_success.txt").write_text("complete")


def content(folder):
    """{path: bytes of a file, or None for a folder} of all that is there."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def save(folder, *steps, restore=False, keep=1, said=None, items=None, last=True):
    """Each as the last step of a run, whose failure is an error; the steps that there are then."""
    lines = [] if said is None else said
    with Checkpointer(folder, max_to_keep=keep, say=lines.append) as checkpointer:
        if restore:
            checkpointer.restore(lambda meta: {})
        for step in steps:
            checkpointer.save(step, items or {}, {}, last=last)
            checkpointer.wait()
        return checkpointer.steps()


@settings(max_examples=25)
@given(folders, st.sampled_from(["open", "read", "save"]), st.integers(1, 2))
@example({"2024.photos": "folder", "2025.tar.gz": "file", "3.11-env": "folder"}, "open", 1)
@example({"2021": "other run", "2022": "other run", "2023": "other run"}, "save", 2)
def test_nothing_of_others_is_ever_changed(entries, action, keep):
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for entry, kind in entries.items():
            put(folder / entry, kind)
        before = content(folder)
        saved = [] if action != "save" else [5, 10, 15]
        save(folder, *saved, restore=action == "read", keep=keep)
        after = content(folder)
        if action != "save":
            assert after == before
        assert {path: after.get(path, "gone") for path in before} == before
        own = {str(step) for step in saved[-keep:]}
        assert {path.partition("/")[0] for path in after.keys() - before.keys()} == own


@settings(max_examples=10)
@given(folders.map(lambda found: {"x" + name: kind for name, kind in found.items()}))
@example({"1.keep": "folder", "1.before-experiment": "folder", "1.tar": "file"})
def test_a_run_that_goes_on_removes_its_own_checkpoints_alone(entries):
    """The older ones of the run go, in this process and of the process before."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        save(folder, 1, 2, keep=None)
        for entry, kind in entries.items():
            put(folder / entry, kind)
        before = {path: found for path, found in content(folder).items() if path[0] not in "12"}
        before |= {path: x for path, x in content(folder).items() if path.startswith("1.")}
        assert save(folder, 3, 4, restore=True, keep=2) == [3, 4]
        after = content(folder)
        assert {path: after.get(path, "gone") for path in before} == before


def test_checkpoints_of_another_run_stay_and_do_not_count(tmp_path):
    """The other run has 3 and 6; this one saves 5, 10 and, after a restart, 15, and keeps two.

    A restart would continue from a later one: a save below it is said, as one in its place.
    """
    for step in (3, 6):
        put(tmp_path / str(step), "other run")
    (tmp_path / "6").rename(tmp_path / "away")
    save(tmp_path, 5, 10, keep=2)
    (tmp_path / "away").rename(tmp_path / "6")
    assert save(tmp_path, 15, restore=True, keep=2) == [3, 6, 10, 15]
    said = []
    assert save(tmp_path, 4, 6, 7, keep=2, said=said) == [3, 4, 6, 7, 10, 15]
    later, there = said
    assert "step 4 " in later and "step 15 " in later and str(tmp_path) in later
    assert "step 6 " in there and f"{tmp_path}/6 " in there


def test_a_step_whose_name_others_have_is_a_failed_save(tmp_path):
    put(tmp_path / "7", "folder")
    said = []
    assert save(tmp_path, 7, 8, said=said, last=False) == [8]
    (line,) = said
    assert "step 7 " in line and str(tmp_path) in line
    assert (tmp_path / "7" / "2024" / "a.jpg").exists()


def test_a_second_process_may_read_but_not_save(tmp_path):
    """Its own lock on the folder stands in for another process's: they exclude each other alike."""
    items = {"outer_params": {"w": jax.device_put(np.ones(2))}}
    with Checkpointer(tmp_path, max_to_keep=1) as first:
        first.save(8, {}, {}, last=True)
        running = tmp_path / f"9{UNFINISHED}"
        running.mkdir()  # as the save of step 9 begins
        before = content(tmp_path)
        save(tmp_path, restore=True)
        with pytest.raises(CheckpointError, match=f"^folder={tmp_path}: "):
            save(tmp_path, 10, items=items)
        assert content(tmp_path) == before
    assert save(tmp_path, 10, items=items) == [8, 10]  # given back when the first one was left


def test_unfinished_saves_of_the_run_are_removed_by_the_next(tmp_path):
    for name in (f"4{UNFINISHED}", f"4{UNFINISHED}-1", f"3{DELETED}"):
        put(tmp_path / name, "folder")
    (tmp_path / f"2{UNFINISHED}").write_text("no folder: not of a save")
    said = []
    save(tmp_path, restore=True, said=said)
    assert len(os.listdir(tmp_path)) == 4 and said == []
    assert save(tmp_path, 5, said=said) == [5]
    assert sorted(os.listdir(tmp_path)) == [f"2{UNFINISHED}", "5"]
    assert len(said) == 3 and str(tmp_path) in said[0]


def test_without_locks_what_is_unfinished_stays_and_is_said(tmp_path, monkeypatch):
    """Some network file systems lock no folders: the save may be that of another process."""

    def no_locks(descriptor, how):
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr(own_folder.fcntl, "flock", no_locks)
    put(tmp_path / f"5{UNFINISHED}", "folder")
    said = []
    assert save(tmp_path, 5, 6, said=said, last=False) == [6]
    assert (tmp_path / f"5{UNFINISHED}" / "2024").exists()
    assert "Bad file descriptor" in said[0]
    assert "step 5 " in said[1] and f"{tmp_path}: 5{UNFINISHED} " in said[1]


def test_a_removed_or_damaged_one_gets_an_unused_name(tmp_path):
    """1.maxdiloco-deleted and 2.damaged are there before the run needs such names."""
    save(tmp_path, 1, 2, keep=None)
    put(tmp_path / "2.damaged", "folder")
    (tmp_path / "2" / "seal.json").unlink()
    with Checkpointer(tmp_path, max_to_keep=1, say=lambda line: None) as checkpointer:
        assert checkpointer.restore(lambda meta: {}).step == 1
        assert sorted(os.listdir(tmp_path)) == ["1", "2", "2.damaged"]  # reading changes nothing
        (tmp_path / f"1{DELETED}").write_text("")
        checkpointer.save(2, {}, {}, last=True)
        checkpointer.wait()
    left = sorted(os.listdir(tmp_path))
    assert left == [f"1{DELETED}", "2", "2.damaged", "2.damaged-2"]
    assert (tmp_path / "2.damaged" / "2024").exists()


def test_objects_of_others_under_the_name_of_a_step_stay(tmp_path, monkeypatch):
    """gs://: a save writes under its final name, so a mark beside it says that it is unfinished."""
    for module in (write, files):
        monkeypatch.setattr(module, "is_local", lambda path: False)
    target = epath.Path(tmp_path / "7")
    put(target, "folder")
    unfinished = write.Save(target, (), {}, {})
    for is_alone in (True, False):
        with pytest.raises(OSError, match=r"\b7 "):
            write.prepare(unfinished, nbytes=0, is_alone=is_alone)
    write.mark_of(target).write_text("")
    assert write.prepare(unfinished, nbytes=0, is_alone=True)
    assert not target.exists() and write.mark_of(target).exists()


VALUES = np.random.default_rng(0).standard_normal(20_000).astype(np.float32)
NBYTES = VALUES.nbytes


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """Sets the size of a disk that holds the checkpoints of tmp_path and nothing else."""
    usage = run_folder.shutil.disk_usage(tmp_path)
    size = [10 * NBYTES]

    def disk_usage(path):
        path.stat()  # as the real one
        used = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
        return usage._replace(free=size[0] - used)

    monkeypatch.setattr(run_folder.shutil, "disk_usage", disk_usage)
    return lambda nbytes: size.__setitem__(0, nbytes)


@pytest.fixture
def opened(tmp_path, disk):
    said = []
    with Checkpointer(tmp_path, max_to_keep=3, say=said.append) as checkpointer:
        yield checkpointer, said


def save_values(checkpointer, step):
    save_and_wait(checkpointer, step, {"outer_params": {"w": jax.device_put(VALUES)}})


def test_without_room_for_it_nothing_of_a_checkpoint_is_written(tmp_path, disk, opened):
    """The leaf of 20,000 float32 takes 80,000 B."""
    checkpointer, said = opened
    disk(NBYTES - 1)
    save_values(checkpointer, 1)
    (line,) = said
    assert "step 1 " in line and line.count("0.1 MB") == 2
    assert os.listdir(tmp_path) == []
    disk(NBYTES)
    save_values(checkpointer, 2)
    assert checkpointer.steps() == [2]


def test_as_few_old_checkpoints_as_suffice_make_room(disk, opened):
    """Room for two and a half: of 1 and 2 the first goes; then of 2 and 3."""
    checkpointer, said = opened
    save_values(checkpointer, 1)
    disk(5 * NBYTES // 2 + seal.nbytes(checkpointer._folder / "1") - NBYTES)
    save_values(checkpointer, 2)
    assert checkpointer.steps() == [1, 2] and said == []
    save_values(checkpointer, 3)
    assert checkpointer.steps() == [2, 3]
    (line,) = said
    assert "checkpoint 1 " in line and " 3" in line
    save_values(checkpointer, 4)
    assert checkpointer.steps() == [3, 4]


def test_nothing_is_removed_if_that_would_not_suffice(disk, opened):
    checkpointer, said = opened
    for step in (1, 2):
        save_values(checkpointer, step)
    disk(3 * NBYTES // 2)  # with 2 kept there is never room for another
    save_values(checkpointer, 3)
    assert checkpointer.steps() == [1, 2]
    assert "step 3 " in said[0] and " 2." in said[0]
    disk(5 * NBYTES)
    save_values(checkpointer, 4)
    assert checkpointer.steps() == [1, 2, 4]


def test_a_start_names_a_disk_too_small_for_all_checkpoints(disk, opened):
    """Those that are there count as room."""
    checkpointer, _ = opened
    save_values(checkpointer, 1)
    disk(4 * NBYTES)
    assert checkpointer.shortage(NBYTES) == []
    disk(2 * NBYTES)
    folder = checkpointer._folder / "not" / "made"
    other = own_folder.OwnFolder(folder, run="", locked=True, say=print)
    assert other.shortage(NBYTES, count=1) == []
    (line,) = checkpointer.shortage(NBYTES)
    assert "max_num_checkpoints_to_keep=3 " in line
    assert str(checkpointer._folder) in line and line.count("0.2 MB") == 2
