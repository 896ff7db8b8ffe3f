"""An island as a state machine: (state, event) -> (state, actions), and nothing else.

It has no clock, thread, socket, file or array: time is an event, an answer of the store is an
event, and the numbers are with whoever carries out the actions (driver.py; the simulator of the
tests). island.py has the state, the events and the actions; rules.py has what the islands agree on.
"""

import operator
from types import MappingProxyType
from typing import Any

from maxdiloco.islands import blocks, records, rules
from maxdiloco.islands.island import (
    CREATED,
    DONE,
    FAILED,
    REPLACED,
    Apply,
    Ask,
    Begin,
    Create,
    Damage,
    Delete,
    Done,
    Evaluate,
    Fetch,
    Get,
    Island,
    Load,
    Log,
    Look,
    Own,
    Pack,
    Put,
    Reduce,
    Roll,
    Say,
    Seen,
    Starts,
    Step,
    at_once,
    changed,
    fragment_of,
    joined,
    replaced,
    stopped,
    want,
    with_log,
)
from maxdiloco.islands.records import Beat, Claim, Ledger, Member, Message, Range, Record, Run

Transition = tuple[Island, list[Any]]
AWAY = "the store is away: this island trains on for two periods"


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
        return _answered(s, event)
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


# -- what the answers to its actions change --------------------------------------------------------


def _answered(s: Island, event: Done) -> Transition:
    """The answer to an action."""
    action, result = event
    if isinstance(action, Pack | Apply):
        return _packed(s, result) if isinstance(action, Pack) else _applied(s, action, result)
    ask = s.asks.pop(action, None)
    if ask is None:
        return s, []
    s, lines = _away(s, action, result)
    if isinstance(result, Damage) and not isinstance(action, Look):
        return stopped(s, result.reason, again=False)
    if result == FAILED and not isinstance(action, Create):
        again = rules.asks_again(action) and _is_of_use(s, action)
        return (_again(s, action, ask.tries) if again else s), lines
    s, actions = _HANDLERS[type(action)](s, action, result, ask.tries)
    return s, lines + actions


def _is_of_use(s: Island, action: Any) -> bool:
    """Whether the log has not gone on without this request."""
    if isinstance(action, Reduce):
        return s.logs[action.draft.fragment].draft == action.draft
    if isinstance(action, Fetch):
        return s.logs[action.record.fragment].record == action.record
    return True


def _again(s: Island, action: Any, tries: int) -> Island:
    return want(s, action, rules.pause(s.pace, tries, f"{s.name}{s.nonce}{action[0]}"), tries + 1)


def _away(s: Island, action: Any, result: Any) -> tuple[Island, list[Any]]:
    """Rule 12: say once that the store is away, and that it is back: a full disk that can be read
    is away until something is written."""
    own = s.pending.get(action[0])
    writes = isinstance(action, Create | Put) or (own is not None and result == own)
    if result == FAILED:
        s.failing_since = s.now if s.failing_since is None else s.failing_since
        s.unwritten_since = s.now if writes and s.unwritten_since is None else s.unwritten_since
        since = s.failing_since if s.unwritten_since is None else s.unwritten_since
        late = s.now - min(since, s.failing_since) >= s.pace.period and not s.said_away
        s.said_away = s.said_away or late
        return s, [Say(AWAY)] * late
    if s.failing_since is not None:
        s = at_once(s) if s.now - s.failing_since >= s.pace.most_poll else s
    s.failing_since, s.unwritten_since = None, None if writes else s.unwritten_since
    said, s.said_away = s.said_away, s.said_away and s.unwritten_since is not None
    return s, [Say("the store is back")] * (said and not s.said_away)


def _packed(s: Island, message: Message) -> Transition:
    if not message.finite:
        line = f"its outer gradient of fragment {message.fragment} is not finite"
        return stopped(s, line, again=True)
    log = s.logs[message.fragment]
    s.period_tokens = s.period_tokens if message.fragment else message.tokens
    s = with_log(s, message.fragment, own=(*log.own, Own(message, s.t, False)))
    name = records.message_name(message.fragment, *rules.key_of(message))
    return want(s, Create(name, message)), []


