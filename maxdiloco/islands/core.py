"""An island as a machine without hands: (state, event) -> (state, actions), and nothing else.

No clock, thread, socket, file or array: time is an event, an answer of the store is an event, and
the numbers are with whoever carries out the actions (driver.py; the simulator of the tests). What
the islands agree on is in rules.py; answers.py takes the store's answers.
"""

import operator
from typing import Any

from maxdiloco.islands import answers, blocks, records, rules
from maxdiloco.islands.island import (
    Apply,
    Ask,
    Begin,
    Create,
    Done,
    Get,
    Island,
    Log,
    Look,
    Pack,
    Put,
    Reduce,
    Step,
    changed,
    joined,
    want,
    with_log,
)  # fmt: skip
from maxdiloco.islands.records import Beat, Claim, Member, Message, Range, Record, Run

Transition = tuple[Island, list[Any]]


def start(
    run: Run,
    pace: rules.Pace,
    name: str,
    nonce: str,
    initial: tuple[str, ...],
    moments_of: int | None = None,
    after: int = 0,
) -> Island:
    """An island that knows nothing yet. Rule 9: a start of everything is the same path.

    after: its program's incarnation before it joined again; 0: this is its first.
    """
    logs = tuple(Log() for _ in run.fragments)
    asks = {Get(records.RUN): Ask(0.0, 0, False)}
    return Island(run, pace, name, nonce, initial, moments_of, after, logs, asks)


def step(s: Island, event: Any) -> Transition:
    """What an event makes of an island, and what it wants done."""
    if s.phase == "stopped":
        return s, []
    s = s.copy()
    if isinstance(event, Done):
        return answers.take(s, event)
    actions: list[Any] = []
    if isinstance(event, Step):
        s = _with_step(s, event.tokens)
        return _at_boundary(s, actions)
    s.now = event.now
    if s.phase in ("load", "in") and not event.within:
        s, actions = _at_boundary(s, actions)
    if s.phase == "load" and _has_caught_up(s):
        s, actions = _begin(s, actions)
    if s.phase == "in":
        for fragment, log in enumerate(s.logs):
            if log.inbox and log.record is None and log.draft is None:
                s, new = _decide(s, fragment)
                actions += new
        s = _beat(_lease(_look(s)))
    return _emit(s, actions)


def may_step(s: Island) -> bool:
    """Rules 6 and 8: whether the next inner step may begin.

    An island waits only before it would send a third undecided message, or without a block of the
    data.
    """
    if s.phase != "in" or (s.run.block_tokens and not s.leases):
        return False
    for fragment, log in enumerate(s.logs):
        full = log.own and not rules.may_send(log.own)
        if full and log.record is None and _is_due(s, fragment):
            return False  # a record that is known decides one, perhaps at a later step
    return True


def watched(s: Island) -> float:
    """Rule 3: how long it has seen the signs of life of others until now [s]."""
    since = s.now - s.rolled_at
    return s.watched + rules.watched(s.pace, since, s.unwritten_since is None)


def _emit(s: Island, actions: list[Any]) -> Transition:
    """Rule 11: the requests whose time has come."""
    now = s.now
    for action, (due, tries, flying) in s.asks.items():
        if not flying and due <= now:
            s.asks[action] = Ask(due, tries, True)
            actions.append(action)
    return s, actions


def _has_caught_up(s: Island) -> bool:
    """Rule 9."""
    return all(log.caught_up and log.record is None for log in s.logs)


def _begin(s: Island, actions: list[Any]) -> Transition:
    """Rule 9: caught up with the log."""
    head, T, P = s.logs[0].ledger.number, s.pace.period, len(s.logs)
    for fragment in range(P):  # so that messages are spread over a period
        s = with_log(s, fragment, sent_at=s.now - T * fragment / P)
    s.phase, s.beat_at = "in", s.now
    return s, [*actions, Begin(rules.moments(s.moments_of, head))]


def _with_step(s: Island, tokens: int) -> Island:
    """Rule 8: a step's tokens are of the leased blocks, in turn."""
    data: list[Range] = []
    leases, left = list(s.leases), tokens
    while leases and left:
        block, lease, first, stop = leases[0]
        taken = min(left, stop - first)
        data.append(Range(block, lease, first, first + taken))
        left -= taken
        leases[:1] = [Range(block, lease, first + taken, stop)] if first + taken < stop else []
    s.logs = tuple(
        changed(
            log,
            steps=log.steps + 1,
            tokens=log.tokens + tokens,
            data=joined(log.data, data, s.run.block_tokens),
        )
        for log in s.logs
    )
    s.t, s.read, s.leases = s.t + 1, s.read + tokens, tuple(leases)
    return s


