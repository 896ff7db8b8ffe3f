"""What an island knows, what happens to it, and what it asks for: plain values of core.py."""

import dataclasses
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from maxdiloco.islands.records import Beat, Ledger, Message, Range, Record, Run

Key = tuple[str, int, int]  # island, incarnation, seq


class Pace(NamedTuple):
    """Times of one island [s], each by its own clock; they need not be equal."""

    period: float = 60.0  # between two messages of a fragment: T
    least_steps: int = 1  # of a message
    dead: float = 60.0
    grace: float = 20.0
    aside: float = 5.0  # for each island that stands before this one
    beat: float = 2.0
    roll: float = 5.0
    poll: float = 0.2
    most_poll: float = 5.0


class Seen(NamedTuple):
    """The newest sign of life of an island, and when it changed: Island.watched then.

    since: when the first one of this incarnation was seen.
    """

    beat: Beat
    at: float
    since: float


# -- actions on the store: each has an answer, sooner or later, in any order ----------------------
# Each may be answered by FAILED: it is not known whether it was done. What is read may be None, for
# an object that is not there, or Damage.
FAILED, CREATED, EXISTS = "failed", "created", "exists"


class Damage(NamedTuple):
    """What was read, or its sender, cannot be trusted, for this reason."""

    reason: str


class Create(NamedTuple):
    """Put an object if there is none of its name. Answer: CREATED, EXISTS."""

    name: str
    body: Any


class Put(NamedTuple):
    """Put a sign of life."""

    name: str
    body: Beat


class Get(NamedTuple):
    """Answer: the object."""

    name: str


class Look(NamedTuple):
    """Answer: a message, without its payload."""

    name: str


class Starts(NamedTuple):
    """Answer: the highest incarnation of an island that is listed; 0: none."""

    island: str


class Roll(NamedTuple):
    """Answer: {island: Beat} of all that are listed."""

    folder: str = "hb"


class Reduce(NamedTuple):
    """Make the gradient of a record and put it. Answer: Reduced."""

    draft: Record


class Reduced(NamedTuple):
    """sha256 of the gradient's payload, or what is wrong with some members: then there is none."""

    sha256: str
    damaged: tuple[tuple[Key, str], ...] = ()


class Fetch(NamedTuple):
    """Get a record's gradient and keep it for Apply. Answer: True."""

    record: Record


class Load(NamedTuple):
    """Take over the newest snapshot that is listed. Answer: its Ledger."""

    fragment: int


class Delete(NamedTuple):
    """Delete what rules.deletable says. Answer: True."""

    fragment: int


# -- actions on the own state: done at once, and their answers are the next events ----------------


class Pack(NamedTuple):
    """Make a message of what is not sent. Answer: it, with norm, finite, sha256, signature."""

    message: Message


class Apply(NamedTuple):
    """Take the outer step of a record. Answer: the digest of the outer state.

    how: "load": x is not there yet; "merge": x <- alpha x + (1 - alpha) theta; "shift": of
    rules.shifted. committed, returned: the own messages, by seq, that it takes and rejects.
    keep: for a snapshot, which the record's author puts.
    """

    record: Record
    how: str
    committed: tuple[int, ...]
    returned: tuple[int, ...]
    keep: bool


class Begin(NamedTuple):
    """x <- theta, and train. moments: of the inner optimizer, "kept" or "zero". No answer."""

    moments: str


class Evaluate(NamedTuple):
    """Evaluate theta: this island alone does. No answer."""

    number: int


class Say(NamedTuple):
    """A line for the user. No answer."""

    line: str


DONE, REPLACED = "done", "replaced"


class Stop(NamedTuple):
    """The island is over. again: it may start once more, and joins as new. No answer.

    why: DONE, REPLACED by another program of its name, or "".
    """

    line: str
    again: bool
    why: str = ""


# -- events ---------------------------------------------------------------------------------------


class Tick(NamedTuple):
    """Time has passed, by the island's own clock [s]. within: an inner step is under way."""

    now: float
    within: bool = False


class Step(NamedTuple):
    """An inner step is done."""

    tokens: int


class Done(NamedTuple):
    """An action's answer."""

    action: Any
    result: Any


# -- state ----------------------------------------------------------------------------------------


class Own(NamedTuple):
    """An own undecided message, the step it was sent at, and whether the store has it."""

    message: Message
    t: int
    stored: bool


class Ask(NamedTuple):
    """A request that is to be made at `due`, or under way."""

    due: float
    tries: int
    flying: bool


