"""The rules' numbers, by hand."""

import pytest
from together import a_run

from maxdiloco.islands import rules
from maxdiloco.islands.records import (
    Block,
    LogState,
    Member,
    Message,
    Range,
    Record,
    Reject,
    Watermark,
)
from maxdiloco.islands.state_machine import Timing

RUN = a_run()  # H = 4, P = 2, tau = 1
EMPTY = LogState(0, 9, "", "", 0, (), (), (), (), 0, ())
GOOD = Range(1, 1, 0, 64)


def message(island="a", seq=1, base=9, steps=2, tokens=8, **changes):
    found = Message(0, island, 1, seq, base, steps, tokens, tokens, (), 1.0, True, "")
    return found._replace(**changes)


def test_a_weight_is_tokens_squared_over_steps_and_fades():
    """8^2 / 2 = 32; two messages are one, (8 + 8)^2 / (2 + 6) = 32; two records late: 0.64."""
    assert rules.weights(RUN, 10, [message()]) == {("a", 1): 32}
    assert rules.weights(RUN, 10, [message(), message(seq=2, steps=6)]) == {("a", 1): 32}
    assert rules.weights(RUN, 10, [message(base=7)]) == {("a", 1): pytest.approx(32 * 0.64)}


def test_a_weight_with_a_global_batch_is_the_tokens():
    """Steps do not count. Two messages are one: 8 + 8; two records late: 0.64."""
    run = RUN._replace(global_batch_size=4)
    assert rules.weights(run, 10, [message()]) == {("a", 1): 8.0}
    assert rules.weights(run, 10, [message(), message(seq=2, steps=6)]) == {("a", 1): 16.0}
    assert rules.weights(run, 10, [message(base=7)]) == {("a", 1): pytest.approx(8 * 0.64)}


def test_one_sgd_step_of_each_island_is_a_step_of_the_global_batch():
    """Seven sequences with gradients 1, 2, 4, ..., in parts of 2, 2 and 3. The mean gradient of a
    part, weighted by the rule, is the mean of all: 127 / 7. Equal weights have another mean."""
    run, gradients = RUN._replace(global_batch_size=7), [2.0**i for i in range(7)]
    sizes = [rules.batch_size(run, log_of("abc"), name) for name in "abc"]
    assert sizes == [2, 2, 3]
    parts = [gradients[:2], gradients[2:4], gradients[4:]]
    sent = [
        message(name, steps=1, tokens=16 * len(p)) for name, p in zip("abc", parts, strict=True)
    ]
    weights = [*rules.weights(run, 10, sent).values()]
    means = [sum(part) / len(part) for part in parts]
    total = sum(w * mean for w, mean in zip(weights, means, strict=True))
    assert total / sum(weights) == pytest.approx(127 / 7, rel=1e-12)
    assert sum(means) / 3 != pytest.approx(127 / 7, rel=0.1)


def log_of(names, dead=()):
    """A log that knows the first incarnation of each island, and these dead ones."""
    marks = tuple(Watermark(name, 1, 1, 8, 1, 9) for name in sorted({*names, *dead}))
    return EMPTY._replace(watermarks=marks, dead=tuple((name, 1) for name in dead))


@pytest.mark.parametrize("total", [1, 2, 3, 7, 8, 30, 64, 1000, 4097])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 8, 64, 1000])
def test_the_islands_of_a_log_share_the_global_batch_evenly(total, count):
    """Their parts differ by one at most and add up. More islands than sequences have one each."""
    names = [f"island{i}" for i in range(count)]
    run, log = RUN._replace(global_batch_size=total), log_of(names)
    sizes = [rules.batch_size(run, log, name) for name in names]
    assert sum(sizes) == max(total, count)
    assert max(sizes) - min(sizes) <= 1


def test_the_global_batch_follows_islands_that_die_and_join():
    """10 sequences: 3 + 3 + 4 of three; 5 + 5 after the death of one. A newcomer has a third at
    once, the others once the log knows it. A second incarnation is the same island."""
    run = RUN._replace(global_batch_size=10)

    def sizes(log, names="abc"):
        return [rules.batch_size(run, log, name) for name in names]

    assert sizes(log_of("abc")) == [3, 3, 4]
    assert sizes(log_of("abc", dead="b"), "ac") == [5, 5]
    assert sizes(log_of("ac", dead="b"), "b") == [3]
    joined = log_of("abcd", dead="b")
    assert sizes(joined, "acd") == [3, 3, 4]
    again = Watermark("a", 2, 1, 8, 9, 9)
    assert sizes(joined._replace(watermarks=(*joined.watermarks, again)), "acd") == [3, 3, 4]
    assert sizes(EMPTY, "a") == [10]


