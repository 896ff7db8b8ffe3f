"""Schedules of islands over a store that goes wrong, and rules taken away to see that it shows."""

from collections import Counter

import pytest
from schedules import run_schedule, verdict
from simulator import Broken, World
from tiers import corner

from maxdiloco.islands import records, rules
from maxdiloco.islands.state_machine import Create, Evaluate, StateMachine


@pytest.mark.parametrize("part", corner(range(20), range(6)))
def test_no_schedule_of_ten_thousand_breaks_an_invariant(part):
    """Three thousand in the default tier: ten times those that find a removed rule below."""
    seeds = range(500 * part, 500 * (part + 1))
    assert [found for found in map(verdict, seeds) if found[1]] == []


REACHED = (
    "the others took it for dead", "another program runs as X Give each its own name", "stale",
    "norm",
    "two of its messages in a row were rejected", "X is deleted already", "sha256",
    "the store is away: this island trains on for two periods", "the store is back", "second lease",
    "lease deleted", "data", Evaluate(1), "period above the usual", "period below the usual",
    "whole batch",
)  # fmt: skip


def test_the_schedules_reach_what_they_are_to_try():
    seen = Counter()
    for seed in range(80):
        seen += run_schedule(seed, length=1500).seen
    assert [what for what in REACHED if not seen[what]] == []


def without_deletion_limit(names, snapshots):
    """Rule 13 removed: below the newest state, whoever still needs it."""
    names = list(names)
    numbers = [records.number_of(n) for n in names if n[0] == "s"]
    return [n for n in names if n[0] in "ugs" and len(numbers) > 1]


def rest_from_the_start(state, size):
    """Rule 8 removed: a dead island's block is read again as a whole."""
    return [part._replace(start=0) for part in RELEASED(state, size)]


def evaluated_by_all(self, record, before, after):
    """Rule 8 removed: whoever knows of the mark evaluates."""
    author = record._replace(author=self.name, nonce=f"{self.incarnation}.")
    return EVALUATE(self, author, before, after)


def all_but_leases(names, snapshots):
    """Rule 13 removed: leases stay."""
    return [name for name in DELETABLE(names, snapshots) if name[0] != "d"]


def ranges_of_any_block(run, state, data):
    """Rule 8 removed: a block may be finished."""
    return ARE_VALID(run, state._replace(tops=()), data)


def own_period(self, record):
    """Rule 7 removed: an island has the period that suits it."""
    FOLLOW(self, record)
    if self.timing.automatic:
        self.timing = self.timing._replace(period=self._suitable_period())


def batch_of_all(run, state, name):
    """Rule 14 removed: the dead have a part of the global batch."""
    return BATCH(run, state._replace(dead=()), name)


BATCH = rules.batch_size
FOLLOW, SHARED = StateMachine._follow_period, rules.shared_period
NEXT_STATE, RELEASED, EVALUATE = rules.next_state, rules.released_ranges, StateMachine._evaluate
DELETABLE, ARE_VALID, REQUEST = rules.deletable, rules.are_valid_ranges, World.request
# {rule: (function, its replacement, and its owner unless that is rules)}
REMOVED = {
    "1 the state of a record": ("next_state", lambda run, state, record, digest: NEXT_STATE(
        run, state, record, digest)._replace(tokens=state.tokens)),
    "2 whose an object is": ("is_own", lambda lease, nonce: True),
    "4 exactly once": ("is_decided", lambda marks, key: False),
    "4 two records stale": ("is_stale", lambda state, message: False),
    "4 two undecided": ("may_send", lambda undecided: True),
    "6 who is no member follows": ("rebase", lambda x, before, after, committed: x),
    "6 in time": ("how_to_apply", lambda run, t, sent_at, others: "merge" if sent_at else "shift"),
    "7 the period of the log": ("_follow_period", own_period, StateMachine),
    "7 of the living": ("shared_period", lambda state: SHARED(state._replace(dead=()))),
    "7 what suits": ("suitable_period", lambda *_: 0.001),
    "8 each token once": ("released_ranges", rest_from_the_start),
    "8 one evaluation": ("_evaluate", evaluated_by_all, StateMachine),
    "10 what is not sent": ("unsent", lambda outer, undecided, x: outer - x),
    "12 ask again": ("_is_retried", lambda self, action: False, StateMachine),
    "12 guards": ("reject_reason", lambda run, state, message, damage: ""),
    "13 deletion": ("deletable", without_deletion_limit),
    "13 leases": ("deletable", all_but_leases),
    "14 the batch of the living": ("batch_size", batch_of_all),
}  # fmt: skip


