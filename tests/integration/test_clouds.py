"""Runs on s3://, against moto, and on az://, in memory: the bits of runs on a disk."""

import json
import signal

import process_tools
import pytest
import run_tools as tools
from etils import epath
from fake_gcs import FakeGcs
from faulty_store import FaultyStore
from s3_server import BUCKET, S3Server

from maxdiloco import hf, report, train
from maxdiloco.checkpoint import staging
from maxdiloco.storage import object_lock, object_store, store

pytestmark = pytest.mark.usefixtures("programs")

LONGER = tools.STEPS + 2


@pytest.fixture(autouse=True)
def no_clients(monkeypatch):
    monkeypatch.setattr(object_store.BucketPath, "_buckets", {})


@pytest.fixture(scope="module")
def s3_server():
    with S3Server() as found:
        yield found


@pytest.fixture
def s3(s3_server, monkeypatch):
    for key, value in s3_server.environ().items():
        monkeypatch.setenv(key, value)
    s3_server.clear()


@pytest.fixture
def az(monkeypatch):
    monkeypatch.setattr(store, "connect", FaultyStore().connect)


def here(run, folder):
    """A copy of a run on this machine, whose arrays Orbax reads."""
    staging.download(run, epath.Path(folder))
    return epath.Path(folder)


@pytest.mark.parametrize("cloud", ["s3", pytest.param("az", marks=pytest.mark.full)])
def test_a_run_has_the_bits_of_one_on_a_disk(finished, cloud, request, tmp_path, capfd):
    """Saves of 20, 40, 60 and 62 beside the training, of which one is kept; the run is resumed,
    drawn, sampled from and exported."""
    request.getfixturevalue(cloud)
    base = f"{cloud}://{BUCKET}/runs"
    keys = dict(async_checkpointing="true", enable_tensorboard="true")
    keys |= dict(checkpoint_period=20, max_num_checkpoints_to_keep=1)
    assert tools.run(base, "a", **keys) == 0
    run = object_store.BucketPath(base) / "a"
    files = {"metrics.jsonl", "history.jsonl", "log.txt", "config.yml", "environment.json"}
    assert {path.name for path in run.iterdir()} == {"checkpoints", "tensorboard"} | files
    assert {path.name for path in (run / "checkpoints").iterdir()} == {str(tools.STEPS)}
    tools.assert_equal_runs(here(run, tmp_path / "copy"), finished, steps=tools.STEPS)

    exports = []
    for name, source in (("of_bucket", run), ("of_disk", finished)):
        out = f"{base}/{name}" if source is run else str(tmp_path / name)
        assert hf.main(["export", str(source), out]) == 0
        exports.append({p.name: p.read_bytes() for p in epath.Path(out).iterdir()})
    assert exports[0] == exports[1] and "config.json" in exports[0]
    code, line = tools.refused(capfd, hf.main, ["export", finished, f"{base}/of_bucket"])
    assert code == 2 and f"DST={base}/of_bucket exists already" in line
    assert report.main([str(run), f"out={tmp_path / 'page.html'}"]) == 0
    assert report.main([str(run), f"out={base}/page.html"]) == 0
    assert (run.parent / "page.html").read_text().startswith("<!doctype html>")

    capfd.readouterr()
    assert tools.run(base, "a", **keys | dict(steps=LONGER)) == 0
    assert f"resumed after step {tools.STEPS};" in capfd.readouterr().out
    assert tools.run(tmp_path, "b", load_parameters_path=run, steps=1, learning_rate=0.0) == 0