STORM = [1.0] * 10 + [10.0, 11.0, 12.0]


@pytest.mark.parametrize(
    ("period", "step_s", "delays", "deaths"),
    [
        (6.0, 0.1, STORM, 0.0),  # half of 12
        (6.0, 0.1, STORM, 1.0),  # P deaths / 4 = 0.5: none is left out
        (5.5, 0.1, STORM, 2.0),  # one is left out: half of 11
        (1.0, 0.1, STORM, 40.0),  # the shortest one counts at most; 1 s at least
        (8.0, 2.0, STORM, 0.0),  # H = 4 steps
        (60.0, 20.0, [], 0.0),  # 60 s at most by steps
        (60.0, 0.1, [1.0, 1.0, 500.0], 0.0),  # and by outages
        (1000.0, 0.1, [1500.0, 1600.0, 1700.0], 0.0),  # not on a slow link: 1600 / 1.6
        (86400.0, 0.1, [1e9], 0.0),
        (1.0, 0.1, [0.2], 0.0),
    ],
)
def test_a_period_suits_delays_steps_and_deaths(period, step_s, delays, deaths):
    assert rules.suitable_period(RUN, Timing(), step_s, delays, deaths) == period


def test_the_period_of_a_log_is_the_largest_of_the_living():
    marks = [Watermark(name, 1, 1, 8, 1, 9, T) for name, T in (("a", 2.0), ("b", 7.0), ("c", 3.0))]
    known = EMPTY._replace(watermarks=tuple(marks))
    assert rules.shared_period(known) == 7.0
    assert rules.shared_period(known._replace(dead=(("b", 1),))) == 3.0
    assert rules.shared_period(EMPTY) == 0.0
    assert rules.shared_period(EMPTY._replace(watermarks=(marks[0]._replace(period=1e9),))) == 86400


def test_a_record_of_few_moves_less():
    assert rules.scale(30, 40.0) == 0.75
    assert rules.scale(50, 40.0) == rules.scale(0, 40.0) == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""), ({"base": 10}, "base"), ({"base": 7}, ""), ({"base": 6}, "stale"),
        ({"finite": False}, "not finite"), ({"norm": 4.0}, ""), ({"norm": 4.1}, "norm"),
        ({"norm": 20.0, "steps": 10}, ""), ({"norm": 20.1, "steps": 10}, "norm"),
        ({"data": (GOOD,)}, ""), ({"data": (GOOD, GOOD._replace(start=1, stop=1))}, "data"),
        ({"data": (GOOD, GOOD._replace(stop=GOOD.stop + 1))}, ""),  # on into the next block
        ({"data": (GOOD._replace(block=2**20 + 5, stop=GOOD.stop + 1),)}, "data"),
        ({"data": (GOOD._replace(start=GOOD.stop),)}, "data"),
        ({"data": (GOOD._replace(lease=3),)}, "data"),
        ({"data": (GOOD._replace(lease=0),)}, "data"),
        ({"data": (GOOD._replace(block=2**20 + 5),)}, ""),
        ({"data": (GOOD._replace(block=2**20 + 6),)}, "data"),
    ],
)  # fmt: skip
def test_why_a_message_cannot_count(changes, reason):
    """The medians of 0.5, 1, 1, 9 are 1, and by step 0.5."""
    ledger = EMPTY._replace(norms=((0.5, 2), (1.0, 2), (1.0, 2), (9.0, 2)), top=5)
    run = RUN._replace(block_tokens=64)
    assert rules.reject_reason(run, ledger, message(**changes), "") == reason
    assert rules.reject_reason(run, ledger, message(**changes), "sha256") == "sha256"
    few = ledger._replace(norms=((1.0, 2),) * 3)
    assert rules.reject_reason(RUN, few, message(norm=9.0), "") == ""


