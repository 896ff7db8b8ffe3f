"""No object of a log grows beyond what its readers accept, and the run goes on."""

import random
from types import SimpleNamespace

import pytest
from simulated_store import Faults
from simulator import World
from together import a_run

from maxdiloco.islands import log_store, outer_step, records, rules
from maxdiloco.islands.records import (
    Heartbeat,
    LogState,
    Member,
    Message,
    Range,
    Record,
    Reject,
    TooLarge,
    Watermark,
)  # fmt: skip
from maxdiloco.islands.rules import Peer, Timing
from maxdiloco.islands.state_machine import FragmentLog, StateMachine
from maxdiloco.storage import store

EMPTY = LogState(0, 0, "", "", 0, (), (), (), (), 0, ())


def churned(starts, **options):
    """A world whose islands are killed one after the other, each once the log has its message."""
    world = World(4, islands_min=1, **options)
    world.faults, rng = Faults(), random.Random(0)
    while world.seen["killed"] < starts:
        world.run_events(20)
        logs = [(p, p.state.logs[0]) for p in world.programs[-60:] if p.living]
        able = [program for program, log in logs if log.seq > len(log.undecided)]
        if able:
            world.end(one := rng.choice(able))
            one.state = SimpleNamespace(
                incarnation=one.state.incarnation, tokens_read=one.state.tokens_read
            )
            world.seen["killed"] += 1
    return world


def newest(world):
    """Ledgers of the newest snapshots, one of each fragment."""
    names = [max(world.listed(f"s/{F}/"), key=records.number_of) for F in world.tokens]
    return [world.objects[name] for name in names]


def require_little(world):
    """Few marks whatever the number of starts; the run goes on, and its tokens add up."""
    for ledger in newest(world):
        assert len(ledger.watermarks) < 150 and len(ledger.dead) < 150 and len(ledger.blocks) < 150
    world.check_growth()
    world.check_ledger()


@pytest.mark.parametrize("snapshot_every", [2, 3])
def test_a_ledger_forgets_incarnations_that_are_over(snapshot_every):
    world = churned(400, names="abc", block_tokens=40, snapshot_every=snapshot_every)
    assert max(ledger.number for ledger in newest(world)) > 100
    require_little(world)


@pytest.mark.full
def test_twenty_thousand_starts_leave_a_small_ledger():
    world = churned(20_000, names="abcd", block_tokens=40, snapshot_every=3)
    require_little(world)


def test_a_ledger_stays_as_small_as_what_it_remembers():
    """Snapshots each 64 records, one incarnation a record: 256 are remembered, and those living."""
    run, ledger = a_run(block_tokens=64, snapshot_every=64), EMPTY
    for number in range(1, 1001):
        name = f"box{number % 300}"
        member = Member(name, number, 1, 1.0, 2, 8, 1.0, (Range(number, 1, 0, 8),))
        before = tuple((m.island, m.incarnation) for m in ledger.watermarks)
        dead = tuple(key for key in before if key not in ledger.dead)
        record = Record(0, number, name, "", (member,), (), dead, 1.0, ledger.record_hash, "", "")
        assert rules.validate_record(ledger, record) == ""
        ledger = rules.next_state(run, ledger, record, "")
    assert len(ledger.watermarks) == 258 and len(ledger.dead) == 257 and len(ledger.blocks) == 258
    assert ledger.tokens == 8 * 1000 and len(records.encode(ledger)) < 60_000


def test_a_ledger_with_the_most_that_it_may_have_fits():
    """Names of 64 letters, numbers of 19 digits; a thousand living islands."""
    most, name = 2**63 - 1, "i" * 64
    marks = (Watermark(name, *[most] * 5, 1.2345678901234567e-300),) * (rules.MAX_DEAD + 1000)
    block = records.Block(most, 2, name, most, most, most)
    wide = LogState(
        most, most, "f" * 64, "f" * 64, most, marks, ((1.2345678901234567e-300, most),) * 16,
        ((name, most),) * rules.MAX_DEAD, (block,) * rules.MAX_UNFINISHED, most,
        (most,) * rules.TOPS,
    )  # fmt: skip
    assert records.fits(wide)


