"""State machine of an island: `StateMachine.handle(event)` returns actions.

The machine has no clock, thread, store or array. Time is an event, and so is the answer to every
action. executor.py and runtime.py carry out the actions; in the tests a simulator does so, with a
single number as the values. rules.py has the rules on which all islands agree, under the numbers of
docs/development/islands-protocol.md.

The file reads from top to bottom: actions, events, state; the step loop; the next record; requests;
answers of the store, in the order in which an island receives them.
"""

import bisect
import collections
import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from maxdiloco.islands import records, rules
from maxdiloco.islands.records import Heartbeat, Lease, LogState, Message, Range, Record, Run
from maxdiloco.islands.rules import Key, Peer, Timing

# -- actions on the store --------------------------------------------------------------------------
# Each action eventually has one answer, in any order. FAILED means that it is unknown whether the
# request was carried out. The answer to a read may be None, for an absent object, or Damage.
FAILED, CREATED, EXISTS = "failed", "created", "exists"


class Damage(NamedTuple):
    """An object that was read but cannot be trusted."""

    reason: str


class Create(NamedTuple):
    """Put an object unless its name exists. Answer: CREATED or EXISTS."""

    name: str
    body: Any


class PutHeartbeat(NamedTuple):
    """Replace this island's heartbeat. Answer: anything."""

    name: str
    body: Heartbeat


class Get(NamedTuple):
    """Read an object. Answer: the object."""

    name: str


class GetMessage(NamedTuple):
    """Read a message without its payload. Answer: the message."""

    name: str


class ListHeartbeats(NamedTuple):
    """Read all heartbeats. Answer: {island: Heartbeat}."""

    folder: str = "hb"


class Reduce(NamedTuple):
    """Compute the gradient of a record and put it. Answer: Reduced."""

    draft: Record


class Reduced(NamedTuple):
    """The gradient's sha256; or, without a gradient, the unusable members and the reasons."""

    sha256: str
    damaged: tuple[tuple[Key, str], ...] = ()


class FetchGradient(NamedTuple):
    """Read the gradient of a record, and keep it for Apply. Answer: True."""

    record: Record


class LoadSnapshot(NamedTuple):
    """Adopt the newest snapshot that is listed. Answer: its LogState."""

    fragment: int


Read = Get | GetMessage | FetchGradient | LoadSnapshot


class Delete(NamedTuple):
    """Delete the objects of rules.deletable. Answer: anything."""

    fragment: int


# -- actions on the island's values: carried out at once; the next event is the answer -------------


class Pack(NamedTuple):
    """Encode the unsent progress. Answer: the message with norm, finite, sha256 and signature."""

    message: Message


class Apply(NamedTuple):
    """Take the outer step of a record. Answer: the digest of the outer state.

    Attributes:
      record: the next record.
      how: change of the island's values x. "load": none, training has not begun; "merge":
        x <- alpha x + (1 - alpha) outer parameters; "shift": rules.rebase.
      committed: numbers of this island's messages that the record accepts.
      returned: numbers of this island's messages that it rejects.
      keep: whether to make a snapshot, which the record's author puts.
    """

    record: Record
    how: str
    committed: tuple[int, ...]
    returned: tuple[int, ...]
    keep: bool


class Begin(NamedTuple):
    """Start training from the outer parameters. moments: "kept" or "zero". No answer."""

    moments: str


class Evaluate(NamedTuple):
    """Evaluate the outer parameters. Only this island does so. No answer."""

    number: int


class Say(NamedTuple):
    """Log a line. No answer."""

    line: str


DONE, REPLACED = "done", "replaced"


class Stop(NamedTuple):
    """The island has ended. No answer.

    Attributes:
      line: the reason, for the user.
      again: whether it may join again, as a new incarnation.
      why: DONE, REPLACED (by another program of its name), or "".
    """

    line: str
    again: bool
    why: str = ""


# -- events ----------------------------------------------------------------------------------------


class Tick(NamedTuple):
    """Time has passed, by the island's own clock [s]. within_step: an inner step is running."""

    now: float
    within_step: bool = False


class StepDone(NamedTuple):
    """An inner step has finished."""

    tokens: int


class Answer(NamedTuple):
    """The answer to an action."""

    action: Any
    result: Any


# -- state -----------------------------------------------------------------------------------------


class Undecided(NamedTuple):
    """A message of this island that no record has decided.

    It has step and time [s] of the message, and whether the store has it.
    """

    message: Message
    t: int
    at: float
    stored: bool


class Request(NamedTuple):
    """A request to the store, due at a time [s] or in flight."""

    due: float
    tries: int
    in_flight: bool