class Log(NamedTuple):
    """One fragment's log, and the island's part in it.

    ledger: of what is applied; None: nothing loaded yet. record: the next one, once it is known;
    fetched: with its gradient. draft: the one that is being written here; drafts: how many there
    were. caught_up: no later record was there. steps, tokens, data: not sent. damaged: {message:
    why}. first_at, ripe_at: when the next record had its first message, and could be written.
    refused: own messages in a row for rules.REPEATED. gone: a missed gradient, and its tries.
    """

    ledger: Ledger | None = None
    record: Record | None = None
    fetched: bool = False
    draft: Record | None = None
    drafts: int = 0
    caught_up: bool = False
    own: tuple[Own, ...] = ()
    seq: int = 0
    steps: int = 0
    tokens: int = 0
    data: tuple[Range, ...] = ()
    sent_at: float = 0.0
    inbox: Mapping[Key, Message] = MappingProxyType({})
    damaged: Mapping[Key, str] = MappingProxyType({})
    first_at: float | None = None
    ripe_at: float | None = None
    refused: int = 0
    gone: tuple[str, int] = ("", 0)


@dataclasses.dataclass
class Island:
    """An island; core.step changes a copy. nonce: of this program.

    phase: found, claim, load, in, stopped.
    initial: digests of the fragments' states before the first record. moments_of: records that the
    own checkpoint has, or None. after: see core.start. asks: requests; pending: objects being
    created, by name. leases: what is left of the blocks of the data; leasing: those being claimed,
    by name; claimed: all so far; missed: others' since the last of its own. period_tokens: of the
    last message of fragment 0. looked: what the messages that it asks for follow from. watched: how
    long it has seen the signs of life [s], up to rolled_at.
    """

    run: Run
    pace: Pace
    name: str
    nonce: str
    initial: tuple[str, ...]
    moments_of: int | None
    after: int
    logs: tuple[Log, ...]
    asks: dict[Any, Ask]
    pending: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    incarnation: int = 1
    phase: str = "found"
    now: float = 0.0
    t: int = 0
    read: int = 0
    seen: Mapping[str, Seen] = dataclasses.field(default_factory=dict)
    looked: tuple[Any, ...] = (None,)
    watched: float = 0.0
    rolled_at: float = 0.0
    beat: int = 0
    beat_at: float = 0.0
    beat_read: int = 0
    leases: tuple[Range, ...] = ()
    leasing: Mapping[str, Range] = dataclasses.field(default_factory=dict)
    claimed: frozenset[tuple[int, int]] = frozenset()
    missed: int = 0
    period_tokens: int = 0
    failing_since: float | None = None
    unwritten_since: float | None = None
    said_away: bool = False

    def copy(self) -> "Island":
        """One whose fields and requests may be changed; all else is replaced as a whole."""
        new = object.__new__(Island)
        new.__dict__ = vars(self) | {"asks": dict(self.asks)}
        return new


def changed(log: Log, **changes: Any) -> Log:
    """log._replace(**changes), in less time."""
    values, fields = list(log), Log._fields
    for name, new in changes.items():
        values[fields.index(name)] = new
    return Log._make(values)


def with_log(s: Island, fragment: int, **changes: Any) -> Island:
    """The island with another log of a fragment."""
    logs = s.logs
    s.logs = (*logs[:fragment], changed(logs[fragment], **changes), *logs[fragment + 1 :])
    return s


def want(s: Island, action: Any, delay: float = 0.0, tries: int = 0) -> Island:
    """Ask for this once `delay` has passed, or earlier where that was wanted already."""
    old, due = s.asks.get(action), s.now + delay
    if old is None or not (old.flying or old.due <= due):
        s.asks[action] = Ask(due, tries, False)
    return s


def at_once(s: Island) -> Island:
    """Ask now for all that waits for its time, and begin with short pauses again."""
    s.asks = {
        action: ask if ask.flying else Ask(min(ask.due, s.now), 0, False)
        for action, ask in s.asks.items()
    }
    return s


def joined(first: Iterable[Range], then: Iterable[Range], size: int) -> tuple[Range, ...]:
    """Ranges one after the other, as one where they touch, also of two blocks. size: of a block."""
    found = list(first)
    for part in then:
        last = found[-1] if found else None
        ahead = size * (part.block - last.block) if last else 0
        if last and last.lease == part.lease and last.stop == ahead + part.start:
            found[-1] = last._replace(stop=ahead + part.stop)
        else:
            found.append(part)
    return tuple(found)


def fragment_of(name: str) -> int:
    """Of an object's name."""
    return int(name.split("/")[1])


def stopped(s: Island, line: str, *, again: bool, why: str = "") -> tuple[Island, list[Any]]:
    """It asks for nothing any more."""
    s.phase = "stopped"
    s.asks.clear()
    return s, [Stop(line, again, why)]


def replaced(s: Island) -> tuple[Island, list[Any]]:
    """It is over: a program of its name has started later."""
    line = f"another program runs as island_name={s.name}. Give each its own"
    return stopped(s, line, again=False, why=REPLACED)
