"""TensorBoard's event file: which steps it holds, and that its failures end no run."""

import errno
import os
import pathlib
import struct
import subprocess
import sys
import threading

import pytest
from tensorboardX import record_writer

from maxdiloco.metrics import tensorboard
from maxdiloco.metrics.writer import MetricsWriter
from maxdiloco.storage.run_folder import RunFolder, locate

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    found = locate(tmp_path, "run")
    found.path.mkdir()
    return found


def write(folder, steps, *, resume_step=None, say=lambda line: None):
    with MetricsWriter(folder, tensorboard=True, resume_step=resume_step, say=say) as writer:
        for step in steps:
            writer.write(step, {"learning/loss": 10.0 / step})


def events(folder):
    """(step, purged step or {name: value}) of all events, in order of the files' age."""
    from tensorboardX.proto import event_pb2

    found = []
    for path in sorted(folder.tensorboard.iterdir(), key=lambda path: os.stat(path).st_mtime_ns):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])  # then 4 bytes CRC, the event, 4 bytes CRC
            event = event_pb2.Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            if event.HasField("session_log"):
                found.append((event.step, "purge"))
            elif event.HasField("summary"):
                values = {value.tag: value.simple_value for value in event.summary.value}
                found.append((event.step, values))
    return found


def test_tensorboard_is_told_which_steps_come_again(folder):
    write(folder, [10, 20, 30])
    write(folder, [30], resume_step=20)
    found = events(folder)
    assert found == [
        (0, "purge"),
        (10, {"learning/loss": 1.0}),
        (20, {"learning/loss": 0.5}),
        (30, {"learning/loss": pytest.approx(1 / 3)}),
        (21, "purge"),
        (30, {"learning/loss": pytest.approx(1 / 3)}),
    ]


def test_a_text_is_written_as_text_and_numbers_beside_it_as_scalars(folder):
    """Tag and plugin are those that TensorBoard's tab of texts looks for."""
    from tensorboardX.proto import event_pb2

    with MetricsWriter(folder, tensorboard=True, resume_step=None) as writer:
        writer.write(1, {"eval/loss": 2.0})
        writer.write_text(1, "eval/sample", "a b\nc")
    (path,) = folder.tensorboard.iterdir()
    data, found = path.read_bytes(), {}
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        event = event_pb2.Event.FromString(data[12 : 12 + length])
        found |= {value.tag: value for value in event.summary.value}
        data = data[16 + length :]
    assert found["eval/loss"].simple_value == 2.0
    sample = found["eval/sample/text_summary"]
    assert sample.metadata.plugin_data.plugin_name == "text"
    assert sample.tensor.string_val[0].decode() == "    a b\n    c\n"
    assert len(folder.metrics.read_text().splitlines()) == 1


def rows_and_warnings(folder, count):
    """Write rows with TensorBoard; what was reported."""
    said = []
    write(folder, range(1, count + 1), say=said.append)
    assert len(folder.metrics.read_text().splitlines()) == count
    return said


def given_up(folder, why):
    return [
        f"warning: TensorBoard is given up for this run: {folder.tensorboard}: {why}. "
        "metrics.jsonl goes on."
    ]


def test_a_failed_write_of_the_event_file_is_one_warning_and_the_rows_go_on(folder, monkeypatch):
    """Many more rows than the queue takes, after the thread has ended: none waits for it."""
    written = []

    def full(self, data):
        written.append(data)
        if len(written) == 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(record_writer.RecordWriter, "write", full)
    said, count = [], 3 * tensorboard.MOST_WAITING
    with MetricsWriter(folder, tensorboard=True, resume_step=None, say=said.append) as writer:
        for step in range(1, count + 1):
            writer.write(step, {"learning/loss": 1.0})
            if step == 3:
                writer._events._thread.join(60)  # the fourth write is that of one of these rows
    assert said == given_up(folder, "No space left on device")
    assert len(written) == 4
    assert len(folder.metrics.read_text().splitlines()) == count


def test_an_event_file_that_cannot_be_made_is_one_warning(folder):
    folder.tensorboard.write_text("a file in the place of the folder")
    assert rows_and_warnings(folder, 3) == given_up(folder, "Not a directory")


def test_a_save_flushes_the_event_file(folder):
    """The recorder calls sync before each; then kill -9 loses no row before the checkpoint."""
    with MetricsWriter(folder, tensorboard=True, resume_step=None) as writer:
        for step in (10, 20):
            writer.write(step, {"learning/loss": 10.0 / step})
            writer.sync()
            assert events(folder)[-1] == (step, {"learning/loss": 10.0 / step})


def test_a_sync_on_a_disk_that_hangs_is_waited_for_once(folder, monkeypatch):
    hanging, waits = threading.Event(), []
    monkeypatch.setattr(record_writer.RecordWriter, "flush", lambda self: hanging.wait())
    for name in ("CLOSE_SECONDS", "SYNC_SECONDS"):
        monkeypatch.setattr(tensorboard, name, 0.05)
    real = threading.Event.wait
    monkeypatch.setattr(
        tensorboard.threading.Event,
        "wait",
        lambda event, seconds=None: waits.append(seconds) or real(event, seconds),
    )
    try:
        with MetricsWriter(folder, tensorboard=True, resume_step=None, say=print) as writer:
            for step in range(1, 9):
                writer.write(step, {"learning/loss": 1.0})
                writer.sync()
            assert waits.count(0.05) == 1
    finally:
        hanging.set()


def test_an_event_file_on_a_disk_that_hangs_holds_nobody_up(folder, monkeypatch):
    """Neither a row, when as many wait as may, nor the end of the run."""
    hanging = threading.Event()
    try:
        monkeypatch.setattr(record_writer.RecordWriter, "flush", lambda self: hanging.wait())
        monkeypatch.setattr(tensorboard, "MOST_WAITING", 5)
        monkeypatch.setattr(tensorboard, "CLOSE_SECONDS", 0.01)
        assert rows_and_warnings(folder, 4) == given_up(folder, "the last rows are not written yet")
        folder.metrics.unlink()
        assert rows_and_warnings(folder, 20) == given_up(folder, "5 rows wait to be written")
    finally:
        hanging.set()


def test_an_event_file_on_an_object_store_is_written_whole(folder, monkeypatch):
    """A local file stands in for the object."""
    write(folder, [10, 20])
    (path,) = folder.tensorboard.iterdir()
    file = tensorboard._RemoteFiles().open(folder.path / "copy")
    content = path.read_bytes()
    file.write(content[:100])
    file.flush()
    file.write(content[100:])
    file.flush()
    assert (folder.path / "copy").read_bytes() == content


def test_without_tensorboard_it_is_neither_imported_nor_written(folder):
    code = (
        "import sys; from maxdiloco.metrics.writer import MetricsWriter; "
        "from maxdiloco.storage.run_folder import locate; "
        "f = locate(sys.argv[1], 'run'); "
        "w = MetricsWriter(f, tensorboard=sys.argv[2] == 'yes', resume_step=None); "
        "w.__exit__(None, None, None); "
        "print('tensorboardX' in sys.modules, f.tensorboard.exists())"
    )
    for wanted, expected in (("no", "False False\n"), ("yes", "True True\n")):
        done = subprocess.run(
            [sys.executable, "-c", code, str(folder.path.parent), wanted],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert done.stdout == expected