@dataclasses.dataclass(slots=True)
class FragmentLog:
    """The log of one fragment, as far as the island has followed it, and the island's part in it.

    Values are replaced as a whole, never changed in place.

    Attributes:
      state: after the records that are applied; None before a snapshot is loaded.
      record: the next record, once it is known.
      fetched: whether the gradient of `record` was read.
      draft: the record that this island is writing.
      drafts: number of drafts so far.
      caught_up: whether no later record existed at the last read.
      undecided: this island's messages that no record has decided.
      seq: number of this island's last message.
      steps, tokens, data: progress that is not sent.
      sent_at: time of the last message [s].
      inbox: messages that the next record may decide.
      damaged: {message: reason}.
      first_at, ripe_at: when the next record had its first message, and could be written [s].
      refused: number of consecutive messages of this island rejected for a reason that repeats.
      missing: a gradient that is deleted, and the number of requests for it.
    """

    state: LogState | None = None
    record: Record | None = None
    fetched: bool = False
    draft: Record | None = None
    drafts: int = 0
    caught_up: bool = False
    undecided: tuple[Undecided, ...] = ()
    seq: int = 0
    steps: int = 0
    tokens: int = 0
    data: tuple[Range, ...] = ()
    sent_at: float = 0.0
    inbox: Mapping[Key, Message] = dataclasses.field(default_factory=dict)
    damaged: Mapping[Key, str] = dataclasses.field(default_factory=dict)
    first_at: float | None = None
    ripe_at: float | None = None
    refused: int = 0
    missing: tuple[str, int] = ("", 0)


Delays = collections.deque[tuple[float, float]]
AWAY = "the store is away: this island trains on for two periods"
FIND, CLAIM, LOAD, TRAIN, STOPPED = "find", "claim", "load", "train", "stopped"  # phases


