"""The rules that all islands agree on, as pure functions of plain values.

docs/development/islands-protocol.md states the rules in prose under the same numbers. The constants
were chosen with the simulator and the storm benchmark, unless a comment has another reason.
"""

import itertools
import statistics
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from maxdiloco.islands import records
from maxdiloco.islands.records import Block, LogState, Member, Message, Range, Record, Reject, Run

Key = tuple[str, int, int]  # island, incarnation, seq

MAX_UNDECIDED = 2  # messages of an island in one fragment
MAX_STALENESS = 2  # records
STALE_WEIGHT = 0.8  # factor for each record
REASONS = ("not finite", "base", "stale", "norm", "data")  # of a reject, in this order
REPEATED = ("norm", "data")  # reasons that also apply to the island's next message
MAX_NORM, NORMS, MIN_NORMS = 4.0, 16, 4  # times the median of the last 16, once there are 4
# Snapshots after which a dead incarnation is forgotten. Its objects are deleted after two
# snapshots; the other two leave time to repeat failed deletions.
REMEMBERED_SNAPSHOTS = 4
# Limits on deaths in a record and in a state, which forgets the oldest first. With watermarks they
# need at most 350 kB of a state, and unfinished blocks 480 kB. The watermarks of 1,000 living
# islands fit in addition.
MAX_DEATHS, MAX_DEAD = 256, 1024
MAX_SPEEDUP = 4.0  # limit on a declared speed, relative to the average so far
NEW_PERIODS = 2  # in which an island without committed tokens is expected to send
SMALL_SCALE = 0.5  # a record with a smaller scale is logged

LEASED_PERIODS = 3  # in which an island can train without the store
MIN_LEASES, MAX_MORE_LEASES = 2, 6  # blocks
MAX_BLOCKS_AHEAD = 1 << 20  # limit on blocks that are read above the highest one seen
MAX_UNFINISHED = 2048  # limit on blocks in a state, which drops the lowest first; 1 or 2 an island
# Values of `top` in a state. The oldest is four snapshots old, and a dead incarnation is remembered
# equally long. A slow island sends its leased data much sooner, or is so late that it joins as new.
TOPS = 5
MAX_PERIOD = 86400.0  # [s]; limits the effect of one island on the others
LISTINGS = 12  # of heartbeats in a period, which limits the delay of a message by a twelfth
PERIODS_TO_DECIDE = 1.6  # in which a typical message is decided: 2, less a fifth for variation
WINDOW_S, MIN_DELAYS = 1800.0, 8  # age of the delays that count, and their least number
# Bytes of a message's header without ranges: names, sha256, signature and numbers of 19 digits.
HEADER_WITHOUT_DATA = 1 << 10


class Timing(NamedTuple):
    """Times of one island, by its own clock [s]. Islands may have different ones.

    Attributes:
      period: between two messages of a fragment, T.
      min_steps: fewest inner steps of a message.
      dead: time without a new heartbeat after which an island is dead.
      grace: how long a record waits for messages after the first one.
      takeover: how long an author waits for each island that precedes it in the order. A shorter
        time than the author needs lets two islands compute and upload the same gradient.
      beat: between two heartbeats of this island that announce no message.
      list: between two listings of heartbeats, which announce messages.
      poll, max_poll: first and longest pause before a request is repeated.
      automatic: whether the period follows from the log. Then `period` is the longest one that
        outages and slow steps can cause; only a slow link causes longer ones.
    """

    period: float = 60.0
    min_steps: int = 1
    dead: float = 60.0
    grace: float = 20.0
    takeover: float = 20.0
    beat: float = 5.0
    list: float = 5.0
    poll: float = 0.5
    max_poll: float = 5.0
    automatic: bool = False


class Peer(NamedTuple):
    """An island as another island observes it. Times are StateMachine.observed_now [s].

    Attributes:
      heartbeat: the newest heartbeat.
      changed_at: when the newest heartbeat was observed.
      since: when the first heartbeat of its incarnation was observed.
    """

    heartbeat: records.Heartbeat
    changed_at: float
    since: float


def message_key(one: Message | Member | Reject) -> Key:
    """Return the key that identifies a message in the log of its fragment."""
    return one.island, one.incarnation, one.seq