def test_a_folder_of_an_earlier_version_on_gs_goes_on(finished, monkeypatch, capfd):
    """The objects as gcsfs wrote them, and a lock without a beat that a killed run has left."""
    monkeypatch.setattr(object_lock, "RENEW_S", 0.05)
    monkeypatch.setattr(object_lock, "STALE_S", 0.5)
    with FakeGcs() as gcs:
        for key, value in gcs.environ().items():
            monkeypatch.setenv(key, value)
        for path in sorted(finished.rglob("*")):
            if path.is_file() and path.name != "lock":
                gcs.put(f"runs/a/{path.relative_to(finished)}", path.read_bytes())
        gcs.put("runs/a/lock", b'{"holder": "process 7 on x", "nonce": "7"}')
        assert tools.run(f"gs://{BUCKET}/runs", "a", steps=LONGER) == 0
        told = capfd.readouterr().out
        assert f"resumed after step {tools.STEPS};" in told and ": taken over." in told
        rows = gcs.objects[BUCKET]["runs/a/metrics.jsonl"].data.decode().splitlines()
        assert [json.loads(row)["step"] for row in rows] == list(range(1, LONGER + 1))


@pytest.mark.full
def test_a_killed_run_on_s3_is_taken_over_and_resumes_to_the_same_bits(
    finished, s3, monkeypatch, tmp_path, capfd
):
    base = f"s3://{BUCKET}/runs"
    with tools.Child(base, "a", checkpoint_period=10) as child:
        child.until("step 25/")
        child.kill()
        assert child.end() == -signal.SIGKILL
    run = object_store.BucketPath(base) / "a"
    assert (run / "lock").exists()
    monkeypatch.setattr(object_lock, "STALE_S", 1.0)
    assert tools.run(base, "a", checkpoint_period=20) == 0
    told = capfd.readouterr().out
    assert "resumed after step 20;" in told and "was not renewed for 1 s: taken over." in told
    tools.assert_equal_runs(here(run, tmp_path / "copy"), finished, steps=tools.STEPS)
    assert not (run / "lock").exists()


@pytest.mark.full
def test_two_processes_on_s3_save_together_and_resume(s3, tmp_path):
    """Process 0 puts the parts of both together. The lock of a killed run is waited for first."""
    base = f"s3://{BUCKET}/runs"
    changes = {"base_output_directory": base, "run_name": "a", "max_num_checkpoints_to_keep": "2"}
    assert train.main(process_tools.flags(changes | {"steps": "2"})) == 0
    run = object_store.BucketPath(base) / "a"
    (run / "lock").write_text('{"holder": "process 7 on x", "nonce": "7"}')
    for steps, period in (("6", "2"), ("8", "8")):
        changes |= {"steps": steps, "checkpoint_period": period}
        both = process_tools.trainers(2, changes, tmp_path, program=process_tools.IMPATIENT)
        try:
            assert [process.end() for process in both] == [0, 0], both[0].text() + both[1].text()
        finally:
            for process in both:
                process.kill()
        if steps == "6":
            assert "resumed after step 2;" in both[0].text()
            assert (run / "checkpoints/6/params/ocdbt.process_1").exists()
    assert "resumed after step 6;" in both[0].text()
    rows = (run / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == list(range(1, 9))


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_run_reads_its_text_from_a_bucket(s3, text_run, workers, tmp_path, capfd):
    """The rows of a run on a file of the disk, evaluations too; in two starts. A bucket that there
    is not is a line and exit code 3."""
    run, keys = text_run
    store.connect("s3", BUCKET).put("text/text.txt", run.parent / "text.txt")
    keys = keys | dict(dataset_path=f"s3://{BUCKET}/text", grain_worker_count=workers)
    for steps in (2, 4):
        assert tools.run(tmp_path, "bucket", **keys | {"steps": steps}) == 0
    rows = tools.rows(tmp_path / "bucket")
    assert rows == tools.rows(run) and len(rows) == 4 and "eval/loss" in rows[3]
    arguments = tools.arguments(tmp_path, "none", **keys | {"dataset_path": "s3://none/text"})
    code, line = tools.refused(capfd, train.main, arguments)
    assert code == 3 and "dataset_path=s3://none/text cannot be read (Not Found (404): " in line
