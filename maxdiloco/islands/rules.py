"""The rules that all islands share, one function a rule.

docs/development/islands-protocol.md has the rules in words.
Pure, and of plain values: who may write, what counts, how an island's own progress is kept. The
numbers are our choice unless a source is named.
"""

import itertools
import statistics
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from maxdiloco.islands import blocks, records
from maxdiloco.islands.island import Key, Pace, Seen
from maxdiloco.islands.records import Ledger, Mark, Member, Message, Record, Reject, Run

MOST_UNDECIDED = 2  # messages of an island and fragment
MOST_STALE = 2  # records
STALE_WEIGHT = 0.8  # a record
REASONS = ("not finite", "base", "stale", "norm", "data")  # of a reject, in this order
REPEATED = ("norm", "data")  # what an island that goes on meets with the next message, too
MOST_NORM, NORMS, LEAST_NORMS = 4.0, 16, 4  # times the median of the last 16, once there are 4
# A dead incarnation is forgotten after so many snapshots' records. Two later, all that it has put
# is deleted; the others are for deletions that failed.
REMEMBERED = 4
# Deaths in a record, and in a ledger, which forgets the oldest first. With marks they take at most
# 350 kB of a ledger, unfinished blocks 480 kB, and the marks of a thousand living islands fit.
MOST_DEATHS, MOST_DEAD = 256, 1024
# Times what an island brought into a record on average is believed of its speed: as for norms.
MOST_SPEEDUP = 4.0
NEW_PERIODS = 2  # in which an island that has committed nothing is expected to bring what others do
SMALL_SCALE = 0.5  # of a record, below which a line is logged


def origin(run: Run) -> str:
    """Rule 1: the link of a log's start, the same for islands that begin a run at once."""
    return records.digest(run._replace(tokens=1, block_tokens=0, eval_tokens=0))


def breach(ledger: Ledger, record: Record) -> str:
    """Rule 1, the log is the only truth: why a record cannot follow, "" if it does."""
    marks = marks_of(ledger)
    if (record.fragment, record.number) != (ledger.fragment, ledger.number + 1):
        return "it has another number"
    if record.previous != ledger.link:
        return "it follows another record"
    if record.state != ledger.digest:
        return f"it has the state {record.state[:12]}, and here is {ledger.digest[:12]}"
    decided = sorted((*record.members, *record.rejected), key=key_of)
    if list(record.members) != sorted(record.members, key=key_of):
        return "its members are not in order"
    for one in decided:
        if not is_next(marks, key_of(one)):
            return f"{one.island}.{one.incarnation}.{one.seq} is decided already, or out of turn"
        marks[one.island, one.incarnation] = one.seq
    died = {*record.dead}
    if len(died) < len(record.dead) or not died <= marks.keys() - {*ledger.dead}:
        return "it has a dead island that is not known, or was dead already"
    if any((m.island, m.incarnation) in ledger.dead for m in record.members):
        return "it has a dead member"
    if not 0 < record.scale <= 1 or any(not m.weight > 0 for m in record.members):
        return "its weights and scale are not positive"
    return ""


def follow(run: Run, ledger: Ledger, record: Record, digest: str) -> Ledger:
    """Rule 1: the ledger after a record. digest: of the outer state after it."""
    marks, number = {(m.island, m.incarnation): m for m in ledger.marks}, record.number
    for one in sorted((*record.members, *record.rejected), key=key_of):
        key = key_of(one)[:2]
        old = marks.get(key, Mark(*key, 0, 0, number, number))
        tokens = old.tokens + (one.tokens if isinstance(one, Member) else 0)
        marks[key] = old._replace(seq=one.seq, tokens=tokens, record=number)
    for key in record.dead:
        marks[key] = marks[key]._replace(record=number)
    all_dead = (*ledger.dead, *record.dead)
    dead = [key for key in all_dead if number - marks[key].record <= remembered(run)][-MOST_DEAD:]
    found, top = blocks.after(run, ledger, record)
    for key in sorted({*all_dead} - {*dead}):
        _forget(marks, key)
        found = tuple(block for block in found if (block.island, block.incarnation) != key)
    norms = [(m.norm, m.steps) for m in record.members]
    norms += [(r.norm, r.steps) for r in record.rejected if r.reason == "norm"]
    return Ledger(
        ledger.fragment,
        record.number,
        records.digest(record),
        digest,
        ledger.tokens + sum(m.tokens for m in record.members),
        tuple(marks[key] for key in sorted(marks)),
        (*ledger.norms, *norms)[-NORMS:],
        tuple(dead),
        found,
        top,
        blocks.tops(run, ledger, number, top),
    )


