"""The replay of a log: every digest, every token, every reject. numpy alone.

What is deleted below the last two snapshots cannot be computed again; its records still have to
follow each other.
"""

import collections
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from maxdiloco.islands import driver, objects, outer, records, rules
from maxdiloco.islands.island import FAILED, Key
from maxdiloco.islands.outer import Outer, Term
from maxdiloco.islands.records import Damaged, Ledger, Message, Record, Run
from maxdiloco.storage.store import Bucket

TRIES = 8  # to read what a run that goes on deletes: our choice
_T = TypeVar("_T")


class Differs(Exception):
    """An object is not what the others say: its name and why."""


class Replayed(NamedTuple):
    """A fragment's log. computed: records whose state was computed, not only followed.

    remade: those whose gradient was computed from their members. messages: that are stored.
    """

    ledger: Ledger
    records: list[Record]
    computed: int
    remade: int
    messages: Mapping[Key, Message]


def replay(bucket: Bucket, run: Run, fragment: int) -> Replayed:
    """The log of a fragment. Raises Differs for the first thing that does, OSError."""
    log: list[Record] = []
    return _in_motion(bucket, fragment, lambda: _replay(bucket, run, fragment, log))


def _in_motion(bucket: Bucket, fragment: int, look: Callable[[], _T]) -> _T:
    """What look returns. A run that goes on deletes what it needs no more: then it looks again."""
    for left in reversed(range(TRIES)):
        before = _deletable(bucket, fragment)
        try:
            return look()
        except (Differs, FileNotFoundError):
            if not left or before <= _deletable(bucket, fragment):
                raise


def _deletable(bucket: Bucket, fragment: int) -> set[str]:
    return {name for kind in "ugs" for name in objects.listed(bucket, f"{kind}/{fragment}")}


def _replay(bucket, run, fragment, log) -> Replayed:
    """log: the records that were read before; those since are added."""
    log += _records(bucket, run, fragment, len(log))
    messages = _messages(bucket, run, fragment)
    names = objects.snapshots(bucket, fragment)
    if not names:
        raise Differs(f"s/{fragment}/: there is no snapshot to start from")
    snapshots = {records.numbers(name)[1]: name for name in names}
    first, state, remade = min(snapshots), None, 0
    if first > len(log):
        raise Differs(f"{names[0]}: the log ends before it")
    found, payload = _read(bucket, run, names[0])
    link = rules.origin(run)
    ledger = Ledger(fragment, 0, link, found.digest, 0, (), (), (), (), 0, ())
    if log and first:
        ledger = ledger._replace(digest=log[0].state)
    for number in range(len(log) + 1):
        if number:
            record = log[number - 1]
            ledger, state, again = _next(bucket, run, ledger, record, state, messages, log)
            remade += again
        if number in snapshots:
            state = _compare(bucket, run, snapshots[number], ledger, state)
    _account(log, messages)
    return Replayed(ledger, log, len(log) - first, remade, messages)


class Followed(NamedTuple):
    """What a log says by its oldest snapshot and the records after it, unchecked.

    last: {island: the record of its last message}.
    """

    ledger: Ledger
    last: Mapping[str, int]

    def behind(self, island: str) -> str:
        """Records since an island's last message."""
        return str(self.ledger.number - self.last[island]) if island in self.last else "all"


def follow(bucket: Bucket, run: Run, fragment: int) -> Followed:
    """The newest state of a log. Raises Differs, OSError."""
    return _in_motion(bucket, fragment, lambda: _follow(bucket, run, fragment))


def _follow(bucket, run, fragment) -> Followed:
    names = objects.snapshots(bucket, fragment)
    if not names:
        raise Differs(f"s/{fragment}/: there is no snapshot to start from")
    ledger, last = _read(bucket, run, names[0])[0], {}
    while True:
        name = records.record_name(fragment, ledger.number + 1)
        if bucket.head(name) is None:
            return Followed(ledger, last)
        record = _read(bucket, run, name)[0]
        ledger = rules.follow(run, ledger, record, "")
        last |= {member.island: record.number for member in record.members}


def lines(run: Run, logs: Iterable[Replayed]) -> list[list[Any]]:
    """Who did what, a row an island."""
    rows: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for fragment, log in enumerate(logs):
        known = set()
        for record in log.records:
            rows[record.author]["written"] += 1
            for reject in record.rejected:
                rows[reject.island]["rejected"] += 1
            for member in record.members:
                rows[member.island]["tokens"] += member.tokens if fragment == 0 else 0
            known |= {rules.key_of(one)[:2] for one in (*record.members, *record.rejected)}
        for name, _ in known:
            rows[name]["incarnations"] += fragment == 0
        for message in pending(log.ledger, log.messages):
            rows[message.island]["pending" if fragment == 0 else ""] += message.tokens
    columns = ("incarnations", "written", "rejected", "tokens", "pending")
    return [[name, *(f"{rows[name][c]:,}" for c in columns)] for name in sorted(rows)]


HEADINGS = ("island", "incarnations", "records written", "rejected", "tokens", "pending")


def pending(ledger: Ledger, messages: Mapping[Key, Message]) -> list[Message]:
    """Messages that no record has decided; those of dead islands are lost."""
    marks = rules.marks_of(ledger)
    return [m for key, m in sorted(messages.items()) if not rules.is_decided(marks, key)]


