"""metrics.jsonl: a row for each step, also after a kill and a resume; history.jsonl: each start."""

import errno
import io
import json
import math
import os
import re
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from maxdiloco.engine.trainer import Description
from maxdiloco.errors import CheckpointError, Preempted
from maxdiloco.metrics import history, line_files
from maxdiloco.metrics.writer import MetricsWriter, row
from maxdiloco.run import recorder


def steps_in(folder):
    return [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()]


def writer(folder, resume_step=None, say=lambda line: None):
    return MetricsWriter(folder, tensorboard=False, resume_step=resume_step, say=say)


def write(folder, steps, **options):
    with writer(folder, **options) as rows:
        for step in steps:
            rows.write(step, {"learning/loss": 10.0 / step})


class Device(np.ndarray):
    """What jax.Array does: float() of one element."""


def test_a_row_is_json_that_is_in_the_file_when_write_returns(folder):
    """One-element arrays are numbers and counts stay whole; RFC 8259 has no NaN."""
    rows = writer(folder)  # which is not closed
    loss = np.array(2.5, np.float32).view(Device)
    rows.write(10, {"learning/loss": loss, "dcn/bytes_sent": np.int64(4096)})
    assert folder.metrics.read_text() == (
        '{"step": 10, "learning/loss": 2.5, "dcn/bytes_sent": 4096}\n'
    )
    for value in (math.nan, math.inf, -math.inf):
        assert row(3, {"loss": value, "lr": 0.1}) == '{"step": 3, "loss": null, "lr": 0.1}'


def test_a_step_is_written_once_also_by_a_run_that_goes_on(folder):
    write(folder, [10, 20])
    with writer(folder, resume_step=20) as rows:
        for step in (20, 19):
            with pytest.raises(ValueError, match=f"step={step} .* 20"):
                rows.write(step, {})
        rows.write(30, {})
        with pytest.raises(ValueError, match="step=30"):
            rows.write(30, {})


def test_a_resume_drops_rows_after_the_checkpoint_a_new_run_all(folder):
    """Killed after step 50, resumed from the checkpoint of step 30: 40 and 50 come again. A clean
    resume leaves the file and says nothing."""
    write(folder, [10])
    write(folder, [10, 20, 30, 40, 50])
    said = []
    write(folder, [40, 50, 60], resume_step=30, say=said.append)
    assert steps_in(folder) == [10, 20, 30, 40, 50, 60]
    (line,) = said
    assert re.findall(r"\d+", line) == ["3", "2", "0"], "rows kept, dropped, broken"
    before = os.stat(folder.metrics).st_ino
    write(folder, [], resume_step=60, say=pytest.fail)
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
    assert [re.findall(r"\d+", line)[-1] for line in said] == ["1"] * lost


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
    monkeypatch.setattr(line_files, "STALL_S", 60.0)  # as long as a busy machine needs
    return found


@pytest.mark.parametrize(
    ("until", "error", "lines", "raised"),
    [
        (90, None, 2, None),  # one line when it fails and one when it works again
        (1000, None, 1, CheckpointError),
        # A loss that is not finite ends with its own exit code, whatever the disk does.
        (1000, ArithmeticError("not finite"), 2, ArithmeticError),
    ],
)
def test_on_a_full_disk_rows_wait_until_there_is_space(folder, disk, until, error, lines, raised):
    """From step 20 to step `until`; rows that stay unwritten are an error at the end."""
    told = []

    def run():
        with writer(folder, say=told.append) as rows:
            for step in range(1, 101):
                disk.room = 1000 if 20 <= step < until else math.inf
                rows.write(step, {"learning/loss": 1.0})
            if error:
                raise error

    with pytest.raises(raised) if raised else nullcontext() as caught:
        run()
    assert len(told) == lines and all(str(folder.metrics) in line for line in told)
    if raised is CheckpointError:
        assert str(caught.value).startswith("base_output_directory: ")
    if not raised:
        assert steps_in(folder) == list(range(1, 101))
    disk.room = math.inf
    write(folder, [100], resume_step=5)
    assert steps_in(folder) == [1, 2, 3, 4, 5, 100]


def test_rows_of_a_file_that_was_removed_are_an_error(folder):
    """The kernel would accept them, for a file without a name."""
    writer = MetricsWriter(folder, tensorboard=False, resume_step=None)
    writer.write(1, {"a": 1})
    folder.metrics.unlink()
    writer.write(2, {"a": 1})
    writer.write(3, {"a": 1})
    with pytest.raises(CheckpointError, match=f"base_output_directory: .*{folder.metrics}"):
        writer.__exit__(None, None, None)


def test_the_history_has_a_line_for_each_start_and_end(folder, monkeypatch):
    """An error is the reason of an end, and is raised."""
    assert history.read_history(folder) == []
    times = iter([10.0, 20.0, 30.0, 40.0, 50.0])
    monkeypatch.setattr(history.time, "time", lambda: next(times))
    with history.History(folder, {"step": 0, "processes": 2}):
        assert len(history.read_history(folder)) == 1
    history.History(folder, {"step": 5, "processes": 1})
    assert history.read_history(folder) == [
        {"event": "start", "time": 10.0, "step": 0, "processes": 2},
        {"event": "end", "time": 20.0, "why": ""},
        {"event": "start", "time": 30.0, "step": 5, "processes": 1},
    ]
    with pytest.raises(Preempted), history.History(folder, {}):
        raise Preempted("SIGTERM after\nstep 3")
    assert history.read_history(folder)[-1]["why"] == "Preempted: SIGTERM after\\nstep 3"


def test_a_torn_history_is_continued_and_a_folder_named(folder, capsys):
    """A folder in the place of metrics.jsonl is an error."""
    folder.history.write_text('{"event": "sta')
    with history.History(folder, {"step": 7}):
        assert [event["event"] for event in history.read_history(folder)] == ["start"]
    folder.history.unlink()
    folder.history.mkdir()
    history.History(folder, {}).__exit__(None, None, None)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2 and all(str(folder.history) in line for line in said)
    folder.metrics.mkdir()
    with pytest.raises(CheckpointError, match=str(folder.metrics)):
        writer(folder)


@pytest.mark.parametrize(("H", "sent"), [(3, [7, 8, 9]), (10**9, None)])
def test_the_line_of_a_start_has_the_bytes_of_the_third_period(folder, H, sent):
    """From the third on all exchanges of a period before are under way; a long one is cut."""
    trainer = SimpleNamespace(period=H, num_replicas=2, bytes_sent=lambda t: t)
    trainer.description = Description("", (), reduce_scatter=True)
    parts = SimpleNamespace(trainer=trainer, mesh=SimpleNamespace(size=4))
    with recorder.open_history(parts, folder, done=5, total=9):
        (line,) = history.read_history(folder)
    assert (line["step"], line["until"], line["replicas"], line["devices"]) == (5, 9, 2, 4)
    assert line["reduce_scatter"] is True
    assert line["bytes_sent"] == sent or len(line["bytes_sent"]) == history.MAX_STEPS
