"""What a run of days meets: memory, two starts at once, one that was not finished."""

from together import PACE, Together, a_run, begun, start_values, with_threads

from maxdiloco.islands import audit, log_store, records
from maxdiloco.islands.executor import Executor
from maxdiloco.islands.log_store import MeteredStore
from maxdiloco.storage import store


def test_an_island_keeps_no_snapshot_of_a_record_of_another():
    """Each record that is divisible by four has one, which its author puts."""
    group = begun(a_run(), "ab", 20)
    names = {entry.name for entry in group.bucket.list_all("s")}
    assert {"s/0/16", "s/1/16"} <= names
    for one in group.islands.values():
        kept = {name for name in one._own if name[0] == "s"}
        assert len(kept) <= len(one.state.requests) and not kept & names


def end_after(requests, bucket, run):
    """An island that ends after so many requests."""
    one = Executor(bucket, run, PACE, "b", start_values(run), clock=lambda: 0.0)
    for _ in range(requests):
        one.tick()
        assert one.work()


def test_a_start_after_many_asks_the_store_as_often_as_the_first():
    """The last heartbeat has the number of its start."""
    counts = []
    for earlier in (0, 60):
        bucket, run = MeteredStore(store.in_memory()), a_run()
        for number in range(1, earlier + 1):
            name = records.incarnation_name("a", number)
            claim = records.Lease(name, "a", number, "n")
            assert log_store.create(bucket, run, name, claim)
            beat = records.Heartbeat("a", number, 1, (1, 1), 1.0, False)
            bucket.put("hb/a", records.encode(beat))
        before = bucket.counts["requests"]
        group = Together(bucket, run, "a", 0)
        group.until(lambda islands: all(one.state.phase == "train" for one in islands))
        assert group.islands["a"].state.incarnation == earlier + 1
        counts.append(bucket.counts["requests"] - before)
    assert counts[1] <= counts[0] + 5


def test_two_that_begin_a_run_at_once_make_one_log():
    """The other one has a step of other tokens, and put the first snapshot before it ended."""
    bucket, run = store.in_memory(), a_run(block_tokens=64, tokens=10**9)
    end_after(2, bucket, run._replace(block_tokens=32, tokens=10**8))
    assert [entry.name for entry in bucket.list_all("s")] == ["s/0/0"]
    begun(run, "a", 3, bucket=bucket)
    for fragment in (0, 1):
        audit.replay(bucket, run, fragment)


def test_a_start_with_other_keys_that_was_not_finished_is_named():
    bucket, run = store.in_memory(), a_run()
    end_after(2, bucket, run._replace(outer_lr=0.5))
    group = Together(bucket, run, "a", 0)
    group.until_stopped()
    (one,) = group.islands.values()
    assert one.stop.line.startswith("s/0/0 ")


def test_a_reader_gets_nothing_of_an_island_that_is_closing():
    one = with_threads(a_run(block_tokens=64))
    assert one.data.read(0, 8)
    one.close(drain=False)
    assert one.data.read(0, 8) == []
