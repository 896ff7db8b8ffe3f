"""A store that does not answer for a while, or has files of others, ends no island.

Over the simulated store, and over a bucket.
"""

import threading

import pytest
import simulated_program
import together
from simulated_store import Faults
from simulator import World
from together import PACE, Together, a_run, begun, start_values, with_threads

from maxdiloco.islands import audit, log_store, records, rules, runtime
from maxdiloco.islands.executor import Executor
from maxdiloco.islands.log_store import MeteredStore
from maxdiloco.islands.records import Heartbeat, LogState, Range, encode
from maxdiloco.islands.state_machine import FAILED, Answer, Get, PutHeartbeat, Request
from maxdiloco.storage import store


def taken_for_dead(seeds):
    """How often a living island was, over a store that is away now and then."""
    found = 0
    for seed in seeds:
        world = World(seed)
        world.faults = Faults(away=0.002)
        world.run_events(1500)
        found += world.seen["the others took it for dead"]
    return found


def test_nobody_is_thought_dead_because_the_store_was_away(monkeypatch):
    pace = simulated_program.TIMING
    usual = pace._replace(beat=pace.dead / 10, list=pace.dead / 10)
    monkeypatch.setattr(simulated_program, "TIMING", usual)
    assert taken_for_dead(range(30)) == 0
    monkeypatch.setattr(rules, "observed", lambda pace, since, writes: since)  # by its clock alone
    assert taken_for_dead(range(30))


def test_an_island_trains_until_two_messages_are_undecided(monkeypatch):
    group = begun(a_run(block_tokens=64), "a", 3)
    (one,) = group.islands.values()
    with monkeypatch.context() as away:
        away.setattr(Executor, "carry_out", lambda self, request: Answer(request, FAILED))
        for _ in range(2000):  # 10 s, of which three periods are 3
            group.event(10**6)
        assert not one.state.may_step()
        assert [len(log.undecided) for log in one.state.logs] == [2, 2] and one.state.leases
    back, t = group.now, one.state.t
    group.until(lambda _: one.state.t > t)
    assert group.now - back < PACE.period


def test_what_waits_for_its_time_is_asked_for_at_once():
    state = Executor(store.in_memory(), a_run(), PACE, "a", start_values(a_run())).state
    late, flying, back = Get("c/0/8"), Get("c/0/9"), Get("c/0/1")
    state.requests = {late: Request(99.0, 7, False), flying: Request(0.0, 3, True)}
    state.requests[back], state.now, state.failing_since = Request(0.0, 3, True), 50.0, 1.0
    state.handle(Answer(back, None))
    assert state.requests == {late: Request(50.0, 0, False), flying: Request(0.0, 3, True)}


def test_signs_of_life_do_not_wait_for_requests_that_hang(monkeypatch):
    goes_on, put = threading.Event(), threading.Semaphore(0)
    real = Executor.carry_out

    def carry_out(self, request):
        if isinstance(request, PutHeartbeat):
            put.release()
        elif self.state.phase == "train":
            goes_on.wait(20)
        return real(self, request)

    monkeypatch.setattr(Executor, "carry_out", carry_out)
    monkeypatch.setattr(runtime, "THREADS", 2)
    both = with_threads(a_run(block_tokens=64))
    try:
        assert all(put.acquire(timeout=5) for _ in range(4))
    finally:
        goes_on.set()
        both.close(drain=False)


@pytest.mark.parametrize(
    ("held", "period", "missed", "wanted"),
    [
        (1, 0, 0, True), (2, 0, 0, False), (2, 42, 0, False), (2, 43, 0, True),
        (7, 0, 9, True), (8, 0, 9, False),
    ],
)  # fmt: skip
def test_blocks_are_held_for_three_periods_and_two_at_least(held, period, missed, wanted):
    parts = [Range(n, 1, 0, 64) for n in range(held)]
    assert rules.wants_lease(parts, period, missed) == wanted


def test_the_next_block_is_above_all_that_are_known():
    ledger = LogState(0, 9, "", "", 0, (), (), (), (), 6, ())
    assert rules.next_lease(ledger, 64, {(9, 1), (4, 2)}) == ("d/10", Range(10, 1, 0, 64))


def test_an_object_is_one_request_and_a_large_one_several(monkeypatch):
    bucket, run = MeteredStore(store.in_memory()), a_run()
    beat = Heartbeat("a", 1, 2, (1, 1), 1.0, False)
    bucket.put("hb/a", encode(beat))
    before = bucket.counts["requests"]
    assert log_store.read(bucket, run, "hb/a") == (beat, b"")
    assert bucket.counts["requests"] == before + 1
    monkeypatch.setattr(store, "BLOCK_BYTES", len(encode(beat)) - 1)
    assert log_store.read(bucket, run, "hb/a") == (beat, b"")
    assert bucket.counts["requests"] == before + 3