def first_violation(seeds, **options):
    """What breaks in the first of the schedules that does."""
    for seed in seeds:
        try:
            run_schedule(seed, **options)
        except Broken as error:
            return f"{seed}: {error}"
    return ""


SLOW = ("4 two records stale", "8 each token once")


@pytest.mark.parametrize("rule", corner(REMOVED, [rule for rule in REMOVED if rule not in SLOW]))
def test_without_a_rule_the_simulator_finds_a_violation(rule, monkeypatch):
    """Positive controls."""
    name, instead, *module = REMOVED[rule]
    monkeypatch.setattr(*(module or [rules]), name, instead)
    assert first_violation(range(300)) or first_violation(range(60), length=1500)


def test_a_lease_after_its_deletion_counts_nothing_twice(monkeypatch):
    """Of requests for leases each fifth reaches the store 100 s late. Control: such a block is
    believed."""

    def request(world, program, action):
        lease = isinstance(action, Create) and action.name[0] == "d"
        if lease and world.random() < 0.2:
            world.later(100.0, program, lambda: REQUEST(world, program, action))
        else:
            REQUEST(world, program, action)

    monkeypatch.setattr(World, "request", request)
    assert first_violation(range(30), length=3000) == ""
    monkeypatch.setattr(rules, "are_valid_ranges", ranges_of_any_block)
    assert "tokens are counted twice" in first_violation(range(30), length=3000)


# -- what could go wrong, found by the simulator: the code before, and a schedule that shows it ---

COVERS = rules.covers_round


def may_step_whatever_is_known(self):
    """It waits with two undecided messages, also where a record waits for its step t + tau."""
    full = any(self._is_due(log) and not rules.may_send(log.undecided) for log in self.logs)
    return MAY_STEP(self) and not full


def blocks_by_their_last_part(run, state, record):
    """A block is read up to where its last part that came ends."""
    known, top = {(b.block, b.lease): b for b in state.blocks}, state.top
    for member in record.members:
        for part in member.data:
            key, top = (part.block, part.lease), max(top, part.block)
            known[key] = records.Block(*key, member.island, member.incarnation, part.stop, 0)
            if part.lease == 2:
                known.pop((part.block, 1), None)
    kept = (known[key] for key in sorted(known))
    return tuple(block for block in kept if block.stop < run.block_tokens), top


MAY_STEP = StateMachine.may_step
FOUND = {
    "a rejected message is waited for, and its island waits": (
        rules, "covers_round", lambda run, members, rejected: COVERS(run, members, ()), 57),
    "a record of rejects alone has a scale above 1": (
        rules, "scale", lambda n, most: max(n, 1) / most if n < most else 1.0, 86, 1500),
    "a record of rejects alone passes over a good message before one": (
        rules, "rejects_in_turn", lambda members, rejected: rejected, 47, 1500),
    "a record waits for a step of an island that waits for the record": (
        StateMachine, "may_step", may_step_whatever_is_known, 121),
    "the rest of a block is read again after a rejected part of it came late": (
        rules, "unfinished_blocks", blocks_by_their_last_part, 137, 1500),
}  # fmt: skip


@pytest.mark.parametrize("what", FOUND)
def test_found(what, monkeypatch):
    module, name, before, *schedule = FOUND[what]  # its seed, and length
    run_schedule(*schedule)
    monkeypatch.setattr(module, name, before)
    with pytest.raises(Broken):
        run_schedule(*schedule)
