"""The folder of a run: made, locked, checked before anything is trained."""

import contextlib
import errno
import fcntl
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

from maxdiloco.errors import CheckpointError
from maxdiloco.storage import object_store, os_errors, run_lock
from maxdiloco.storage.run_folder import locate, open_run_folder, require_usable

ROOT = pathlib.Path(__file__).parents[2]


def child(code, *arguments):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, cwd=ROOT, **pipes)


def refused(base, find=open_run_folder, **options):
    """Why a run named run cannot have its folder."""
    with pytest.raises(CheckpointError) as error:
        find(str(base), "run", **options).__enter__()
    return str(error.value)


def test_the_folder_its_parents_and_its_parts_are_made(tmp_path, monkeypatch):
    """The path becomes absolute, as Orbax needs it."""
    monkeypatch.chdir(tmp_path)
    with open_run_folder("a/b", "run") as folder:
        assert folder.path.is_dir() and str(folder.path) == str(tmp_path / "a" / "b" / "run")
        names = [folder.checkpoints, folder.metrics, folder.tensorboard, folder.history]
        assert [path.relative_to(folder.path).as_posix() for path in names] == [
            "checkpoints", "metrics.jsonl", "tensorboard", "history.jsonl",
        ]  # fmt: skip
    assert os.listdir(folder.path) == ["lock"]


@pytest.mark.parametrize("name", ["", ".", "..", "a/b"])
def test_a_run_name_is_one_folder(name, tmp_path):
    with pytest.raises(CheckpointError, match=f"run_name='{re.escape(name)}' "):
        locate(tmp_path, name)


def test_a_name_that_differs_by_case_is_not_the_same_run(tmp_path, monkeypatch):
    """A link that is not listed stands in for the folder on a file system that ignores case."""
    with open_run_folder(str(tmp_path), "Abc"):
        pass
    with open_run_folder(str(tmp_path), "abc"):
        pass  # the control: another folder
    (tmp_path / "ABc").symlink_to("Abc")
    listed = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: [n for n in listed(path) if n[:2] != "AB"])
    with pytest.raises(CheckpointError, match="^run_name=ABc .*run_name=[Aa]bc"):
        with open_run_folder(str(tmp_path), "ABc"):
            pass
    assert listed(tmp_path / "Abc") == ["lock"]
    with open_run_folder(str(tmp_path), "Abc"):
        pass  # its own name resumes it


def test_a_second_run_of_one_name_is_refused_while_one_runs(tmp_path):
    """Only the first process of a run locks. Each makes the folder, in which it has a log."""
    with open_run_folder(str(tmp_path), "run", primary=False) as folder:
        assert os.listdir(folder.path) == []
    with open_run_folder(str(tmp_path), "run"):
        line = refused(tmp_path)
        for named in ("run_name=run ", f"process {os.getpid()} on ", f"{tmp_path}/run"):
            assert named in line
        for name, primary in (("another", True), ("run", False)):
            with open_run_folder(str(tmp_path), name, primary=primary) as folder:
                assert folder.path.exists()
    with open_run_folder(str(tmp_path), "run"):
        pass


@pytest.mark.parametrize("content", [b"user@host:42\n", bytes(range(256)), b"process 1 on a\nmine"])
def test_files_of_others_in_the_folder_of_a_run_stay_as_they_are(tmp_path, monkeypatch, content):
    """A file `lock` that no run wrote is locked and not written; nothing probes by a fixed name."""
    monkeypatch.setattr(run_lock, "LOCK_WAIT_S", 0.0)
    (tmp_path / "run").mkdir()
    files = [tmp_path / "run" / name for name in ("lock", "write-probe")]
    for path in files:
        path.write_bytes(content)
    with open_run_folder(str(tmp_path), "run"):
        assert "run_name=run " in refused(tmp_path)
    assert [path.read_bytes() for path in files] == [content] * 2


@pytest.mark.parametrize("left", [None, "", "process 999999999 on a-host-of-a-long-name\n"])
def test_the_lock_of_an_earlier_run_names_its_new_holder(tmp_path, left):
    """Also one that a kill or a full disk left empty."""
    lock = tmp_path / "run" / "lock"
    lock.parent.mkdir()
    if left is not None:
        lock.write_text(left)
    with open_run_folder(str(tmp_path), "run"):
        line = lock.read_text()
        assert line.startswith(f"process {os.getpid()} on {os.uname().nodename} (boot ")
        assert line == run_lock._own_line() + "\n"


HOLDER = """
import subprocess, sys, time
from maxdiloco.storage.run_folder import open_run_folder
with open_run_folder(sys.argv[1], "run"):
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    print(worker.pid, flush=True)
    time.sleep(60)
"""


def test_after_kill_9_the_lock_is_free_even_if_a_worker_remains(tmp_path):
    holder = child(HOLDER, tmp_path)
    worker = int(holder.stdout.readline())
    try:
        assert f"process {holder.pid} on" in refused(tmp_path)
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        os.kill(worker, 0)  # still there
        with open_run_folder(str(tmp_path), "run"):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)