def watermarks(state: LogState) -> dict[tuple[str, int], int]:
    """Return {(island, incarnation): number of its last decided message}."""
    return {(one.island, one.incarnation): one.seq for one in state.watermarks}


# -- rule 1: the log is the only truth -------------------------------------------------------------


def genesis_hash(run: Run) -> str:
    """Rule 1: return the hash at the start of the chain of records.

    It depends only on the settings, so islands that begin a run concurrently have the same hash.
    """
    return records.digest(run._replace(tokens=1, block_tokens=0, eval_tokens=0))


def genesis(run: Run, fragment: int, digest: str) -> LogState:
    """Rule 1: return the state before the first record. digest: of the outer state."""
    return LogState(fragment, 0, genesis_hash(run), digest, 0, (), (), (), (), 0, ())


def validate_record(state: LogState, record: Record) -> str:
    """Rule 1: return the reason why a record cannot follow a state; "" if it can."""
    marks = watermarks(state)
    if (record.fragment, record.number) != (state.fragment, state.number + 1):
        return "it has another number"
    if record.previous != state.record_hash:
        return "it follows another record"
    if record.state != state.digest:
        return f"it has the state {record.state[:12]}, and here is {state.digest[:12]}"
    if list(record.members) != sorted(record.members, key=message_key):
        return "its members are not in order"
    for one in sorted((*record.members, *record.rejected), key=message_key):
        if not is_next(marks, message_key(one)):
            return f"{one.island}.{one.incarnation}.{one.seq} is decided already, or out of turn"
        marks[one.island, one.incarnation] = one.seq
    died = {*record.dead}
    if len(died) < len(record.dead) or not died <= marks.keys() - {*state.dead}:
        return "it has a dead island that is not known, or was dead already"
    if any((one.island, one.incarnation) in state.dead for one in record.members):
        return "it has a dead member"
    if not 0 < record.scale <= 1 or any(not one.weight > 0 for one in record.members):
        return "its weights and scale are not positive"
    return ""


def next_state(run: Run, state: LogState, record: Record, digest: str) -> LogState:
    """Rule 1: return the state after a record. digest: of the outer state after it."""
    marks = {(one.island, one.incarnation): one for one in state.watermarks}
    number = record.number
    for one in sorted((*record.members, *record.rejected), key=message_key):
        key = message_key(one)[:2]
        old = marks.get(key, records.Watermark(*key, 0, 0, number, number))
        if isinstance(one, Member):
            old = old._replace(tokens=old.tokens + one.tokens, period=one.period)
        marks[key] = old._replace(seq=one.seq, record=number)
    for key in record.dead:
        marks[key] = marks[key]._replace(record=number)
    all_dead, remembered = (*state.dead, *record.dead), remembered_records(run)
    dead = [key for key in all_dead if number - marks[key].record <= remembered][-MAX_DEAD:]
    blocks, top = unfinished_blocks(run, state, record)
    for key in sorted({*all_dead} - {*dead}):
        _forget(marks, key)
        blocks = tuple(block for block in blocks if (block.island, block.incarnation) != key)
    norms = [(one.norm, one.steps) for one in record.members]
    norms += [(one.norm, one.steps) for one in record.rejected if one.reason == "norm"]
    is_snapshot = number % run.snapshot_every == 0
    return LogState(
        fragment=state.fragment,
        number=number,
        record_hash=records.digest(record),
        digest=digest,
        tokens=state.tokens + sum(one.tokens for one in record.members),
        watermarks=tuple(marks[key] for key in sorted(marks)),
        norms=(*state.norms, *norms)[-NORMS:],
        dead=tuple(dead),
        blocks=blocks,
        top=top,
        tops=(*state.tops, top)[-TOPS:] if is_snapshot else state.tops,
    )


def _forget(marks: dict[tuple[str, int], records.Watermark], key: tuple[str, int]) -> None:
    """Drop the watermark of an incarnation. The island's next incarnation inherits its tokens."""
    old = marks.pop(key)
    if later := [other for other in marks if other[0] == key[0] and other > key]:
        heir = marks[min(later)]
        since = min(heir.since, old.since)
        marks[min(later)] = heir._replace(tokens=heir.tokens + old.tokens, since=since)


# -- rule 2: the author of a record ----------------------------------------------------------------