def _forget(marks: dict[tuple[str, int], Mark], key: tuple[str, int]) -> None:
    """Drop an incarnation's mark; its island's next one has its tokens then."""
    old = marks.pop(key)
    later = [other for other in marks if other[0] == key[0] and other > key]
    if later:
        heir = marks[min(later)]
        since = min(heir.since, old.since)
        marks[min(later)] = heir._replace(tokens=heir.tokens + old.tokens, since=since)


def remembered(run: Run) -> int:
    """Records after which a dead incarnation is forgotten."""
    return REMEMBERED * run.snapshot_every


def is_forgotten(run: Run, ledger: Ledger, message: Message) -> bool:
    """Rule 4, exactly once: whether the log no longer knows if it has decided this message.

    It was stale long before, so nothing is lost that could count.
    """
    return ledger.number - message.base > remembered(run)


def fits(run: Run, ledger: Ledger, record: Record) -> bool:
    """Rule 12: whether a record, and a snapshot after it, can be written and read."""
    digest = "0" * 64  # of what is not known yet: the gradient and the state
    record = record._replace(gradient=digest)
    return records.fits(record) and records.fits(follow(run, ledger, record, digest))


def marks_of(ledger: Ledger) -> dict[tuple[str, int], int]:
    """{(island, incarnation): its last message that is decided}."""
    return {(m.island, m.incarnation): m.seq for m in ledger.marks}


def key_of(one: Message | Member | Reject) -> Key:
    """What names a message in its fragment's log."""
    return one.island, one.incarnation, one.seq


def distance(number: int, name: str, present: Iterable[str]) -> int:
    """Rule 2: how many islands stand before this one as the author of a record; 0: none."""
    order = sorted({*present, name})
    return (order.index(name) - number) % len(order)


def is_own(claim: records.Claim, nonce: str) -> bool:
    """Rule 2: whether what is in the store was written by this program, whatever the answer was."""
    return claim.nonce == nonce


def watched(pace: Pace, since: float, writes: bool) -> float:
    """Rule 3: what counts of the time between two looks at the signs of life, a pause and half a
    one for the answer. While the store is away, or the observer stands still, nobody is silent.

    writes: whether the observer's own sign of life comes into the store; the others' may not.
    """
    return min(since, 1.5 * pace.roll) if writes else 0.0


def alive(seen: Mapping[str, Seen], time: float, pace: Pace) -> set[str]:
    """Rule 3: islands whose sign of life has changed lately.

    time: so long the observer has watched.
    """
    return {name for name, one in seen.items() if time - one.at < pace.dead}


def newly_dead(
    ledger: Ledger, living: Mapping[str, int], *, absent: bool
) -> tuple[tuple[str, int], ...]:
    """Rules 3 and 8: incarnations that the log knows and that live no more.

    living: {island: its newest incarnation}; an earlier one is over. absent: whether all others
    have been watched for long enough to be dead, too.
    """
    dead = {*ledger.dead}
    known = ((m.island, m.incarnation) for m in ledger.marks)
    found = (m for m in known if m not in dead and living.get(m[0], m[1] + absent) > m[1])
    return tuple(itertools.islice(found, MOST_DEATHS))


def is_decided(marks: Mapping[tuple[str, int], int], key: Key) -> bool:
    """Rule 4, exactly once: whether a record has taken or rejected a message."""
    return key[2] <= marks.get(key[:2], 0)


def is_next(marks: Mapping[tuple[str, int], int], key: Key) -> bool:
    """Rule 4, in turn: whether a message is the one after those of its incarnation."""
    return not is_decided(marks, key) and key[2] - 1 <= marks.get(key[:2], 0)


def is_stale(ledger: Ledger, message: Message) -> bool:
    """Rule 4: whether the next record is too late for a message."""
    return ledger.number - message.base > MOST_STALE


def may_send(own: Sequence[Any]) -> bool:
    """Rule 4: at most two undecided messages of an island and fragment."""
    return len(own) < MOST_UNDECIDED


