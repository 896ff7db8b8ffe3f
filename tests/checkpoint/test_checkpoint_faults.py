"""Saves that fail: one line, tried again, twice in a row the end; complete checkpoints stay."""

import asyncio
import errno
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading

import pytest
from checkpoint_tools import folder_of, items, save_and_wait, wanted

from maxdiloco.checkpoint import seal
from maxdiloco.checkpoint import write as write_lib
from maxdiloco.checkpoint.checkpointer import Checkpointer
from maxdiloco.errors import SaveError
from maxdiloco.storage import durable

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def opened(tmp_path):
    said = []
    with Checkpointer(folder_of(tmp_path), max_to_keep=None, say=said.append) as checkpointer:
        save_and_wait(checkpointer, 1)
        assert said == []
        yield checkpointer, said


def failing(module, name):
    def let_fail(monkeypatch, number):
        def fail(*args, **kwargs):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(module, name, fail)

    return let_fail


of_python = failing(durable, "sync_tree")  # as it does where a disk fills up or breaks
of_preparation = failing(write_lib, "prepare")


def of_orbax(monkeypatch, number):
    """Every array of a checkpoint fails to be written, each in a task of its own."""
    from orbax.checkpoint._src.serialization import serialization

    async def fail(*args, **kwargs):
        async def write():
            await asyncio.sleep(0.01)
            raise ValueError(f"RESOURCE_EXHAUSTED: Failed to write 5 bytes: {os.strerror(number)}")

        await asyncio.gather(write(), write(), write())

    monkeypatch.setattr(serialization, "async_serialize_from_host", fail)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("where", [of_python, of_orbax, of_preparation])
def test_a_failed_save_is_reported_and_two_in_a_row_exit_with_75(
    opened, monkeypatch, capfd, where, number
):
    """Full disk, quota, broken disk, read-only. No other library prints anything."""
    checkpointer, said = opened
    for step, broken in ((2, True), (3, False), (4, True)):  # a good one in between starts again
        with monkeypatch.context() as patch:
            if broken:
                where(patch, number)
            save_and_wait(checkpointer, step)
        assert checkpointer.steps() == ([1] if step == 2 else [1, 3])
        if not broken:
            assert sorted(os.listdir(checkpointer._folder)) == ["1", "3"]  # nothing is left of 2
            assert not checkpointer.save(3, items(3), {})  # there already
    where(monkeypatch, number)
    with pytest.raises(SaveError) as error:
        save_and_wait(checkpointer, 5)
    assert error.value.exit_code == 75
    for line, failed, good in ((said[0], 2, 1), (said[1], 4, 3), (str(error.value), 5, 3)):
        assert f"step {failed} " in line and os.strerror(number) in line
        assert re.search(rf"\b{good}\.", line), "the last step that was saved"
    assert str(error.value).startswith("base_output_directory: ")
    assert checkpointer.restore(wanted).step == 3
    assert len(said) == 2 and capfd.readouterr() == ("", "")


def test_a_save_that_fails_at_the_end_is_an_error_and_hides_none(tmp_path, monkeypatch):
    of_python(monkeypatch, errno.EIO)
    said = []

    def save_and_leave(error=None):
        with Checkpointer(folder_of(tmp_path), max_to_keep=1, say=said.append) as checkpointer:
            checkpointer.save(1, items(1), {})
            if error is not None:
                raise error

    with pytest.raises(SaveError, match="step 1 "):
        save_and_leave()
    with pytest.raises(ZeroDivisionError):
        save_and_leave(ZeroDivisionError())
    assert "step 1 " in said[-1] and os.strerror(errno.EIO) in said[-1]


def test_an_error_of_our_code_is_not_a_failed_save(opened, monkeypatch):
    checkpointer, said = opened

    def wrong(path):
        raise TypeError("of ours")

    monkeypatch.setattr(durable, "sync_tree", wrong)
    checkpointer.save(2, items(2), {})
    with pytest.raises(TypeError, match="of ours"):
        checkpointer.wait()


def test_a_save_that_takes_longer_than_its_time_has_failed(tmp_path, held_write):
    said = []
    options = dict(max_to_keep=None, timeout_s=0.1, say=said.append)
    with Checkpointer(folder_of(tmp_path), **options) as checkpointer:
        save_and_wait(checkpointer, 1)
        held_write.set()
    assert len(said) == 1 and "step 1 " in said[0]


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
    monkeypatch.setattr(write_lib, "free_bytes", lambda folder: None)
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
        assert len(said) == 1 and os.strerror(errno.ENOSPC) in said[0] and " 1." in said[0]
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
        assert len(said) == 2 and os.strerror(errno.EROFS) in said[1] and " 3." in said[1]
        with pytest.raises(SaveError, match=f"step 5 .*{os.strerror(errno.EROFS)}"):
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