def authors_before(number: int, name: str, present: Iterable[str]) -> int:
    """Rule 2: return the number of islands that precede this one as author of a record."""
    order = sorted({*present, name})
    return (order.index(name) - number) % len(order)


def is_own(lease: records.Lease, nonce: str) -> bool:
    """Rule 2: return whether this program wrote an object, regardless of the store's answer."""
    return lease.nonce == nonce


def decidable(
    run: Run,
    state: LogState,
    inbox: Mapping[Key, Message],
    damaged: Mapping[Key, str],
    present: set[str],
    *,
    waited: float,
    timing: Timing,
) -> tuple[list[Message], list[Reject]] | None:
    """Rule 2: return the messages that the next record accepts and rejects; None: not yet.

    Args:
      run: run.json of the log.
      state: before the record.
      inbox: messages by key.
      damaged: {key: reason} of the messages that cannot be used.
      present: islands that are ready and alive.
      waited: time since the first message arrived [s].
      timing: times of the author.
    """
    members, rejected = order_messages(run, state, inbox, damaged)
    islands = {one.island for one in members}
    late = waited >= timing.grace
    if len(islands) < run.islands_min:
        first = rejects_in_turn(members, rejected)
        return ([], first) if first and late else None
    complete = present <= islands | {one.island for one in rejected}
    if not (late or complete) or not covers_round(run, members, rejected):
        return None
    return members, rejected


# -- rule 3: who is alive --------------------------------------------------------------------------


def observed(timing: Timing, since: float, writes: bool) -> float:
    """Rule 3: return how much of the time since a listing counts as observed, at most 1.5 pauses.

    While the store is unavailable, or the observer is suspended, no island is considered silent.

    Args:
      timing: times of the observer.
      since: time since the last listing [s].
      writes: whether the observer can write its heartbeat; otherwise others may fail, too.
    """
    return min(since, 1.5 * timing.list) if writes else 0.0


def alive(peers: Mapping[str, Peer], now: float, timing: Timing) -> set[str]:
    """Rule 3: return the islands with a recent heartbeat. now: as the times of Peer [s]."""
    return {name for name, one in peers.items() if now - one.changed_at < timing.dead}


def newly_dead(
    state: LogState, living: Mapping[str, int], *, absent: bool
) -> tuple[tuple[str, int], ...]:
    """Rules 3 and 8: return the incarnations that a record declares dead.

    Args:
      state: before the record.
      living: {island: its newest incarnation}; earlier incarnations are dead.
      absent: whether the observation was long enough to declare all other islands dead, too.
    """
    dead = {*state.dead}
    known = ((one.island, one.incarnation) for one in state.watermarks)
    found = (
        key for key in known if key not in dead and living.get(key[0], key[1] + absent) > key[1]
    )
    return tuple(itertools.islice(found, MAX_DEATHS))


# -- rule 4: a message counts exactly once ---------------------------------------------------------


def is_decided(marks: Mapping[tuple[str, int], int], key: Key) -> bool:
    """Rule 4: return whether a record has accepted or rejected a message."""
    return key[2] <= marks.get(key[:2], 0)


def is_next(marks: Mapping[tuple[str, int], int], key: Key) -> bool:
    """Rule 4: return whether a message follows the decided messages of its incarnation."""
    return not is_decided(marks, key) and key[2] - 1 <= marks.get(key[:2], 0)


def is_stale(state: LogState, message: Message) -> bool:
    """Rule 4: return whether a message is too late for the next record."""
    return state.number - message.base > MAX_STALENESS


def may_send(undecided: Sequence[Any]) -> bool:
    """Rule 4: return whether an island may send one more message of a fragment."""
    return len(undecided) < MAX_UNDECIDED


def remembered_records(run: Run) -> int:
    """Rule 4: return the number of records after which a dead incarnation is forgotten."""
    return REMEMBERED_SNAPSHOTS * run.snapshot_every


def is_forgotten(run: Run, state: LogState, message: Message) -> bool:
    """Rule 4: return whether the log may no longer know that it has decided a message.

    The message was stale long before, so nothing is lost that could count.
    """
    return state.number - message.base > remembered_records(run)


