"""Rows, log and TensorBoard's file of a run in a bucket: numbered chunks, uploaded by a thread."""

import contextlib
import json
import re
import threading
import time

import pytest
from tensorboardX.proto import event_pb2
from tiers import full

from maxdiloco.errors import CheckpointError
from maxdiloco.metrics import line_files, line_writer
from maxdiloco.metrics.console import Console
from maxdiloco.metrics.line_files import ChunkTarget
from maxdiloco.metrics.line_writer import LineWriter
from maxdiloco.metrics.writer import MetricsWriter
from maxdiloco.report import event_files, run_data
from maxdiloco.storage.run_folder import locate

BASE = "az://bucket/runs"
WAIT_S = 60.0  # far longer than anything here takes


@pytest.fixture
def bucket_run(faulty, monkeypatch):
    """The folder of a run in the bucket."""
    monkeypatch.setattr(line_writer, "RETRY_S", 0.01)
    return locate(BASE, "a")


def writer(folder, *, resume_step=None, tensorboard=False, say=lambda line: None):
    return MetricsWriter(folder, tensorboard=tensorboard, resume_step=resume_step, say=say)


def write(folder, steps, **options):
    with writer(folder, **options) as rows:
        for step in steps:
            rows.write(step, {"learning/loss": 10.0 / step})


def steps_in(folder):
    lines = (line_files.read(folder.metrics) or b"").splitlines()
    return [json.loads(line)["step"] for line in lines]


def until(condition):
    limit = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


@pytest.mark.parametrize("count", [200_000, full(1_000_000)])
def test_rows_transfer_at_most_1_1_times_their_size(faulty, bucket_run, monkeypatch, count):
    """With a chunk each 50 ms, and 20 saves. What is transferred does not depend on how many."""
    monkeypatch.setattr(line_files, "CHUNK_S", 0.05)
    with writer(bucket_run) as rows:
        for step in range(1, count + 1):
            rows.write(step, {"learning/loss": 1 / step, "perf/step_time": 0.1})
            if step % (count // 20) == 0:
                rows.sync()
    chunks = line_files.chunks_of(bucket_run.metrics)
    assert len(chunks) >= 20  # one a save at the least
    content = line_files.read(bucket_run.metrics)
    assert faulty.uploaded <= 1.1 * len(content)
    assert content.count(b"\n") == count
    assert content.endswith(b"\n") and json.loads(content.splitlines()[-1])["step"] == count


def test_all_files_of_a_run_transfer_at_most_1_1_times(faulty, bucket_run, monkeypatch):
    """Of a log and an event file too, in a chunk of 100 rows each or so."""
    monkeypatch.setattr(line_files, "CHUNK_S", 0.05)
    console = Console(shown=False)
    log = bucket_run.path / "log.txt"
    with console.logging(log), writer(bucket_run, tensorboard=True) as rows:
        for step in range(1, 10_001):
            rows.write(step, {"learning/loss": 1 / step})
            console.say(f"step {step}")
    stored = sum(map(len, faulty.content().values()))
    assert stored > 10_000 * 100 and faulty.uploaded <= 1.1 * stored
    assert line_files.read(log).count(b"step ") == 10_000


def test_no_request_is_made_in_the_training_thread(faulty, bucket_run):
    """Neither by rows, texts and lines, nor before a save, nor at the end."""
    console = Console(shown=False)
    log = bucket_run.path / "log.txt"
    with contextlib.ExitStack() as stack:
        rows = stack.enter_context(writer(bucket_run, tensorboard=True))
        assert threading.get_ident() in faulty.threads  # it has read the rows of an earlier start
        faulty.threads.clear()
        stack.enter_context(console.logging(log))
        for step in (1, 2):
            rows.write(step, {"learning/loss": 1.0})
            rows.write_text(step, "eval/sample", "text")
            console.say("line")
            rows.sync()
        rows.write(3, {"learning/loss": 1.0})
    assert faulty.threads and threading.get_ident() not in faulty.threads
    assert steps_in(bucket_run) == [1, 2, 3]
    assert line_files.read(log).count(b"line\n") == 2


def test_a_store_that_answers_nothing_holds_up_no_row(faulty, bucket_run, monkeypatch):
    monkeypatch.setattr(line_files, "CHUNK_S", 0.0)
    asked, answers = threading.Event(), threading.Event()

    def hold(number, function):
        asked.set()
        answers.wait(WAIT_S)

    with writer(bucket_run, tensorboard=True) as rows:
        faulty.fault = hold
        rows.write(1, {"learning/loss": 1.0})
        assert asked.wait(WAIT_S)
        for step in range(2, 1001):
            rows.write(step, {"learning/loss": 1.0})
        assert "runs/a/metrics/000001.jsonl" not in faulty.names()
        answers.set()
    assert steps_in(bucket_run) == list(range(1, 1001))


def test_a_store_that_fails_is_one_line_and_loses_no_row(faulty, bucket_run, monkeypatch):
    """TensorBoard's file continues too."""
    monkeypatch.setattr(line_files, "CHUNK_S", 0.0)
    said = []
    with writer(bucket_run, tensorboard=True, say=said.append) as rows:
        faulty.fault = lambda number, function: "503"
        for step in range(1, 101):
            rows.write(step, {"learning/loss": 1.0})
            time.sleep(0.001)
        rows.sync()
        rows.sync()
        assert len(said) == 1 and "(503)" in said[0]
        faulty.fault = lambda number, function: None
        rows.sync()
        rows.write(101, {"learning/loss": 1.0})
    assert len(said) == 2 and str(bucket_run.metrics) in said[1]
    assert steps_in(bucket_run) == list(range(1, 102))
    found = event_files.rows(event_files.find(bucket_run.path / "tensorboard"))
    assert [row["step"] for row in found] == list(range(1, 102))


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, ArithmeticError])
def test_every_end_of_a_run_uploads_the_rest(bucket_run, error):
    with contextlib.suppress(KeyboardInterrupt, ArithmeticError), writer(bucket_run) as rows:
        rows.write(1, {"learning/loss": 1.0})
        if error:
            raise error
    assert steps_in(bucket_run) == [1]


