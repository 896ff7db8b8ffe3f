"""Saves that fail: one line, tried again, twice in a row the end; complete checkpoints stay."""

import asyncio
import errno
import os
import shutil
import subprocess
import threading

import jax
import numpy as np
import pytest

from maxdiloco.checkpoint import seal
from maxdiloco.checkpoint import write as write_lib
from maxdiloco.checkpoint.checkpointer import Checkpointer
from maxdiloco.errors import SaveError
from maxdiloco.storage import durable, run_folder
from maxdiloco.storage.run_folder import locate


def values(step):
    return np.random.default_rng(step).standard_normal((64, 64)).astype(np.float32)


def items(step):
    return {
        "outer_params": {"w": jax.device_put(values(step))},
        "state": {name: jax.device_put(values(step + n)) for n, name in enumerate("ab")},
    }


def wanted(meta):
    return jax.eval_shape(lambda: items(0))


def folder_of(path):
    return locate(path, "run").checkpoints


def save_and_wait(checkpointer, step):
    checkpointer.save(step, items(step), {})
    checkpointer.wait()


@pytest.fixture
def opened(tmp_path):
    said = []
    with Checkpointer(folder_of(tmp_path), max_to_keep=None, say=said.append) as checkpointer:
        checkpointer.save(1, items(1), {"t": 1})
        checkpointer.wait()
        assert said == []
        yield checkpointer, said


def of_python(monkeypatch, number):
    """Every fsync of a checkpoint's files fails, as it does where a disk fills up or breaks."""

    def fail(path):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(durable, "sync_tree", fail)


def of_orbax(monkeypatch, number):
    """Every array of a checkpoint fails to be written, each in a task of its own."""
    from orbax.checkpoint._src.serialization import serialization

    async def fail(*args, **kwargs):
        async def write():
            await asyncio.sleep(0.01)
            raise ValueError(f"RESOURCE_EXHAUSTED: Failed to write 5 bytes: {os.strerror(number)}")

        await asyncio.gather(write(), write(), write())

    monkeypatch.setattr(serialization, "async_serialize_from_host", fail)


def of_preparation(monkeypatch, number):
    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(write_lib, "prepare", fail)


WHERE = [of_python, of_orbax, of_preparation]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("where", WHERE)
def test_one_failed_save_is_one_line_and_the_next_one_makes_up_for_it(
    opened, monkeypatch, capfd, where, number
):
    """Full disk, quota, broken disk, read-only: nothing of another library is printed."""
    checkpointer, said = opened
    where(monkeypatch, number)
    save_and_wait(checkpointer, 2)
    assert len(said) == 1
    assert said[0].startswith("warning: step 2 could not be saved in ")
    assert said[0].endswith(
        f"{os.strerror(number)}; the last step saved is 1. It is tried again with the next save."
    )
    assert checkpointer.steps() == [1]
    monkeypatch.undo()
    save_and_wait(checkpointer, 3)
    assert not checkpointer.save(3, items(3), {})  # there already
    assert sorted(os.listdir(checkpointer._folder)) == ["1", "3"]  # nothing is left of 2
    assert len(said) == 1
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("where", WHERE)
def test_two_failed_saves_in_a_row_end_the_run_with_75(opened, monkeypatch, capfd, where):
    checkpointer, said = opened
    for step, broken in ((2, True), (3, False), (4, True)):  # a good one in between starts anew
        with monkeypatch.context() as patch:
            if broken:
                where(patch, errno.EIO)
            save_and_wait(checkpointer, step)
    with monkeypatch.context() as patch:
        where(patch, errno.EIO)
        with pytest.raises(SaveError) as error:
            save_and_wait(checkpointer, 5)
    assert error.value.exit_code == 75
    assert str(error.value).startswith("base_output_directory: step 5 could not be saved in ")
    assert str(error.value).endswith(
        "Input/output error; the last step saved is 3. Free some space or mend the disk; then the "
        "same command goes on."
    )
    assert [line.split()[2] for line in said] == ["2", "4"]
    assert checkpointer.restore(wanted).step == 3
    assert capfd.readouterr() == ("", "")


def test_a_save_that_fails_while_the_run_ends_is_an_error(tmp_path, monkeypatch):
    def save_and_leave():
        with Checkpointer(folder_of(tmp_path), max_to_keep=1) as checkpointer:
            of_python(monkeypatch, errno.EIO)
            checkpointer.save(1, items(1), {})

    message = "step 1 could not be saved in .*no step was saved since the start"
    with pytest.raises(SaveError, match=message):
        save_and_leave()


def test_a_mistake_of_ours_is_no_failed_save(opened, monkeypatch):
    checkpointer, said = opened

    def wrong(path):
        raise TypeError("sync_tree() takes 0 positional arguments")

    monkeypatch.setattr(durable, "sync_tree", wrong)
    checkpointer.save(2, items(2), {})
    with pytest.raises(TypeError, match="takes 0"):
        checkpointer.wait()