def order_messages(
    run: Run, state: LogState, inbox: Mapping[Key, Message], damaged: Mapping[Key, str]
) -> tuple[list[Message], list[Reject]]:
    """Rules 4 and 12: return the messages that the next record may accept and must reject."""
    marks, members, rejected = watermarks(state), [], []
    for key in sorted(inbox):
        message = inbox[key]
        if not is_next(marks, key) or key[:2] in state.dead or is_forgotten(run, state, message):
            continue
        marks[key[:2]] = key[2]
        if reason := reject_reason(run, state, message, damaged.get(key, "")):
            rejected.append(Reject(*key, reason, message.steps, message.norm))
        else:
            members.append(message)
    return members, rejected


def rejects_in_turn(members: Sequence[Message], rejected: Sequence[Reject]) -> list[Reject]:
    """Rule 4: return the rejects that may be decided without the members."""
    waiting = {(one.island, one.incarnation): one.seq for one in reversed(members)}
    return [
        one for one in rejected if one.seq < waiting.get((one.island, one.incarnation), one.seq + 1)
    ]


# -- rule 5: weights and scale ---------------------------------------------------------------------


def weights(run: Run, number: int, messages: Iterable[Message]) -> dict[tuple[str, int], float]:
    """Rule 5: return the weights of incarnations in record `number`: tokens^2 / steps.

    Decoupled DiLoCo (arXiv 2604.21428) has these weights. With a global batch size the weights are
    the tokens, as in federated averaging (arXiv 1602.05629). One SGD step of each island then has
    the mean gradient of the global batch. A weight is lower if the first message is stale.

    Args:
      run: run.json of the log.
      number: number of the record.
      messages: members of the record, grouped by incarnation.
    """
    found = {}
    for key, group in itertools.groupby(messages, key=lambda one: message_key(one)[:2]):
        own = [*group]
        tokens, steps = sum(one.tokens for one in own), sum(one.steps for one in own)
        found[key] = max(tokens, 1) ** 2 / max(steps, 1)
        if run.global_batch_size:
            found[key] = float(max(tokens, 1))
        for _ in range(number - 1 - own[0].base):
            found[key] *= STALE_WEIGHT
    return found


def member_of(message: Message, weights: Mapping[tuple[str, int], float]) -> Member:
    """Return the entry of a message in a record."""
    key, one = message_key(message), message
    weight = weights[key[:2]]
    return Member(*key, weight, one.steps, one.tokens, one.norm, one.data, one.period)


def expected_tokens(
    state: LogState, peer: Peer, mean: float, observed: float, timing: Timing
) -> float:
    """Rule 5: return the tokens that an island without a message would have contributed.

    Args:
      state: before the record.
      peer: the island.
      mean: tokens of an island in the record.
      observed: StateMachine.observed_now [s].
      timing: times of the author.
    """
    heartbeat = peer.heartbeat
    for mark in state.watermarks:
        if (mark.island, mark.incarnation) == (heartbeat.island, heartbeat.incarnation):
            most = MAX_SPEEDUP * mark.tokens / (state.number - mark.since + 1)
            break
    else:
        most = mean if observed - peer.since < NEW_PERIODS * timing.period else 0.0
    return min(heartbeat.speed * timing.period, most)


def scale(committed: int, expected: float) -> float:
    """Rule 5: return the fraction of a full outer step that a record applies."""
    return min(1.0, committed / expected) if committed else 1.0


def covers_round(run: Run, members: Sequence[Message], rejected: Sequence[Reject]) -> bool:
    """Rule 5: return whether the median island took H / P steps, or an island waits."""
    steps: dict[str, list[int]] = {}
    for message in members:
        steps.setdefault(message.island, []).append(message.steps)
    full = any(not may_send(messages) for messages in steps.values())
    least = run.sync_period // len(run.fragments)
    return full or bool(rejected) or statistics.median(map(sum, steps.values())) >= least


# -- rules 6, 7 and 10: the island's own values ----------------------------------------------------


def how_to_apply(run: Run, t: int, sent_at: int | None, others: int) -> str:
    """Rule 6: return "wait", "merge" or "shift" for a record at step t.

    Args:
      run: run.json of the log.
      t: inner steps done.
      sent_at: step of this island's message in the record; None without one.
      others: number of this island's messages that stay undecided.
    """
    if sent_at is None:
        return "shift"
    due = sent_at + run.overlap_steps
    if t < due:
        return "wait"
    return "merge" if t == due and not others else "shift"


