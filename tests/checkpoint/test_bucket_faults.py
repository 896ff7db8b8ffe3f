"""Checkpoints in a bucket whose requests go wrong: a save is whole or is no checkpoint."""

import faulty_store
import numpy as np
import pytest
from checkpoint_tools import folder_of, items, values, wanted
from fake_gcs import BUCKET
from faulty_store import FaultyStore

from maxdiloco.checkpoint.checkpointer import Checkpointer
from maxdiloco.checkpoint.files import COMMIT
from maxdiloco.errors import CheckpointError, SaveError
from maxdiloco.storage import object_store, store


@pytest.fixture
def faulty(monkeypatch):
    found = FaultyStore()
    monkeypatch.setattr(object_store.BucketPath, "_buckets", {})
    monkeypatch.setattr(store, "connect", found.connect)
    return found


@pytest.fixture
def folder(faulty):
    return folder_of(f"az://{BUCKET}/runs")


def session(folder, said):
    """Restore, save the next two steps and keep one of them. Returns the last step."""
    with Checkpointer(
        folder, max_to_keep=1, use_async=False, locked=True, say=said.append, files={"a/b": b"c"}
    ) as checkpointer:
        restored = checkpointer.restore(wanted)
        done = 0 if restored is None else restored.step
        if restored is not None:
            found = restored.items["outer_params"]["w"]
            np.testing.assert_array_equal(found, values(done))
        for step in (done + 1, done + 2):
            checkpointer.save(step, items(step), {"t": step})
    return done + 2


def test_with_a_damaged_object_the_older_checkpoint_is_used(faulty, folder):
    with Checkpointer(folder, max_to_keep=None, use_async=False, locked=True) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, items(step), {})
    name = next(name for name in faulty.names() if "/2/state/ocdbt.process_0/d/" in name)
    bucket = faulty.connect("az", BUCKET)
    bucket.put(name, bucket.get(name)[:-1])
    said = []
    assert session(folder, said) == 3
    assert f"{folder}/2 " in said[0] and "state/" in said[0]
    assert any("/2.damaged/" in name for name in faulty.names())


def mixed(count):
    """At every ninth request another kind of fault."""
    kinds = faulty_store.KINDS
    return [(number, kinds[number // 9 % len(kinds)]) for number in range(0, count, 9)]


def each_of(kind):
    """A kind of fault at each request."""
    return lambda count: [(number, kind) for number in range(count)]


FULL = [pytest.param(each_of(kind), id=kind, marks=pytest.mark.full) for kind in faulty_store.KINDS]


@pytest.mark.parametrize("plan", [mixed, *FULL])
def test_a_fault_at_any_request_loses_no_checkpoint(faulty, folder, plan):
    """The checkpoint before stays, or a newer one takes its place; the next session resumes, and
    removes the checkpoints before it. Control: two sessions without a fault."""
    assert session(folder, []) == 2
    before = faulty.content()
    faulty.calls.clear()
    assert session(folder, []) == 4
    assert {name.split("/")[3] for name in faulty.names()} == {"4"}
    assert {name.split("/")[4] for name in faulty.names()} == {
        "outer_params", "state", "meta", "a", "seal.json", "commit_success.txt"
    }  # fmt: skip
    for number, kind in plan(len(faulty.calls)):
        bucket = faulty.connect("az", BUCKET)
        bucket.delete(faulty.names())
        for name, content in before.items():
            bucket.put(name, content)
        faulty.calls.clear()
        faulty.fault = faulty_store.at(number, kind)
        said = []
        try:
            session(folder, said)
        except (CheckpointError, SaveError) as error:
            said.append(str(error))
        faulty.fault = lambda number, function: None
        assert all("\n" not in line and "Debug" not in line for line in said)
        end = session(folder, [])
        assert end >= 4, f"{kind} at request {number}: {said}"
        whole = {n.split("/")[3] for n in faulty.names() if n.count("/") == 4 and COMMIT in n}
        assert str(end) in whole and whole <= {str(end - 1), str(end)}, (number, kind, said)