def account(log: Iterable[Record], messages: Mapping[Key, Message]) -> str:
    """The ledger of the tokens that were read, "" if it adds up, or the message that does not.

    A message says what its incarnation had read: that is what was sent before and not rejected by
    the records which it knew, and its own.
    """
    log = list(log)
    # By the first record: what is unreadable may be met again once its incarnation is forgotten.
    rejected = {rules.key_of(r): one.number for one in reversed(log) for r in one.rejected}
    counted = {rules.key_of(m): m.tokens for record in log for m in record.members}
    for key in counted.keys() & messages.keys():
        if messages[key].tokens != counted[key]:
            return f"{_name(messages[key])} has {messages[key].tokens} tokens, its record another"
    for key, message in sorted(messages.items()):
        read, whole = message.tokens, True
        for seq in range(1, key[2]):
            earlier = (*key[:2], seq)
            if rejected.get(earlier, message.base + 1) > message.base:
                tokens = messages[earlier].tokens if earlier in messages else counted.get(earlier)
                whole = whole and tokens is not None
                read += tokens or 0
        if whole and read != message.read:
            return f"{_name(message)} says {message.read} tokens were read, and {read} add up"
    return ""


def _account(log, messages) -> None:
    if wrong := account(log, messages):
        raise Differs(wrong)


def _name(message: Message) -> str:
    return records.message_name(message.fragment, *rules.key_of(message))


def _read(bucket: Bucket, run: Run | None, name: str) -> tuple[Any, bytes]:
    try:
        return objects.read(bucket, run, name)
    except FileNotFoundError as error:
        raise Differs(f"{name}: it is not there") from error
    except Damaged as error:
        raise Differs(str(error)) from error


def read_run(bucket: Bucket) -> Run | None:
    """run.json, None where there is none. Raises Differs, OSError."""
    if bucket.head(records.RUN) is None:
        return None
    run = _read(bucket, None, records.RUN)[0]
    if wrong := outer.problem(run):
        raise Differs(f"{records.RUN}: {wrong}")
    return run


def _records(bucket: Bucket, run: Run, fragment: int, known: int) -> list[Record]:
    """Those after the first `known`."""
    last = max((records.numbers(n)[1] for n in objects.listed(bucket, f"c/{fragment}")), default=0)
    return [
        _read(bucket, run, records.record_name(fragment, number))[0]
        for number in range(known + 1, last + 1)
    ]


def _messages(bucket: Bucket, run: Run, fragment: int) -> dict[Key, Message]:
    """Those that can be read; a record says of the others why it does not take them."""
    found = {}
    for name in objects.listed(bucket, f"u/{fragment}"):
        message = objects.look(bucket, run, name)
        if message == FAILED:
            raise OSError(5, f"{name} cannot be read")
        if isinstance(message, Message) and name == _name(message):
            found[rules.key_of(message)] = message
    return found


def _next(bucket, run, ledger, record, state, messages, log) -> tuple[Ledger, Outer | None, bool]:
    """The ledger and the state after a record, and whether its gradient was made again."""
    name = records.record_name(record.fragment, record.number)
    if reason := rules.breach(ledger, record):
        raise Differs(f"{name} does not follow: {reason}")
    known = [messages.get(rules.key_of(one)) for one in record.members]
    _check_decisions(run, ledger, record, messages)
    if state is None:
        later = log[record.number].state if record.number < len(log) else ""
        return rules.follow(run, ledger, record, later), None, False
    gradient = None
    if record.members:
        try:
            gradient = driver.gradient_of(functools.partial(objects.read, bucket, run), run, record)
        except FileNotFoundError as error:
            raise Differs(f"{name}: {records.gradient_name(record)} is not there") from error
        except Damaged as error:
            raise Differs(f"{name}: {error}") from error
    remade = bool(known) and None not in known
    if remade:
        terms = [driver.term(bucket, run, record.fragment, member) for member in record.members]
        bad = [term for term in terms if not isinstance(term, Term)]
        if bad:
            raise Differs(f"{name} takes the message {bad[0][0]}, which is bad: {bad[0][1]}")
        if records.sha256(outer.reduced(run, record.fragment, terms)) != record.gradient:
            raise Differs(f"{name}: its gradient is not the mean of its members")
    state = driver.apply(run, state, record, gradient)
    return rules.follow(run, ledger, record, state.digest()), state, remade


def _check_decisions(run, ledger, record, messages) -> None:
    """Rules 4, 5 and 12: weights, and reasons that the headers show."""
    name = records.record_name(record.fragment, record.number)
    own: dict[tuple[str, int], list[Message]] = collections.defaultdict(list)
    for member in record.members:
        if (message := messages.get(rules.key_of(member))) is None:
            return
        own[member.island, member.incarnation].append(message)
        if reason := rules.reject_reason(run, ledger, message, ""):
            raise Differs(f"{name} takes {_name(message)}, which is bad: {reason}")
    for member in record.members:
        due = rules.weight(record.number, own[member.island, member.incarnation])
        if member.weight != due:
            raise Differs(f"{name} weighs {member.island} {member.weight:g}, not {due:g}")
    for reject in record.rejected:
        message = messages.get(rules.key_of(reject))
        if message is None or reject.reason not in rules.REASONS:
            continue
        found = rules.reject_reason(run, ledger, message, "")
        if found != reject.reason:
            raise Differs(
                f"{name} rejects {_name(message)} as {reject.reason}, and it is {found or 'good'}"
            )


def _compare(bucket, run, name, ledger: Ledger, state: Outer | None) -> Outer:
    """A snapshot against what was followed so far."""
    found, payload = _read(bucket, run, name)
    stored = outer.from_bytes(payload)
    for key, told, due in zip(ledger._fields, found, ledger, strict=True):
        if key != "digest" and told != due:
            raise Differs(f"{name}: its {key} is not that of the records")
    if stored.digest() != found.digest or (ledger.digest and found.digest != ledger.digest):
        raise Differs(f"{name}: its state is not that of the records")
    return stored if state is None else state
