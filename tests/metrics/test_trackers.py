"""Where else the rows go: TensorBoard and wandb, and that their failures end no run."""

import errno
import importlib
import json
import os
import struct
import sys
import threading

import pytest
from run import names_key, train
from tensorboardX import record_writer
from tensorboardX.proto import event_pb2

from maxdiloco.errors import ConfigError
from maxdiloco.metrics import line_files
from maxdiloco.metrics.writer import MetricsWriter


def opened(folder, *, say=lambda line: None, **options):
    return MetricsWriter(folder, say=say, **{"tensorboard": True, "resume_step": None} | options)


def write(folder, steps, **options):
    with opened(folder, **options) as writer:
        for step in steps:
            writer.write(step, {"learning/loss": 10.0 / step})


def steps_in(folder):
    return [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()]


def records(folder):
    for path in sorted(folder.tensorboard.iterdir(), key=lambda path: os.stat(path).st_mtime_ns):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])  # then 4 bytes CRC, the event, 4 bytes CRC
            yield event_pb2.Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]


def events(folder):
    """(step, "purge" or {name: value}) of each record that has one."""
    found = []
    for event in records(folder):
        if event.HasField("session_log"):
            found.append((event.step, "purge"))
        elif event.HasField("summary"):
            values = {value.tag: value.simple_value for value in event.summary.value}
            found.append((event.step, values))
    return found


def test_tensorboardx_is_imported_in_a_thread_before_a_row(folder, monkeypatch):
    """Rows wait for the import and block nothing: two imports at once would wait for each other's
    parts of the package. Without TensorBoard nothing is imported."""
    imported, ready = [], threading.Event()

    def slow(name):
        ready.wait(60)
        imported.append(name)

    monkeypatch.setattr(importlib, "import_module", slow)
    with opened(folder, tensorboard=False) as writer:
        writer.import_ahead()
    with opened(folder) as writer:
        writer.import_ahead()
        writer.write(10, {"learning/loss": 1.0})
        writer.sync()
        assert not folder.tensorboard.exists()
        threading.Timer(0.2, ready.set).start()
    assert imported == ["tensorboardX.summary"]
    assert [step for step, _ in events(folder)] == [0, 10]


def test_tensorboardx_that_cannot_be_imported_ends_no_run(folder, monkeypatch):
    for name in ("tensorboardX", "tensorboardX.proto.event_pb2"):
        monkeypatch.setitem(sys.modules, name, None)
    said = []
    with opened(folder, say=said.append) as writer:
        writer.import_ahead()
        writer.write(10, {"learning/loss": 1.0})
    assert len(said) == 1 and "TensorBoard" in said[0] and steps_in(folder) == [10]


def test_tensorboard_is_told_which_steps_come_again(folder):
    """In records with the checksums that tensorboardX writes."""
    write(folder, [10, 20, 30])
    (path,) = folder.tensorboard.iterdir()
    again = record_writer.RecordWriter(str(folder.path / "again"))
    for event in records(folder):
        again.write(event.SerializeToString())
    again.close()
    assert (folder.path / "again").read_bytes() == path.read_bytes()
    write(folder, [30], resume_step=20)
    ten, twenty, thirty = (
        (step, {"learning/loss": pytest.approx(10 / step)}) for step in (10, 20, 30)
    )
    assert events(folder) == [(0, "purge"), ten, twenty, thirty, (21, "purge"), thirty]


def test_a_text_is_text_and_a_save_flushes_the_event_file(folder):
    """Tag and plugin are those that TensorBoard's tab of texts looks for. The recorder calls sync
    before each save; then kill -9 loses no row before the checkpoint."""
    with opened(folder) as writer:
        writer.write(1, {"eval/loss": 2.0})
        writer.write_text(1, "eval/sample", "a b\nc")
        for step in (10, 20):
            writer.write(step, {"learning/loss": 10.0 / step})
            writer.sync()
            assert events(folder)[-1] == (step, {"learning/loss": 10.0 / step})
    found = {value.tag: value for event in records(folder) for value in event.summary.value}
    assert found["eval/loss"].simple_value == 2.0
    sample = found["eval/sample/text_summary"]
    assert sample.metadata.plugin_data.plugin_name == "text"
    assert sample.tensor.string_val[0].decode() == "    a b\n    c\n"
    assert steps_in(folder) == [1, 10, 20]


def given_up(folder, why, count):
    """Write some rows with TensorBoard, which fails with one warning."""
    said = []
    write(folder, range(1, count + 1), say=said.append)
    assert steps_in(folder) == list(range(1, count + 1))
    assert len(said) == 1 and str(folder.tensorboard) in said[0] and why in said[0]


def test_a_failed_event_file_is_one_warning_and_ends_no_run(folder, monkeypatch):
    append, failed = line_files.FileTarget.append, []

    def full(self, line):
        if b"learning/loss" in line and not line.startswith(b"{"):
            failed.append(line)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return append(self, line)

    monkeypatch.setattr(line_files.FileTarget, "append", full)
    monkeypatch.setattr(line_files, "STALL_S", 60.0)  # as long as a busy machine needs
    given_up(folder, "No space left on device", 30)
    assert len(failed) == 1


def test_an_event_file_that_cannot_be_made_is_one_warning(folder):
    folder.tensorboard.write_text("a file in the place of the folder")
    given_up(folder, "File exists", 3)


# What only looks like wandb.
WANDB = """
import types
class Error(Exception): pass
errors = types.SimpleNamespace(Error=Error)
calls = []
refuses = set()
class Run:
    def log(self, values, step):
        if "log" in refuses: raise Error("quota")
        calls.append(("log", step, values))
    def finish(self): calls.append(("finish",))
def init(**options):
    if "init" in refuses: raise Error("no login")
    calls.append(("init", options))
    return Run()
"""


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    yield importlib.import_module("wandb")
    sys.modules.pop("wandb", None)


IN_WANDB = {"tensorboard": False, "wandb_config": {"steps": 9}}


def test_rows_go_to_wandb_and_a_restart_resumes_the_same_run(folder, wandb):
    write(folder, [2, 4], **IN_WANDB)
    write(folder, [5], resume_step=4, **IN_WANDB)
    first, *rows, second, row, _ = wandb.calls
    assert rows[:2] == [("log", 2, {"learning/loss": 5}), ("log", 4, {"learning/loss": 2.5})]
    assert rows[2:] == [("finish",)]
    assert (first, row) == (second, ("log", 5, {"learning/loss": 2}))
    options = first[1]
    assert options.items() >= dict(project="maxdiloco", name="run", resume="allow").items()
    assert options["config"] == {"steps": 9} and options["id"]


def test_a_row_wandb_refuses_is_one_warning_and_a_run_an_error(folder, wandb):
    wandb.refuses.add("log")
    said = []
    write(folder, [2, 4], say=said.append, **IN_WANDB)
    assert len(said) == 1 and "wandb" in said[0] and "quota" in said[0]
    assert steps_in(folder) == [2, 4]
    wandb.refuses.add("init")
    with pytest.raises(ConfigError, match="enable_wandb.*no login"):
        write(folder, [2], **IN_WANDB)


def test_without_wandb_no_folder_of_the_run_is_made(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # what makes an import fail
    run = train(tmp_path / "runs" / "w", enable_wandb="true")
    assert run.code == 2 and names_key(run.error, "enable_wandb")
    assert not (tmp_path / "runs").exists()
