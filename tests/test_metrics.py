"""Rows of metrics.jsonl and TensorBoard: one a step, also after a kill and a resume."""

import json
import os
import pathlib
import resource
import signal
import struct
import subprocess
import sys

import numpy as np
import pytest

from maxdiloco import metrics
from maxdiloco.errors import CheckpointError
from maxdiloco.metrics import MetricsWriter, row, spread
from maxdiloco.run_folder import RunFolder, locate

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    found = locate(tmp_path, "run")
    found.path.mkdir()
    return found


def rows(folder):
    return [json.loads(line) for line in folder.metrics.read_text().splitlines()]


def write(folder, steps, *, resume_step=None, tensorboard=False, report=lambda line: None):
    with MetricsWriter(
        folder, tensorboard=tensorboard, resume_step=resume_step, report=report
    ) as writer:
        for step in steps:
            writer.write(step, {"learning/loss": 10.0 / step})


def test_a_row_is_an_object_with_its_step_and_the_names(folder):
    with MetricsWriter(folder, tensorboard=False, resume_step=None) as writer:
        writer.write(10, {"learning/loss": 2.5, "dcn/bytes_sent": 4096})
        assert rows(folder) == [{"step": 10, "learning/loss": 2.5, "dcn/bytes_sent": 4096}]


def test_a_row_is_in_the_file_when_write_returns(folder):
    writer = MetricsWriter(folder, tensorboard=False, resume_step=None)
    writer.write(1, {"a": 1.0})
    assert len(rows(folder)) == 1


def test_one_element_arrays_are_numbers_and_counts_stay_whole():
    class Device(np.ndarray):  # what jax.Array does: float() of one element
        pass

    with_array = np.array(0.5, np.float32).view(Device)
    line = row(1, {"a": metrics._number(with_array), "b": metrics._number(np.int64(7))})
    assert line == '{"step": 1, "a": 0.5, "b": 7}'


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_null_so_that_the_row_is_json(value):
    """RFC 8259 has no NaN; a strict reader must accept the row."""

    def refuse(name):
        raise AssertionError(name)

    line = row(3, {"learning/loss": value, "learning/lr": 0.1})
    assert json.loads(line, parse_constant=refuse) == {
        "step": 3,
        "learning/loss": None,
        "learning/lr": 0.1,
    }


def test_a_step_is_written_once(folder):
    with MetricsWriter(folder, tensorboard=False, resume_step=None) as writer:
        writer.write(5, {"a": 1.0})
        for step in (5, 4):
            with pytest.raises(ValueError, match=f"step={step} .*last row's step 5: gather all"):
                writer.write(step, {"b": 1.0})


def test_resume_drops_the_rows_beyond_the_checkpoint(folder):
    """Killed after step 50, resumed from the checkpoint of step 30: 40 and 50 come again."""
    write(folder, [10, 20, 30, 40, 50])
    said = []
    write(folder, [40, 50, 60], resume_step=30, report=said.append)
    assert [found["step"] for found in rows(folder)] == [10, 20, 30, 40, 50, 60]
    assert said == [
        "metrics.jsonl: 3 rows kept, 2 later rows and 0 broken lines of an earlier life of this "
        "run dropped"
    ]


def test_a_resumed_run_cannot_write_a_step_that_is_there(folder):
    write(folder, [10, 20])
    with MetricsWriter(folder, tensorboard=False, resume_step=20) as writer:
        with pytest.raises(ValueError, match="step=20"):
            writer.write(20, {})


def test_a_run_that_starts_anew_starts_an_empty_file(folder):
    write(folder, [10, 20])
    write(folder, [10], resume_step=None)
    assert [found["step"] for found in rows(folder)] == [10]


def test_a_clean_resume_leaves_the_file_and_says_nothing(folder):
    write(folder, [10, 20])
    before = os.stat(folder.metrics).st_ino
    said = []
    write(folder, [], resume_step=20, report=said.append)
    assert os.stat(folder.metrics).st_ino == before
    assert said == []


@pytest.mark.parametrize("torn", ['{"step": 30, "learning/lo', '{"step"', "\0\0\0", "17"])
def test_a_torn_last_line_is_repaired(folder, torn):
    write(folder, [10, 20])
    with open(folder.metrics, "a") as file:
        file.write(torn)
    said = []
    write(folder, [30], resume_step=20, report=said.append)
    assert [found["step"] for found in rows(folder)] == [10, 20, 30]
    assert "1 broken lines" in said[0]