@pytest.mark.parametrize("hangs", [True, False])
def test_at_the_end_a_store_has_a_deadline(faulty, bucket_run, monkeypatch, hangs):
    monkeypatch.setattr(line_files, "UPLOAD_S", 0.2)
    answers = threading.Event()
    rows = writer(bucket_run)
    rows.write(1, {"learning/loss": 1.0})
    faulty.fault = lambda *call: (hangs and answers.wait(WAIT_S) and None) or "503"
    begun = time.monotonic()
    with pytest.raises(CheckpointError, match="^base_output_directory: "):
        rows.__exit__(None, None, None)
    assert time.monotonic() - begun < WAIT_S / 2
    answers.set()


def test_a_killed_run_keeps_what_is_older_than_a_chunk_may_be(bucket_run, monkeypatch):
    """A file that nobody closes or writes to any more: its lines are stored all the same."""
    monkeypatch.setattr(line_files, "CHUNK_S", 0.1)
    rows = writer(bucket_run)
    rows.write(1, {"learning/loss": 1.0})
    rows.write(2, {"learning/loss": 1.0})
    until(lambda: steps_in(bucket_run) == [1, 2])
    assert line_files.CHUNK_S < 60


def test_a_resume_drops_later_rows_and_continues_the_chunks(faulty, bucket_run):
    """A chunk with rows on both sides of the checkpoint is cut, later ones are removed."""
    write(bucket_run, [1, 2])
    write(bucket_run, [3, 4, 5], resume_step=2)
    write(bucket_run, [6, 7], resume_step=5)
    faulty.calls.clear()
    said = []
    write(bucket_run, [5, 6], resume_step=4, say=said.append)
    assert steps_in(bucket_run) == [1, 2, 3, 4, 5, 6]
    assert re.findall(r"\d+", said[0])[:2] == ["4", "3"], "rows kept, dropped"
    names = [path.name for path in line_files.chunks_of(bucket_run.metrics)]
    assert names == ["000001.jsonl", "000002.jsonl", "000003.jsonl"]
    assert faulty.calls.count("put") == 2  # the cut one and the new one
    write(bucket_run, [1])
    assert steps_in(bucket_run) == [1]