def _at_boundary(s: Island, actions: list[Any]) -> Transition:
    """Between two inner steps: sends, then applies of other fragments."""
    for fragment, log in enumerate(s.logs):
        if s.phase == "in" and _is_due(s, fragment) and rules.may_send(log.own):
            left = log.data[blocks.fitting(log.data) :]  # for the next message
            tokens = blocks.tokens_of(left)
            actions.append(Pack(_message(s, fragment, len(log.data) - len(left), tokens)))
            s = with_log(
                s, fragment, steps=0, tokens=tokens, data=left, sent_at=s.now, seq=log.seq + 1
            )
        elif log.record is not None and log.fetched:
            actions += _apply(s, log)
    return s, actions


def _is_due(s: Island, fragment: int) -> bool:
    log = s.logs[fragment]
    return rules.is_due(s.pace, log.steps, s.now - log.sent_at)


def _message(s: Island, fragment: int, ranges: int, left: int) -> Message:
    """ranges: of log.data that it has; left: tokens of the others."""
    log = s.logs[fragment]
    return Message(
        fragment, s.name, s.incarnation, log.seq + 1, log.ledger.number, log.steps,
        log.tokens - left, s.read - left, log.data[:ranges], 0.0, True, "",
    )  # fmt: skip


def _apply(s: Island, log: Log) -> list[Any]:
    """Rule 6."""
    record = log.record
    taken = {rules.key_of(m) for m in record.members}
    refused = {rules.key_of(r) for r in record.rejected}
    committed = [own for own in log.own if rules.key_of(own.message) in taken]
    returned = [own for own in log.own if rules.key_of(own.message) in refused]
    how = "load"
    if s.phase == "in":
        sent_at = max((own.t for own in committed), default=None)
        others = len(log.own) - len(committed) - len(returned)
        how = rules.how_to_apply(s.run, s.t, sent_at, others)
    if how == "wait":
        return []
    seqs = (tuple(own.message.seq for own in part) for part in (committed, returned))
    own = record.author == s.name and how != "load"
    return [Apply(record, how, *seqs, own and record.number % s.run.snapshot_every == 0)]


def _present(s: Island) -> set[str]:
    """Islands whose messages a record waits for."""
    log = s.logs[0]
    ready = {
        name
        for name in rules.alive(s.seen, watched(s), s.pace)
        if name in s.seen
        and s.seen[name].beat.ready
        and not s.seen[name].beat.left
        and (name, s.seen[name].beat.incarnation) not in log.ledger.dead
    }
    return ready | ({s.name} if _sent(s) else set())


def _sent(s: Island) -> bool:
    decided = sum(log.seq - len(log.own) for log in s.logs)
    return rules.is_ready(decided + sum(own.stored for log in s.logs for own in log.own))


def _decide(s: Island, fragment: int) -> Transition:
    """Rule 2: begin to write the next record, if it is this island's turn."""
    log = s.logs[fragment]
    present = _present(s)
    first_at = s.now if log.first_at is None else log.first_at
    found = rules.members_in(
        s.run, log.ledger, log.inbox, log.damaged, present, s.now - first_at, s.pace
    )
    ripe_at = None if found is None else s.now if log.ripe_at is None else log.ripe_at
    if (first_at, ripe_at) != (log.first_at, log.ripe_at):
        s = with_log(s, fragment, first_at=first_at, ripe_at=ripe_at)
    if found is None:
        return s, []
    before = rules.distance(log.ledger.number + 1, s.name, present)
    if s.now - ripe_at < before * s.pace.aside:
        return s, []
    draft = _fitting(s, log, present, *found)
    if draft is None:
        return s, []
    s = with_log(s, fragment, draft=draft, drafts=log.drafts + 1)
    create = Create(records.record_name(fragment, draft.number), draft)
    return want(s, Reduce(draft) if draft.members else create), []