def _applied(s: Island, action: Apply, digest: str) -> Transition:
    record, log = action.record, s.logs[action.record.fragment]
    ledger = rules.follow(s.run, log.ledger, record, digest)
    marks = rules.marks_of(ledger)
    refused = log.refused if not action.committed else 0
    steps, tokens, data = log.steps, log.tokens, log.data
    for own in reversed(log.own):
        if own.message.seq in action.returned:
            steps, tokens = steps + own.message.steps, tokens + own.message.tokens
            data = joined(own.message.data, data, s.run.block_tokens)
    reasons = {rules.key_of(r): r.reason for r in record.rejected}
    refused += any(reasons.get(rules.key_of(own.message)) in rules.REPEATED for own in log.own)
    decided = {*action.committed, *action.returned}
    s = with_log(
        s, record.fragment, ledger=ledger, record=None, fetched=False, draft=None, steps=steps,
        tokens=tokens, data=data, first_at=None, ripe_at=None, refused=refused,
        own=tuple(own for own in log.own if own.message.seq not in decided),
        inbox={
            k: m
            for k, m in log.inbox.items()
            if not rules.is_decided(marks, k) and not rules.is_forgotten(s.run, ledger, m)
        },
        damaged={k: m for k, m in log.damaged.items() if not rules.is_decided(marks, k)},
    )  # fmt: skip
    s = want(s, Get(records.record_name(record.fragment, record.number + 1)))
    if action.keep:
        s = want(s, Create(records.snapshot_name(record.fragment, record.number), ledger))
    if refused >= rules.MOST_UNDECIDED:
        return stopped(s, "two of its messages in a row were rejected", again=True)
    if (s.name, s.incarnation) in ledger.dead:
        return stopped(s, "the others took it for dead", again=True)
    undecided = s.logs[record.fragment].own
    if any(rules.is_forgotten(s.run, ledger, own.message) for own in undecided):
        return stopped(s, "the log has gone on without its messages", again=True)
    if s.phase == "in" and not record.fragment and rules.progress(s.run, ledger) >= 1:
        return stopped(s, f"done: {ledger.tokens} tokens are committed", again=False, why=DONE)
    return s, _evaluation(s, record, log.ledger, ledger)


def _evaluation(s: Island, record: Record, before: Ledger, after: Ledger) -> list[Any]:
    """Rule 8: an evaluation is of the author of the record that passes its mark, of this start."""
    own = record.author == s.name and record.nonce.startswith(f"{s.incarnation}.")
    if s.phase != "in" or record.fragment or not own or not s.run.eval_tokens:
        return []
    number = after.tokens // s.run.eval_tokens
    return [Evaluate(number)] if number > before.tokens // s.run.eval_tokens else []


def _created(s: Island, action: Create, result: str, tries: int) -> Transition:
    """Rule 2: where it is not known, what is in the store says whose it is."""
    if result == CREATED:
        return _settled(s, action.name, action.body)
    s.pending = {**s.pending, action.name: action.body}
    delay = rules.pause(s.pace, tries, s.nonce) if result == FAILED else 0.0
    return want(s, Get(action.name), delay, tries), []


def _got(s: Island, action: Get, found: Any, tries: int) -> Transition:
    name = action.name
    own = s.pending.get(name)
    if own is not None:
        s.pending = {n: body for n, body in s.pending.items() if n != name}
    if found is not None:
        return _settled(s, name, found)
    if own is not None:
        s = want(s, Create(name, own), tries=tries + 1)
    elif name == records.RUN:  # the first island makes the start, and what names it last
        link = rules.origin(s.run)
        for fragment, digest in enumerate(s.initial):
            first = Ledger(fragment, 0, link, digest, 0, (), (), (), (), 0, ())
            s = want(s, Create(records.snapshot_name(fragment, 0), first))
    if name[0] == "c":
        fragment, number = fragment_of(name), records.numbers(name)[1]
        log = s.logs[fragment]
        if log.ledger is not None and number == log.ledger.number + 1 and log.record is None:
            s = s if log.caught_up else with_log(s, fragment, caught_up=True)
            s = _again(s, action, tries)
    return s, []


