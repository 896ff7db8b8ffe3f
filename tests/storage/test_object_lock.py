"""The lock of a run in a bucket: who has it, when it goes stale, how it is lost."""

import concurrent.futures
import os
import socket
import threading
import time

import pytest
from fake_gcs import BUCKET, LOST

from maxdiloco.errors import CheckpointError
from maxdiloco.storage import object_lock, store
from maxdiloco.storage.object_lock import ObjectLock
from maxdiloco.storage.run_folder import absolute, open_run_folder

NAME = "runs/a/lock"
# As they are since the first version, which had no beat.
OF_7, OF_8 = (b'{"holder": "process %d on x", "nonce": "%d"}' % (n, n) for n in (7, 8))
ME = f"process {os.getpid()} on {socket.gethostname()} (started "


@pytest.fixture(autouse=True)
def times(monkeypatch):
    monkeypatch.setattr(object_lock, "RENEW_S", 0.05)
    monkeypatch.setattr(object_lock, "STALE_S", 60.0)


@pytest.fixture
def soon(monkeypatch):
    """A lock is stale after half a second."""
    monkeypatch.setattr(object_lock, "STALE_S", 0.5)


def lock(say=lambda line: None, scheme="gs"):
    words = {"key": "run_name=a", "otherwise": "set another run_name"}
    return ObjectLock(absolute(f"{scheme}://{BUCKET}/{NAME}"), **words, say=say)


def refused(use):
    """Why a run may not continue: one line."""
    with pytest.raises(CheckpointError) as error:
        use()
    assert "\n" not in str(error.value)
    return str(error.value)


def writes(gcs):
    return [status for request, status in gcs.requests if request.kind == "write"]


def wait_for(holds):
    limit = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_a_held_lock_is_renewed_and_refuses_a_second_run(cloud):
    """The first renewal that the second one sees tells that the holder lives. Nothing is left."""
    said, bucket = [], store.connect(cloud, BUCKET)
    with lock(scheme=cloud) as held:
        first = bucket.get_version(NAME)
        wait_for(lambda: bucket.get_version(NAME)[1] != first[1])
        line = refused(lock(said.append, cloud).__enter__)
        held.require()
    for named in ("run_name=a ", f"{cloud}://{BUCKET}/{NAME} ", ME, "set another run_name"):
        assert named in line
    assert len(said) == 1 and " 60 s" in said[0]
    time.sleep(0.2)
    assert list(bucket.list_all("")) == []


def test_a_lock_that_nobody_renews_is_waited_for_and_taken_over(cloud, soon):
    """By the clock of the one that waits. The store's and the other host's say nothing of it."""
    said, bucket = [], store.connect(cloud, BUCKET)
    bucket.put(NAME, OF_7)
    began = time.monotonic()
    with lock(said.append, cloud) as held:
        assert time.monotonic() - began >= object_lock.STALE_S
        held.require()
        assert ME.encode() in bucket.get(NAME)
    assert len(said) == 2 and all("process 7 on x" in line for line in said)


def test_a_lock_that_is_given_back_meanwhile_is_taken_at_once(gcs):
    gcs.put(NAME, OF_7)
    with lock(lambda line: gcs.objects[BUCKET].clear()):
        assert ME.encode() in gcs.objects[BUCKET][NAME].data


@pytest.mark.parametrize("content", [b"[]", b"?", b"\xff", b'{"holder": 1}'])
def test_an_object_of_others_with_the_name_of_the_lock_stays(gcs, content):
    """An upload is whole or absent, so no run can have left it."""
    gcs.put(NAME, content)
    with pytest.raises(CheckpointError, match=f"{BUCKET}/{NAME} "):
        lock().__enter__()
    assert gcs.names() == [NAME] and gcs.objects[BUCKET][NAME].data == content


def test_a_stale_lock_that_another_run_takes_first_is_left_to_it(gcs, soon):
    """Between the last look at the stale object and the write."""
    gcs.put(NAME, OF_7)

    def fault(request):
        if request.query.get("ifGenerationMatch", "0") != "0":
            gcs.put(NAME, OF_8)

    gcs.fault = fault
    with pytest.raises(CheckpointError, match="run_name=a .*process 8 on x"):
        lock().__enter__()
    assert gcs.objects[BUCKET][NAME].data == OF_8


def test_of_two_that_take_over_a_stale_lock_one_gets_it(gcs, soon):
    gcs.put(NAME, OF_7)
    both = threading.Barrier(2)
    left = [0, 1]

    def fault(request):  # both have looked at the stale object before one writes
        if request.query.get("ifGenerationMatch", "0") != "0" and left:
            left.pop()
            both.wait(60)

    refused = threading.Event()

    def run(_):
        try:
            with lock():
                return "held" if refused.wait(60) else "held by both"
        except CheckpointError:
            refused.set()
            return "refused"

    gcs.fault = fault
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        assert sorted(threads.map(run, range(2))) == ["held", "refused"]


def test_a_lost_lock_is_an_error_and_left_to_its_new_holder(gcs):
    with lock() as held:
        other = gcs.put(NAME, OF_8)
        wait_for(lambda: 412 in writes(gcs))
        wait_for(lambda: held._lost is not None)
        line = refused(held.require)
    assert "run_name=a: gs://" in line and "process 8 on x" in line
    assert gcs.objects[BUCKET][NAME] == other


@pytest.mark.parametrize("first", [True, False], ids=["created", "renewed"])
def test_an_answer_that_never_arrives_does_not_lose_the_lock(gcs, first):
    """The client repeats the upload, and the store refuses: the generation is no longer the old."""
    lost = []

    def fault(request):
        if request.kind == "write" and not lost:
            lost.append(request)
            return LOST
        return None

    said = []
    gcs.fault = fault if first else None
    with lock(said.append) as held:
        gcs.fault = fault
        wait_for(lambda: 412 in writes(gcs))
        count = len(writes(gcs))
        wait_for(lambda: len(writes(gcs)) > count + 1)
        held.require()
    assert gcs.names() == []
    assert (lost[0].query["ifGenerationMatch"] == "0") == first and said == []


def test_a_lock_is_renewed_later_when_the_store_was_unavailable(gcs, monkeypatch):
    monkeypatch.setattr(store, "RETRY_S", 0.2)
    said = []
    with lock(said.append) as held:
        gcs.fault = lambda request: 503
        wait_for(lambda: said)
        gcs.fault = None
        generation = gcs.objects[BUCKET][NAME].generation
        wait_for(lambda: gcs.objects[BUCKET][NAME].generation > generation)
        held.require()
    assert f"gs://{BUCKET}/{NAME} " in said[0] and "503" in said[0]


@pytest.mark.parametrize(("bucket", "status"), [("absent-bucket", None), (BUCKET, 403)])
def test_a_bucket_that_cannot_be_written_is_named(gcs, bucket, status):
    gcs.fault = lambda request: status
    line = refused(lambda: open_run_folder(f"gs://{bucket}/b", "a").__enter__())
    assert f"base_output_directory=gs://{bucket}/b " in line and f"({status or 404})" in line
