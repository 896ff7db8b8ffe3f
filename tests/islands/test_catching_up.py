"""What an island reads of a log before it asks for it, while it catches up."""

import collections
import threading
import time

import pytest
from together import a_run, begun, with_threads

from maxdiloco.islands import audit, executor, log_store, records
from maxdiloco.islands.log_store import MeteredStore


class Slow(MeteredStore):
    """A bucket whose answers take a while. times: by name; most: at once of records."""

    def __init__(self, bucket):
        super().__init__(bucket)
        self.times, self.lock = collections.Counter(), threading.Lock()
        self.flying, self.most = 0, 0

    def get_first(self, name, most):
        with self.lock:
            self.times[name] += 1
            self.flying += name[0] == "c"
            self.most = max(self.most, self.flying)
        time.sleep(0.01)
        with self.lock:
            self.flying -= name[0] == "c"
        return super().get_first(name, most)


def joined(bucket, run):
    """A newcomer that has caught up with the log, and the bucket that it read it from."""
    slow = Slow(bucket)
    both = with_threads(run, "b", slow)
    both.close(drain=False)
    return both.executor, slow


@pytest.fixture(scope="module")
def log():
    """Of one island: its bucket and run, some records of two fragments, and no snapshot of late."""
    group = begun(a_run(snapshot_every=64), "a", 16)
    return group.bucket, group.run


def test_a_late_joiner_prefetches_and_reads_each_object_once(log):
    bucket, run = log
    one, slow = joined(bucket, run)
    for fragment in range(2):
        ledger = audit.replay(bucket, run, fragment).state
        assert one.state.logs[fragment].state == ledger
        for number in range(1, ledger.number + 1):
            assert slow.times[records.record_name(fragment, number)] == 1
    assert {count for name, count in slow.times.items() if name[0] == "u"} == {1}
    assert slow.most > 4


@pytest.mark.parametrize(("limit", "number"), [("MAX_RECORDS", 1), ("MAX_BYTES", 0)])
def test_without_room_it_reads_one_record_of_a_fragment_at_a_time(log, limit, number, monkeypatch):
    monkeypatch.setattr(executor, limit, number)
    assert joined(*log)[1].most <= 2


def test_a_record_that_was_absent_when_it_was_read_ahead_is_read_later(log, monkeypatch):
    bucket, run = log
    absent, real = {"c/0/5"}, log_store.read

    def read(*arguments):
        name = arguments[-1]
        if name in absent:
            absent.remove(name)
            raise FileNotFoundError(name)
        return real(*arguments)

    monkeypatch.setattr(log_store, "read", read)
    one, _ = joined(bucket, run)
    assert not absent and one.state.logs[0].state.number >= 16
