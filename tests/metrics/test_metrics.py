"""Rows of metrics.jsonl: one a step, also after a kill and a resume."""

import errno
import io
import json
import math
import os
from types import SimpleNamespace

import numpy as np
import pytest

from maxdiloco.errors import CheckpointError
from maxdiloco.metrics import line_files
from maxdiloco.metrics import writer as writer_lib
from maxdiloco.metrics.writer import MetricsWriter, row


def steps_in(folder):
    return [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()]


def writer(folder, resume_step=None, say=lambda line: None):
    return MetricsWriter(folder, tensorboard=False, resume_step=resume_step, say=say)


def write(folder, steps, **options):
    with writer(folder, **options) as rows:
        for step in steps:
            rows.write(step, {"learning/loss": 10.0 / step})


def test_a_row_is_an_object_that_is_in_the_file_when_write_returns(folder):
    rows = writer(folder)  # which is not closed
    rows.write(10, {"learning/loss": 2.5, "dcn/bytes_sent": 4096})
    assert folder.metrics.read_text() == (
        '{"step": 10, "learning/loss": 2.5, "dcn/bytes_sent": 4096}\n'
    )


def test_one_element_arrays_are_numbers_and_counts_stay_whole():
    class Device(np.ndarray):  # what jax.Array does: float() of one element
        pass

    with_array = np.array(0.5, np.float32).view(Device)
    line = row(1, {"a": writer_lib._number(with_array), "b": writer_lib._number(np.int64(7))})
    assert line == '{"step": 1, "a": 0.5, "b": 7}'


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_null_so_that_the_row_is_json(value):
    """RFC 8259 has no NaN."""
    assert row(3, {"loss": value, "lr": 0.1}) == '{"step": 3, "loss": null, "lr": 0.1}'


def test_a_step_is_written_once_also_by_a_run_that_goes_on(folder):
    write(folder, [10, 20])
    with writer(folder, resume_step=20) as rows:
        for step in (20, 19):
            with pytest.raises(ValueError, match=f"step={step} .*last row's step 20: gather all"):
                rows.write(step, {})
        rows.write(30, {})
        with pytest.raises(ValueError, match="step=30"):
            rows.write(30, {})


def test_resume_drops_the_rows_beyond_the_checkpoint(folder):
    """Killed after step 50, resumed from the checkpoint of step 30: 40 and 50 come again."""
    write(folder, [10, 20, 30, 40, 50])
    said = []
    write(folder, [40, 50, 60], resume_step=30, say=said.append)
    assert steps_in(folder) == [10, 20, 30, 40, 50, 60]
    assert said == [
        "metrics.jsonl: 3 rows kept, 2 later rows and 0 broken lines of an earlier life of this "
        "run dropped"
    ]


def test_a_run_that_starts_anew_starts_an_empty_file(folder):
    write(folder, [10, 20])
    write(folder, [10])
    assert steps_in(folder) == [10]


def test_a_clean_resume_leaves_the_file_and_says_nothing(folder):
    write(folder, [10, 20])
    before = os.stat(folder.metrics).st_ino
    write(folder, [], resume_step=20, say=pytest.fail)
    assert os.stat(folder.metrics).st_ino == before


@pytest.mark.parametrize(
    ("torn", "lost"),
    [
        ('{"step": 30, "learning/lo', 1),
        ('{"step"', 1),
        ("\0\0\0", 1),
        ("17", 1),
        ('{"step": 20}', 0),  # which lacks its newline only
    ],
)
def test_a_torn_last_line_is_repaired(folder, torn, lost):
    write(folder, [10])
    with open(folder.metrics, "a") as file:
        file.write(torn)
    said = []
    write(folder, [30], resume_step=20, say=said.append)
    assert steps_in(folder) == ([10, 30] if lost else [10, 20, 30])
    assert [line.partition("rows and ")[2][:14] for line in said] == ["1 broken lines"] * lost


@pytest.fixture
def disk(monkeypatch):
    """A disk with room for so many bytes of a file: a write takes a part, the next one fails."""
    found = SimpleNamespace(room=math.inf)

    class File(io.FileIO):
        def write(self, line):
            taken = min(len(line), found.room - os.fstat(self.fileno()).st_size)
            if taken <= 0:
                raise OSError(errno.ENOSPC, "Full")
            return super().write(line[:taken])

    monkeypatch.setattr(line_files, "open", lambda path, mode, **_: File(path, mode), raising=False)
    return found


def on_a_full_disk(folder, disk, until, error=None):
    """(what a run of 100 steps says whose disk is full from step 20 until another, its error)."""
    said = []

    def run():
        with writer(folder, say=said.append) as rows:
            for step in range(1, 101):
                disk.room = 1000 if 20 <= step < until else math.inf
                rows.write(step, {"learning/loss": 1.0})
            if error:
                raise error

    found = None
    try:
        run()
    except (CheckpointError, ArithmeticError) as caught:
        found = str(caught)
    return [line.replace(str(folder.metrics), "FILE") for line in said], found


CANNOT = "base_output_directory: cannot write FILE: Full."
WAITS = f"warning: {CANNOT} Its rows are kept for later."


def test_on_a_full_disk_rows_wait_until_there_is_space_again(folder, disk):
    """One line at each turn, and a file without a gap."""
    assert on_a_full_disk(folder, disk, 90) == ([WAITS, "FILE is written again."], None)
    assert steps_in(folder) == list(range(1, 101))


def test_rows_that_stay_unwritten_are_an_error_at_the_end(folder, disk):
    said, error = on_a_full_disk(folder, disk, 1000)
    assert said == [WAITS]
    assert error.replace(str(folder.metrics), "FILE") == (
        f"{CANNOT} The rows since then are lost. The training is not: free some space, and the "
        "same command goes on from the last checkpoint."
    )
    disk.room = math.inf
    write(folder, [100], resume_step=5)
    assert steps_in(folder) == [1, 2, 3, 4, 5, 100]


def test_rows_that_stay_unwritten_do_not_hide_another_error(folder, disk):
    """A loss that is not finite ends with its own exit code, whatever the disk does."""
    said, error = on_a_full_disk(folder, disk, 1000, ArithmeticError("another error"))
    assert said == [WAITS, f"warning: {CANNOT} The rows since then are lost."]
    assert error == "another error"


def test_a_folder_in_the_place_of_the_file_is_one_line(folder):
    folder.metrics.mkdir()
    with pytest.raises(CheckpointError, match=r"cannot write .*metrics.jsonl: Is a directory"):
        writer(folder)


def remote_rows(path, clock, require_lock=lambda: None):
    """A local file stands in for the object."""
    return line_files.RemoteLines(path, "old\n", clock, require_lock)


def test_rows_on_an_object_store_are_written_whole_and_not_at_every_step(tmp_path):
    """gs:// cannot append."""
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
    sink = remote_rows(path, lambda: 0.0, require_lock)
    sink.write("a")
    lost = True
    for write in (sink.sync, sink.close, lambda: sink.write("b")):
        with pytest.raises(CheckpointError, match="lost"):
            write()
    assert not path.exists()