@dataclasses.dataclass
class StateMachine:
    """The state of an island, and its transitions.

    Attributes:
      run: settings that all islands of the log have in common.
      timing: times of this island, with the period that the log has now.
      name: name of this island.
      nonce: nonce of this program.
      initial: digests of the outer state of each fragment before the first record.
      moments_of: number of records in this island's checkpoint; None without a checkpoint.
      after: the incarnation of this program before it joined again; 0 at its first start.
      logs: one for each fragment.
      requests: requests to the store.
      creating: {name: object} whose creation is not confirmed.
      phase: FIND the run, CLAIM an incarnation, LOAD the log, TRAIN, or STOPPED.
      t, tokens_read: inner steps, and their tokens.
      peers: newest heartbeat of each island.
      observed: how long heartbeats were observed until listed_at [s].
      beats, announced: number of this island's last heartbeat, and the messages that it announced.
      speed, measured: tokens a second, and time [s] and tokens_read when the speed was measured.
      leases: remaining parts of the blocks that this island holds.
      leasing: requested leases by name.
      leased: every block that was requested.
      missed: number of consecutive requests that others won.
      period_tokens: tokens of the last message of fragment 0.
      failing_since, unwritten_since: since when requests, or writes, fail [s].
      shared: period of the log [s]; 0: not known yet.
      step_s: shortest mean time of an inner step between two messages [s].
      timed: time [s] and step of the last message, or of the first step.
      delays: (time at which a record decided a message, time since it was sent) [s].
      deaths: when records declared incarnations dead, and how many for each living one [s].
    """

    run: Run
    timing: Timing
    name: str
    nonce: str
    initial: tuple[str, ...]
    moments_of: int | None = None
    after: int = 0
    logs: tuple[FragmentLog, ...] = ()
    requests: dict[Any, Request] = dataclasses.field(default_factory=dict)
    creating: dict[str, Any] = dataclasses.field(default_factory=dict)
    incarnation: int = 1
    phase: str = FIND
    now: float = 0.0
    t: int = 0
    tokens_read: int = 0
    peers: Mapping[str, Peer] = dataclasses.field(default_factory=dict)
    observed: float = 0.0
    listed_at: float = 0.0
    beats: int = 0
    announced: tuple[int, ...] | None = None
    speed: float = 0.0
    measured: tuple[float, int] = (0.0, 0)
    leases: tuple[Range, ...] = ()
    leasing: dict[str, Range] = dataclasses.field(default_factory=dict)
    leased: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    missed: int = 0
    period_tokens: int = 0
    failing_since: float | None = None
    unwritten_since: float | None = None
    said_away: bool = False
    shared: float = 0.0
    step_s: float = math.inf
    timed: tuple[float, int] = (0.0, 1)
    delays: Delays = dataclasses.field(default_factory=lambda: collections.deque(maxlen=4096))
    deaths: Delays = dataclasses.field(default_factory=lambda: collections.deque(maxlen=4096))
    _asked_for: tuple[Any, ...] = (None,)  # input of the last requests for messages
    _actions: list[Any] = dataclasses.field(default_factory=list)

    def __post_init__(self):
        """Request the run of the store. Rule 9: every start takes the same path."""
        self.logs = tuple(FragmentLog() for _ in self.run.fragments)
        self._initial_timing = self.timing
        self._request(Get(records.RUN))

    def handle(self, event: Any) -> list[Any]:
        """Apply an event to the state, and return the resulting actions."""
        if self.phase == STOPPED:
            return []
        match event:
            case Tick(now, within_step):
                self._tick(now, within_step)
            case StepDone(tokens):
                self._count_step(tokens)
                self._at_boundary()
            case Answer(Pack(), message):
                self._packed(message)
            case Answer(Apply() as action, digest):
                self._applied(action, digest)
            case Answer(action, result):
                if (request := self.requests.pop(action, None)) is not None:
                    self._answered(action, result, request.tries)
        actions, self._actions = self._actions, []
        return actions

    def may_step(self) -> bool:
        """Rules 6 and 8: return whether the next inner step may begin.

        An island waits only if it would send a third undecided message, or has no leased data.
        """
        if self.phase != TRAIN or (self.run.block_tokens and not self.leases):
            return False
        # A known record decides a message, although it may be applied at a later step.
        return not any(
            log.undecided
            and not rules.may_send(log.undecided)
            and log.record is None
            and self._is_due(log)
            for log in self.logs
        )

    def observed_now(self) -> float:
        """Rule 3: return how long heartbeats were observed until now [s]."""
        since = self.now - self.listed_at
        return self.observed + rules.observed(self.timing, since, self.unwritten_since is None)

    def alive(self) -> set[str]:
        """Rule 3: return the islands that are alive."""
        return rules.alive(self.peers, self.observed_now(), self.timing)

    def stored_messages(self) -> tuple[int, ...]:
        """Rule 11: return the number of this island's last message in the store, by fragment."""
        return tuple(
            min([one.message.seq - 1 for one in log.undecided if not one.stored], default=log.seq)
            for log in self.logs
        )

    # -- the step loop -----------------------------------------------------------------------------

    def _tick(self, now: float, within_step: bool) -> None:
        self.now = now
        if self.phase in (LOAD, TRAIN) and not within_step:
            self._at_boundary()
        if self.phase == LOAD and all(log.caught_up and log.record is None for log in self.logs):
            self._begin()
        if self.phase == TRAIN:
            for log in self.logs:
                if log.inbox and log.record is None and log.draft is None:
                    self._draft_record(log)
            self._ask_for_messages()
            self._ask_for_leases()
            self._send_heartbeat()
        for action, (due, tries, in_flight) in self.requests.items():
            if not in_flight and due <= now:
                self.requests[action] = Request(due, tries, True)
                self._actions.append(action)

    def _begin(self) -> None:
        """Rule 9: begin training, after catching up. The messages are spread over a period."""
        for fragment, log in enumerate(self.logs):
            log.sent_at = self.now - self.timing.period * fragment / len(self.logs)
        self.phase, self.measured = TRAIN, (self.now, 0)
        moments = rules.moments(self.moments_of, self.logs[0].state.number)
        self._actions.append(Begin(moments))

    def _count_step(self, tokens: int) -> None:
        """Rule 8: count a step, which reads the leased blocks in turn."""
        data: list[Range] = []
        leases, left = list(self.leases), tokens
        while leases and left:
            block, lease, start, stop = leases[0]
            end = min(start + left, stop)
            data.append(Range(block, lease, start, end))
            left -= end - start
            leases[:1] = [Range(block, lease, end, stop)] if end < stop else []
        for log in self.logs:
            log.steps, log.tokens = log.steps + 1, log.tokens + tokens
            log.data = rules.joined(log.data, data, self.run.block_tokens)
        self.t, self.tokens_read, self.leases = self.t + 1, self.tokens_read + tokens, tuple(leases)
        if self.t == 1:  # it may have compiled
            self.timed = self.now, 1

    def _at_boundary(self) -> None:
        """Between two inner steps: send fragments that are due, and apply the next records."""
        for fragment, log in enumerate(self.logs):
            if self.phase == TRAIN and self._is_due(log) and rules.may_send(log.undecided):
                self._send(fragment, log)
            elif log.record is not None and log.fetched:
                self._apply(log)

    def _is_due(self, log: FragmentLog) -> bool:
        if self.timing.automatic and not self.shared:
            part = log.state.fragment / len(self.logs) if log.seq == 0 else 0.0
            if log.steps > self.run.sync_period * (1 - part):
                return True
        waited = self.now - log.sent_at
        others = any(name != self.name for name, *_ in log.inbox)
        invited = others and not log.undecided and log.record is None
        return rules.is_due(self.run, self.timing, log.steps, waited, invited=invited)

    def _follow_period(self, record: Record | None) -> None:
        """Rule 7: adopt the period of the log of fragment 0, and note the deaths of a record."""
        state = self.logs[0].state
        self.shared = rules.shared_period(state)
        if self.timing.automatic:
            period = self.shared or self._initial_timing.period
            self.timing = rules.at_period(self._initial_timing, period)
        if record is not None and record.dead and self.phase == TRAIN:
            living = max(len(state.watermarks) - len(state.dead), 1)
            self.deaths.append((self.now, len(record.dead) / living))

    def _suitable_period(self) -> float:
        if not self.timing.automatic:
            return self.timing.period
        start = self.now - rules.WINDOW_S
        while len(self.delays) > rules.MIN_DELAYS * len(self.logs) and self.delays[0][0] < start:
            self.delays.popleft()
        since = self.delays[0][0] if self.delays else 0.0
        deaths = sum(number for at, number in self.deaths if at >= since)
        delays = [delay for _, delay in self.delays]
        return rules.suitable_period(self.run, self._initial_timing, self.step_s, delays, deaths)

    def _send(self, fragment: int, log: FragmentLog) -> None:
        count = rules.fitting_ranges(log.data)
        left = rules.tokens_of(log.data[count:])  # sent with the next message
        if self.t > self.timed[1]:
            step_s = (self.now - self.timed[0]) / (self.t - self.timed[1])
            self.step_s, self.timed = min(self.step_s, step_s), (self.now, self.t)
        message = Message(
            fragment=fragment,
            island=self.name,
            incarnation=self.incarnation,
            seq=log.seq + 1,
            base=log.state.number,
            steps=log.steps,
            tokens=log.tokens - left,
            read=self.tokens_read - left,
            data=log.data[:count],
            norm=0.0,
            finite=True,
            sha256="",
            period=self._suitable_period(),
        )
        log.steps, log.tokens, log.data, log.sent_at = 0, left, log.data[count:], self.now
        self._actions.append(Pack(message))

    def _packed(self, message: Message) -> None:
        if not message.finite:
            line = f"its outer gradient of fragment {message.fragment} is not finite"
            return self._stop(line, again=True)
        log = self.logs[message.fragment]
        log.seq = message.seq
        if message.fragment == 0:
            self.period_tokens = message.tokens
        log.undecided = (*log.undecided, Undecided(message, self.t, self.now, False))
        self._request(Create(records.name_of_message(message), message))

    def _apply(self, log: FragmentLog) -> None:
        """Rule 6: apply the next record."""
        record, how = log.record, "load"
        taken = {rules.message_key(one) for one in record.members}
        refused = {rules.message_key(one) for one in record.rejected}
        committed = [own for own in log.undecided if rules.message_key(own.message) in taken]
        returned = [own for own in log.undecided if rules.message_key(own.message) in refused]
        if self.phase == TRAIN:
            sent_at = max((own.t for own in committed), default=None)
            others = len(log.undecided) - len(committed) - len(returned)
            how = rules.how_to_apply(self.run, self.t, sent_at, others)
        if how == "wait":
            return
        keep = record.author == self.name and how != "load"
        self._actions.append(
            Apply(
                record,
                how,
                committed=tuple(own.message.seq for own in committed),
                returned=tuple(own.message.seq for own in returned),
                keep=keep and record.number % self.run.snapshot_every == 0,
            )
        )

    def _applied(self, action: Apply, digest: str) -> None:
        record, log, size = action.record, self.logs[action.record.fragment], self.run.block_tokens
        before = log.state
        log.state = rules.next_state(self.run, before, record, digest)
        if record.fragment == 0:
            self._follow_period(record)
        for own in reversed(log.undecided):
            if own.message.seq in action.returned:
                log.steps += own.message.steps
                log.tokens += own.message.tokens
                log.data = rules.joined(own.message.data, log.data, size)
        reasons = {rules.message_key(one): one.reason for one in record.rejected}
        own_reasons = [reasons.get(rules.message_key(own.message)) for own in log.undecided]
        log.refused = 0 if action.committed else log.refused
        log.refused += any(reason in rules.REPEATED for reason in own_reasons)
        decided = {*action.committed, *action.returned}
        log.undecided = tuple(own for own in log.undecided if own.message.seq not in decided)
        marks, forgotten = rules.watermarks(log.state), rules.is_forgotten
        log.inbox = {
            key: one
            for key, one in log.inbox.items()
            if not rules.is_decided(marks, key)
            and key[:2] not in log.state.dead
            and not forgotten(self.run, log.state, one)
        }
        log.damaged = {k: why for k, why in log.damaged.items() if not rules.is_decided(marks, k)}
        log.record = log.draft = log.first_at = log.ripe_at = None
        log.fetched = False
        self._request(Get(records.record_name(record.fragment, record.number + 1)))
        if action.keep:
            name = records.snapshot_name(record.fragment, record.number)
            self._request(Create(name, log.state))
        if log.refused >= rules.MAX_UNDECIDED:
            return self._stop("two of its messages in a row were rejected", again=True)
        if (self.name, self.incarnation) in log.state.dead:
            return self._stop("the others took it for dead", again=True)
        if any(rules.is_forgotten(self.run, log.state, own.message) for own in log.undecided):
            return self._stop("the log has gone on without its messages", again=True)
        if self.phase == TRAIN and record.fragment == 0:
            if rules.progress(self.run, log.state) >= 1:
                line = f"done: {log.state.tokens} tokens are committed"
                return self._stop(line, again=False, why=DONE)
            self._evaluate(record, before.tokens, log.state.tokens)

    def _evaluate(self, record: Record, before: int, after: int) -> None:
        """Rule 8: evaluate if this island wrote a record that passes a multiple of eval_tokens."""
        own = record.author == self.name and record.nonce.startswith(f"{self.incarnation}.")
        interval = self.run.eval_tokens
        if own and interval and after // interval > before // interval:
            self._actions.append(Evaluate(after // interval))

    # -- the next record ---------------------------------------------------------------------------

    def _draft_record(self, log: FragmentLog) -> None:
        """Rule 2: begin to write the next record, if it is this island's turn."""
        present = self._present()
        log.first_at = self.now if log.first_at is None else log.first_at
        inputs = log.state, log.inbox, log.damaged, present
        waited = self.now - log.first_at
        found = rules.decidable(self.run, *inputs, waited=waited, timing=self.timing)
        if found is None:
            log.ripe_at = None
            return
        log.ripe_at = self.now if log.ripe_at is None else log.ripe_at
        earlier = rules.authors_before(log.state.number + 1, self.name, present)
        if self.now - log.ripe_at < earlier * self.timing.takeover:
            return
        draft = self._largest_that_fits(log, present, *found)
        if draft is None:
            return
        log.draft, log.drafts = draft, log.drafts + 1
        name = records.record_name(draft.fragment, draft.number)
        self._request(Reduce(draft) if draft.members else Create(name, draft))

    def _present(self) -> set[str]:
        """Return the islands whose messages a record waits for."""
        dead = self.logs[0].state.dead
        present = {self.name} if rules.is_ready(self.stored_messages()) else set()
        for name in self.alive() & self.peers.keys():
            heartbeat = self.peers[name].heartbeat
            if rules.is_ready(heartbeat.sent) and not heartbeat.left:
                present |= {name} if (name, heartbeat.incarnation) not in dead else set()
        return present

    def _largest_that_fits(self, log, present, members, rejected) -> Record | None:
        """Rule 12: return the record of the most messages that fit; None if not even one fits.

        The oldest messages come first, but an island's second message follows all first messages.
        """
        draft = self._record(log, present, members, rejected)
        if rules.fits(self.run, log.state, draft):
            return draft
        marks = rules.watermarks(log.state)

        def turn(key):
            return key[2] - marks.get(key[:2], 0), log.inbox[key].base, key

        order = sorted(map(rules.message_key, (*members, *rejected)), key=turn)

        def oldest(count):
            chosen = {*order[:count]}
            parts = [
                [one for one in part if rules.message_key(one) in chosen]
                for part in (members, rejected)
            ]
            return self._record(log, present, *parts)

        def is_too_large(count):
            return not rules.fits(self.run, log.state, oldest(count))

        count = bisect.bisect_left(range(1, len(order)), True, key=is_too_large)
        return oldest(count) if count else None

    def _record(self, log, present, members, rejected) -> Record:
        """Rule 5: return a record with weights and scale."""
        state, observed = log.state, self.observed_now()
        weights = rules.weights(self.run, state.number + 1, members)
        tokens: collections.Counter[str] = collections.Counter()
        for one in members:
            tokens[one.island] += one.tokens
        came = tokens.total()
        mean = came / max(len(tokens), 1)
        absent = [self.peers[name] for name in sorted(self.peers.keys() & present - tokens.keys())]
        missing = (
            rules.expected_tokens(state, peer, mean, observed, self.timing) for peer in absent
        )
        living = {name: self.peers[name].heartbeat.incarnation for name in self.alive()}
        living[self.name] = self.incarnation
        return Record(
            fragment=state.fragment,
            number=state.number + 1,
            author=self.name,
            nonce=f"{self.incarnation}.{log.drafts}",
            members=tuple(rules.member_of(one, weights) for one in members),
            rejected=tuple(rejected),
            dead=rules.newly_dead(state, living, absent=observed >= self.timing.dead),
            scale=rules.scale(came, came + sum(missing)),
            previous=state.record_hash,
            state=state.digest,
            gradient="",
        )

    # -- requests ----------------------------------------------------------------------------------

    def _request(self, action: Any, delay: float = 0.0, tries: int = 0) -> None:
        """Make a request after `delay`, or earlier if that was planned already."""
        old, due = self.requests.get(action), self.now + delay
        if old is None or not (old.in_flight or old.due <= due):
            self.requests[action] = Request(due, tries, False)

    def _repeat(self, action: Any, tries: int) -> None:
        salt = f"{self.name}{self.nonce}{action[0]}"
        self._request(action, rules.pause(self.timing, tries, salt), tries + 1)

    def _ask_for_messages(self) -> None:
        """Rule 11: read the messages that heartbeats of others announce."""
        known_from = (self.peers, *(part for log in self.logs for part in (log.state, log.inbox)))
        if all(map(lambda a, b: a is b, known_from, self._asked_for)):
            return  # all are already requested, with growing pauses
        self._asked_for = known_from
        watermarks = [rules.watermarks(log.state) for log in self.logs]
        for name, peer in self.peers.items():
            key = name, peer.heartbeat.incarnation
            for fragment, log in enumerate(self.logs) if name != self.name else ():
                mark = watermarks[fragment].get(key, 0)
                known = max([k[2] for k in log.inbox if k[:2] == key], default=mark)
                last = min(peer.heartbeat.sent[fragment], mark + rules.MAX_UNDECIDED)
                if known < last and key not in log.state.dead:
                    self._request(GetMessage(records.message_name(fragment, *key, known + 1)))

    def _ask_for_leases(self) -> None:
        """Rule 8: request blocks for the time that this island can train without the store."""
        size, log = self.run.block_tokens, self.logs[0]
        period_tokens = max(self.period_tokens, log.tokens)
        while size and rules.wants_lease(
            [*self.leases, *self.leasing.values()], period_tokens, self.missed
        ):
            name, found = rules.next_lease(log.state, size, self.leased)
            self.leasing[name] = found
            self.leased.add(found[:2])
            self._request(Create(name, Lease(name, self.name, self.incarnation, self.nonce)))

    def _send_heartbeat(self) -> None:
        """Rules 3 and 11: put the next heartbeat, if it is due or announces a message."""
        (measured_at, tokens), sent = self.measured, self.stored_messages()
        since = self.now - measured_at
        if since < self.timing.beat and sent == self.announced:
            return
        if any(isinstance(one, PutHeartbeat) for one in self.requests):
            return
        if since >= self.timing.beat:
            self.speed = (self.tokens_read - tokens) / since
            self.measured = self.now, self.tokens_read
        self.beats, self.announced = self.beats + 1, sent
        body = Heartbeat(self.name, self.incarnation, self.beats, sent, self.speed, left=False)
        self._request(PutHeartbeat(f"hb/{self.name}", body))

    # -- answers of the store ----------------------------------------------------------------------

    def _answered(self, action: Any, result: Any, tries: int) -> None:
        self._watch_store(action, result)
        if isinstance(result, Damage) and not isinstance(action, GetMessage):
            return self._stop(result.reason, again=False)
        if result == FAILED and not isinstance(action, Create):
            if self._is_retried(action):
                self._repeat(action, tries)
            return
        match action:
            case Create(name, body):
                self._created(name, body, result, tries)
            case Get():
                self._got(action, result, tries)
            case ListHeartbeats():
                self._listed(action, result)
            case LoadSnapshot() if result is None:
                self._repeat(action, tries)
            case LoadSnapshot():
                self._adopt(result)
            case GetMessage():
                self._got_message(action, result, tries)
            case Reduce(draft):
                self._reduced(draft, result)
            case FetchGradient(record):
                self._fetched(record, result)

    def _watch_store(self, action: Any, result: Any) -> None:
        """Rule 12: log once that the store is unavailable, and once that it is available again.

        A full disk counts as unavailable until a write succeeds, although it can be read.
        """
        own = self.creating.get(action[0])
        writes = isinstance(action, Create | PutHeartbeat) or (own is not None and result == own)
        if result == FAILED:
            if self.failing_since is None:
                self.failing_since = self.now
            if writes and self.unwritten_since is None:
                self.unwritten_since = self.now
            failing = self.failing_since, self.unwritten_since
            since = min(one for one in failing if one is not None)
            if self.now - since >= self.timing.period and not self.said_away:
                self.said_away = True
                self._actions.append(Say(AWAY))
            return
        if self.failing_since is not None and self.now - self.failing_since >= self.timing.max_poll:
            self.requests = {  # at once, and with short pauses again
                one: old if old.in_flight else Request(min(old.due, self.now), 0, False)
                for one, old in self.requests.items()
            }
        self.failing_since = None
        self.unwritten_since = None if writes else self.unwritten_since
        if self.said_away and self.unwritten_since is None:
            self.said_away = False
            self._actions.append(Say("the store is back"))

    def _is_retried(self, action: Any) -> bool:
        """Rule 12: return whether a failed request is repeated without limit.

        Heartbeats are not repeated, since the next one is newer. Neither are deletions, nor
        requests for objects that the log has passed.
        """
        match action:
            case PutHeartbeat() | Delete():
                return False
            case Reduce(draft):
                return self.logs[draft.fragment].draft == draft
            case FetchGradient(record):
                return self.logs[record.fragment].record == record
        return True

    def _created(self, name: str, body: Any, result: str, tries: int) -> None:
        """Rule 2: handle the answer to a creation. Read the object unless its creation is known."""
        if result == CREATED:
            return self._settled(name, body)
        self.creating[name] = body
        delay = rules.pause(self.timing, tries, self.nonce) if result == FAILED else 0.0
        self._request(Get(name), delay, tries)

    def _got(self, action: Get, found: Any, tries: int) -> None:
        name = action.name
        own = self.creating.pop(name, None)
        if found is not None:
            return self._settled(name, found)
        if own is not None:
            self._request(Create(name, own), tries=tries + 1)
        elif name == records.RUN:  # this island begins the run: snapshots first, then run.json
            for fragment, digest in enumerate(self.initial):
                state = rules.genesis(self.run, fragment, digest)
                self._request(Create(records.snapshot_name(fragment, 0), state))
        if name[0] == "c":
            fragment, number = records.fragment_of(name), records.number_of(name)
            log = self.logs[fragment]
            if log.state is not None and number == log.state.number + 1 and log.record is None:
                log.caught_up = True
                # Without a message there will be no record.
                if self.phase == LOAD or log.inbox:
                    self._repeat(action, tries)

    def _settled(self, name: str, body: Any) -> None:
        """Act on an object that the store has under this name permanently."""
        match name[0]:
            case "r":
                self._run_settled(body)
            case "i":
                self._incarnation_settled(body)
            case "s":
                self._snapshot_settled(name, body)
            case "u":
                self._message_settled(name, body)
            case "c":
                self._record_settled(name, body)
            case "d":
                self._lease_settled(name, body)

    def _run_settled(self, run: Run) -> None:
        for key, own, other in zip(run._fields, self.run, run, strict=True):
            if own != other:
                line = f"{key}={own} here, and {other} in the run of this store. Set the same, or"
                return self._stop(f"{line} use another store", again=False)
        self.phase = CLAIM
        # A program that joins again knows its number; a higher number belongs to a later program.
        if self.after:
            self._claim(self.after + 1)
        self._request(ListHeartbeats())

    def _claim(self, incarnation: int) -> None:
        """Rule 2: claim an incarnation. The put decides, since a heartbeat may be outdated."""
        name = records.incarnation_name(self.name, incarnation)
        self._request(Create(name, Lease(name, self.name, incarnation, self.nonce)))

    def _incarnation_settled(self, lease: Lease) -> None:
        """Rule 2: use an incarnation, or try the next one if another program has it."""
        if self.phase != CLAIM:
            return
        if not rules.is_own(lease, self.nonce):
            return self._replaced() if self.after else self._claim(lease.incarnation + 1)
        self.phase, self.incarnation = LOAD, lease.incarnation
        for fragment in range(len(self.logs)):
            self._request(LoadSnapshot(fragment))

    def _snapshot_settled(self, name: str, state: LogState) -> None:
        if self.phase != FIND:
            return self._request(Delete(state.fragment))
        if state.record_hash != rules.genesis_hash(self.run):
            line = f"{name} is of a start with other keys, which has no {records.RUN} yet."
            return self._stop(f"{line} Use another store, or a folder without it", again=False)
        self.logs[state.fragment].caught_up = True
        if all(log.caught_up for log in self.logs):
            for log in self.logs:
                log.caught_up = False
            self._request(Create(records.RUN, self.run))

    def _message_settled(self, name: str, message: Message) -> None:
        log, key = self.logs[message.fragment], rules.message_key(message)
        for own in log.undecided:
            if rules.message_key(own.message) == key:
                if message != own.message:
                    line = f"another program writes {name}"
                    return self._stop(line, again=True, why=REPLACED)
                log.undecided = tuple(
                    one._replace(stored=True) if one is own else one for one in log.undecided
                )
                self._note(log, message)

    def _record_settled(self, name: str, record: Record) -> None:
        """Rule 1: check that a record follows the log, and keep it as the next one."""
        log = self.logs[records.fragment_of(name)]
        number = records.number_of(name)
        if log.state is None or number != log.state.number + 1 or log.record is not None:
            return
        if reason := rules.validate_record(log.state, record):
            return self._stop(f"{name} does not follow: {reason}", again=False)
        log.record, log.fetched, log.draft = record, not record.members, None
        if record.members:
            self._request(FetchGradient(record))
        decided = {rules.message_key(one) for one in (*record.members, *record.rejected)}
        for own in log.undecided:
            # The first record may wait for islands that start later.
            if own.message.base and rules.message_key(own.message) in decided:
                self.delays.append((self.now, self.now - own.at))

    def _lease_settled(self, name: str, lease: Lease) -> None:
        found = self.leasing.pop(name)
        if rules.is_own(lease, self.nonce):
            self.leases, self.missed = (*self.leases, found), 0
        else:
            self.missed += 1

    def _listed(self, action: ListHeartbeats, heartbeats: Mapping[str, Heartbeat]) -> None:
        """Rule 3: note changes of heartbeats by this island's clock."""
        self.observed, self.listed_at = self.observed_now(), self.now
        peers = dict(self.peers)
        for name, heartbeat in heartbeats.items():
            old = peers.get(name)
            if old is None or heartbeat[1:3] > old.heartbeat[1:3]:  # incarnation, then count
                same = old is not None and old.heartbeat.incarnation == heartbeat.incarnation
                peers[name] = Peer(heartbeat, self.observed, old.since if same else self.observed)
        self.peers = peers
        self._request(action, self.timing.list)
        last = peers[self.name].heartbeat.incarnation if self.name in peers else 0
        if self.phase == CLAIM and not self.after:  # the first listing
            self._claim(last + 1)
        elif self.phase in (LOAD, TRAIN) and last > self.incarnation:
            self._replaced()

    def _adopt(self, state: LogState) -> None:
        """Rule 9: begin with a state of the log."""
        self.logs[state.fragment].state = state
        if state.fragment == 0:
            self._follow_period(None)
        self._request(Get(records.record_name(state.fragment, state.number + 1)))

    def _got_message(self, action: GetMessage, found: Any, tries: int) -> None:
        """Rule 12: note a message. An unreadable message is also decided: rejected by its name."""
        fragment, key = records.fragment_of(action.name), records.message_of(action.name)
        log = self.logs[fragment]
        if rules.is_decided(rules.watermarks(log.state), key) or key[:2] in log.state.dead:
            return
        if found is None:
            peer = self.peers.get(key[0])
            if peer is not None and peer.heartbeat.incarnation == key[1]:
                self._repeat(action, tries)
            return
        if isinstance(found, Damage):
            log.damaged = {**log.damaged, key: found.reason}
            base = log.state.number
            found = Message(fragment, *key, base, 0, 0, 0, (), 0.0, False, "")
        elif rules.is_forgotten(self.run, log.state, found):
            return
        self._note(log, found)

    def _note(self, log: FragmentLog, message: Message) -> None:
        """Rule 11: note a message, and look for the record that decides it."""
        log.inbox = {**log.inbox, rules.message_key(message): message}
        record = Get(records.record_name(message.fragment, log.state.number + 1))
        if log.record is None and record not in self.requests:
            self._request(record, self.timing.poll)

    def _reduced(self, draft: Record, result: Reduced) -> None:
        log = self.logs[draft.fragment]
        if log.draft != draft or log.record is not None:
            return
        if result.damaged:
            log.draft, log.damaged = None, {**log.damaged, **dict(result.damaged)}
            return
        name = records.record_name(draft.fragment, draft.number)
        self._request(Create(name, draft._replace(gradient=result.sha256)))

    def _fetched(self, record: Record, found: Any) -> None:
        """Rule 13: note a gradient. If it is deleted, the island is too late and joins as new."""
        log = self.logs[record.fragment]
        if log.record != record:
            return
        if found is not None:
            log.fetched = True
            return
        name = records.gradient_name(record)
        if self.phase == TRAIN:
            return self._stop(f"{name} is deleted already", again=True)
        times = log.missing[1] + 1 if log.missing[0] == name else 0
        log.state, log.record, log.caught_up, log.missing = None, None, False, (name, times)
        log.fetched = False
        if times == 1:
            line = f"{name} is lost: this island waits for a snapshot that is later"
            self._actions.append(Say(line))
        self._repeat(LoadSnapshot(record.fragment), times)

    # -- the end -----------------------------------------------------------------------------------

    def _stop(self, line: str, *, again: bool, why: str = "") -> None:
        self.phase = STOPPED
        self.requests.clear()
        self._actions.append(Stop(line, again, why))

    def _replaced(self) -> None:
        line = f"another program runs as island {self.name}. Give each its own name"
        self._stop(line, again=False, why=REPLACED)