def test_a_forgotten_incarnation_keeps_only_its_tokens():
    run = a_run(snapshot_every=2, block_tokens=64)  # remembered for eight records
    ledger = EMPTY
    for number in range(1, 12):
        member = Member("a", 1 + (number > 1), max(1, number - 1), 1.0, 2, 8, 1.0, ())
        dead = (("a", 1),) if number == 2 else ()
        record = Record(0, number, "a", "", (member,), (), dead, 1.0, "", "", "")
        ledger = rules.next_state(run, ledger, record, "")
        assert (("a", 1) in ledger.dead) == (2 <= number <= 10)
    assert ledger.watermarks == (Watermark("a", 2, 10, 88, 1, 11),)
    old = Message(0, "a", 1, 1, 0, 2, 8, 8, (), 1.0, True, "")
    assert rules.order_messages(run, ledger, {rules.message_key(old): old}, {}) == ([], [])
    late = old._replace(base=3)
    rejects = [Reject("a", 1, 1, "stale", 2, 1.0)]
    assert rules.order_messages(run, ledger, {rules.message_key(late): late}, {}) == ([], rejects)


def test_a_dead_island_that_the_log_does_not_know_is_refused():
    record = Record(0, 1, "a", "", (), (), (("b", 1),), 1.0, "", "", "")
    assert "dead" in rules.validate_record(EMPTY, record)
    known = EMPTY._replace(watermarks=(Watermark("b", 1, 1, 8, 1, 1),))
    assert rules.validate_record(known, record) == ""
    assert "dead" in rules.validate_record(known._replace(dead=(("b", 1),)), record)


def test_many_deaths_are_declared_in_turn_and_the_oldest_forgotten():
    run = a_run(snapshot_every=64)
    ledger = EMPTY._replace(
        watermarks=tuple(Watermark(f"i{n:04}", 1, 1, 8, 1, 1) for n in range(1500))
    )
    for number in range(1, 7):
        dead = rules.newly_dead(ledger, {"i0000": 1}, absent=True)
        assert len(dead) == min(256, 1499 - 256 * (number - 1))
        record = Record(0, number, "a", "", (), (), dead, 1.0, "", "", "")
        ledger = rules.next_state(run, ledger, record, "")
    assert len(ledger.dead) == 1024 and len(ledger.watermarks) == 1025
    assert ledger.dead[-1] == ("i1499", 1) and ledger.dead[0] == ("i0476", 1)


def test_messages_of_dead_incarnations_are_deleted():
    ledgers = [
        EMPTY._replace(number=n, dead=dead)
        for n, dead in ((2, ()), (4, (("a", 1),)), (6, (("a", 1), ("b", 1))))
    ]
    assert rules.deletable(["u/0/a.1.9", "u/0/b.1.9", "u/0/a.2.1"], ledgers) == ["u/0/a.1.9"]


def leased(world):
    return [records.number_of(name) for name in world.listed("d/")]


def test_leases_stay_few_and_a_slow_island_keeps_its_own(monkeypatch):
    """Speeds of 1 : 8; the slow one's messages have a step or two of the sixteen of a block."""
    monkeypatch.setattr(rules, "is_outlier", lambda ledger, message: False)  # of one value each
    world = World(4, names="ab", block_tokens=32, islands_min=1, snapshot_every=64)
    world.faults = Faults()
    for program, time in zip(world.programs, (0.25, 2.0), strict=True):
        program.step_time = time
    counts = []
    for number in (500, 1000, 1500):
        while world.heads()[0] < number:
            world.run_events(20)
        counts.append(len(leased(world)))
        assert len(world.programs) == 2 and not world.seen["data"]
    assert min(leased(world)) > 1 and max(counts) < 1.2 * min(counts)
    marks = {mark.island: mark for mark in world.programs[0].state.logs[0].state.watermarks}
    assert marks["b"].tokens > marks["a"].tokens / 16 > 0


# -- records ------------------------------------------------------------------------------------