@pytest.mark.parametrize(
    ("messages", "present", "waited", "number"),
    [
        ([message()], {"a"}, 0.0, 1),  # all that are ready, H / P = 2 steps
        ([message()], {"a", "b"}, 0.0, None),
        ([message()], {"a", "b"}, 20.0, 1),  # grace is over
        ([message(steps=1)], {"a"}, 99.0, None),
        ([message(steps=1), message(seq=2, steps=1)], {"a"}, 0.0, 2),  # it would have to wait
        ([message(seq=2)], {"a"}, 99.0, None),  # out of turn
        ([message(), message("b", steps=1), message("c", steps=9)], set("abc"), 0.0, 3),
    ],
)
def test_when_a_record_is_written(messages, present, waited, number):
    inbox = {rules.message_key(m): m for m in messages}
    found = rules.decidable(RUN, EMPTY, inbox, {}, present, waited=waited, timing=Timing())
    assert (found and len(found[0])) == number


def test_too_few_decide_what_is_bad_alone_and_in_turn():
    run = a_run(islands_min=2)
    inbox = {
        rules.message_key(m): m for m in (message(base=5), message(seq=2), message(seq=3, base=5))
    }
    assert rules.decidable(run, EMPTY, inbox, {}, {"a"}, waited=0.0, timing=Timing()) is None
    late = rules.decidable(run, EMPTY, inbox, {}, {"a"}, waited=20.0, timing=Timing())
    assert late == ([], [Reject("a", 1, 1, "stale", 2, 1.0)])


def test_how_a_record_is_applied():
    """Sent at 5, tau = 1: not before 6, merged at 6, later shifted."""
    hows = [rules.how_to_apply(RUN, t, 5, 0) for t in (5, 6, 7)]
    assert hows == ["wait", "merge", "shift"]
    assert rules.how_to_apply(RUN, 6, 5, 1) == rules.how_to_apply(RUN, 6, None, 0) == "shift"


def test_own_progress_stays():
    """theta 8 -> 6; x = 8 - 3 (sent) - 1 = 4. Committed, x = 6 - 1; else x = 6 - 3 - 1."""
    assert rules.unsent(8, [3], 4) == 1
    assert rules.rebase(4, 8, 6, [3]) == 5 and rules.unsent(6, [], 5) == 1
    assert rules.rebase(4, 8, 6, []) == 2 and rules.unsent(6, [3], 2) == 1


def test_authors_take_turns():
    assert [rules.authors_before(R, "b", {"a", "c"}) for R in (3, 4, 5)] == [1, 0, 2]


def test_pauses_double_up_to_the_longest_with_jitter():
    pauses = [rules.pause(Timing(), tries, "a") for tries in range(60)]
    for tries, pause in enumerate(pauses):
        longest = min(0.5 * 2**tries, 5.0)
        assert longest / 2 <= pause <= longest
    assert len(set(pauses)) == 60 and pauses[9] != rules.pause(Timing(), 9, "b")


@pytest.mark.parametrize(
    ("steps", "waited", "invited", "due"),
    [
        (9, 60.0, False, True), (9, 59.0, False, False), (9, 30.0, True, True),
        (9, 29.0, True, False), (1, 59.0, True, False), (1, 60.0, True, True),
    ],
)  # fmt: skip
def test_an_invited_island_sends_after_half_of_a_period(steps, waited, invited, due):
    """And after H / P = 2 steps."""
    assert rules.is_due(RUN, Timing(), steps, waited, invited=invited) == due


def test_inner_moments_of_a_joiner():
    ages = [rules.moments(own, 10) for own in (None, 7, 8, 10, 11)]
    assert ages == ["zero", "zero", "kept", "kept", "zero"]


def test_the_rest_of_a_dead_islands_block_is_free_once():
    blocks = (
        Block(1, 1, "a", 1, 30, 30), Block(2, 1, "b", 1, 8, 8), Block(3, 2, "a", 1, 9, 9),
        Block(4, 1, "a", 1, 64, 50),
    )  # fmt: skip
    ledger = EMPTY._replace(blocks=blocks, dead=(("a", 1),))
    assert rules.released_ranges(ledger, 64) == [Range(1, 2, 30, 64)]


def test_a_block_is_finished_when_all_of_it_came_in_any_order():
    """Of a block of 30 tokens 9 to 30 come first, since the message with 0 to 9 was rejected."""
    run, ledger = a_run(block_tokens=30), EMPTY
    for start, stop, blocks in ((9, 30, (Block(5, 1, "a", 1, 30, 21),)), (0, 9, ())):
        member = Member("a", 1, 1, 1.0, 2, 9, 1.0, (Range(5, 1, start, stop),))
        record = Record(0, 10, "a", "", (member,), (), (), 1.0, "", "", "")
        ledger = rules.next_state(run, ledger, record, "")
        assert (ledger.blocks, ledger.top) == (blocks, 5)


