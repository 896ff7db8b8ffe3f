"""Rows and event files from another source: a page or one line, never a traceback."""

import itertools
import json
import math
import os
import struct

import pytest
import synthetic_runs
from etils import epath
from tensorboardX.proto import event_pb2

from maxdiloco.report import __main__ as report
from maxdiloco.report import event_files, run_data

pytestmark = pytest.mark.filterwarnings("error")
MOST = 3.4e38  # of a float32
VALUES = (0, -1, MOST, -MOST, 1e300, 10**400, 1e-300, None, True)
NAMES = tuple(synthetic_runs.row(10, replicas=2))[1:]


def event(step, values, wall_time=1.0):
    """A record of an event file with scalars by their tags."""
    found = event_pb2.Event(step=step, wall_time=wall_time)
    for tag, value in values.items():
        found.summary.value.add(tag=tag, simple_value=value)
    data = found.SerializeToString()
    return struct.pack("<Q", len(data)) + bytes(4) + data + bytes(4)


def reported(folder, capsys):
    """The exit code of a report, and what it prints to standard error."""
    code = report.main([str(folder), f"out={folder.parent / 'page.html'}"])
    return code, capsys.readouterr().err


HEALTHY = event(7, {"learning/loss": 2.0}) + event(9, {"learning/loss": 1.0})
BAD_EVENTS = {
    "tag step": event(1, {"step": math.nan}) + event(8, {"step": 5.0}),
    "steps": event(-1, {"a": 1.0}) + event(-(2**63), {"a": 1.0}) + event(2**63 - 1, {"a": 1.0}),
    "length": HEALTHY + struct.pack("<Q", 2**64 - 1) + bytes(100),
    "no event": HEALTHY + struct.pack("<Q", 50) + b"\xff" * 58,
}


@pytest.mark.parametrize("kind", BAD_EVENTS)
def test_a_bad_record_of_an_event_file_is_left_out(kind, tmp_path, capsys):
    folder = epath.Path(tmp_path) / "a"
    folder.mkdir()
    (folder / "events.out.tfevents.1.x").write_bytes(HEALTHY + BAD_EVENTS[kind])
    assert reported(folder, capsys) == (0, "")
    (found,) = run_data.load([str(folder)], base_output_directory="runs", defaults={})
    assert found.steps.tolist() == [7, 9]
    assert found.columns["learning/loss"].tolist() == [2, 1]


@pytest.mark.parametrize("value", [math.nan, math.inf, MOST, -MOST, 0.0])
def test_no_value_of_an_event_file_ends_the_report(value, tmp_path, capsys):
    tags = [*NAMES, *event_files.NAMES, event_files.STEP_TOKENS, event_files.WALL_TIME, "<b>", ""]
    times = (1.0, value, -1.7e308, 1.7e308)
    content = b"".join(
        event(step, dict.fromkeys(tags, value) | {"learning/loss": 1.0}, wall_time)
        for step, wall_time in enumerate(times)
    )
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "events.out.tfevents.1.x").write_bytes(content)
    assert reported(tmp_path / "a", capsys) == (0, "")


@pytest.mark.parametrize("config", [synthetic_runs.CONFIG, None])
@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_no_value_of_a_row_ends_the_report(value, config, tmp_path, capsys):
    """One in each second row, and then in all, in the columns of a healthy run."""
    rows = [synthetic_runs.row(t, replicas=2) for t in range(1, 41)]
    rows += [dict.fromkeys([*NAMES, "dcn/waited_s", "learning/loss_replica_x"], value)] * 40
    bad = [row | {"step": 2 * t} for t, row in enumerate(rows)]
    for t, row in itertools.islice(enumerate(bad), 0, 40, 2):
        row |= dict.fromkeys(NAMES, value) | {"step": 2 * t}
    folder = synthetic_runs.write(tmp_path / "a", steps=0, config=config)
    synthetic_runs.append(folder / "metrics.jsonl", *bad)
    assert reported(folder, capsys) == (0, "")


@pytest.mark.parametrize("line", ["9" * 6000, "[" * 100_000, json.dumps({"step": True}), "\0" * 99])
def test_a_hostile_line_is_a_broken_line(line, tmp_path):
    content = f'{{"step": {line}}}\n{line}\n{{"step": 1}}\n'.encode()
    steps, _, notes = run_data.parse(content)
    assert steps.tolist() == [1] and notes[0].startswith("2 ")


@pytest.mark.parametrize("name", ["metrics.jsonl", "history.jsonl", "events.out.tfevents.1.x"])
def test_a_file_that_never_ends_is_refused(name, tmp_path, capsys):
    """A FIFO has no writer, and a link to a device fills the memory."""
    folder = synthetic_runs.write(tmp_path / "a", steps=0 if name.startswith("e") else 5)
    if name.startswith("e"):
        (folder / "metrics.jsonl").unlink()
    (folder / name).unlink(missing_ok=True)
    for make in (os.mkfifo, lambda path: os.symlink("/dev/zero", path)):
        make(folder / name)
        code, error = reported(folder, capsys)
        assert code == 2 and len(error.splitlines()) == 1 and f"RUN={folder}" in error
        (folder / name).unlink()
