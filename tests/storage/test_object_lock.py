"""The lock of a run on gs://: who has it, when it goes stale, how it is lost."""

import concurrent.futures
import os
import socket
import threading
import time

import pytest
from fake_gcs import BUCKET, LOST, FakeGcs

from maxdiloco.errors import CheckpointError
from maxdiloco.storage import object_lock
from maxdiloco.storage.object_lock import ObjectLock
from maxdiloco.storage.run_folder import absolute, open_run_folder

NAME = "runs/a/lock"
OF_7, OF_8 = (b'{"holder": "process %d on x", "nonce": "%d"}' % (n, n) for n in (7, 8))
ME = f"process {os.getpid()} on {socket.gethostname()} (started "


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(object_lock, "RENEW_S", 0.05)
    monkeypatch.setattr(object_lock, "STALE_S", 60.0)
    with FakeGcs() as found:
        for key, value in found.environ().items():
            monkeypatch.setenv(key, value)
        yield found


@pytest.fixture
def stale(store):
    """The store, with a lock that nobody has renewed for 61 s."""
    store.put(NAME, OF_7)
    store.age(NAME, 61.0)
    return store


def lock(say=lambda line: None):
    return ObjectLock(absolute(f"gs://{BUCKET}/{NAME}"), run_name="a", say=say)


def writes(store):
    return [status for request, status in store.requests if request.kind == "write"]


def wait_for(holds):
    limit = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_the_lock_is_renewed_while_it_is_held_and_refuses_a_second_run(store):
    """The first renewal that the second one sees tells that the holder lives. Nothing is left."""
    said = []
    with lock() as held:
        first = store.objects[BUCKET][NAME].generation
        wait_for(lambda: store.objects[BUCKET][NAME].generation > first)
        with pytest.raises(CheckpointError) as error:
            lock(said.append).__enter__()
        held.require()
    assert str(error.value).startswith(f"run_name=a is in use: gs://{BUCKET}/{NAME} of {ME}")
    assert str(error.value).endswith(
        "was renewed 0 s ago. Wait for it, stop it, or set another run_name."
    )
    assert len(said) == 1 and "waiting up to 60 s to see whether that run still lives" in said[0]
    assert store.names() == []
    count = len(store.requests)
    time.sleep(0.2)
    assert len(store.requests) == count


def test_a_lock_that_nobody_renews_is_waited_for_and_taken_over(store, monkeypatch):
    """By the clock of the store: the object has aged there, and the host's says nothing of it."""
    monkeypatch.setattr(object_lock, "STALE_S", 4.0)
    said = []
    store.put(NAME, OF_7)
    store.age(NAME, 3.0)
    with lock(said.append) as held:
        held.require()
        assert ME.encode() in store.objects[BUCKET][NAME].data
    assert len(said) == 2 and "of process 7 on x was renewed 3 s ago: waiting up to 1 s" in said[0]
    assert "of process 7 on x was renewed 4 s ago: taken over." in said[1]


@pytest.mark.parametrize("content", [b"[]", b"?", b"\xff", b'{"holder": 1}'])
def test_an_object_of_others_with_the_name_of_the_lock_stays(store, content):
    """An upload is whole or absent, so no run can have left it."""
    store.put(NAME, content)
    store.age(NAME, 61.0)
    with pytest.raises(CheckpointError, match=r"lock is no lock of a run, .*Move it, or set"):
        lock().__enter__()
    assert store.names() == [NAME] and store.objects[BUCKET][NAME].data == content


def test_a_stale_lock_that_another_takes_over_just_before_stays_that_ones(stale):
    """Between the look at the stale object, which ends with a probe's removal, and the write."""
    seen = []

    def fault(request):
        seen.append(request.kind)
        if "delete" in seen and request.kind in ("write", "stat"):  # taken over, then renewed
            stale.put(NAME, OF_8)
        return None

    stale.fault = fault
    with pytest.raises(CheckpointError, match="run_name=a is in use: .* of process 8 on x"):
        lock().__enter__()
    assert stale.objects[BUCKET][NAME].data == OF_8


def test_of_two_that_take_over_a_stale_lock_one_gets_it(stale):
    both = threading.Barrier(2)
    looked = set()

    def fault(request):  # both have looked at the stale object before one writes
        who = threading.get_ident()
        if request.query.get("ifGenerationMatch", "0") != "0" and request.kind == "write":
            if who not in looked and len(looked) < 2:
                looked.add(who)
                both.wait(60)
        return None

    refused = threading.Event()

    def run(_):
        try:
            with lock():
                return "held" if refused.wait(60) else "held by both"
        except CheckpointError:
            refused.set()
            return "refused"

    stale.fault = fault
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        assert sorted(threads.map(run, range(2))) == ["held", "refused"]


def test_a_lock_that_is_lost_is_an_error_and_is_left_to_its_new_holder(store):
    with lock() as held:
        other = store.put(NAME, OF_8)
        wait_for(lambda: 412 in writes(store))
        wait_for(lambda: held._lost is not None)
        with pytest.raises(CheckpointError) as error:
            held.require()
    assert "run_name=a: gs://" in str(error.value)
    assert "was not renewed in time and is now that of process 8 on x" in str(error.value)
    assert store.objects[BUCKET][NAME] == other


@pytest.mark.parametrize("first", [True, False], ids=["created", "renewed"])
def test_an_answer_that_never_arrives_does_not_lose_the_lock(store, first):
    """The client repeats the upload, and the store refuses: the generation is no longer the old."""
    lost = []

    def fault(request):
        if request.kind == "write" and not lost:
            lost.append(request)
            return LOST
        return None

    said = []
    store.fault = fault if first else None
    with lock(said.append) as held:
        store.fault = fault
        wait_for(lambda: 412 in writes(store))
        count = len(writes(store))
        wait_for(lambda: len(writes(store)) > count + 1)
        held.require()
    assert store.names() == []
    assert (lost[0].query["ifGenerationMatch"] == "0") == first and said == []


def test_a_store_that_is_unavailable_is_a_warning_and_the_lock_is_renewed_later(store, monkeypatch):
    monkeypatch.setattr(object_lock, "STALE_S", 4.0)
    said = []
    with lock(said.append) as held:
        store.fault = lambda request: 503
        wait_for(lambda: said)
        store.fault = None
        generation = store.objects[BUCKET][NAME].generation
        wait_for(lambda: store.objects[BUCKET][NAME].generation > generation)
        held.require()
    assert said[0].startswith(f"warning: gs://{BUCKET}/{NAME} cannot be renewed: Service Unavail")


@pytest.mark.parametrize(
    ("base", "status", "words"),
    [
        ("gs://absent-bucket/b", None, "Not Found (404): The specified bucket does not exist"),
        (f"gs://{BUCKET}/b", 403, "Forbidden (403): fake 403"),
    ],
)
def test_a_bucket_that_cannot_be_written_is_one_line(store, base, status, words):
    store.fault = lambda request: status
    with pytest.raises(CheckpointError) as error:
        open_run_folder(base, "a").__enter__()
    assert str(error.value) == (
        f"base_output_directory={base} cannot hold run_name=a: {words}. Choose a folder that can "
        "be written."
    )
