"""Damaged, half-written and unwritable checkpoints: reported, and the one before is used."""

import json
import os
import pathlib
import shutil

import jax
import numpy as np
import pytest
from checkpoint_tools import folder_of, items, save_and_wait, wanted

from maxdiloco.checkpoint import metadata, own_folder, read, seal
from maxdiloco.checkpoint.checkpointer import Checkpointer
from maxdiloco.checkpoint.read import restore_from
from maxdiloco.errors import CheckpointError


@pytest.fixture(scope="module")
def two_saved(tmp_path_factory):
    """A run with the checkpoints of steps 10 and 20, and the files of the second."""
    path = tmp_path_factory.mktemp("saved")
    with Checkpointer(folder_of(path), max_to_keep=None) as checkpointer:
        for step in (10, 20):
            save_and_wait(checkpointer, step)
    newest = pathlib.Path(folder_of(path)) / "20"
    return path, sorted(str(f.relative_to(newest)) for f in newest.rglob("*") if f.is_file())


DAMAGES = {
    "missing": None,
    "cut": lambda content: content[: len(content) // 2],
    "emptied": lambda content: b"",
    "zeroed": lambda content: bytes(len(content)),
    "one bit": lambda content: content[:-9] + bytes([content[-9] ^ 64]) + content[-8:],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damage_of_any_file_is_reported_and_the_older_one_used(tmp_path, two_saved, damage, capsys):
    saved, files = two_saved
    restored = restore_from(saved / "run", wanted, key="k")  # the positive control
    assert restored.step == 20 and capsys.readouterr().out == ""
    assert "seal.json" in files and "meta/metadata" in files and len(files) > 8
    for name in set(files) - {"commit_success.txt"}:  # written after the seal
        run = tmp_path / name.replace("/", "_")
        shutil.copytree(saved, run)
        file = pathlib.Path(folder_of(run)) / "20" / name
        if damage is None:
            file.unlink()
        else:
            file.write_bytes(damage(file.read_bytes()))
        restored = restore_from(run / "run", wanted, key="k")
        assert restored.step == 10, name
        jax.tree.map(np.testing.assert_array_equal, restored.items, items(10))
        (said,) = capsys.readouterr().out.splitlines()
        assert f"{folder_of(run)}/20 " in said, name


def damaged_run(tmp_path, two_saved, *steps):
    shutil.copytree(two_saved[0], tmp_path, dirs_exist_ok=True)
    for step in steps:
        (folder_of(tmp_path) / str(step) / "outer_params" / "manifest.ocdbt").unlink()
    return folder_of(tmp_path)


def test_a_resumed_run_sets_a_damaged_one_aside_and_saves_again(tmp_path, two_saved):
    folder = damaged_run(tmp_path, two_saved, 20)
    said = []
    for _ in range(2):  # the second time 20 is there again, and is damaged again
        with Checkpointer(folder, max_to_keep=None, say=said.append) as checkpointer:
            assert checkpointer.restore(lambda meta: {}).step == 10
            assert checkpointer.restore(wanted).step == 10
            assert checkpointer.steps() == [10]
            assert checkpointer.save(20, items(20), {})
        (folder / "20" / "outer_params" / "manifest.ocdbt").unlink()
    assert sorted(os.listdir(folder)) == ["10", "20", "20.damaged", "20.damaged-2"]
    assert len(said) == 2
    assert "outer_params/manifest.ocdbt" in said[0]


def test_when_all_are_damaged_the_run_ends_and_names_each(tmp_path, two_saved):
    folder = damaged_run(tmp_path, two_saved, 10, 20)
    gone = "outer_params/manifest.ocdbt"
    with Checkpointer(folder, max_to_keep=None, say=lambda line: None) as checkpointer:
        with pytest.raises(CheckpointError, match=f"{folder} .*20: {gone}.*10: {gone}"):
            checkpointer.restore(wanted)
    with pytest.raises(CheckpointError, match="load_full_state_path"):
        restore_from(folder / "20", wanted, key="load_full_state_path")
    assert sorted(os.listdir(folder)) == ["10", "20"]  # they may be whole again after a mount


def test_a_checkpoint_of_a_later_format_is_named_and_not_damage(tmp_path, two_saved):
    """Even if its seal is written in a way that this version does not know."""
    folder = damaged_run(tmp_path, two_saved)
    (folder / "20" / "seal.json").write_text("[]")
    meta = folder / "20" / "meta" / "metadata"
    later = json.loads(meta.read_text()) | {"format": 7, "version": "9.9", "more": 1}
    meta.write_text(json.dumps(later))
    message = rf"{folder}/20 .*format 7.*9\.9"
    with Checkpointer(folder, max_to_keep=1) as checkpointer:
        for read_it in (
            lambda: restore_from(folder.parent, wanted, key="k"),
            lambda: read.newest_meta(folder.parent, key="k"),
            lambda: checkpointer.restore(wanted),
        ):
            with pytest.raises(CheckpointError, match=message):
                read_it()
    assert sorted(os.listdir(folder)) == ["10", "20"]


def test_a_meta_that_no_version_writes_is_damaged(tmp_path, two_saved):
    folder = damaged_run(tmp_path, two_saved)
    meta = folder / "20" / "meta" / "metadata"
    assert metadata.read_note(folder / "20").step == 20  # the positive control
    for wrong in ("[" * 100_000, "[]", "{}", '{"format": "x", "version": ""}'):
        meta.write_text(wrong)
        with pytest.raises(metadata.DamagedError, match=f"{folder}/20"):
            metadata.read_note(folder / "20")


def test_processes_share_the_check_and_large_files_only_sizes(tmp_path, two_saved, monkeypatch):
    newest = damaged_run(tmp_path, two_saved) / "20"
    meta = newest / "meta" / "metadata"
    content = meta.read_bytes()
    meta.unlink()
    found = [seal.damage(newest, range(process, 100, 3)) for process in range(3)]
    assert len([one for one in found if one and "meta/metadata" in one.what]) == 1
    index = next(one.index for one in found if one)
    assert seal.damage(newest, indices=[index]) in found
    assert seal.damage(newest, indices=[index + 1]) is None
    meta.write_bytes(content)
    monkeypatch.setattr(seal, "CONTENT_LIMIT_BYTES", 10)
    seal.write(newest)
    tree = newest / "outer_params" / "_METADATA"
    whole = tree.read_bytes()
    tree.write_bytes(bytes(len(whole)))
    assert seal.damage(newest) is None
    tree.write_bytes(whole[1:])
    assert "outer_params/_METADATA" in seal.damage(newest).what
    tree.write_bytes(whole)
    meta.write_bytes(bytes(len(content)))  # META has its checksum all the same
    assert "meta/metadata" in seal.damage(newest).what


def test_without_renames_the_commit_file_is_removed_first(tmp_path, two_saved, monkeypatch):
    """gs://: a folder has its final name from the start, a mark beside it says that it goes."""
    folder = damaged_run(tmp_path, two_saved)
    monkeypatch.setattr(own_folder, "is_local", lambda path: False)
    gone = []
    rmtree = type(folder).rmtree

    def noted(path, **options):
        gone.append(sorted(os.listdir(path)))
        rmtree(path, **options)

    monkeypatch.setattr(type(folder), "rmtree", noted)
    own = own_folder.OwnFolder(folder, run="", locked=True, say=print)
    own.adopt(folder / "20", older=True)
    own.remove(10)
    (names,) = gone
    assert names and "commit_success.txt" not in names
    assert sorted(os.listdir(folder)) == ["20"] and own.steps == {20}


def test_an_old_checkpoint_that_cannot_be_removed_is_a_warning(tmp_path, two_saved, monkeypatch):
    folder = damaged_run(tmp_path, two_saved)

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    said = []
    with Checkpointer(folder, max_to_keep=2, say=said.append) as checkpointer:
        checkpointer.restore(lambda meta: {})
        monkeypatch.setattr(type(folder), "rmtree", refuse)
        save_and_wait(checkpointer, 30)
        assert len(said) == 1 and str(folder) in said[0] and "Permission denied" in said[0]
        monkeypatch.undo()
    assert sorted(os.listdir(folder)) == [f"10{own_folder.DELETED}", "20", "30"]