def is_due(run: Run, timing: Timing, steps: int, waited: float, *, invited: bool) -> bool:
    """Rule 7: return whether a fragment is sent, `steps` and `waited` [s] after the last time.

    An invited island may send after half of a period. So the messages of all islands come at about
    the same time, in one record, although the islands started at different times.

    Args:
      run: run.json of the log.
      timing: times of the island.
      steps: inner steps since the last message.
      waited: time since the last message [s].
      invited: whether only messages of other islands wait for the next record.
    """
    early = invited and steps >= run.sync_period // len(run.fragments)
    return waited >= timing.period / (1 + early) and steps >= timing.min_steps


def at_period(timing: Timing, period: float) -> Timing:
    """Rule 7: return times for another period. A shorter one also shortens the other times."""
    scale = min(1.0, period / timing.period)
    return timing._replace(
        period=period,
        grace=timing.grace * scale,
        takeover=timing.takeover * scale,
        list=min(timing.list, period / LISTINGS),
        poll=timing.poll * scale,
        max_poll=timing.max_poll * scale,
    )


def shared_period(state: LogState) -> float:
    """Rule 7: return the longest period that suits a living island [s]; 0 if none is known.

    Args:
      state: log state of fragment 0.
    """
    dead = {*state.dead}
    marks = (mark for mark in state.watermarks if (mark.island, mark.incarnation) not in dead)
    return min(max((mark.period for mark in marks), default=0.0), MAX_PERIOD)


def suitable_period(
    run: Run, timing: Timing, step_s: float, delays: Collection[float], deaths: float
) -> float:
    """Rule 7: return the period that suits an island [s].

    An island waits for max(0, delay - 2 T) because of a message that is decided late. A death
    costs T / 2 of work that was not sent. The sum of both is least at half of a delay. Longer
    delays are then at most P deaths / 4, since P fragments report each outage.

    Args:
      run: run.json of the log.
      timing: times of the island, before a period is known.
      step_s: time of an inner step [s].
      delays: times from sending a message until a record decided it, of P fragments [s].
      deaths: of an average island, in the same time.
    """
    rare = typical = 0.0
    if delays:
        left_out = min(int(deaths * len(run.fragments) / 4), len(delays) - 1)
        rare = sorted(delays)[-1 - left_out] / 2
        typical = statistics.median(delays) / PERIODS_TO_DECIDE
    useful = min(timing.period, max(rare, step_s * run.sync_period))
    least = timing.period / 60  # bounds the number of requests
    return max(least, round(min(MAX_PERIOD, max(useful, typical)), 3))


def unsent(outer: Any, undecided: Iterable[Any], x: Any) -> Any:
    """Rule 10: return the progress that is not sent: outer parameters - undecided messages - x.

    Arguments are numbers or arrays. The result includes the rounding errors of the wire format.
    """
    for value in undecided:
        outer = outer - value
    return outer - x


def rebase(x: Any, before: Any, after: Any, committed: Iterable[Any]) -> Any:
    """Rules 6 and 10: return x after a record, with all progress that is not committed.

    Args:
      x: this island's values.
      before: outer parameters before the record.
      after: outer parameters after the record.
      committed: this island's messages that the record accepts.
    """
    x = x + (after - before)
    for value in committed:
        x = x + value
    return x


# -- rule 8: data and the end ----------------------------------------------------------------------


def progress(run: Run, state: LogState) -> float:
    """Rule 8: return the part of the run that is done, by the state of fragment 0."""
    return state.tokens / run.tokens


def unfinished_blocks(run: Run, state: LogState, record: Record) -> tuple[tuple[Block, ...], int]:
    """Rule 8: return the unfinished blocks and the highest block seen, after a record."""
    blocks, top = {(one.block, one.lease): one for one in state.blocks}, state.top
    size = run.block_tokens
    for member in record.members:
        for part in (one for each in member.data for one in ranges_by_block(each, size)):
            key, top = (part.block, part.lease), max(top, part.block)
            old = blocks.get(key)
            # A part of a rejected message may arrive after a later part.
            stop = max(old.stop if old else 0, part.stop)
            tokens = (old.tokens if old else 0) + part.stop - part.start
            blocks[key] = Block(*key, member.island, member.incarnation, stop, tokens)
            if part.lease == 2:  # the rest of a dead island's block
                blocks.pop((part.block, 1), None)
    kept = (blocks[key] for key in sorted(blocks))
    unfinished = [one for one in kept if (one.tokens if one.lease == 1 else one.stop) < size]
    return tuple(unfinished[-MAX_UNFINISHED:]), top


