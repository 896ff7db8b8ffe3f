"""Rows of metrics.jsonl: one a step, also after a kill and a resume."""

import json
import os
import pathlib
import resource
import signal
import subprocess
import sys

import numpy as np
import pytest

from maxdiloco.errors import CheckpointError
from maxdiloco.metrics import line_files
from maxdiloco.metrics import writer as writer_lib
from maxdiloco.metrics.writer import MetricsWriter, row
from maxdiloco.storage.run_folder import RunFolder, locate

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    found = locate(tmp_path, "run")
    found.path.mkdir()
    return found


def rows(folder):
    return [json.loads(line) for line in folder.metrics.read_text().splitlines()]


def write(folder, steps, *, resume_step=None, tensorboard=False, say=lambda line: None):
    with MetricsWriter(
        folder, tensorboard=tensorboard, resume_step=resume_step, say=say
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
    line = row(1, {"a": writer_lib._number(with_array), "b": writer_lib._number(np.int64(7))})
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
    write(folder, [40, 50, 60], resume_step=30, say=said.append)
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
    write(folder, [], resume_step=20, say=said.append)
    assert os.stat(folder.metrics).st_ino == before
    assert said == []


@pytest.mark.parametrize("torn", ['{"step": 30, "learning/lo', '{"step"', "\0\0\0", "17"])
def test_a_torn_last_line_is_repaired(folder, torn):
    write(folder, [10, 20])
    with open(folder.metrics, "a") as file:
        file.write(torn)
    said = []
    write(folder, [30], resume_step=20, say=said.append)
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
from maxdiloco.metrics.writer import MetricsWriter
from maxdiloco.storage.run_folder import locate
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
from maxdiloco.metrics.writer import MetricsWriter
from maxdiloco.storage.run_folder import locate
infinity = resource.RLIM_INFINITY
try:
    with MetricsWriter(locate(sys.argv[1], "run"), tensorboard=False, resume_step=None) as writer:
        for step in range(1, 101):
            if step == 20:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000, infinity))
            if step == int(sys.argv[2]):
                resource.setrlimit(resource.RLIMIT_FSIZE, (infinity, infinity))
            writer.write(step, {"learning/loss": 1.0})
        if sys.argv[3:]:
            raise ArithmeticError("another error")
except (CheckpointError, ArithmeticError) as error:
    print(f"{type(error).__name__}: {error}")
"""


def on_a_full_disk(folder, *arguments):
    """What a child prints whose disk is full from step 20 on, until a step.

    A limit on the size of files stands in for the disk: a write takes a part, the next one fails.
    """
    command = [sys.executable, "-c", FULL, str(folder.path.parent), *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == ""
    return done.stdout.replace(str(folder.metrics), "FILE").splitlines()


CANNOT = "base_output_directory: cannot write FILE: File too large."
LOST = f"{CANNOT} The rows since then are lost."
REMEDY = (
    "The training is not: free some space, and the same command goes on from the last checkpoint."
)


def test_on_a_full_disk_rows_wait_until_there_is_space_again(folder):
    """One line at each turn, and a file without a gap."""
    said = on_a_full_disk(folder, 90)
    assert said == [f"warning: {CANNOT} Its rows are kept for later.", "FILE is written again."]
    assert [found["step"] for found in rows(folder)] == list(range(1, 101))


def test_rows_that_stay_unwritten_are_an_error_at_the_end(folder):
    said = on_a_full_disk(folder, 1000)
    assert said[1:] == [f"CheckpointError: {LOST} {REMEDY}"]
    write(folder, [100], resume_step=5)
    assert [found["step"] for found in rows(folder)] == [1, 2, 3, 4, 5, 100]


def test_rows_that_stay_unwritten_do_not_hide_another_error(folder):
    """A loss that is not finite ends with its own exit code, whatever the disk does."""
    said = on_a_full_disk(folder, 1000, "raise")
    assert said[1:] == [f"warning: {LOST}", "ArithmeticError: another error"]


def test_a_folder_in_the_place_of_the_file_is_one_line(folder):
    folder.metrics.mkdir()
    with pytest.raises(CheckpointError, match=r"cannot write .*metrics.jsonl: Is a directory"):
        MetricsWriter(folder, tensorboard=False, resume_step=None)


def test_rows_on_an_object_store_are_written_whole_and_not_at_every_step(tmp_path):
    """gs:// cannot append. A local file stands in for the object, counted steps for the clock."""
    now = [0.0]
    path = tmp_path / "metrics.jsonl"
    sink = remote_rows(path, lambda: now[0])
    sink.write("a")
    assert not path.exists()
    now[0] = line_files.REMOTE_FLUSH_SECONDS
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
    return line_files.RemoteLines(path, "old\n", clock, require_lock)


def test_the_limit_on_file_sizes_is_not_in_force_here():
    """The full-disk test sets it in a child only."""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