SWEEP = """
import ctypes, errno, json, os, pathlib, sys
import jax, numpy as np
from maxdiloco.checkpoint import seal
from maxdiloco.checkpoint.checkpointer import Checkpointer
from maxdiloco.errors import SaveError
sys.path.insert(0, "tests")
from checkpoint_tools import folder_of, items, values, wanted

faults = ctypes.CDLL(os.environ["LD_PRELOAD"])
folder = folder_of(sys.argv[1])
below, never = str(folder).encode(), (1 << 31)

def arm(first, last, number):
    faults.faults_arm(below, ctypes.c_long(first), ctypes.c_long(last), number)

said = []
with Checkpointer(folder, max_to_keep=2, say=said.append) as checkpointer:
    for step in (1, 2, 3):  # the third removes the first
        arm(0, 0, 0)
        checkpointer.save(step, items(step), {}, last=True)
        checkpointer.wait()
    operations = faults.faults_count()

    def attempt(step, first, last, number):
        said.clear()
        arm(first, last, number)
        error = ""
        try:
            checkpointer.save(step, items(step), {}, last=True)
        except SaveError as failure:
            error = str(failure)
        checkpointer.wait()  # for the removal of old ones, which may fail too
        arm(0, 0, 0)
        restored = checkpointer.restore(wanted)
        checkpointer._known_good.clear()
        return restored, error, list(said)

    found, lasting = [], []
    for n in range(1, operations + 1):
        step += 1
        restored, error, lines = attempt(step, n, n, errno.EIO)
        same = np.array_equal(restored.items["state"]["b"], values(step + 1))
        found.append([restored.step == step and same and not error, lines])
    for n in range(1, operations, operations // 5):
        for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            step, newest = step + 1, checkpointer.steps()[-1]
            restored, error, lines = attempt(step, n, never, number)
            good = restored.step in (newest, step)
            lasting.append([good, error, os.strerror(number), lines])
print(json.dumps([operations, found, lasting]))
"""


def test_after_any_failed_file_operation_the_state_is_saved(tmp_path):
    """Each of the operations of a save fails once with EIO; and all from the n-th on.

    One that fails is made up for by the second try, so that the newest checkpoint is whole and
    holds the numbers of its step.
    """
    if shutil.which("gcc") is None:
        pytest.skip("no gcc to build the library that lets operations fail")
    library, source = tmp_path / "file_faults.so", ROOT / "tests" / "file_faults.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    sweep = [sys.executable, "-c", SWEEP, str(tmp_path / "out")]
    options = dict(cwd=ROOT, env=os.environ | {"LD_PRELOAD": str(library)})
    done = subprocess.run(sweep, capture_output=True, text=True, **options)
    assert done.returncode == 0 and done.stderr == "", done.stderr[-3000:]
    operations, found, lasting = json.loads(done.stdout)  # and nothing else is printed
    assert operations > 60
    for number, (whole, said) in enumerate(found, 1):
        assert whole, number
        assert len(said) <= 1, said
        assert all(line.startswith("warning: ") for line in said)
    failed = [said for _, said in found if said and "Input/output error" in said[0]]
    assert len(failed) > operations / 2, "the faults are seen at all"
    for whole, error, reason, said in lasting:
        assert whole
        assert error == "" or (reason in error and "\n" not in error)
        assert len(said) <= 2 and all(reason in line for line in said), said
    assert sum(error != "" for _, error, _, _ in lasting) > len(lasting) / 2


# Saves with so many free file descriptors each, which two of two tries fail; then one with enough.
FEW_DESCRIPTORS = """
import os
import resource
import sys

import jax
import jax.numpy as jnp

from maxdiloco import Checkpointer
from maxdiloco.errors import SaveError

jax.config.update("jax_platforms", "cpu")
items = {name: {"w": jnp.ones((64, 64)), "b": jnp.ones(64)} for name in ("params", "outer_params")}
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
with Checkpointer(sys.argv[1], max_to_keep=None) as saver:
    saver.save(0, items, {}, last=True)
    used = len(os.listdir("/proc/self/fd")) - 1
    for step, free in enumerate((0, 1, 3, 5, 8, 12, 16, 20), start=1):
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + free, hard))
        try:
            saver.save(step, items, {}, last=True)
        except SaveError as error:
            print("failed:", str(error).count(os.linesep), step)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    saver.save(100, items, {}, last=True)
    print(saver.steps())
"""


def test_no_file_descriptor_left_is_one_line_and_no_traceback(tmp_path):
    """Whatever a save opens that is one too many: an event loop, a socket, a file."""
    command = [sys.executable, "-c", FEW_DESCRIPTORS, str(tmp_path / "checkpoints")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stderr) == (0, "")
    lines = ended.stdout.splitlines()
    failed = [int(line.split()[2]) for line in lines if line.startswith("failed: 0 ")]
    assert failed[:4] == [1, 2, 3, 4]
    assert lines[-1] == str([0, *(step for step in range(1, 9) if step not in failed), 100])