def test_a_row_that_only_lacks_its_newline_is_kept(folder):
    write(folder, [10])
    with open(folder.metrics, "a") as file:
        file.write('{"step": 20}')
    write(folder, [30], resume_step=20)
    assert [found["step"] for found in rows(folder)] == [10, 20, 30]


WRITER = """
import os, signal, sys
from maxdiloco.metrics import MetricsWriter
from maxdiloco.run_folder import locate
writer = MetricsWriter(locate(sys.argv[1], "run"), tensorboard=True, resume_step=None)
for step in range(1, 10**9):
    writer.write(step, {"learning/loss": 1.0 / step, "learning/lr": 0.1})
    if step == 200:
        print("ready", flush=True)
"""


def test_kill_9_while_writing_loses_nothing_before_the_checkpoint(folder, tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "ready\n"
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    write(folder, [101, 102], resume_step=100)
    assert [found["step"] for found in rows(folder)] == list(range(1, 103))


FULL = """
import resource, sys
from maxdiloco.errors import CheckpointError
from maxdiloco.metrics import MetricsWriter
from maxdiloco.run_folder import locate
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
writer = MetricsWriter(locate(sys.argv[1], "run"), tensorboard=False, resume_step=None)
try:
    for step in range(1, 1000):
        writer.write(step, {"learning/loss": 1.0})
except CheckpointError as error:
    print(error)
"""


def test_a_full_disk_is_one_line(folder, tmp_path):
    """A limit on the size of files stands in for the disk: the write fails the same way."""
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout == (
        f"base_output_directory: cannot write {folder.metrics}: File too large. Free some space "
        "or set another folder.\n"
    )
    write(folder, [100], resume_step=5)
    assert [found["step"] for found in rows(folder)] == [1, 2, 3, 4, 5, 100]


def test_a_folder_in_the_place_of_the_file_is_one_line(folder):
    folder.metrics.mkdir()
    with pytest.raises(CheckpointError, match=r"cannot write .*metrics.jsonl: Is a directory"):
        MetricsWriter(folder, tensorboard=False, resume_step=None)


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
    write(folder, [10, 20, 30], tensorboard=True)
    write(folder, [30], tensorboard=True, resume_step=20)
    found = events(folder)
    assert found == [
        (0, "purge"),
        (10, {"learning/loss": 1.0}),
        (20, {"learning/loss": 0.5}),
        (30, {"learning/loss": pytest.approx(1 / 3)}),
        (21, "purge"),
        (30, {"learning/loss": pytest.approx(1 / 3)}),
    ]


def test_without_tensorboard_it_is_neither_imported_nor_written(folder):
    code = (
        "import sys; from maxdiloco.metrics import MetricsWriter; "
        "from maxdiloco.run_folder import locate; "
        "f = locate(sys.argv[1], 'run'); "
        "MetricsWriter(f, tensorboard=sys.argv[2] == 'yes', resume_step=None); "
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


def test_rows_on_an_object_store_are_written_whole_and_not_at_every_step(tmp_path):
    """gs:// cannot append. A local file stands in for the object, counted steps for the clock."""
    now = [0.0]
    path = tmp_path / "metrics.jsonl"
    sink = remote_rows(path, lambda: now[0])
    sink.write("a")
    assert not path.exists()
    now[0] = metrics.REMOTE_FLUSH_SECONDS
    sink.write("b")
    assert path.read_text() == "old\na\nb\n"
    sink.write("c")
    sink.sync()  # as before a save
    assert path.read_text() == "old\na\nb\nc\n"
    path.unlink()
    sink.close()  # nothing new
    assert not path.exists()


def test_rows_are_not_written_over_those_of_a_run_that_has_taken_the_lock(tmp_path):
    def require_lock():
        if lost:
            raise CheckpointError("lost")

    path = tmp_path / "metrics.jsonl"
    lost = False
    sink = remote_rows(path, lambda: 0.0, require_lock=require_lock)
    sink.write("a")
    lost = True
    for write in (sink.sync, sink.close, lambda: sink.write("b")):
        with pytest.raises(CheckpointError, match="lost"):
            write()
    assert not path.exists()


def remote_rows(path, clock, require_lock=lambda: None):
    return metrics._RemoteRows(path, "old\n", clock, require_lock)


def test_spread_names_the_mean_and_each_replica():
    assert spread("learning/loss", [1.0, 2.0, 6.0]) == {
        "learning/loss": 3.0,
        "learning/loss_replica_0": 1.0,
        "learning/loss_replica_1": 2.0,
        "learning/loss_replica_2": 6.0,
    }


def test_the_limit_on_file_sizes_is_not_in_force_here():
    """The full-disk test sets it in a child only."""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