def test_who_is_dead_by_the_ledger():
    """An island that is absent is dead once it was watched; an earlier incarnation is at once."""
    marks = tuple(Watermark(name, 1, 1, 8, 1, 1) for name in "abc")
    ledger = EMPTY._replace(watermarks=marks, dead=(("c", 1),))
    assert rules.newly_dead(ledger, {"a": 1}, absent=True) == (("b", 1),)
    assert rules.newly_dead(ledger, {"a": 2, "b": 1}, absent=True) == (("a", 1),)
    assert rules.newly_dead(ledger, {"a": 1}, absent=False) == ()
    assert rules.newly_dead(ledger, {"a": 2}, absent=False) == (("a", 1),)


def test_what_may_be_deleted():
    """Below the second newest snapshot of three: its own gradient, what its ledger has decided."""
    names = "g/0/3.a.1 g/0/4.a.1 g/0/5.a.1 c/0/1 s/0/2 s/0/4 s/0/6 u/0/a.1.7 u/0/a.1.8".split()
    marks = {n: (Watermark("a", 1, n + 3, 0, 1, 1),) for n in (2, 4, 6)}
    old, newer, newest = (EMPTY._replace(number=n, watermarks=m) for n, m in marks.items())
    found = rules.deletable(names, [newest, old, newer])
    assert found == ["g/0/3.a.1", "g/0/4.a.1", "s/0/2", "u/0/a.1.7"]
    assert rules.deletable(names, [newest]) == []


def ledgers_with_blocks():
    """Five snapshots of every fourth record, whose highest blocks were 10, 20, ... 50; of those
    below the first of them two are unfinished."""
    run, ledger = a_run(block_tokens=64), EMPTY._replace(number=0)
    for number in range(1, 21):
        read = (Range(10 * -(-number // 4), 1, 0, 64),)
        read += (Range(3, 1, 0, 60), Range(7, 1, 0, 60)) if number == 1 else ()
        member = Member("a", 1, number, 1.0, 2, 8, 1.0, read)
        record = Record(0, number, "a", "", (member,), (), (), 1.0, "", "", "")
        yield run, (ledger := rules.next_state(run, ledger, record, ""))


def test_a_block_is_over_four_snapshots_after_a_higher_one():
    found = {ledger.number: ledger for _, ledger in ledgers_with_blocks()}
    assert found[20].tops == (10, 20, 30, 40, 50)
    assert [*rules.finished_blocks(found[20], range(1, 13))] == [1, 2, 4, 5, 6, 8, 9, 10]
    assert [*rules.finished_blocks(found[19], range(1, 13))] == []


@pytest.mark.parametrize(
    ("read", "reason"),
    [
        (Range(10, 1, 0, 8), "data"), (Range(10, 2, 0, 8), "data"), (Range(1, 1, 0, 8), "data"),
        (Range(11, 1, 0, 8), ""), (Range(3, 1, 60, 64), ""), (Range(7, 2, 60, 64), ""),
        (Range(7, 1, 60, 65), "data"), (Range(2, 1, 60, 70), "data"), (Range(3, 1, 60, 65), "data"),
        (Range(10, 1, 63, 65), "data"), (Range(11, 1, 0, 640), ""),
    ],
)  # fmt: skip
def test_a_message_on_a_block_that_is_over_is_rejected(read, reason):
    *_, (run, ledger) = ledgers_with_blocks()
    sent = message(base=ledger.number, data=(read,))
    assert rules.reject_reason(run, ledger, sent, "") == reason


def test_leases_of_blocks_that_are_over_are_deleted():
    """By the second newest snapshot: the newest one knows more of them."""
    found = {ledger.number: ledger for _, ledger in ledgers_with_blocks()}
    newest = found[20]._replace(number=24, tops=(20, 30, 40, 50, 60))
    names = "d/1 d/3 d/3.2 d/7 d/8 d/8.2 d/10 d/11 d/20 d/21".split()
    assert rules.deletable(names, [newest, found[20]]) == ["d/1", "d/8", "d/8.2", "d/10"]
    assert rules.deletable(names, [found[20]]) == []
