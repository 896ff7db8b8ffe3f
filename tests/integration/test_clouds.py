"""Runs on gs://, on s3://, against moto, and on az://, in memory: the bits of runs on a disk."""

import threading

import pytest
from etils import epath
from run import (
    CLUSTER_KEYS,
    STEPS,
    assert_exit_codes,
    names_key,
    refused,
    start_cluster,
    train,
)
from run_files import assert_equal_runs, logged_steps, metrics_rows, saved_steps
from s3_server import BUCKET
from tiers import full

from maxdiloco import hf
from maxdiloco.checkpoint import staging
from maxdiloco.metrics import line_files
from maxdiloco.report import __main__ as report
from maxdiloco.run.recorder import Recorder
from maxdiloco.storage import object_store, store

pytestmark = pytest.mark.usefixtures("programs")

LONGER = STEPS + 2
# The trainer, for which a lock is stale after three seconds.
STALE_AFTER_3_S = """
from maxdiloco import train
from maxdiloco.storage import object_lock

object_lock.STALE_S = 3.0
train.main()
"""


def here(run, folder):
    """A copy of a run on this machine, whose arrays Orbax reads."""
    staging.download(run, epath.Path(folder))
    return epath.Path(folder)


@pytest.mark.parametrize("scheme, server", [("gs", "gcs"), full("s3", "s3"), full("az", "faulty")])
def test_a_run_in_a_bucket_has_the_bits_and_files_of_one_on_a_disk(
    finished, scheme, server, request, tmp_path, evaluated
):
    """Saves of 20, 40, 60 and 62 during the training, of which one is kept; the run is resumed,
    reported, evaluated by its name and by its path, and exported."""
    request.getfixturevalue(server)
    base = f"{scheme}://{BUCKET}/runs"
    keys = dict(async_checkpointing="true", enable_tensorboard="true")
    keys |= dict(checkpoint_period=20, max_num_checkpoints_to_keep=1)
    assert train(f"{base}/a", **keys).code == 0
    run = object_store.BucketPath(base) / "a"
    files = {"metrics", "history", "log", "config.yml", "environment.json"}
    names = [entry.name.split("/") for entry in store.connect(scheme, BUCKET).list_all("")]
    assert {name[2] for name in names} == {"checkpoints", "tensorboard"} | files
    assert {name[3] for name in names if name[2] == "checkpoints"} == {str(STEPS)}
    assert f"step {STEPS}/{STEPS}  loss" in line_files.read(run / "log.txt").decode()
    assert_equal_runs(here(run, tmp_path / "copy"), finished, steps=STEPS)

    runs = (["a", f"base_output_directory={base}"], [run], [finished])
    by_name, by_path, on_disk = (evaluated(*argv, "eval_steps=1")["texts"] for argv in runs)
    assert by_name == by_path == on_disk

    exports = []
    for name, source in (("of_bucket", run), ("of_disk", finished)):
        out = f"{base}/{name}" if source is run else str(tmp_path / name)
        assert hf.main(["export", str(source), out]) == 0
        exports.append({p.name: p.read_bytes() for p in epath.Path(out).iterdir()})
    assert exports[0] == exports[1] and "config.json" in exports[0]
    code, line = refused(hf.main, "export", finished, f"{base}/of_bucket")
    assert code == 2 and names_key(line, "DST")
    assert report.main([str(run), f"out={tmp_path / 'page.html'}"]) == 0
    assert report.main([str(run), f"out={base}/page.html"]) == 0
    assert (run.parent / "page.html").read_text().startswith("<!doctype html>")

    assert f"resumed after step {STEPS};" in train(f"{base}/a", **keys | dict(steps=LONGER)).output
    assert train(tmp_path / "b", load_parameters_path=run, steps=1, learning_rate=0.0).code == 0


@pytest.mark.full
@pytest.mark.parametrize("scheme, server", [("gs", "gcs"), ("s3", "s3")])
def test_two_processes_wait_for_a_stale_lock_save_and_resume(scheme, server, request, started):
    """The lock of a first process that was killed: the second process waits with the first.
    Process 0 puts the parts of both together."""
    request.getfixturevalue(server)
    base = f"{scheme}://{BUCKET}/runs"
    keys = dict(max_num_checkpoints_to_keep=2)
    assert train(f"{base}/a", **CLUSTER_KEYS | keys | dict(steps=2)).code == 0
    run = object_store.BucketPath(base) / "a"
    assert saved_steps(run) == [2] and not (run / "lock").exists()
    (run / "lock").write_text('{"holder": "process 7 on x", "nonce": "7"}')
    for steps, period, kept in ((6, 2, [4, 6]), (8, 8, [6, 8])):
        keys |= dict(steps=steps, checkpoint_period=period)
        both = start_cluster(2, f"{base}/a", program=STALE_AFTER_3_S, **keys)
        started += both
        assert_exit_codes(both, 0, 0)
        assert ("waiting up to" in both[0].output) == (steps == 6)
        assert f"resumed after step {2 if steps == 6 else 6};" in both[0].output
        assert saved_steps(run) == kept
        if steps == 6:
            assert (run / "checkpoints/6/params/ocdbt.process_1").exists()
    files = {"metrics", "history", "log", "log_1", "config.yml"}
    assert {path.name for path in run.iterdir()} == {"checkpoints", "environment.json", *files}
    assert logged_steps(run) == list(range(1, 9))


@pytest.mark.parametrize("workers", [0, full(1)])
def test_a_run_reads_its_text_from_a_bucket(s3, text_run, workers, tmp_path):
    """The rows of a run on a file of the disk, evaluations too; in two starts. A bucket that does
    not exist is refused with exit code 3."""
    run, keys = text_run
    store.connect("s3", BUCKET).put("text/text.txt", run.parent / "text.txt")
    keys = keys | dict(dataset_path=f"s3://{BUCKET}/text", grain_worker_count=workers)
    for steps in (2, 4):
        assert train(tmp_path / "bucket", **keys | {"steps": steps}).code == 0
    rows = metrics_rows(tmp_path / "bucket")
    assert rows == metrics_rows(run) and len(rows) == 4 and "eval/loss" in rows[3]
    keys |= dict(dataset_path="s3://none/text")
    absent = train(tmp_path / "none", **keys)
    assert absent.code == 3
    assert names_key(absent.error, "dataset_path") and "(404)" in absent.error


def test_the_steps_of_a_run_make_no_request_in_their_thread(faulty, monkeypatch):
    """With saves, rows, an event file and a chunk at each line. At the start the thread does."""
    monkeypatch.setattr(line_files, "CHUNK_S", 0.0)
    made, after_step = [], []

    def note(number, function):
        if threading.current_thread() is threading.main_thread():
            made.append(function)

    def write(self, t):
        write_rows(self, t)
        after_step.append(len(made))

    write_rows = Recorder.write
    monkeypatch.setattr(Recorder, "write", write)
    faulty.fault = note
    base = f"az://{BUCKET}/runs"
    keys = dict(async_checkpointing="true", enable_tensorboard="true")
    assert train(f"{base}/a", steps=30, checkpoint_period=10, **keys).code == 0
    assert len(after_step) == 30 and after_step[0] == after_step[-1] > 0
    run = object_store.BucketPath(base) / "a"
    assert logged_steps(run) == list(range(1, 31))
    assert len(line_files.chunks_of(run / "metrics.jsonl")) > 3
