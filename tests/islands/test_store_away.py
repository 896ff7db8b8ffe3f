"""A store that does not answer for a while, or has files of others, ends no island.

Over the simulated store, and over a bucket.
"""

import threading

import pytest
import simulated_program
import together
from simulated_store import Faults
from simulator import World
from together import PACE, Together, a_run, begun, beside_training, start_values

from maxdiloco.islands import audit, beside, blocks, island, objects, records, rules
from maxdiloco.islands.counted import Counted
from maxdiloco.islands.driver import Driver
from maxdiloco.islands.island import FAILED, Done, Put
from maxdiloco.islands.records import Beat, Ledger, Range, encode
from maxdiloco.run.island.processes import standing
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
    pace = simulated_program.PACE
    usual = pace._replace(beat=pace.dead / 10, roll=pace.dead / 10)
    monkeypatch.setattr(simulated_program, "PACE", usual)
    assert taken_for_dead(range(30)) == 0
    monkeypatch.setattr(rules, "watched", lambda pace, since, writes: since)  # by its clock alone
    assert taken_for_dead(range(30))


def test_an_island_trains_until_two_messages_are_undecided(monkeypatch):
    group = begun(a_run(block_tokens=64), "a", 3)
    (one,) = group.islands.values()
    with monkeypatch.context() as away:
        away.setattr(Driver, "carried_out", lambda self, request: Done(request, FAILED))
        for _ in range(2000):  # 10 s, of which three periods are 3
            group.event(10**6)
        assert not one.may_step()
        assert [len(log.own) for log in one.state.logs] == [2, 2] and one.state.leases
    back, t = group.now, one.state.t
    group.until(lambda _: one.state.t > t)
    assert group.now - back < PACE.period


def test_what_waits_for_its_time_is_asked_for_at_once():
    state = Driver(store.in_memory(), a_run(), PACE, "a", start_values(a_run())).state
    state.asks = {"late": island.Ask(9.0, 7, False), "flying": island.Ask(0.0, 3, True)}
    state.now = 2.0
    assert island.at_once(state).asks == {
        "late": island.Ask(2.0, 0, False), "flying": island.Ask(0.0, 3, True)
    }  # fmt: skip


def test_signs_of_life_do_not_wait_for_requests_that_hang(monkeypatch):
    goes_on, put = threading.Event(), threading.Semaphore(0)
    real = Driver.carried_out

    def carried_out(self, request):
        if isinstance(request, Put):
            put.release()
        elif self.state.phase == "in":
            goes_on.wait(20)
        return real(self, request)

    monkeypatch.setattr(Driver, "carried_out", carried_out)
    monkeypatch.setattr(beside, "THREADS", 2)
    both = beside_training(a_run(block_tokens=64))
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
    assert blocks.wants(parts, period, missed) == wanted


def test_the_next_block_is_above_all_that_are_known():
    ledger = Ledger(0, 9, "", "", 0, (), (), (), (), 6, ())
    assert blocks.to_claim(ledger, 64, {(9, 1), (4, 2)}) == ("d/10", Range(10, 1, 0, 64))


def test_an_object_is_one_request_and_a_large_one_several(monkeypatch):
    bucket, run = Counted(store.in_memory()), a_run()
    beat = Beat("a", 1, 2, True, 1.0, False)
    bucket.put("hb/a", encode(beat))
    before = bucket.counts.requests
    assert objects.read(bucket, run, "hb/a") == (beat, b"")
    assert bucket.counts.requests == before + 1
    monkeypatch.setattr(store, "BLOCK_BYTES", len(encode(beat)) - 1)
    assert objects.read(bucket, run, "hb/a") == (beat, b"")
    assert bucket.counts.requests == before + 3


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
    bucket, good = store.in_memory(), Beat("a", 1, 1, True, 1.0, False)
    wrong = {"b": Beat("a", 9, 1, True, 1.0, False), "c": Beat("c", 1, 1, True, -1e9, False)}
    for name, beat in (wrong | {"a": good, "d": good._replace(island="d")}).items():
        bucket.put(f"hb/{name}", encode(beat))
    assert objects.beats(bucket, a_run()) == {"a": good, "d": good._replace(island="d")}


def test_a_joiner_refuses_another_fragment_s_snapshot():
    bucket, group = three(a_run(), 5)
    newest = objects.snapshots(bucket, 0)[-1]
    bucket.put(newest, bucket.get(objects.snapshots(bucket, 1)[-1]))
    joiner = Together(bucket, group.run, ("q",), 5)
    joiner.until_stopped()
    assert joiner.islands["q"].stop.line.startswith(newest)


@pytest.mark.parametrize("changes", [{"fragment": 99}, {"number": 4}, {"author": "a/../b"}])
def test_a_record_that_is_not_what_its_name_says_is_damaged(changes):
    bucket, group = three(a_run(), 2)
    record, _ = objects.read(bucket, group.run, "c/0/2")
    bucket.put("c/0/2", encode(record._replace(**changes)))
    with pytest.raises(records.Damaged, match="c/0/2 "):
        objects.read(bucket, group.run, "c/0/2")


def test_what_is_there_under_the_name_of_another_is_damaged():
    """An older snapshot, a message, a gradient; each under its own name is the control. A claim
    that cannot be read is another's."""
    bucket, group = three(run := a_run(), 6)
    for name in ("i/a/1", "d/1"):
        bucket.put(f"{name}9", encode(records.Claim(name, "a", 1, "n")))
    assert objects.get(bucket, run, "i/a/19").reason.startswith("i/a/19 ")
    assert objects.get(bucket, run, "d/19").island == ""
    for first, *_, last in (sorted(objects.listed(bucket, f"{kind}/0")) for kind in "sug"):
        assert objects.read(bucket, run, last)[0]
        bucket.put(last, bucket.get(first))
        assert objects.get(bucket, run, last).reason.startswith(f"{last} ")


def test_a_joiner_waits_for_a_snapshot_after_a_lost_gradient():
    """The others have it already. They write the next snapshot at record 8."""
    bucket, group = three(run := a_run(tokens=10**6), 5)
    bucket.delete([name for name in objects.listed(bucket, "g/0") if name.startswith("g/0/5.")])
    joiner = Together(bucket, run, ("q",), 5)
    one = joiner.islands["q"]
    joiner.until(lambda islands: one.said)
    for _ in range(2000):
        joiner.event(10**6)
    (line,) = one.said
    assert line.startswith("g/0/5.")
    assert one.state.phase == "load" and one.stop is None
    group.until(lambda islands: objects.snapshots(bucket, 0)[-1] == "s/0/8")
    joiner.until(lambda islands: one.state.phase == "in")


def test_the_rate_counts_what_every_living_island_has_on_its_way():
    """Of three islands: by its own alone the rate would jump at each record."""
    _, group = three(run := a_run(tokens=10**6), 3)
    one = group.islands["a"]
    log = one.state.logs[0]
    own = log.tokens + sum(each.message.tokens for each in log.own)
    found = standing(run, one, warm_from=None, several=False)
    assert own > 0 and found.with_own == (log.ledger.tokens + 3 * own) / 10**6
    for name in "bc":
        one.state.seen[name] = one.state.seen[name]._replace(at=-1e9)
    assert standing(run, one, warm_from=None, several=False).with_own < found.with_own