def weight(number: int, messages: Sequence[Message]) -> float:
    """Rule 5, of one island in a record: tokens^2 / steps; rule 4: less by its staleness."""
    tokens, steps = sum(m.tokens for m in messages), sum(m.steps for m in messages)
    found = max(tokens, 1) ** 2 / max(steps, 1)
    for _ in range(number - 1 - messages[0].base):
        found *= STALE_WEIGHT
    return found


def expected_tokens(ledger: Ledger, seen: Seen, mean: float, watched: float, pace: Pace) -> float:
    """Rule 5: what an island whose message is missing would have brought into the next record.

    By the speed that it claims, as far as the log confirms it: an island brings at most
    MOST_SPEEDUP times what it brought into a record on average. One that has committed nothing is
    expected to bring the mean of the others, and after NEW_PERIODS nothing.

    Args:
      ledger: of the log before the record.
      seen: the island's newest sign of life.
      mean: tokens of an island in the record.
      watched: Island.watched.
      pace: of the observer.
    """
    beat = seen.beat
    for mark in ledger.marks:
        if (mark.island, mark.incarnation) == (beat.island, beat.incarnation):
            most = MOST_SPEEDUP * mark.tokens / (ledger.number - mark.since + 1)
            break
    else:
        most = mean if watched - seen.since < NEW_PERIODS * pace.period else 0.0
    return min(beat.speed * pace.period, most)


def scale(committed: int, expected: float) -> float:
    """Rule 5: a record of few members moves less."""
    return min(1.0, committed / expected) if committed else 1.0


def spans(run: Run, members: Sequence[Message], rejected: Sequence[Reject]) -> bool:
    """Rule 5: whether the median island took H / P steps; or one waits, with two undecided."""
    steps: dict[str, list[int]] = {}
    for message in members:
        steps.setdefault(message.island, []).append(message.steps)
    full = any(not may_send(messages) for messages in steps.values())
    least = run.sync_period // len(run.fragments)
    return full or bool(rejected) or statistics.median(map(sum, steps.values())) >= least


def how_to_apply(run: Run, t: int, sent_at: int | None, others: int) -> str:
    """Rule 6: "wait", "merge" or "shift" for a record at step t.

    sent_at: the step of the own message in it, or None. others: own messages left undecided.
    """
    if sent_at is None:
        return "shift"
    due = sent_at + run.overlap_steps
    if t < due:
        return "wait"
    return "merge" if t == due and not others else "shift"


def is_due(pace: Pace, steps: int, waited: float) -> bool:
    """Rule 7: a message every T seconds, whatever the steps.

    steps, waited: since the message before."""
    return waited >= pace.period and steps >= pace.least_steps


def progress(run: Run, ledger: Ledger) -> float:
    """Rule 8: the part of the run that is done, by the ledger of fragment 0: learning rate, end."""
    return ledger.tokens / run.tokens


def moments(own: int | None, head: int) -> str:
    """Rule 9, a joiner's inner optimizer: "kept" from its checkpoint, or "zero" with a warm-up.

    own: the records that its checkpoint has; None: it has none.
    """
    return "kept" if own is not None and 0 <= head - own <= 2 else "zero"


def is_ready(sent: int) -> bool:
    """Rule 9: a joiner is waited for once it has sent a message."""
    return sent > 0


def members_in(
    run: Run,
    ledger: Ledger,
    inbox: Mapping[Key, Message],
    damaged: Mapping[Key, str],
    present: set[str],
    waited: float,
    pace: Pace,
) -> tuple[list[Message], list[Reject]] | None:
    """Rule 2, the decision that may be written now, or None.

    present: ready and alive. waited: since the first message was in place [s].
    """
    members, rejected = sort_out(run, ledger, inbox, damaged)
    inside = {m.island for m in members}
    answered = inside | {r.island for r in rejected}
    late = waited >= pace.grace
    if len(inside) < run.islands_min:
        first = in_turn(members, rejected)
        return ([], first) if first and late else None
    if not (late or present <= answered) or not spans(run, members, rejected):
        return None
    return members, rejected