def test_files_of_others_among_those_of_a_log_are_left_alone():
    bucket = store.in_memory()
    others = {"u/0/README", "u/0/a.1.3.tmp", "u/0/.nfs01", "s/0/x", "g/0/x"}
    for name in others:
        bucket.put(name, b"")
    together.in_lockstep(bucket, a_run(snapshot_every=1, islands_min=2), "ab", 24)
    names = {entry.name for entry in bucket.list_all("")}
    assert others <= names and "s/0/1" not in names and len(names & {"s/0/4", "s/0/5"}) == 2


def three(run, records):
    """Islands whose logs have so many, and their bucket."""
    group = begun(run, "abc", records, seed=1)
    return group.bucket, group


def test_a_message_that_is_gone_is_rejected_and_the_log_goes_on():
    """Another island has seen it and not yet read it."""
    bucket, group = three(a_run(), 3)

    def seen():
        logs = [one.state.logs[0] for name, one in group.islands.items() if name != "a"]
        return [key for log in logs for key in log.inbox if key[0] == "a"]

    group.until(lambda islands: seen())
    bucket.delete([records.message_name(0, *seen()[0])])
    group.until_records(max(together.heads(group.islands.values())) + 3)
    log = audit.replay(bucket, group.run, 0)
    assert {r.reason for one in log.records for r in one.rejected} == {"gone"}


@pytest.mark.parametrize(
    ("name", "options"),
    [("s/0/4", {}), ("d/60", {"block_tokens": 64})],
)
def test_what_is_damaged_and_not_needed_ends_no_island(name, options):
    bucket, group = three(a_run(**options), 6)
    bucket.put(name, b"")
    group.until_records(40)
    assert not any(one.stop for one in group.islands.values())


def test_a_sign_of_life_counts_of_whom_it_names_alone():
    bucket, good = store.in_memory(), Heartbeat("a", 1, 1, (1, 1), 1.0, False)
    wrong = {
        "b": Heartbeat("a", 9, 1, (1, 1), 1.0, False),
        "c": Heartbeat("c", 1, 1, (1, 1), -1e9, False),
    }
    for name, beat in (wrong | {"a": good, "d": good._replace(island="d")}).items():
        bucket.put(f"hb/{name}", encode(beat))
    assert log_store.heartbeats(bucket, a_run(), {}) == {"a": good, "d": good._replace(island="d")}


def test_a_joiner_refuses_another_fragment_s_snapshot():
    bucket, group = three(a_run(), 5)
    newest = log_store.snapshots(bucket, 0)[-1]
    bucket.put(newest, bucket.get(log_store.snapshots(bucket, 1)[-1]))
    joiner = Together(bucket, group.run, ("q",), 5)
    joiner.until_stopped()
    assert joiner.islands["q"].stop.line.startswith(newest)


@pytest.mark.parametrize("changes", [{"fragment": 99}, {"number": 4}, {"author": "a/../b"}])
def test_a_record_that_is_not_what_its_name_says_is_damaged(changes):
    bucket, group = three(a_run(), 2)
    record, _ = log_store.read(bucket, group.run, "c/0/2")
    bucket.put("c/0/2", encode(record._replace(**changes)))
    with pytest.raises(records.Damaged, match="c/0/2 "):
        log_store.read(bucket, group.run, "c/0/2")


def test_what_is_there_under_the_name_of_another_is_damaged():
    """An older snapshot, a message, a gradient; each under its own name is the control. A claim
    that cannot be read is another's."""
    bucket, group = three(run := a_run(), 6)

    def got(name):
        return group.islands["a"].carry_out(Get(name)).result

    for name in ("i/a/1", "d/1"):
        bucket.put(f"{name}9", encode(records.Lease(name, "a", 1, "n")))
    assert got("i/a/19").reason.startswith("i/a/19 ")
    assert got("d/19").island == ""
    for first, *_, last in (sorted(log_store.listed(bucket, f"{kind}/0")) for kind in "sug"):
        assert log_store.read(bucket, run, last)[0]
        bucket.put(last, bucket.get(first))
        assert got(last).reason.startswith(f"{last} ")


def test_a_joiner_waits_for_a_snapshot_after_a_lost_gradient():
    """The others have it already. They write the next snapshot at record 8."""
    bucket, group = three(run := a_run(tokens=10**6), 5)
    bucket.delete([name for name in log_store.listed(bucket, "g/0") if name.startswith("g/0/5.")])
    joiner = Together(bucket, run, ("q",), 5)
    one = joiner.islands["q"]
    joiner.until(lambda islands: one.said)
    for _ in range(2000):
        joiner.event(10**6)
    (line,) = one.said
    assert line.startswith("g/0/5.")
    assert one.state.phase == "load" and one.stop is None
    group.until(lambda islands: log_store.snapshots(bucket, 0)[-1] == "s/0/8")
    joiner.until(lambda islands: one.state.phase == "train")