def crowd(islands, ranges, run):
    """An island that is in, and the messages of all, each of so many blocks apart."""
    s = StateMachine(run, Timing(), "i000", "n", ("",))
    inbox = {}
    for place in range(islands):
        data = tuple(Range(2 + place + islands * n, 1, 0, 64) for n in range(ranges))
        tokens = 64 * ranges
        one = Message(0, f"i{place:03}", 1, 1, 0, 9, tokens, tokens, data, 1.0, True, "")
        inbox[rules.message_key(one)] = one
    s.phase, s.incarnation, s.observed = "train", 1, 99.0
    s.logs = (FragmentLog(state=EMPTY, inbox=inbox, caught_up=True),)
    return s


def test_a_record_takes_as_many_messages_as_fit():
    """300 islands with 75 blocks each: 1.3 MB. The rest is in the next record."""
    run = a_run(fragments=a_run().fragments[:1], block_tokens=64)
    s, taken = crowd(300, 75, run), []
    for _ in range(2):
        log = s.logs[0]
        draft = s._largest_that_fits(
            log, set(), *rules.order_messages(run, log.state, log.inbox, {})
        )
        assert len(records.encode(draft)) <= log_store.max_bytes(run, "c/0/1")
        assert rules.validate_record(log.state, draft) == ""
        ledger = rules.next_state(run, log.state, draft, "")
        assert len(records.encode(ledger)) <= log_store.max_bytes(run, "s/0/1")
        inbox = {k: m for k, m in log.inbox.items() if not rules.is_decided(
            rules.watermarks(ledger), k)}  # fmt: skip
        log.state, log.inbox = ledger, inbox
        taken.append(len(draft.members))
    assert sum(taken) == 300 and taken[0] > 100 and taken[1] > 0


def test_a_record_takes_the_oldest_messages_first(monkeypatch):
    run = a_run(fragments=a_run().fragments[:1], block_tokens=64)
    s = crowd(20, 9, run)
    (log,) = s.logs
    ages = {key: m._replace(base=int(key[0] < "i010")) for key, m in log.inbox.items()}
    log.inbox, log.state = ages, EMPTY._replace(number=1)
    monkeypatch.setattr(records, "_MAX_HEADER", 5000)
    draft = s._largest_that_fits(log, set(), *rules.order_messages(run, log.state, ages, {}))
    names = [member.island for member in draft.members]
    assert 3 < len(names) <= 10 and min(names) == "i010" and names == sorted(names)


def apart(names):
    """rules.next_lease where an island gets each N-th block, so that none are neighbours."""

    def to_claim(ledger, size, claimed):
        last = max([block for block, _ in claimed], default=0)
        block = last + len(names) if last else next(firsts)
        return f"d/{block}", Range(block, 1, 0, size)

    firsts = iter(range(1, 10**6))
    return to_claim


@pytest.mark.parametrize(
    ("names", "tokens", "least"),
    [("abcdefgh", (5, 6, 7), 7000), ("ab", (1,) * 20 + (90,), 4000)],
)
def test_a_run_goes_on_whose_records_and_messages_do_not_fit(names, tokens, least, monkeypatch):
    """Limits of a hundredth: a record takes some of the islands, a message some of its blocks."""
    monkeypatch.setattr(records, "_MAX_HEADER", 1 << 13)
    monkeypatch.setattr(records, "_MAX_MESSAGE_HEADER", 1 << 12)
    monkeypatch.setattr(rules, "next_lease", apart(names))
    world = World(
        5, names=names, step_tokens=tokens, block_tokens=1, islands_min=1,
        snapshot_every=3, fragments=a_run().fragments[1:],
    )  # fmt: skip
    world.faults = Faults()
    while min(world.heads()) < 12:
        world.run_events(500)
    log = [world.objects[f"c/0/{number}"] for number in range(1, 13)]
    largest = max(len(records.encode(record)) for record in log)
    assert least < largest <= 1 << 13
    assert 60 < max(len(m.data) for record in log for m in record.members) < 80  # of 4 KiB
    world.check_growth()
    world.check_ledger()


# -- messages -----------------------------------------------------------------------------------