def _settled(s: Island, name: str, body: Any) -> Transition:
    """What is in the store under this name for ever."""
    return _SETTLED[name[0]](s, name, body)


def _run_settled(s: Island, name: str, run: Any) -> Transition:
    for key, own, other in zip(run._fields, s.run, run, strict=True):
        if own != other:
            line = f"{key}={own} here, and {other} in the run of this store. Set the same, or"
            return stopped(s, f"{line} use another islands_store", again=False)
    s.phase = "claim"
    # A program that joins again knows its number, and has none after it but of a later program.
    return _claim(s, s.after + 1) if s.after else (want(s, Starts(s.name)), [])


def _listed(s: Island, action: Starts, last: int, tries: int) -> Transition:
    """Rule 2: an island's next incarnation; a listing may be late, the claim decides."""
    return _claim(s, last + 1)


def _claim(s: Island, incarnation: int) -> Transition:
    name = records.incarnation_name(s.name, incarnation)
    return want(s, Create(name, Claim(name, s.name, incarnation, s.nonce))), []


def _incarnation_settled(s: Island, name: str, claim: Claim) -> Transition:
    """Rule 2: of programs that share an id each has its own incarnation."""
    if s.phase != "claim":
        return s, []
    if not rules.is_own(claim, s.nonce):
        return replaced(s) if s.after else _claim(s, claim.incarnation + 1)
    s.phase, s.incarnation, s.rolled_at = "load", claim.incarnation, s.now
    for fragment in range(len(s.logs)):
        s = want(s, Load(fragment))
    return want(s, Roll()), []


def _snapshot_settled(s: Island, name: str, ledger: Ledger) -> Transition:
    if s.phase != "found":
        return want(s, Delete(ledger.fragment)), []
    if ledger.link != rules.origin(s.run):
        line = f"{name} is of a start with other keys, which has no {records.RUN} yet. Use another"
        return stopped(s, f"{line} islands_store, or a folder without it", again=False)
    s = with_log(s, ledger.fragment, caught_up=True)
    if all(log.caught_up for log in s.logs):
        s.logs = tuple(changed(log, caught_up=False) for log in s.logs)
        s = want(s, Create(records.RUN, s.run))
    return s, []


def _message_settled(s: Island, name: str, message: Message) -> Transition:
    log, key = s.logs[message.fragment], rules.key_of(message)
    own = [o for o in log.own if rules.key_of(o.message) == key]
    if not own:
        return s, []
    if message != own[0].message:
        return stopped(s, f"another program writes {name}", again=True, why=REPLACED)
    kept = tuple(o._replace(stored=True) if o in own else o for o in log.own)
    return with_log(s, message.fragment, own=kept, inbox={**log.inbox, key: message}), []


def _record_settled(s: Island, name: str, record: Record) -> Transition:
    """Rule 1."""
    log, number = s.logs[fragment_of(name)], records.numbers(name)[1]
    if log.ledger is None or number != log.ledger.number + 1 or log.record is not None:
        return s, []
    if reason := rules.breach(log.ledger, record):
        return stopped(s, f"{name} does not follow: {reason}", again=False)
    s = with_log(s, fragment_of(name), record=record, fetched=not record.members, draft=None)
    return (want(s, Fetch(record)) if record.members else s), []


def _lease_settled(s: Island, name: str, claim: Claim) -> Transition:
    found, s.leasing = s.leasing[name], {n: r for n, r in s.leasing.items() if n != name}
    own = rules.is_own(claim, s.nonce)
    s.leases, s.missed = (*s.leases, found) if own else s.leases, 0 if own else s.missed + 1
    return s, []