def ranges_by_block(part: Range, size: int) -> Iterator[Range]:
    """Yield a range block by block."""
    block, lease, start, stop = part
    while stop > size > 0:
        yield Range(block, lease, start, size)
        block, start, stop = block + 1, 0, stop - size
    yield Range(block, lease, start, stop)


def joined(first: Iterable[Range], then: Iterable[Range], size: int) -> tuple[Range, ...]:
    """Concatenate ranges, and join those that touch. size: tokens of a block."""
    found = list(first)
    for part in then:
        last = found[-1] if found else None
        ahead = size * (part.block - last.block) if last else 0
        if last and last.lease == part.lease and last.stop == ahead + part.start:
            found[-1] = last._replace(stop=ahead + part.stop)
        else:
            found.append(part)
    return tuple(found)


def tokens_of(data: Sequence[Range]) -> int:
    """Return the number of tokens of ranges."""
    return sum(part.stop - part.start for part in data)


def highest_finished(state: LogState) -> int:
    """Rule 8: return the highest block that can be finished; 0 without one."""
    return state.tops[0] if len(state.tops) == TOPS else 0


def finished_blocks(state: LogState, blocks: Iterable[int]) -> Iterator[int]:
    """Rule 8: yield the blocks that no message may name any more, so that leases can be deleted.

    They are committed, or no island began them until four snapshots after a higher one. A finished
    block is finished in all later states. An island with an outdated state may lease one again, but
    every record rejects its messages.
    """
    highest, unfinished = highest_finished(state), {one.block for one in state.blocks}
    return (block for block in blocks if block <= highest and block not in unfinished)


