"""Whatever a store does: who uses it loses nothing, doubles nothing, and ends in one clear line.

Each user runs once for every request that it makes, with a fault at that request, and once more
without one, as a restart does.
"""

import json

import faulty_store
import pytest
from fake_gcs import BUCKET

from maxdiloco.errors import CheckpointError, ConfigError
from maxdiloco.metrics import line_files, line_writer
from maxdiloco.metrics.history import History, read_history
from maxdiloco.metrics.writer import MetricsWriter
from maxdiloco.storage import durable, object_lock, output_file
from maxdiloco.storage.object_lock import ObjectLock
from maxdiloco.storage.os_errors import reason
from maxdiloco.storage.run_folder import absolute, locate, open_run_folder

BASE = f"az://{BUCKET}/runs"


@pytest.fixture(autouse=True)
def times(monkeypatch):
    monkeypatch.setattr(object_lock, "RENEW_S", 0.01)
    monkeypatch.setattr(object_lock, "STALE_S", 0.05)
    monkeypatch.setattr(line_files, "CHUNK_S", 0.0)
    monkeypatch.setattr(line_writer, "RETRY_S", 0.01)


def words_of(error):
    """The one line that a user reads of an error."""
    line = reason(error) if isinstance(error, OSError) else str(error)
    assert line and "\n" not in line and "Debug source" not in line
    return line


def attempt(use):
    """use(), whose failure is a clear line; whether it went well."""
    try:
        use()
    except (CheckpointError, ConfigError, OSError) as error:
        words_of(error)
        return False
    return True


def with_faults(faulty, kind, use):
    """use() with a fault at each of its requests in turn; gives whether it went well each time."""
    faulty.calls.clear()
    use()
    for number in range(len(faulty.calls)):
        faulty.calls.clear()
        faulty.fault = faulty_store.at(number, kind)
        went_well = attempt(use)
        faulty.fault = lambda number, function: None
        yield went_well


@pytest.mark.parametrize("kind", faulty_store.KINDS)
def test_the_lock(faulty, kind):
    """Never held by two, never left behind for good, and not lost to the run that has it."""
    path = absolute(f"{BASE}/a/lock")

    def lock():
        return ObjectLock(path, key="run_name=a", otherwise="wait", say=lambda line: None)

    def hold():
        with lock() as held:
            held.require()
            assert not lock()._write(None)

    for went_well in with_faults(faulty, kind, hold):
        assert went_well or kind not in ("delay", "late", "412")
        hold()  # a lock that a failed start has left goes stale
        assert faulty.names() == []


@pytest.mark.parametrize("kind", faulty_store.KINDS)
def test_the_rows_and_the_history(faulty, kind):
    """Every step once, whatever failed: a row that could not be written is written later."""
    folder = locate(BASE, "a")

    def live(first):
        with (
            History(folder, {"step": first}),
            MetricsWriter(folder, tensorboard=False, resume_step=first) as writer,
        ):
            for step in range(first + 1, first + 4):
                writer.write(step, {"loss": step / 2})
            writer.sync()

    def steps():
        line_files.read(folder.metrics)  # the listing that lacks what is new
        rows = [json.loads(row) for row in (line_files.read(folder.metrics) or b"").splitlines()]
        assert all(row["loss"] == row["step"] / 2 for row in rows)
        return [row["step"] for row in rows]

    for went_well in with_faults(faulty, kind, lambda: live(0)):
        assert steps() == [1, 2, 3] or not went_well
        kept = [step for step in steps() if step <= 3]
        live(3)  # as a restart after a save of step 3
        assert steps() == [*kept, 4, 5, 6]
        assert [event["event"] for event in read_history(folder)][-2:] == ["start", "end"]


@pytest.mark.parametrize("kind", faulty_store.KINDS)
def test_a_file_that_takes_the_place_of_another(faulty, kind):
    """The report, the index of lines: the old content or the new, and no part."""
    place = f"{BASE}/page.html"

    def write():
        output_file.check_path("out", place)
        output_file.write_whole("out", place, b"new" * 1000)

    for _ in with_faults(faulty, kind, write):
        content = faulty.content()
        assert content.pop("runs/page.html", b"new" * 1000) == b"new" * 1000
        assert not any(content.values())  # a probe whose removal failed is empty


@pytest.mark.parametrize("kind", ["429", "503", "lost"])
def test_a_store_that_stays_away_is_named_with_its_status(faulty, kind):
    faulty.fault = faulty_store.from_on(0, kind)
    with pytest.raises(CheckpointError) as error:
        open_run_folder(BASE, "a").__enter__()
    line = words_of(error.value)
    assert f"base_output_directory={BASE} " in line and "run_name=a" in line
    assert kind == "lost" or f"({kind})" in line


def test_a_body_that_is_cut_is_no_content(faulty):
    path = absolute(f"{BASE}/a")
    path.write_text("whole")
    faulty.fault = lambda number, function: "cut"
    with pytest.raises(OSError, match="runs/a .* 0 to 5"):
        path.read_text()
    with pytest.raises(OSError, match="runs/a .* 1 to 3"):
        path.bucket().get_range("runs/a", 1, 3)


def test_replacing_writes_under_the_name_itself(faulty):
    """An object appears whole, so none lies beside it."""
    with durable.atomic_write(absolute(f"{BASE}/a")) as path:
        path.write_text("x")
    assert faulty.calls == ["put"] and faulty.content() == {"runs/a": b"x"}
