"""Runs on gs://, against a store of our own, whatever it does."""

import signal
import threading
import time

import pytest
from fake_gcs import BUCKET, FakeGcs
from run import STEPS, WAIT_S, names_key, start_train, train
from run_files import assert_equal_runs, logged_steps

from maxdiloco.storage import object_lock, object_store

pytestmark = pytest.mark.usefixtures("programs")

BASE = f"gs://{BUCKET}/runs"
RUN = object_store.BucketPath(BASE) / "a"


@pytest.fixture(scope="module")
def server():
    """One for all tests here: TensorStore reads the address once."""
    with FakeGcs(page=20) as found, pytest.MonkeyPatch.context() as patch:
        for key, value in found.environ().items():
            patch.setenv(key, value)
        patch.setattr(object_store.BucketPath, "_buckets", {})
        yield found


@pytest.fixture
def store(server):
    server.objects[BUCKET].clear()
    server.requests.clear()
    server.fault = None
    yield server
    server.fault = None


@pytest.mark.full
def test_a_run_killed_during_a_save_resumes_to_the_same_bits(finished, store, monkeypatch):
    """The objects of the unfinished save count for nothing and are removed. The store is slow and
    at times unavailable while the run resumes and saves."""
    reached, opened = threading.Event(), threading.Event()

    def hold(request):
        if "/checkpoints/20/outer_params/" not in request.name or opened.is_set():
            return None
        reached.set()
        opened.wait(WAIT_S)
        return 503  # whoever asked is gone

    store.fault = hold
    keys = dict(async_checkpointing="true", checkpoint_period=10)
    with start_train(f"{BASE}/a", paced=True, **keys) as process:
        process.wait_for_output("step 20/")
        assert reached.wait(WAIT_S)
        process.popen.kill()
        assert process.wait_for_exit() == -signal.SIGKILL
    opened.set()
    assert "runs/a/lock" in store.names()
    assert store.names("runs/a/checkpoints/20/")
    assert "runs/a/checkpoints/20/commit_success.txt" not in store.names()
    monkeypatch.setattr(object_lock, "STALE_S", 2.0)

    left = {"/checkpoints/10/": 2, "/checkpoints/62/": 2}  # read, and written

    def burst(request):
        time.sleep(0.01)
        for place, count in left.items():
            if count > 0 and place in request.name:
                left[place] -= 1
                return 503
        return None

    store.fault = burst
    run = train(f"{BASE}/a", checkpoint_period=10**6, max_num_checkpoints_to_keep=1)
    assert run.code == 0 and "resumed after step 10;" in run.output
    assert max(left.values()) <= 0
    assert "Traceback" not in run.errors
    assert_equal_runs(RUN, finished, steps=STEPS)
    assert {name.split("/")[3] for name in store.names("runs/a/checkpoints/")} == {str(STEPS)}


def test_a_run_that_loses_its_lock_ends_and_writes_no_more(store, monkeypatch):
    """Another process takes the lock, as it may after a long silence of this one."""
    monkeypatch.setattr(object_lock, "RENEW_S", 0.05)
    taken = []

    def take(request):
        if "/checkpoints/5/" in request.name and not taken:
            taken.append(store.put("runs/a/lock", b'{"holder": "process 1 on b", "nonce": ""}'))
        return None

    store.fault = take
    run = train(f"{BASE}/a", steps=10**6, learning_rate_schedule_steps=100)
    assert run.code == 2
    (line,) = run.errors.strip().splitlines()[-1:]
    assert line.startswith("CheckpointError: run_name=a: ") and "process 1 on b" in line
    assert store.objects[BUCKET]["runs/a/lock"] == taken[0]
    assert logged_steps(RUN) == [1, 2, 3, 4, 5]  # written before the save, and not again
    assert store.names("runs/a/metrics/") and not store.names("runs/a/log/")


@pytest.mark.parametrize(
    ("key", "value", "status"),
    [
        ("load_parameters_path", "gs://absent/runs/a", None),
        ("load_full_state_path", f"{BASE}/absent", None),
        ("load_full_state_path", f"{BASE}/a", 403),
    ],
)
def test_a_path_that_cannot_be_read_is_refused_by_key(store, tmp_path, key, value, status):
    store.fault = lambda request: status
    run = train(tmp_path / "a", **{key: value})
    assert run.code == 2 and names_key(run.error, key) and value in run.error
    assert ("(403)" in run.error) == (status == 403)