def in_turn(members: Sequence[Message], rejected: Sequence[Reject]) -> list[Reject]:
    """Rule 4: the rejects that may be decided without the members."""
    waiting = {(m.island, m.incarnation): m.seq for m in reversed(members)}
    return [r for r in rejected if r.seq < waiting.get((r.island, r.incarnation), r.seq + 1)]


def sort_out(
    run: Run, ledger: Ledger, inbox: Mapping[Key, Message], damaged: Mapping[Key, str]
) -> tuple[list[Message], list[Reject]]:
    """Rules 4 and 12: the messages that the next record decides, in order."""
    marks = marks_of(ledger)
    members, rejected = [], []
    for key in sorted(inbox):
        if not is_next(marks, key) or key[:2] in ledger.dead:
            continue
        if is_forgotten(run, ledger, inbox[key]):
            continue
        marks[key[:2]] = key[2]
        message = inbox[key]
        if reason := reject_reason(run, ledger, message, damaged.get(key, "")):
            rejected.append(Reject(*key, reason, message.steps, message.norm))
        else:
            members.append(message)
    return members, rejected


def reject_reason(run: Run, ledger: Ledger, message: Message, damage: str) -> str:
    """Rule 12: why a message cannot count, "" if it can. damage: of its payload."""
    found = [
        not message.finite,
        message.base > ledger.number,
        is_stale(ledger, message),
        is_too_long(ledger, message),
        not blocks.are_parts(run, ledger, message.data),
    ]
    return damage or next(itertools.compress(REASONS, found), "")


def is_too_long(ledger: Ledger, message: Message) -> bool:
    """Rule 12: beside the last ones, as a whole and by step: a quick island's are longer, and where
    steps go to and fro one of few steps is longer by step."""
    if len(ledger.norms) < LEAST_NORMS:
        return False
    whole = statistics.median(norm for norm, _ in ledger.norms)
    by_step = statistics.median(norm / max(steps, 1) for norm, steps in ledger.norms)
    return message.norm > MOST_NORM * max(whole, by_step * message.steps)


def unsent(theta: Any, undecided: Iterable[Any], x: Any) -> Any:
    """Rule 10: what an island has not sent: x = theta - (its undecided messages) - this.

    Numbers or arrays. What a wire rounds off is not sent: the next message has it."""
    for value in undecided:
        theta = theta - value
    return theta - x


def shifted(x: Any, before: Any, after: Any, committed: Iterable[Any]) -> Any:
    """Rules 6 and 10: x after a record. What was committed is in theta now; all else stays.

    before, after: theta. committed: the own messages in it."""
    x = x + (after - before)
    for value in committed:
        x = x + value
    return x


def pause(pace: Pace, tries: int, salt: str) -> float:
    """Rule 11: how long to wait before a request is made again [s]: doubled, with jitter."""
    jitter = zlib.crc32(f"{salt} {tries}".encode()) / 2**32
    return min(pace.poll * 2 ** min(tries, 20), pace.most_poll) * (0.5 + jitter / 2)


def asks_again(action: Any) -> bool:
    """Rule 12: whether a request that failed is made again, for however long the store is away.

    A sign of life is not: the next one says more. Nor a deletion."""
    return type(action).__name__ not in ("Put", "Delete")


def deletable(names: Iterable[str], snapshots: Iterable[Ledger]) -> list[str]:
    """Rule 13: of names of one fragment those that nobody needs: below the last two snapshots.

    So are all messages of an incarnation that was dead by then. Of fragment 0, whose log has the
    data, the leases of blocks that were over by then. Records stay: a reader can follow their chain
    from the start."""
    kept = sorted(snapshots, key=lambda ledger: ledger.number)[-2:]
    if len(kept) < 2:
        return []
    oldest, found = kept[0], []
    marks, dead, names = marks_of(oldest), {*oldest.dead}, [*names]
    leased = (records.numbers(name)[1] for name in names if name[0] == "d")
    over = {*blocks.over(oldest, leased)}
    for name in names:
        kind, number = name[0], records.numbers(name)[1]
        if kind == "u":
            island, incarnation, seq = name.split("/")[2].split(".")
            key = island, int(incarnation), int(seq)
            needed = not is_decided(marks, key) and key[:2] not in dead
        elif kind == "d":
            needed = number not in over
        else:
            needed = kind == "c" or number > oldest.number - (kind == "s")
        found += [] if needed else [name]
    return found
