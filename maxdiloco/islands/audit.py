"""Replay a log and check every digest, weight, reject and token. Needs numpy, not JAX.

Records before the oldest snapshot cannot be computed again, since their gradients are deleted. They
still have to follow each other.
"""

import collections
import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from maxdiloco.islands import log_store, outer_step, records, rules
from maxdiloco.islands.outer_step import Outer
from maxdiloco.islands.records import Damaged, LogState, Message, Record, Run
from maxdiloco.islands.rules import Key
from maxdiloco.storage.store import Bucket

TRIES = 8  # to read a log while its run deletes objects
_T = TypeVar("_T")


class Replayed(NamedTuple):
    """The log of a fragment.

    Attributes:
      state: the log state after the last record.
      records: all records.
      computed: number of records whose outer state was computed, not only followed.
      remade: number of records whose gradient was computed from their members.
      messages: the stored messages.
    """

    state: LogState
    records: list[Record]
    computed: int
    remade: int
    messages: Mapping[Key, Message]


def replay(bucket: Bucket, run: Run, fragment: int) -> Replayed:
    """Replay the log of a fragment. Raises Damaged with the first contradiction, OSError."""
    log: list[Record] = []
    return _in_motion(bucket, fragment, lambda: _replay(bucket, run, fragment, log))


def _in_motion(bucket: Bucket, fragment: int, look: Callable[[], _T]) -> _T:
    """Return look(), and call it again if the run has deleted objects meanwhile."""
    for left in reversed(range(TRIES)):
        before = _deletable(bucket, fragment)
        try:
            return look()
        except (Damaged, FileNotFoundError):
            if not left or before <= _deletable(bucket, fragment):
                raise


def _deletable(bucket: Bucket, fragment: int) -> set[str]:
    return {name for kind in "ugs" for name in log_store.listed(bucket, f"{kind}/{fragment}")}


def _replay(bucket, run, fragment, log) -> Replayed:
    """Replay a log. log: records that were read before; later records are appended."""
    log += _records(bucket, run, fragment, len(log))
    messages = _messages(bucket, run, fragment)
    names = _snapshots(bucket, fragment)
    snapshots = {records.number_of(name): name for name in names}
    first, outer, remade = min(snapshots), None, 0
    if first > len(log):
        raise Damaged(f"{names[0]}: the log ends before it")
    found, payload = _read(bucket, run, names[0])
    at = rules.genesis(run, fragment, log[0].state if log and first else found.digest)
    for number in range(len(log) + 1):
        if number:
            record = log[number - 1]
            at, outer, again = _next(bucket, run, at, record, outer, messages, log)
            remade += again
        if number in snapshots:
            outer = _compare(bucket, run, snapshots[number], at, outer)
    if wrong := account(log, messages):
        raise Damaged(wrong)
    return Replayed(at, log, len(log) - first, remade, messages)


def follow(bucket: Bucket, run: Run, fragment: int) -> tuple[LogState, dict[str, int]]:
    """Return the newest state of a log, unchecked, and the record of each island's last message.

    Raises:
      Damaged, OSError: the log cannot be read.
    """
    return _in_motion(bucket, fragment, lambda: _follow(bucket, run, fragment))


def _follow(bucket, run, fragment) -> tuple[LogState, dict[str, int]]:
    state, last = _read(bucket, run, _snapshots(bucket, fragment)[0])[0], {}
    for record in _records(bucket, run, fragment, state.number):
        state = rules.next_state(run, state, record, "")
        last |= {member.island: record.number for member in record.members}
    return state, last


def lines(logs: Iterable[Replayed]) -> list[tuple[str, ...]]:
    """Return HEADINGS, and a row of figures for each island."""
    rows: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for fragment, log in enumerate(logs):
        known = set()
        for record in log.records:
            rows[record.author]["records written"] += 1
            for reject in record.rejected:
                rows[reject.island]["rejected"] += 1
            for member in record.members:
                rows[member.island]["tokens"] += member.tokens if fragment == 0 else 0
            known |= {rules.message_key(one)[:2] for one in (*record.members, *record.rejected)}
        for name, _ in known:
            rows[name]["incarnations"] += fragment == 0
        for message in pending(log.state, log.messages):
            rows[message.island]["pending"] += message.tokens if fragment == 0 else 0
    table = [HEADINGS]
    for name in sorted(rows):
        table.append((name, *(f"{rows[name][heading]:,}" for heading in HEADINGS[1:])))
    return table


HEADINGS = ("island", "incarnations", "records written", "rejected", "tokens", "pending")


def pending(state: LogState, messages: Mapping[Key, Message]) -> list[Message]:
    """Return the messages that no record has decided. Messages of dead islands are lost."""
    marks = rules.watermarks(state)
    return [m for key, m in sorted(messages.items()) if not rules.is_decided(marks, key)]


def account(log: Iterable[Record], messages: Mapping[Key, Message]) -> str:
    """Return the first message whose tokens do not add up, or "".

    A message declares how many tokens its incarnation has read. These are the tokens of the message
    and of earlier messages that no record had rejected by its base.
    """
    log = list(log)
    # The first record counts: an unreadable message may recur once its incarnation is forgotten.
    rejected = {rules.message_key(r): one.number for one in reversed(log) for r in one.rejected}
    counted = {rules.message_key(m): m.tokens for record in log for m in record.members}
    for key in counted.keys() & messages.keys():
        if messages[key].tokens != counted[key]:
            name = records.name_of_message(messages[key])
            return f"{name} has {messages[key].tokens} tokens, its record another number"
    for key, message in sorted(messages.items()):
        read, whole = message.tokens, True
        for seq in range(1, key[2]):
            earlier = (*key[:2], seq)
            if rejected.get(earlier, message.base + 1) > message.base:
                tokens = messages[earlier].tokens if earlier in messages else counted.get(earlier)
                whole = whole and tokens is not None
                read += tokens or 0
        if whole and read != message.read:
            name = records.name_of_message(message)
            return f"{name} declares {message.read} tokens, and {read} were read"
    return ""


