"""What is told to be saved is on the disk: by the order of what is forced there, and by real cuts.

A file system keeps a file's contents once the file is synced, and its name once the folder is.
"""

import errno
import os

import jax
import numpy as np
import pytest
from checkpoint_tools import folder_of, items, wanted
from power import small_ext4

from maxdiloco.checkpoint import seal
from maxdiloco.checkpoint.checkpointer import Checkpointer
from maxdiloco.checkpoint.own_folder import DELETED
from maxdiloco.metrics.writer import MetricsWriter
from maxdiloco.storage import durable
from maxdiloco.storage.run_folder import locate, open_run_folder


class Disk:
    """What would be left of a folder if the power went now, for the worst of file systems.

    Follows fsync, rename and the removal of folders as Python makes them.
    """

    def __init__(self, monkeypatch):
        self.files = {}  # path: (size, time) of a file when it was last synced
        self.names = {}  # path of a folder: the names in it when it was last synced
        self.visible = []  # checkpoints: (step, what of it was not on the disk at the rename)
        self.removed = []  # checkpoints: (step, the names on the disk in the folder above)
        fsync = os.fsync

        def synced(descriptor):
            fsync(descriptor)
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            if os.path.isdir(path):
                self.names[path] = set(os.listdir(path))
            elif os.path.exists(path):  # a file without a name is lost with its process
                self.files[path] = self.state(path)

        def renaming(really):
            def renamed(source, target, **options):
                self.before_rename(os.fspath(source), os.fspath(target))
                really(source, target, **options)

            return renamed

        monkeypatch.setattr(os, "fsync", synced)
        monkeypatch.setattr(os, "replace", renaming(os.replace))
        monkeypatch.setattr(os, "rename", renaming(os.rename))

    @staticmethod
    def state(path):
        found = os.stat(path)
        return found.st_size, found.st_mtime_ns

    def missing(self, folder):
        """Paths below a folder that a cut would take or spoil."""
        lost = []
        for path, folders, files in os.walk(folder):
            lost += [p for p in folders + files if p not in self.names.get(path, ())]
            for name in files:
                file = os.path.join(path, name)
                if self.files.get(file) != self.state(file):
                    lost.append(name)
        return lost

    def before_rename(self, source, target):
        name = os.path.basename(target)
        if name.isdigit():
            self.visible.append((int(name), self.missing(source)))
        elif name.endswith(DELETED):
            above = self.names.get(os.path.dirname(source), set())
            self.removed.append((int(name.partition(".")[0]), above))


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


def save(tmp_path, steps):
    """Checkpoints of these steps, one after another; yields after each."""
    with Checkpointer(folder_of(tmp_path), max_to_keep=1) as checkpointer:
        for step in steps:
            checkpointer.save(step, items(step), {}, last=True)
            yield folder_of(tmp_path), step


def test_all_of_a_checkpoint_is_on_the_disk_before_it_is_visible(tmp_path, disk):
    """And its name is when the run says "saved", and when an old one is removed."""
    for folder, step in save(tmp_path, (1, 2)):
        assert str(step) in disk.names[str(folder)]
    assert disk.visible == [(1, []), (2, [])]
    [(step, names)] = disk.removed
    assert step == 1 and "2" in names


@pytest.mark.parametrize("name", ["sync_file", "sync_folder"])
def test_a_checkpoint_that_is_not_forced_to_the_disk_is_found(tmp_path, disk, monkeypatch, name):
    """The positive control of the test above."""
    monkeypatch.setattr(durable, name, lambda path: None)
    list(save(tmp_path, (1,)))
    [(step, lost)] = disk.visible
    assert step == 1 and {"seal.json", "metadata", "_METADATA"} <= set(lost)


def test_the_names_of_the_run_s_folders_are_on_the_disk(tmp_path, disk):
    with open_run_folder(str(tmp_path / "a" / "b"), "run") as folder:
        with Checkpointer(folder.checkpoints, max_to_keep=1) as checkpointer:
            checkpointer.save(1, items(1), {})
    for path in ("a", "a/b", "a/b/run", "a/b/run/checkpoints"):
        above, name = os.path.split(tmp_path / path)
        assert name in disk.names[above], path


def test_rows_are_on_the_disk_when_they_are_synced(tmp_path, disk):
    folder = locate(tmp_path, "run")
    folder.path.mkdir()
    with MetricsWriter(folder, tensorboard=False, resume_step=None) as writer:
        writer.write(1, {"learning/loss": 2.0})
        assert str(folder.metrics) not in disk.files
        writer.sync()
        assert disk.files[str(folder.metrics)] == disk.state(folder.metrics)
        assert "metrics.jsonl" in disk.names[str(folder.path)]
        writer.write(2, {"learning/loss": 1.0})
        assert disk.files[str(folder.metrics)] != disk.state(folder.metrics)


def test_a_folder_that_cannot_be_synced_is_not_a_broken_disk(tmp_path, monkeypatch):
    """Some network mounts sync files only."""

    def fail(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    number = errno.EINVAL
    durable.sync_folder(tmp_path)
    number = errno.EIO
    with pytest.raises(OSError, match="output"):
        durable.sync_folder(tmp_path)


def save_and_cut(ext4, *steps):
    """Save steps, cut the power right after the last one is told to be saved."""
    with Checkpointer(folder_of(ext4.path), max_to_keep=2) as checkpointer:
        checkpointer.restore(lambda meta: {})
        for step in steps:
            checkpointer.save(step, items(step), {}, last=step == steps[-1])
    ext4.cut()


def test_a_real_power_cut_leaves_the_saved_checkpoint(tmp_path, monkeypatch):
    """Control: one that was not forced to the disk is visible, and empty after the cut, or gone."""
    with small_ext4(tmp_path) as ext4:
        folder = folder_of(ext4.path)
        for steps in ((1,), (2, 3, 4), (5, 6)):
            save_and_cut(ext4, *steps)
            whole = [path for path in folder.iterdir() if path.name.isdigit()]
            assert [seal.damage(path) for path in whole] == [None] * len(whole)
            with Checkpointer(folder, max_to_keep=2) as checkpointer:
                restored = checkpointer.restore(wanted)
            assert restored.step == steps[-1]
            jax.tree.map(np.testing.assert_array_equal, restored.items, items(steps[-1]))
        monkeypatch.setattr(durable, "sync_file", lambda path: None)
        save_and_cut(ext4, 7)
        left = folder / "7"
        assert not left.exists() or seal.damage(left) is not None