def are_valid_ranges(run: Run, state: LogState, data: Sequence[Range]) -> bool:
    """Rules 8 and 12: return whether ranges can belong to blocks that an island holds."""
    size = run.block_tokens
    known = all(
        0 <= part.start < min(part.stop, size)
        and part.lease in (1, 2)
        and part.block + (part.stop - 1) // size <= state.top + MAX_BLOCKS_AHEAD
        for part in data
    )
    end = highest_finished(state) + 1  # bounds the loop for a very long range
    parts = (range(p.block, min(p.block + -(-p.stop // size), end)) for p in data)
    finished = finished_blocks(state, itertools.chain.from_iterable(parts))
    return known and not any(True for _ in finished)


def released_ranges(state: LogState, size: int) -> list[Range]:
    """Rule 8: return the remaining parts of dead islands' blocks, which may be leased once more."""
    dead = (
        one
        for one in state.blocks
        if one.lease == 1 and (one.island, one.incarnation) in state.dead
    )
    return [Range(one.block, 2, one.stop, size) for one in dead if one.stop < size]


def wants_lease(held: Sequence[Range], period_tokens: int, missed: int) -> bool:
    """Rule 8: return whether an island requests one more block.

    The island can then read while the store is unavailable. It trains for three periods, until two
    messages are undecided and a third one is due. It holds at least the current and the next block.

    Args:
      held: leases, including requested ones.
      period_tokens: tokens that the island reads in a period.
      missed: consecutive requests that others won. It lets a late joiner skip their blocks quickly.
    """
    least = MIN_LEASES + min(missed, MAX_MORE_LEASES)
    return len(held) < least or tokens_of(held) < LEASED_PERIODS * period_tokens


def next_lease(
    state: LogState, size: int, leased: Collection[tuple[int, int]]
) -> tuple[str, Range]:
    """Rule 8: return the name and the range of the next lease.

    Args:
      state: log state of fragment 0.
      size: tokens of a block.
      leased: (block, number of the lease) pairs that were requested before.
    """
    rests = [one for one in released_ranges(state, size) if one[:2] not in leased]
    block = max([state.top, *(block for block, _ in leased)]) + 1
    found = rests[0] if rests else Range(block, 1, 0, size)
    return f"d/{found.block}.2" if found.lease == 2 else f"d/{found.block}", found


# -- rule 14: the global batch ---------------------------------------------------------------------


def batch_size(run: Run, state: LogState, name: str) -> int:
    """Rule 14: return the sequences of an island in an inner step, at least 1.

    The islands of the log share the global batch in the order of their names, as evenly as
    possible. An island that no record has named yet counts itself in addition.

    Args:
      run: run.json of the log, with a global batch size.
      state: log state of fragment 0.
      name: name of the island.
    """
    dead, total = {*state.dead}, run.global_batch_size
    living = (one for one in state.watermarks if (one.island, one.incarnation) not in dead)
    islands = sorted({one.island for one in living} | {name})
    place, count = islands.index(name), len(islands)
    return max(total * (place + 1) // count - total * place // count, 1)


# -- rule 9: newcomers -----------------------------------------------------------------------------


def moments(own: int | None, head: int) -> str:
    """Rule 9: return "kept" or "zero" for the moments of a late joiner's inner optimizer.

    Args:
      own: number of records that its checkpoint has; None without a checkpoint.
      head: number of records in the log.
    """
    return "kept" if own is not None and 0 <= head - own <= MAX_STALENESS else "zero"


def is_ready(sent: Iterable[int]) -> bool:
    """Rule 9: return whether records wait for an island with these last messages, by fragment."""
    return any(sent)


# -- rules 11, 12 and 13: requests, guards, deletion -----------------------------------------------


def pause(timing: Timing, tries: int, salt: str) -> float:
    """Rule 11: return the pause before a request is repeated [s]: doubled, with jitter."""
    jitter = zlib.crc32(f"{salt} {tries}".encode()) / 2**32
    return min(timing.poll * 2 ** min(tries, 20), timing.max_poll) * (0.5 + jitter / 2)


def reject_reason(run: Run, state: LogState, message: Message, damage: str) -> str:
    """Rule 12: return the reason to reject a message; "" if valid. damage: of its payload."""
    found = [
        not message.finite,
        message.base > state.number,
        is_stale(state, message),
        is_outlier(state, message),
        not are_valid_ranges(run, state, message.data),
    ]
    return damage or next(itertools.compress(REASONS, found), "")


def is_outlier(state: LogState, message: Message) -> bool:
    """Rule 12: return whether a norm is too large against recent ones, in total and per inner step.

    A fast island has longer updates in total. A message of few steps has longer updates per step,
    since steps oscillate.
    """
    if len(state.norms) < MIN_NORMS:
        return False
    total = statistics.median(norm for norm, _ in state.norms)
    per_step = statistics.median(norm / max(steps, 1) for norm, steps in state.norms)
    return message.norm > MAX_NORM * max(total, per_step * message.steps)


def fits(run: Run, state: LogState, record: Record) -> bool:
    """Rule 12: return whether a record, and a snapshot after it, can be written and read."""
    digest = "0" * 64  # placeholder for the gradient's and the state's
    record = record._replace(gradient=digest)
    return records.fits(record) and records.fits(next_state(run, state, record, digest))


def fitting_ranges(data: Sequence[Range]) -> int:
    """Rule 12: return the number of ranges, from the first, that fit into a message."""
    left = records.max_header(Message) - HEADER_WITHOUT_DATA
    for count, part in enumerate(data):
        left -= records.size_in_list(part)
        if left < 0:
            return count
    return len(data)


def deletable(names: Iterable[str], snapshots: Iterable[LogState]) -> list[str]:
    """Rule 13: return the names of one fragment that are not needed after the last two snapshots.

    This includes messages of incarnations that were dead by then, and leases of blocks that were
    finished by then. Records stay, so that a reader can follow their chain from the start.
    """
    kept = sorted(snapshots, key=lambda state: state.number)[-2:]
    if len(kept) < 2:
        return []
    oldest, found, names = kept[0], [], [*names]
    marks, dead = watermarks(oldest), {*oldest.dead}
    leased = (records.number_of(name) for name in names if name[0] == "d")
    finished = {*finished_blocks(oldest, leased)}
    for name in names:
        kind, number = name[0], records.number_of(name)
        if kind == "u":
            key = records.message_of(name)
            needed = not is_decided(marks, key) and key[:2] not in dead
        elif kind == "d":
            needed = number not in finished
        else:
            needed = kind == "c" or number > oldest.number - (kind == "s")
        found += [] if needed else [name]
    return found