def _fitting(s: Island, log: Log, present: set[str], members, rejected) -> Record | None:
    """Rule 12: the record of as many messages as fit; the others wait for the next one.

    The oldest first, but an island's second message after all first ones. None: not one fits.
    """
    draft = _draft(s, log, present, members, rejected)
    if rules.fits(s.run, log.ledger, draft):
        return draft
    marks = rules.marks_of(log.ledger)

    def turn(key):
        return key[2] - marks.get(key[:2], 0), log.inbox[key].base, key

    order = sorted(map(rules.key_of, (*members, *rejected)), key=turn)
    fits, too_many, found = 0, len(order), None
    while too_many - fits > 1:
        number = (fits + too_many) // 2
        taken = {*order[:number]}
        parts = ([m for m in part if rules.key_of(m) in taken] for part in (members, rejected))
        draft = _draft(s, log, present, *parts)
        if rules.fits(s.run, log.ledger, draft):
            fits, found = number, draft
        else:
            too_many = number
    return found


def _draft(s: Island, log: Log, present: set[str], members, rejected) -> Record:
    """Rule 5: weights and scale."""
    ledger, own = log.ledger, {}
    for message in members:
        own.setdefault((message.island, message.incarnation), []).append(message)
    weights = {key: rules.weight(ledger.number + 1, found) for key, found in own.items()}
    tokens: dict[str, float] = {}
    for message in members:
        tokens[message.island] = tokens.get(message.island, 0) + message.tokens
    others, time = sorted((present - set(tokens)) & set(s.seen)), watched(s)
    came, mean = sum(tokens.values()), sum(tokens.values()) / max(len(tokens), 1)
    expected = came + sum(
        rules.expected_tokens(ledger, s.seen[name], mean, time, s.pace) for name in others
    )
    alive = rules.alive(s.seen, time, s.pace) & set(s.seen)
    living = {name: s.seen[name].beat.incarnation for name in alive} | {s.name: s.incarnation}
    return Record(
        ledger.fragment,
        ledger.number + 1,
        s.name,
        f"{s.incarnation}.{log.drafts}",
        tuple(
            Member(m.island, m.incarnation, m.seq, weights[m.island, m.incarnation], m.steps,
                   m.tokens, m.norm, m.data)
            for m in members
        ),
        tuple(rejected),
        rules.newly_dead(ledger, living, absent=time >= s.pace.dead),
        rules.scale(came, expected),
        ledger.link,
        ledger.digest,
        "",
    )  # fmt: skip


def _look(s: Island) -> Island:
    """Rule 11: messages of others by their names; the signs of life alone are listed."""
    known_from = (s.seen, *(part for log in s.logs for part in (log.ledger, log.inbox)))
    if all(map(operator.is_, known_from, s.looked)):
        return s  # it has asked for all of them, with pauses that grow
    s.looked = known_from
    marks = [rules.marks_of(log.ledger) for log in s.logs]
    for name, (beat, *_) in s.seen.items():
        if name == s.name:
            continue
        key = name, beat.incarnation
        for fragment, log in enumerate(s.logs):
            mark = marks[fragment].get(key, 0)
            known = max([k[2] for k in log.inbox if k[:2] == key], default=mark)
            if known < mark + rules.MOST_UNDECIDED and key not in log.ledger.dead:
                s = want(s, Look(records.message_name(fragment, *key, known + 1)))
    return s


def _lease(s: Island) -> Island:
    """Rule 8: blocks for as long as this island trains on without the store."""
    size, log = s.run.block_tokens, s.logs[0]
    period_tokens = max(s.period_tokens, log.tokens)
    while size and blocks.wants([*s.leases, *s.leasing.values()], period_tokens, s.missed):
        name, found = blocks.to_claim(log.ledger, size, s.claimed)
        s.leasing, s.claimed = {**s.leasing, name: found}, s.claimed | {found[:2]}
        s = want(s, Create(name, Claim(name, s.name, s.incarnation, s.nonce)))
    return s


def _beat(s: Island) -> Island:
    """Rule 3: a sign of life."""
    if s.now < s.beat_at or any(isinstance(action, Put) for action in s.asks):
        return s
    since = s.now - s.beat_at + s.pace.beat
    speed = (s.read - s.beat_read) / since
    beat = Beat(s.name, s.incarnation, s.beat + 1, _sent(s), speed, left=False)
    s.beat, s.beat_at, s.beat_read = s.beat + 1, s.now + s.pace.beat, s.read
    return want(s, Put(f"hb/{s.name}", beat))