def _looked(s: Island, action: Look, found: Any, tries: int) -> Transition:
    """Rule 12: a message that cannot be read is decided too: rejected, by its name."""
    kind, fragment, last = action.name.split("/")
    island, incarnation, seq = last.split(".")
    key, log = (island, int(incarnation), int(seq)), s.logs[int(fragment)]
    if rules.is_decided(rules.marks_of(log.ledger), key) or key[:2] in log.ledger.dead:
        return s, []
    if found is None:
        beat = s.seen[island].beat if island in s.seen else None
        current = beat is not None and beat.incarnation == key[1]
        return (_again(s, action, tries) if current else s), []
    damaged = log.damaged
    if isinstance(found, Damage):
        damaged = {**damaged, key: found.reason}
        base = log.ledger.number
        found = Message(log.ledger.fragment, *key, base, 0, 0, 0, (), 0.0, False, "")
    elif rules.is_forgotten(s.run, log.ledger, found):
        return s, []
    return with_log(s, int(fragment), inbox={**log.inbox, key: found}, damaged=damaged), []


def _rolled(s: Island, action: Roll, beats: Any, tries: int) -> Transition:
    """Rule 3: changes are noted by the own clock."""
    writes, since = s.unwritten_since is None, s.now - s.rolled_at
    s.watched, s.rolled_at = s.watched + rules.watched(s.pace, since, writes), s.now
    s.seen = seen = dict(s.seen)
    for name, beat in beats.items():
        old = seen.get(name)
        if old is None or beat[1:3] > old.beat[1:3]:  # a later incarnation, or a later beat
            is_same = old is not None and old.beat.incarnation == beat.incarnation
            seen[name] = Seen(beat, s.watched, old.since if is_same else s.watched)
    s = want(s, action, s.pace.roll)
    mine = seen.get(s.name)
    if mine is not None and s.phase in ("load", "in") and mine.beat.incarnation > s.incarnation:
        return replaced(s)
    return s, []


def _reduced(s: Island, action: Reduce, result: Any, tries: int) -> Transition:
    draft, log = action.draft, s.logs[action.draft.fragment]
    if log.draft != draft or log.record is not None:
        return s, []
    if result.damaged:
        damaged = {**log.damaged, **dict(result.damaged)}
        return with_log(s, draft.fragment, draft=None, damaged=damaged), []
    record = draft._replace(gradient=result.sha256)
    return want(s, Create(records.record_name(draft.fragment, draft.number), record)), []


def _fetched(s: Island, action: Fetch, result: Any, tries: int) -> Transition:
    """Rule 13: who is so late that a gradient is gone joins as new."""
    record, log = action.record, s.logs[action.record.fragment]
    if log.record != record:
        return s, []
    if result is not None:
        return with_log(s, record.fragment, fetched=True), []
    name = records.gradient_name(record)
    if s.phase == "in":
        return stopped(s, f"{name} is deleted already", again=True)
    times = log.gone[1] + 1 if log.gone[0] == name else 0
    s = with_log(s, record.fragment, ledger=None, record=None, caught_up=False, gone=(name, times))
    lost = f"{name} is lost: this island waits for a snapshot that is later"
    return _again(s, Load(record.fragment), times), [Say(lost)] if times == 1 else []


def _loaded(s: Island, action: Load, ledger: Any, tries: int) -> Transition:
    """Rule 9."""
    if ledger is None:
        return _again(s, action, tries), []
    s = with_log(s, action.fragment, ledger=ledger)
    return want(s, Get(records.record_name(action.fragment, ledger.number + 1))), []


def _nothing(s: Island, action: Any, result: Any, tries: int) -> Transition:
    return s, []


_HANDLERS = MappingProxyType({
    Create: _created, Get: _got, Look: _looked, Roll: _rolled, Reduce: _reduced, Fetch: _fetched,
    Load: _loaded, Put: _nothing, Delete: _nothing, Starts: _listed,
})  # fmt: skip
_SETTLED = MappingProxyType({
    "r": _run_settled, "i": _incarnation_settled, "s": _snapshot_settled, "u": _message_settled,
    "c": _record_settled, "d": _lease_settled,
})  # fmt: skip