@contextlib.contextmanager
def _must_exist(name: str) -> Iterator[None]:
    """Raise Damaged for an object that is absent."""
    try:
        yield
    except FileNotFoundError as error:
        raise Damaged(f"{name}: it is not there") from error


def _read(bucket: Bucket, run: Run | None, name: str) -> tuple[Any, bytes]:
    with _must_exist(name):
        return log_store.read(bucket, run, name)


def _snapshots(bucket: Bucket, fragment: int) -> list[str]:
    """Return the names of the snapshots, at least one. Raises Damaged."""
    if names := log_store.snapshots(bucket, fragment):
        return names
    raise Damaged(f"s/{fragment}/: snapshot missing")


def read_run(bucket: Bucket) -> Run | None:
    """Return run.json; None if it is absent. Raises Damaged, OSError."""
    if bucket.head(records.RUN) is None:
        return None
    run = _read(bucket, None, records.RUN)[0]
    if wrong := outer_step.problem(run):
        raise Damaged(f"{records.RUN}: {wrong}")
    return run


def _records(bucket: Bucket, run: Run, fragment: int, known: int) -> list[Record]:
    """Return the records after the first `known`."""
    last = max((records.number_of(n) for n in log_store.listed(bucket, f"c/{fragment}")), default=0)
    return [
        _read(bucket, run, records.record_name(fragment, number))[0]
        for number in range(known + 1, last + 1)
    ]


def _messages(bucket: Bucket, run: Run, fragment: int) -> dict[Key, Message]:
    """Return the readable messages. The records have the reasons for rejecting the others."""
    found = {}
    for name in log_store.listed(bucket, f"u/{fragment}"):
        with contextlib.suppress(FileNotFoundError, Damaged):
            message = log_store.read_header(bucket, run, name)
            found[rules.message_key(message)] = message
    return found


def _next(bucket, run, state, record, outer, messages, log) -> tuple[LogState, Outer | None, bool]:
    """Return log state and outer state after a record, and whether its gradient was remade."""
    name = records.record_name(record.fragment, record.number)
    if reason := rules.validate_record(state, record):
        raise Damaged(f"{name} does not follow: {reason}")
    own = [messages.get(rules.message_key(one)) for one in record.members]
    _check_decisions(run, state, record, own, messages)
    if outer is None:
        later = log[record.number].state if record.number < len(log) else ""
        return rules.next_state(run, state, record, later), None, False
    gradient, read = None, functools.partial(log_store.read, bucket, run)
    if record.members:
        with _must_exist(" or ".join(log_store.sources_of(run, record))):
            gradient = log_store.read_gradient(read, run, record)
    remade = bool(own) and None not in own
    if remade and outer_step.has_gradient(run, record):
        with _must_exist(name):
            payload = log_store.compute_gradient(read, run, record)
        if records.sha256(payload) != record.gradient:
            raise Damaged(f"{name}: its gradient is not the mean of its members")
    outer = outer_step.stepped(run, outer, record, gradient)
    return rules.next_state(run, state, record, outer.digest()), outer, remade


def _check_decisions(run, state, record, own, messages) -> None:
    """Rules 4, 5 and 12: check weights, and the reasons that headers show.

    own: messages of the members; None for a message that is deleted.
    """
    name = records.record_name(record.fragment, record.number)
    for message in filter(None, own):
        if reason := rules.reject_reason(run, state, message, ""):
            sent = records.name_of_message(message)
            raise Damaged(f"{name} takes {sent}, which is bad: {reason}")
    if None in own:
        return
    weights = rules.weights(run, record.number, own)
    for member, message in zip(record.members, own, strict=True):
        due = weights[member.island, member.incarnation]
        if member.weight != due:
            raise Damaged(f"{name} weighs {member.island} {member.weight:g}, not {due:g}")
        if member.period != message.period:
            periods = f"{member.period:g} s, not {message.period:g}"
            raise Damaged(f"{name} has {member.island} with {periods}")
    for reject in record.rejected:
        message = messages.get(rules.message_key(reject))
        if message is None or reject.reason not in rules.REASONS:
            continue
        found = rules.reject_reason(run, state, message, "")
        if found != reject.reason:
            sent = records.name_of_message(message)
            raise Damaged(f"{name} rejects {sent} as {reject.reason}, not {found or 'good'}")


def _compare(bucket, run, name, state: LogState, outer: Outer | None) -> Outer:
    """Compare a snapshot with the records before it, and return its outer state."""
    found, payload = _read(bucket, run, name)
    for key, declared, due in zip(state._fields, found, state, strict=True):
        if key != "digest" and declared != due:
            raise Damaged(f"{name}: its {key} differs from the records")
    if records.sha256(payload) != found.digest or state.digest not in ("", found.digest):
        raise Damaged(f"{name}: its state differs from the records")
    return outer_step.from_bytes(payload) if outer is None else outer