@pytest.fixture
def held(tmp_path):
    """held(text): the lock of a run with that text in it; who holds it lets go when it is closed.

    A lock is that of an open file: another one of this process stands for another process's.
    """
    (tmp_path / "run").mkdir()
    with contextlib.ExitStack() as stack:

        def hold(text):
            file = stack.enter_context(open(tmp_path / "run" / "lock", "w"))
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(text)
            file.flush()
            return file

        yield hold


@pytest.mark.parametrize("name", ["process 1 on another-host", ""])
def test_the_lock_of_a_host_that_may_be_dead_is_waited_for(tmp_path, held, monkeypatch, name):
    """A file server lets go of it after a while. One line says that the run waits."""
    holder = held(name)
    said, slept = [], []
    with monkeypatch.context() as patch:
        patch.setattr(run_lock, "LOCK_WAIT_S", 0.05)
        error = refused(tmp_path, warn=said.append)
    assert f"{name or 'another process'} " in error and len(said) == 1

    def let_go(seconds):
        if len(slept) == 2:
            holder.close()
        slept.append(seconds)

    monkeypatch.setattr(run_lock.time, "sleep", let_go)
    with open_run_folder(str(tmp_path), "run", warn=said.append):
        pass
    assert len(slept) == 3
    (line,) = said[1:]
    assert "run_name=run " in line and f"{name or 'another process'}" in line and "120 s" in line


def test_a_holder_that_lives_on_this_host_is_refused_at_once(tmp_path, held, monkeypatch):
    monkeypatch.setattr(run_lock.time, "sleep", lambda s: pytest.fail("waited"))
    held(f"process {os.getppid()} on here ({run_lock._moment(os.getppid())})")
    assert f"process {os.getppid()} on here " in refused(tmp_path)


@pytest.mark.parametrize("number", [1, 0, 999999999])  # 0: its own; the last is above any pid_max
@pytest.mark.parametrize("change", ["", "start", "boot"])
def test_a_lock_of_a_dead_process_of_that_number_is_waited_for(
    tmp_path, held, monkeypatch, number, change
):
    """As process 1 of a container's successor sees it on NFS; the host's name is the same too.
    A child of a process that has ended may hold the lock a little longer."""
    number = number or os.getpid()
    moment = run_lock._moment(number) or run_lock._moment(1)
    if change == "start":
        moment = re.sub(r"start \d+", "start 0", moment)
    if change == "boot":
        moment = re.sub(r"boot [0-9a-f]{4}", "boot 0000", moment)
    line = f"process {number} on {os.uname().nodename}" + (f" ({moment})" if change else "")
    holder, slept = held(line), []

    def let_go(seconds):
        slept.append(seconds)
        holder.close()

    monkeypatch.setattr(run_lock.time, "sleep", let_go)
    with open_run_folder(str(tmp_path), "run", warn=lambda line: None):
        assert len(slept) == 1


def test_a_place_is_looked_at_before_the_folder_is_made(tmp_path):
    """Control: a place that can be written passes, and nothing is made in it."""
    require_usable(str(tmp_path / "new" / "runs"), "run")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    for base in ("/proc/runs", tmp_path / "file"):
        for find in (require_usable, open_run_folder):
            line = refused(base, find)
            assert f"base_output_directory={base} " in line and "run_name=run" in line


def test_a_full_disk_is_found_before_training(tmp_path):
    """A limit on the size of files stands in for the disk: the probe cannot be written."""
    code = "import resource, sys; from maxdiloco.storage.run_folder import open_run_folder\n"
    code += "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
    code += "open_run_folder(sys.argv[1], 'run').__enter__()"
    text = child(code, tmp_path).communicate()[1]
    assert f"base_output_directory={tmp_path} " in text and "File too large" in text
    assert os.listdir(tmp_path / "run") == ["lock"]


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch):
    def no_locks(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    said = []
    with open_run_folder(str(tmp_path), "run", warn=said.append):
        pass
    (line,) = said
    assert "No locks available" in line and "run_name=run" in line


@pytest.mark.parametrize("url", ["gs://bucket", "s3://bucket/a", "az://bucket"])
def test_a_bucket_without_the_library_names_the_package(monkeypatch, url):
    monkeypatch.setattr(object_store.BucketPath, "_buckets", {})
    monkeypatch.setitem(sys.modules, "obstore", None)
    line = refused(url)
    assert f"base_output_directory={url} " in line and "obstore" in line


def test_the_reason_of_an_error_is_its_last_words():
    layers = 'while doing "x": Failed to write 5 bytes: Disk full [code=1]\nmore: here'
    full = "No space left on device"
    assert os_errors.reason(OSError(errno.ENOSPC, full)) == full
    assert os_errors.reason(ValueError()) == "ValueError"
    assert os_errors.reason(ValueError(layers)) == "Failed to write 5 bytes: Disk full"