def test_neighbouring_blocks_of_a_message_are_one_range():
    parts = [Range(block, 1, 0, 64) for block in range(3, 5003)]
    (one,) = rules.joined((), parts, 64)
    assert one == Range(3, 1, 0, 5000 * 64) and [*rules.ranges_by_block(one, 64)] == parts
    cut = rules.joined((Range(3, 1, 8, 70),), (Range(4, 1, 6, 64), Range(6, 1, 0, 1)), 64)
    assert cut == (Range(3, 1, 8, 128), Range(6, 1, 0, 1))
    other = rules.joined((Range(3, 1, 0, 64),), (Range(4, 2, 0, 64),), 64)
    assert len(other) == 2  # of another lease


def test_a_message_of_five_thousand_blocks_takes_as_many_as_fit():
    run = a_run(fragments=a_run().fragments[:1], block_tokens=1 << 20)
    data = tuple(Range(10**6 + 2 * n, 1, 0, 1 << 20) for n in range(5000))
    tokens = 5000 << 20
    s = StateMachine(run, Timing(), "a", "n", ("",))
    s.phase, s.incarnation, s.tokens_read, s.now = "train", 1, tokens, 99.0
    s.logs = (FragmentLog(state=EMPTY, steps=9, tokens=tokens, data=data),)
    s._at_boundary()
    (pack,), (log,) = s._actions, s.logs
    message = pack.message
    assert message.data + log.data == data and len(message.data) > 4000
    assert message.tokens + log.tokens == message.read + log.tokens == tokens
    assert log.tokens == len(log.data) << 20 > 0
    worst = message._replace(
        island="i" * 64, sha256="f" * 64, signature="f" * 128, norm=-1.2345678901234567e-300,
        incarnation=2**62, seq=2**62, base=2**62, steps=2**62, tokens=2**62, read=2**62,
    )  # fmt: skip
    name = records.message_name(0, "i" * 64, 2**62, 2**62)
    payload = bytes(outer_step.payload_size(run.wire, (300, 4)))
    bucket = store.in_memory()
    assert log_store.create(bucket, run, name, worst, payload)
    assert log_store.read_header(bucket, run, name) == worst


def test_a_writer_cannot_write_what_a_reader_refuses():
    run, bucket = a_run(), store.in_memory()
    wide = EMPTY._replace(watermarks=(Watermark("a", 1, 1, 1, 1, 1),) * 20_000)
    data = tuple(Range(n, 1, 0, 1) for n in range(1, 20_000, 2))
    message = Message(0, "a", 1, 1, 0, 1, 1, 1, data, 1.0, True, "")
    gradient = records.Gradient(0, 1, "")
    for name, value, payload in (
        ("s/0/1", wide, b""), ("u/0/a.1.1", message, b""), ("g/0/1.a.1", gradient, bytes(1 << 22)),
    ):  # fmt: skip
        with pytest.raises(TooLarge):
            log_store.create(bucket, run, name, value, payload)
    assert list(bucket.list_all("")) == []
    assert log_store.create(bucket, run, "g/0/1.a.1", gradient, b"x")


# -- signs of life ------------------------------------------------------------------------------


def expected(speed, watermarks=(), since=0.0, number=10):
    seen = Peer(Heartbeat("b", 1, 9, (1,), speed, False), 0.0, since)
    ledger = EMPTY._replace(number=number, watermarks=watermarks)
    return rules.expected_tokens(
        ledger, seen, mean=600.0, observed=100.0, timing=Timing(period=60.0)
    )


def test_a_claimed_speed_counts_as_far_as_the_log_confirms_it():
    """800 tokens in records 3 to 10 are 100 a record, of which four times as many are believed."""
    marks = (Watermark("a", 1, 9, 10**9, 1, 10), Watermark("b", 1, 3, 800, 3, 5))
    assert expected(1.0, marks) == 60 and expected(9e11, marks) == 400
    assert expected(9e11, (Watermark("b", 1, 3, 0, 3, 5),)) == 0  # all rejected


def test_a_new_island_is_expected_to_bring_the_mean_at_first():
    assert expected(9e11, since=50.0) == 600 and expected(1.0, since=50.0) == 60
    assert expected(9e11, since=-50.0) == 0