def test_without_room_for_it_nothing_of_a_checkpoint_is_written(tmp_path, monkeypatch):
    """Three leaves of 64 * 64 float32 are 49,152 B; the disk is said to have 49,151 free."""
    usage = run_folder.shutil.disk_usage(tmp_path)
    said = []
    with Checkpointer(folder_of(tmp_path), max_to_keep=None, say=said.append) as checkpointer:
        monkeypatch.setattr(run_folder.shutil, "disk_usage", lambda p: usage._replace(free=49151))
        assert checkpointer.save(1, items(1), {})
        assert len(said) == 1
        assert "step 1 could not be saved" in said[0]
        assert "0.0 MB are free but it takes 0.0 MB; no step was saved since the start" in said[0]
        assert os.listdir(folder_of(tmp_path)) == []
        monkeypatch.setattr(run_folder.shutil, "disk_usage", lambda p: usage._replace(free=49152))
        save_and_wait(checkpointer, 2)
        assert checkpointer.steps() == [2]


def test_a_save_that_takes_longer_than_its_time_has_failed(tmp_path, held_write):
    said = []
    options = dict(max_to_keep=None, timeout_s=0.1, say=said.append)
    with Checkpointer(folder_of(tmp_path), **options) as checkpointer:
        save_and_wait(checkpointer, 1)
        held_write.set()
    assert len(said) == 1
    assert "the arrays were not written within checkpoint_timeout_seconds; no step" in said[0]


def test_old_checkpoints_go_in_a_thread_that_no_save_waits_for(tmp_path, monkeypatch):
    folder = folder_of(tmp_path)
    may_go, begun = threading.Event(), threading.Event()
    threads = []
    rmtree = type(folder).rmtree

    def slow(path):
        begun.set()
        assert may_go.wait(60)
        threads.append(threading.current_thread())
        rmtree(path)

    monkeypatch.setattr(type(folder), "rmtree", slow)
    with Checkpointer(folder, max_to_keep=1) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, items(step), {}, last=True)
        assert begun.wait(60)
        assert checkpointer.steps() in ([2, 3], [3])  # 1 is no longer there, though its files are
        may_go.set()
        checkpointer.wait()
        assert checkpointer.steps() == [3]
    assert threads and threading.main_thread() not in threads


@pytest.fixture
def tmpfs(tmp_path):
    """A file system of 1 MB of memory."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_a_real_full_disk_and_a_real_read_only_one(tmpfs, monkeypatch, capfd):
    said = []
    folder = folder_of(tmpfs)
    monkeypatch.setattr(write_lib, "require_space", lambda *_: None)
    discard, discarded = write_lib.discard, []

    def noted(path):
        discard(path)
        discarded.append(path.name)

    monkeypatch.setattr(write_lib, "discard", noted)
    with Checkpointer(folder, max_to_keep=2, say=said.append) as checkpointer:
        checkpointer.save(1, items(1), {}, last=True)
        filler = tmpfs / "filler"
        filler.write_bytes(bytes(shutil.disk_usage(tmpfs).free - 40_000))
        save_and_wait(checkpointer, 2)
        assert len(said) == 1 and "No space left on device; the last step saved is 1." in said[0]
        assert checkpointer.steps() == [1]
        assert discarded == [f"2{write_lib.UNFINISHED}"]  # at once: it takes room
        late = folder / f"2{write_lib.UNFINISHED}" / "late"  # a thread of the failed save may write
        late.parent.mkdir(parents=True, exist_ok=True)
        late.write_text("")
        filler.unlink()
        checkpointer.save(3, items(3), {}, last=True)
        checkpointer.wait()
        assert set(os.listdir(folder)) == {"1", "3"}

        def remount(how):
            subprocess.run(["mount", "-o", f"remount,{how}", str(tmpfs)], check=True)

        remount("ro")
        save_and_wait(checkpointer, 4)
        assert len(said) == 2 and "Read-only file system; the last step saved is 3." in said[1]
        with pytest.raises(SaveError, match="step 5 could not be saved .*Read-only file system"):
            checkpointer.save(5, items(5), {}, last=True)
        remount("rw")
        assert checkpointer.restore(wanted).step == 3
        save_and_wait(checkpointer, 6)
        assert checkpointer.steps() == [3, 6]
    assert capfd.readouterr() == ("", "")


def test_the_seal_of_a_second_try_is_that_of_its_own_files(opened, monkeypatch):
    """The second try writes to a folder that no late write of the first one can touch."""
    checkpointer, _ = opened
    folders = []
    write = seal.write

    def fail_once(folder):
        folders.append(folder.name)
        if len(folders) == 1:
            raise OSError(errno.EIO, "Input/output error")
        write(folder)

    monkeypatch.setattr(seal, "write", fail_once)
    checkpointer.save(2, items(2), {}, last=True)
    assert folders == [f"2{write_lib.UNFINISHED}", f"2{write_lib.UNFINISHED}-1"]
    assert seal.damage(checkpointer._folder / "2") is None
