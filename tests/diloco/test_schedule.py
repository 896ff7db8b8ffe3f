"""The schedule against a brute-force statement of its contract, and worked examples by hand."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxdiloco.diloco import schedule
from maxdiloco.diloco.schedule import Action, Event, Schedule, check, offsets


@st.composite
def schedules(draw):
    """Any H up to 24, P, tau or outer overlap, default or explicit offsets."""
    H = draw(st.integers(1, 24))
    P = draw(st.integers(1, min(H, 8)))
    overlap = draw(st.sampled_from(schedule.ROUND_OVERLAPS))
    tau = draw(st.integers(0, H - 1)) if overlap == "none" else 0
    chosen = offsets(P, H)
    if draw(st.booleans()):
        residues = draw(st.permutations(range(H)))[:P]
        chosen = tuple(o + H * draw(st.integers(-3, 3)) for o in residues)
    return Schedule(H, tau, chosen, overlap)


def brute_sends(s, steps):
    """Every send of steps 1..steps as (step, fragment, round), step by step."""
    found, rounds = [], [0] * len(s.offsets)
    for t in range(1, steps + 1):
        for p, offset in enumerate(s.offsets):
            if t % s.H == offset % s.H:
                rounds[p] += 1
                found.append((t, p, rounds[p]))
    return found


def brute_lag(s):
    return s.tau if s.round_overlap == "none" else s.H


def in_flight(s, sent, t):
    return [x for x in sent if x[0] <= t < x[0] + brute_lag(s)]


def key(event):
    return (event.send_step, event.fragment, event.round)


def test_overlap_longer_than_the_gap_holds_several_fragments():
    """H=6, P=3, tau=5 by hand: sends at 2, 4, 6, ...; each applied 5 steps later.

    w = min(5, 2) = 2 chunks; before the apply at 7, the sends of 2, 4 and 6 wait: 3 slots. A resume
    at step 4 drops two. Offsets are floors: of H=10 and P=4 of 0, 2.5, 5, 7.5.
    """
    assert offsets(4, 10) == (0, 2, 5, 7) and offsets(1, 7) == (0,)
    s = Schedule(6, 5, offsets(3, 6))
    assert (s.gap, s.max_chunks, s.slots) == (2, 2, 3)
    second, third = Event(2, 1, 4, 1), Event(0, 1, 6, 2)
    assert [s.actions(t) for t in range(1, 8)] == [
        (Action(schedule.INNER),),
        (Action(schedule.INNER), Action(schedule.PACK, 1)),
        (Action(schedule.INNER_EXCHANGE, 1, slot=0, chunk=0),),
        (Action(schedule.INNER_EXCHANGE, 1, slot=0, chunk=1), Action(schedule.PACK, 2)),
        (Action(schedule.INNER_EXCHANGE, 2, slot=1, chunk=0),),
        (Action(schedule.INNER_EXCHANGE, 2, slot=1, chunk=1), Action(schedule.PACK, 0)),
        (Action(schedule.INNER_EXCHANGE, 0, slot=2, chunk=0), Action(schedule.MERGE, 1, slot=0)),
    ]
    assert s.pending(7) == (second, third)
    assert s.ages(8) == (8, 6, 8)
    for dropped, merged in ((0, [7, 9, 11]), (4, [11])):
        found = {t: s.actions(t, dropped_until=dropped) for t in range(5, 12)}
        assert [t for t in found if any(a.name == schedule.MERGE for a in found[t])] == merged


@settings(max_examples=150)
@given(schedules())
def test_events_are_those_of_the_contract_and_one_send_at_a_time_is_carried(s):
    """Sent when t = t_p (mod H) and t >= 1; applied lag steps later; sends come first. Chunk c
    rides step send + 1 + c; w chunks of every send, none of two sends in one step, all before the
    apply."""
    steps = 4 * s.H
    sent = brute_sends(s, steps)
    pairs = [b[0] - a[0] for a, b in itertools.combinations(sent, 2) if b[0] > a[0]]
    assert s.gap == min([*pairs, s.H])  # every fragment follows itself after H
    assert s.max_chunks == min(brute_lag(s), s.gap)
    for t in range(1, steps + 1):
        riding = [(x, t - x[0] - 1) for x in sent if 0 <= t - x[0] - 1 < s.max_chunks]
        assert len(riding) <= 1 and all(t <= x[0] + brute_lag(s) for x, _ in riding)
        carried = s.carried_chunk(t)
        assert ([] if carried is None else [(key(carried[0]), carried[1])]) == riding
        now = [x for x in sent if x[0] == t]
        assert [key(e) for e in s.sends(t)] == now
        assert {p for p in range(s.P) if s.is_sent(p, t)} == {p for _, p, _ in now}
        due = [x for x in sent if x[0] + brute_lag(s) == t]
        if s.round_overlap != "none":  # the first send of a fragment calls the outer optimizer too
            due += [(t - s.H, p, 0) for step, p, n in sent if step == t and n == 1]
        assert [key(e) for e in s.applies(t)] == due


@settings(max_examples=150)
@given(schedules(), st.data())
def test_actions_are_the_inner_step_then_sends_then_applies(s, data):
    """Algorithm 2, lines 3-12. tau = 0: send and apply are one program; delayed and eager: the
    outer step is taken at the send. A chunk that a fragment does not have is no exchange."""
    counts = st.lists(st.integers(0, s.max_chunks), min_size=s.P, max_size=s.P)
    chunks = tuple(data.draw(counts))
    s = dataclasses.replace(s, num_chunks=chunks)
    for t in range(1, 4 * s.H + 1):
        inner, *others = s.actions(t)
        carried = s.carried_chunk(t)
        if carried is None or carried[1] >= chunks[carried[0].fragment]:
            assert inner == Action(schedule.INNER)
        else:
            send, chunk = carried
            assert inner == Action(schedule.INNER_EXCHANGE, send.fragment, send.slot, chunk)
        if s.round_overlap != "none":
            name = schedule.DELAYED_STEP if s.round_overlap == "delayed" else schedule.EAGER_STEP
            wanted = [Action(name, e.fragment, e.slot) for e in s.sends(t)]
        elif s.tau == 0:
            wanted = [Action(schedule.SYNCHRONISE, e.fragment) for e in s.sends(t)]
        else:
            wanted = [Action(schedule.PACK, e.fragment) for e in s.sends(t)]
            wanted += [Action(schedule.MERGE, e.fragment, e.slot) for e in s.applies(t)]
        assert others == wanted


def test_parts_go_to_their_owners_before_the_means_come_back():
    """H=8, P=2, tau=4 by hand: 4 steps, of which 1 brings the parts of the fragment sent at 4 and 2
    those of the one sent at 8; the last of 2 steps of means is left out. Dropped: nothing to
    reduce."""
    s = Schedule(8, 4, offsets(2, 8), num_chunks=(2, 1), scatter_steps=2, num_scatter_chunks=(2, 1))
    assert (s.max_chunks, s.share_steps, s.slots) == (4, 2, 1)
    inner, A = Action(schedule.INNER), Action
    assert [s.actions(t) for t in range(4, 13)] == [
        (inner, A(schedule.PACK, 1)),
        (A(schedule.INNER_SCATTER, 1, chunk=0),),
        (inner, A(schedule.REDUCE, 1)),
        (A(schedule.INNER_EXCHANGE, 1, chunk=0),),
        (inner, A(schedule.PACK, 0), A(schedule.MERGE, 1)),
        (A(schedule.INNER_SCATTER, 0, chunk=0),),
        (A(schedule.INNER_SCATTER, 0, chunk=1), A(schedule.REDUCE, 0)),
        (A(schedule.INNER_EXCHANGE, 0, chunk=0),),
        (A(schedule.INNER_EXCHANGE, 0, chunk=1), A(schedule.PACK, 1), A(schedule.MERGE, 0)),
    ]
    assert s.actions(6, dropped_until=5) == (inner,)
    one = dataclasses.replace(s, tau=1, scatter_steps=1, num_chunks=None, num_scatter_chunks=None)
    assert one.share_steps == 0
    parts = A(schedule.INNER_SCATTER, 1, chunk=0)
    fused, apart = schedule.REDUCE_AND_SHARE, schedule.REDUCE
    assert one.actions(5) == (parts, A(fused, 1), A(schedule.MERGE, 1))
    host = dataclasses.replace(one, in_programs=False)
    assert host.actions(5) == (inner, A(apart, 1), A(schedule.MERGE, 1))


def test_a_transport_outside_programs_has_no_chunks_and_no_fused_exchange():
    """tau = 0: pack, merge; with reduce-scatter a reduction between them."""
    s = Schedule(4, 0, (0,), in_programs=False)
    pack, merge, reduce = (Action(n, 0) for n in (schedule.PACK, schedule.MERGE, schedule.REDUCE))
    assert s.actions(4) == (Action(schedule.INNER), pack, merge)
    scattered = dataclasses.replace(s, collective=schedule.REDUCE_SCATTER)
    assert scattered.actions(4) == (Action(schedule.INNER), pack, reduce, merge)
    tau_1 = dataclasses.replace(s, tau=1)
    assert [tau_1.actions(t) for t in (4, 5)] == [
        (Action(schedule.INNER), pack),
        (Action(schedule.INNER), merge),
    ]


@settings(max_examples=150)
@given(schedules())
def test_slots_are_as_few_as_possible_and_never_shared(s):
    """A slot belongs to one exchange from the step after its send to its apply."""
    steps = 4 * s.H
    sent = brute_sends(s, steps)
    assert s.slots == max(len(in_flight(s, sent, t)) for t in range(1, steps + 1))
    if s.round_overlap == "none":
        assert (s.slots == 0) == (s.tau == 0)
    else:
        assert s.slots == s.P
    owner = {}
    for t in range(1, steps + 1):
        if s.carried_chunk(t) is not None:
            owner[s.carried_chunk(t)[0].slot] = key(s.carried_chunk(t)[0])
        for event in s.applies(t):
            if s.max_chunks and event.round > 0:
                assert owner[event.slot] == key(event)
            elif s.max_chunks:
                assert event.slot not in owner  # round 0 reads zeros: nothing has arrived there
        for event in s.sends(t):
            assert s.slots == 0 or event.slot == sent.index(key(event)) % s.slots


@settings(max_examples=150)
@given(schedules(), st.integers(0, 80))
def test_pending_and_ages_follow_from_the_events(s, dropped_until):
    """pending: sent, not yet applied. ages: t minus the newest applied send, from every replica.

    The in-flight exchange after step `dropped_until` is never applied.
    """
    steps = 4 * s.H
    sent = brute_sends(s, steps)
    dropped = in_flight(s, sent, dropped_until)
    taken = dict.fromkeys(range(s.P), 0)
    kept = dict.fromkeys(range(s.P), 0)
    for t in range(1, steps + 1):
        assert [key(e) for e in s.pending(t)] == in_flight(s, sent, t)
        for step, p, round_ in sent:
            if step + brute_lag(s) == t:
                taken[p] = step
                if (step, p, round_) not in dropped:
                    kept[p] = step
        assert s.ages(t) == tuple(t - taken[p] for p in range(s.P))
        if t >= dropped_until:
            assert s.ages(t, dropped_until=dropped_until) == tuple(t - kept[p] for p in range(s.P))


GOOD = {"H": 10, "P": 2, "tau": 3, "offsets": (0, 5), "round_overlap": "none"}


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"H": 0}, "sync_period=0"),
        ({"H": 2.5}, "sync_period=2.5"),
        ({"H": True}, "sync_period=True"),
        ({"P": True}, "num_fragments=True"),
        ({"P": 0}, "num_fragments=0"),
        ({"P": 11}, "num_fragments=11"),
        ({"tau": 10}, "overlap_steps=10"),
        ({"tau": -1}, "overlap_steps=-1"),
        ({"round_overlap": "late"}, "round_overlap='late'"),
        ({"round_overlap": "eager"}, "overlap_steps=3"),
        ({"round_overlap": "delayed"}, "round_overlap=delayed"),
        ({"offsets": (0,)}, r"offsets=\(0,\)"),
        ({"offsets": (0, 0.5)}, r"offsets=\(0, 0.5\)"),
        ({"offsets": (1, 11)}, r"offsets=\(1, 11\)"),
    ],
)
def test_an_impossible_schedule_is_named(bad, named):
    """tau < H, P <= H, distinct offsets."""
    check(**GOOD)
    with pytest.raises(ValueError, match=named):
        check(**GOOD | bad)
    with pytest.raises(ValueError, match=r"offsets=\(1, 11\)"):
        Schedule(10, 0, (1, 11))  # a schedule object is always checked