def test_a_chunk_that_a_listing_lacks_is_not_overwritten(faulty, bucket_run):
    write(bucket_run, [1, 2])
    faulty._unlisted["runs/a/metrics/000001.jsonl"] = 2  # for the start and for the upload
    write(bucket_run, [3], resume_step=2)
    assert steps_in(bucket_run) == [1, 2, 3]


def test_a_run_that_has_lost_its_lock_uploads_no_more(faulty, bucket_run):
    lost = False

    def require_lock():
        if lost:
            raise CheckpointError("lost")

    folder = bucket_run.path / "metrics"
    sink = LineWriter(ChunkTarget(folder, require_lock, suffix=".jsonl"), require_lock)
    sink.write(b"a\n")
    sink.sync()
    sink.write(b"b\n")
    lost = True
    for use in (sink.sync, sink.close, lambda: sink.write(b"c\n")):
        with pytest.raises(CheckpointError, match="lost"):
            use()
    assert faulty.content() == {"runs/a/metrics/000001.jsonl": b"a\n"}


def test_while_a_store_is_away_the_newest_lines_stay(faulty, bucket_run, monkeypatch):
    """In a memory that does not grow. The lines of an upload under way are kept besides."""
    monkeypatch.setattr(line_writer, "MAX_PENDING_BYTES", 100)
    monkeypatch.setattr(line_files, "CHUNK_S", WAIT_S)
    sink = LineWriter(ChunkTarget(bucket_run.path / "log", lambda: None))
    for number in range(1000):
        sink.write(b"%9d\n" % number)
    sink.close()
    assert [int(x) for x in faulty.content()["runs/a/log/000001"].split()] == [*range(990, 1000)]


def test_each_chunk_of_an_event_file_is_an_event_file(faulty, bucket_run):
    """The first record says the version; the order of the names is that of the rows."""
    with writer(bucket_run, tensorboard=True) as rows:
        for step in range(1, 13):
            rows.write(step, {"learning/loss": 1.0 / step})
            rows.sync()
    content = faulty.content()
    names = sorted(name for name in content if "/tensorboard/events.out.tfevents." in name)
    assert len(names) == 12
    for name in names:
        length = int.from_bytes(content[name][:8], "little")
        first = event_pb2.Event.FromString(content[name][12 : 12 + length])
        assert first.file_version == "brain.Event:2"
    found = event_files.rows(event_files.find(bucket_run.path / "tensorboard"))
    assert [(row["step"], row["learning/loss"]) for row in found] == [
        (step, pytest.approx(1.0 / step)) for step in range(1, 13)
    ]


def test_the_report_reads_chunks_and_a_copied_run_goes_on(faulty, bucket_run, tmp_path):
    """In a folder that was copied from the bucket, rows go to one file again."""
    write(bucket_run, [1, 2])
    write(bucket_run, [3], resume_step=2)
    for name, content in faulty.content().items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    copy = locate(tmp_path / "runs", "a")
    for folder in (bucket_run, copy):
        (found,) = run_data.load([str(folder.path)], base_output_directory="runs", defaults={})
        assert found.steps.tolist() == [1, 2, 3]
    write(copy, [3, 4], resume_step=2)
    assert [json.loads(line)["step"] for line in copy.metrics.read_text().splitlines()] == [
        1, 2, 3, 4,
    ]  # fmt: skip
    assert line_files.chunks_of(copy.metrics) == []


def test_a_run_that_began_on_a_disk_goes_on_in_a_bucket(faulty, bucket_run):
    """Its file, which lacks the last newline, comes before the chunks."""
    bucket_run.metrics.write_text('{"step": 1}\n{"step": 2}')
    write(bucket_run, [3], resume_step=2)
    assert steps_in(bucket_run) == [1, 2, 3]
