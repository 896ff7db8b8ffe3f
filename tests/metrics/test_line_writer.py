"""Lines are written in a thread: a slow target stalls no step, and a kill loses nothing stored."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import tensorboardX.summary  # noqa: F401  takes seconds, which are not those of a write
from etils import epath

from maxdiloco.metrics import line_files
from maxdiloco.metrics.line_files import FileTarget
from maxdiloco.metrics.line_writer import LineWriter
from maxdiloco.metrics.writer import MetricsWriter

WAIT_S = 60.0  # far longer than anything here takes


@pytest.fixture
def target(tmp_path, monkeypatch):
    """A file whose append waits until `released` is set."""
    monkeypatch.setattr(line_files, "STALL_S", 0.2)
    found = FileTarget(epath.Path(tmp_path / "lines"))
    found.path, found.released = tmp_path / "lines", threading.Event()
    append = found.append

    def slow(data):
        assert found.released.wait(WAIT_S)
        return append(data)

    found.append = slow
    yield found
    found.released.set()


def test_a_disk_that_hangs_stalls_one_write_for_a_moment(target):
    """100 lines take one stall of 0.2 s, not 100; all are stored once the disk answers."""
    writer = LineWriter(target)
    begun = time.monotonic()
    for number in range(100):
        writer.write(b"%d\n" % number)
    took, found = time.monotonic() - begun, target.path.read_bytes()
    target.released.set()
    writer.close()
    assert 0.2 <= took < 100 * 0.2 / 2 and found == b""
    assert target.path.read_bytes().split() == [b"%d" % number for number in range(100)]


def test_after_a_hang_lines_are_stored_when_write_returns(target, monkeypatch):
    target.stall_s = WAIT_S
    target.released.set()
    writer = LineWriter(target)
    writer.write(b"a\n")
    target.released.clear()
    target.stall_s = 0.05
    writer.write(b"b\n")
    target.stall_s = WAIT_S
    target.released.set()
    writer.sync()
    writer.write(b"c\n")
    assert target.path.read_bytes() == b"a\nb\nc\n"


def test_sync_waits_for_a_slow_disk(target, monkeypatch):
    """Longer than a write does, and until the file is forced to the disk."""
    synced = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number).st_size))
    writer = LineWriter(target)
    writer.write(b"a\n")
    threading.Timer(0.5, target.released.set).start()
    writer.sync()
    assert target.released.is_set() and target.path.read_bytes() == b"a\n"
    assert synced[0] == 2  # and then the folder


def test_a_failed_sync_is_an_error_and_the_next_one_is_not(target, monkeypatch):
    target.released.set()
    writer = LineWriter(target)
    sync, errors = target.sync, [OSError(errno.EIO, "Broken")]

    def broken():
        if errors:
            raise errors.pop()
        sync()

    target.sync = broken
    writer.write(b"a\n")
    with pytest.raises(OSError, match="Broken"):
        writer.sync()
    writer.sync()
    writer.close()
    assert target.path.read_bytes() == b"a\n"


KILLED = """
import os, signal, sys
from maxdiloco.metrics import line_files
from maxdiloco.metrics.writer import MetricsWriter
from maxdiloco.storage.run_folder import locate
line_files.STALL_S = 60.0
folder = locate(sys.argv[1], "run")
folder.path.mkdir()
writer = MetricsWriter(folder, tensorboard=True, resume_step=None)
for step in range(1, 101):
    writer.write(step, {"learning/loss": 1.0})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_kill_9_after_a_write_loses_no_row(tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path], timeout=120)
    assert done.returncode == -signal.SIGKILL
    rows = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert rows.count(b"\n") == 100 and rows.startswith(b'{"step": 1,')
    (events,) = (tmp_path / "run" / "tensorboard").iterdir()
    assert events.read_bytes().count(b"learning/loss") == 100


def test_a_step_does_not_wait_for_a_disk_that_hangs(folder, monkeypatch):
    """All files of a run: one stall each."""
    append, released = FileTarget.append, threading.Event()

    def slow(self, data):
        assert released.wait(WAIT_S)
        return append(self, data)

    monkeypatch.setattr(line_files, "STALL_S", 0.5)
    monkeypatch.setattr(FileTarget, "append", slow)
    with MetricsWriter(folder, tensorboard=True, resume_step=None) as writer:
        begun = time.monotonic()
        for step in range(1, 101):
            writer.write(step, {"learning/loss": 1.0})
        took = time.monotonic() - begun
        found = folder.metrics.read_bytes()
        released.set()
    assert took < 100 * 0.5 / 2 and found == b""
    assert folder.metrics.read_bytes().count(b"\n") == 100
