"""The hands of an island: they carry out what core.py asks for, on a bucket and on arrays.

Nothing here has a thread, and nothing waits but the store (beside.py has threads). What an inner
step is, and when one is taken, is the caller's; `theta` and `x` are a fragment's leaves, whole,
flattened and put end to end.
"""

import contextlib
import functools
import secrets
import time
from collections.abc import Callable, MutableSequence, Sequence
from typing import Any

import numpy as np

from maxdiloco.errors import ConfigError
from maxdiloco.islands import core, island, keys, objects, outer, records, rules, wires
from maxdiloco.islands.ahead import Ahead, ReadAhead
from maxdiloco.islands.objects import Read
from maxdiloco.islands.outer import Outer, Term
from maxdiloco.islands.records import (
    Beat,
    Damaged,
    Gradient,
    Ledger,
    Message,
    Record,
    Reject,
    Run,
)
from maxdiloco.storage.store import Bucket


class Driver:
    """An island over a bucket.

    theta: of each fragment, where this island makes the start. x: the island's own values, by
    fragment; None: kept here, and the caller may replace them between two calls. feedback: whether
    what a wire rounds off stays for the next message also where a merge replaces x (error
    feedback). moments_of: records that a checkpoint of the inner optimizer has. after: see
    core.start. key: of 32 bytes, to sign with. nonce: of this start, None: a random one. clock:
    [s].
    outer: the state of each fragment. requests: what the store is to be asked. said: lines for the
    user; evaluations: numbers of those that are this island's; moments: what becomes of those of
    the inner optimizer, "" until it has begun; norm: of the last message; finite: whether all were;
    stop: why it is over, if it is. Raises ConfigError for a run that cannot be computed with.
    """

    def __init__(
        self,
        bucket: Bucket,
        run: Run,
        pace: rules.Pace,
        name: str,
        theta: Sequence[np.ndarray],
        *,
        x: MutableSequence[np.ndarray] | None = None,
        feedback: bool = False,
        moments_of: int | None = None,
        after: int = 0,
        key: bytes | None = None,
        nonce: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        if wrong := outer.problem(run):
            raise ConfigError(f"{wrong}: islands cannot run with it. Set another value.")
        self._bucket, self._run, self._key, self._clock = bucket, run, key, clock
        self._ahead = ReadAhead(run, functools.partial(objects.read, bucket, run))
        self.outer = [outer.fresh(values) for values in theta]
        self.x = [state.theta for state in self.outer] if x is None else x
        self.sent: list[dict[int, np.ndarray]] = [{} for _ in theta]
        # With feedback: what the last message has left over, and what the next one has to add.
        self._feedback = feedback
        self._left: list[Any] = [np.float32(0)] * len(theta)
        self._residual: list[Any] = [np.float32(0)] * len(theta)
        self._payloads = {
            records.snapshot_name(fragment, 0): state.to_bytes()
            for fragment, state in enumerate(self.outer)
        }
        self._small = [False] * len(theta)  # whether the last record moved little
        self._after: dict[str, tuple[Outer, str]] = {}  # by the name of a record's gradient
        self.requests: list[Any] = []
        self.said: list[str] = []
        self.evaluations: list[int] = []
        self.moments, self.norm, self.finite = "", 0.0, True
        self.stop: island.Stop | None = None
        digests = tuple(state.digest() for state in self.outer)
        nonce = secrets.token_hex(8) if nonce is None else nonce
        self.state: island.Island = core.start(run, pace, name, nonce, digests, moments_of, after)

    def tick(self, *, within: bool = False) -> None:
        """Let time pass. within: an inner step is under way, so x stays as it is."""
        self.deliver(island.Tick(self._clock(), within))

    def may_step(self) -> bool:
        """Whether the next inner step may begin."""
        return core.may_step(self.state)

    def stepped(self, tokens: int) -> None:
        """An inner step is done, and its values are in `x`."""
        self.deliver(island.Step(tokens))

    def work(self) -> bool:
        """Carry out the request that was made first; False where there is none."""
        if not self.requests:
            return False
        self.deliver(self.carried_out(self.requests.pop(0)))
        return True

    def carried_out(self, request: Any) -> island.Done:
        """Carry out a request; the event to deliver. Requests may be under way in many threads."""
        try:
            return island.Done(request, self._request(request))
        except OSError:
            return island.Done(request, island.FAILED)
        except Damaged as error:
            return island.Done(request, island.Damage(str(error)))

    def deliver(self, event: Any) -> None:
        """What an event changes; one at a time."""
        self.state, actions = core.step(self.state, event)
        for action in actions:
            match action:
                case island.Pack(message):
                    self.deliver(island.Done(action, self._packed(message)))
                case island.Apply():
                    self.deliver(island.Done(action, self._applied(action)))
                case island.Begin(moments):
                    self.moments = moments
                    for fragment, state in enumerate(self.outer):
                        self.x[fragment] = state.theta
                case island.Evaluate(number):
                    self.evaluations.append(number)
                case island.Say(line):
                    self.said.append(line)
                case island.Stop():
                    self.stop = action
                    self.requests.clear()
                case _:
                    self.requests.append(action)
                    if self.state.phase == "load" and isinstance(action, island.Get):
                        self.requests += self._ahead.after(action.name)

    def leave(self) -> None:
        """Put a last sign of life once the program is over, so that nobody waits for more."""
        s = self.state
        was_replaced = self.stop is not None and self.stop.why == island.REPLACED
        if s.beat and not was_replaced and s.failing_since is None:
            sent = Beat(s.name, s.incarnation, s.beat + 1, False, 0.0, left=True)
            with contextlib.suppress(OSError):  # without it the others wait until it is dead
                self._request(island.Put(f"hb/{s.name}", sent))

    # -- on arrays --------------------------------------------------------------------------------

    def _packed(self, message: Message) -> Message:
        fragment, sizes = message.fragment, outer.sizes_of(self._run, message.fragment)
        theta, sent = self.outer[fragment].theta, self.sent[fragment]
        wanted = rules.unsent(theta, sent.values(), self.x[fragment]) + self._residual[fragment]
        payload = wires.encode(self._run.wire, sizes, wanted)
        values = wires.decode(self._run.wire, sizes, payload)
        norm, sent[message.seq] = outer.norm(values), values
        finite = bool(np.isfinite(wanted).all() and np.isfinite(norm))
        norm, sha256 = norm if finite else 0.0, records.sha256(payload)
        self.norm, self.finite, self._left[fragment] = norm, finite, wanted - values
        message = message._replace(norm=norm, finite=finite, sha256=sha256)
        self._payloads[name_of(message)] = payload
        return self._signed(message)

    def _signed(self, value: keys.Signed) -> keys.Signed:
        return value if self._key is None else keys.signed(value, self._key)

    def _applied(self, action: island.Apply) -> str:
        record, fragment, run = action.record, action.record.fragment, self._run
        before, sent = self.outer[fragment], self.sent[fragment]
        name = records.gradient_name(record)
        after, digest = self._after.pop(name) if record.members else (before, before.digest())
        for own in self.state.logs[fragment].own:
            if own.message.seq in (*action.committed, *action.returned):
                del self._payloads[name_of(own.message)]
        committed = [sent.pop(seq) for seq in action.committed]
        for seq in action.returned:
            del sent[seq]
        if action.how == "shift":
            x = self.x[fragment]
            self.x[fragment] = rules.shifted(x, before.theta, after.theta, committed)
        elif action.how == "merge":
            x = self.x[fragment] if run.alpha else after.theta  # where it is not asked for
            self.x[fragment] = merged(x, after.theta, run.alpha)
            if self._feedback:
                self._residual[fragment] = self._left[fragment]
        self.outer[fragment] = after
        if action.how != "load":
            self.said += [rejected(record, reject) for reject in record.rejected]
            if (is_small := record.scale < rules.SMALL_SCALE) and not self._small[fragment]:
                self.said.append(scaled(record))
            self._small[fragment] = is_small
        if action.keep:
            name = records.snapshot_name(fragment, record.number)
            self._payloads[name] = after.to_bytes()
        return digest

    # -- on the store -----------------------------------------------------------------------------

    def _request(self, action: Any) -> Any:
        bucket, run = self._bucket, self._run
        match action:
            case island.Create(name, body):
                result = objects.create(bucket, run, name, body, self._payloads.get(name, b""))
                if result in (island.CREATED, island.EXISTS) and name[0] != "u":
                    self._payloads.pop(name, None)
                return result
            case island.Put(name, body):
                return bucket.put(name, objects.encoded(run, name, self._signed(body)))
            case island.Starts(name):
                return objects.starts(bucket, name)
            case island.Get(name):
                return objects.answered(self._ahead.read, name)
            case Ahead():
                return self._ahead.carry_out(action)
            case island.Look(name):
                return objects.look(bucket, run, name)
            case island.Roll():
                return objects.beats(bucket, run)
            case island.Reduce(draft):
                return self._reduced(draft)
            case island.Fetch(record):
                return self._fetched(record)
            case island.Load(fragment):
                return self._loaded(fragment)
            case island.Delete(fragment):
                return self._deleted(fragment)
        raise ValueError(f"{action} is no request")

    def _reduced(self, draft: Record) -> island.Reduced:
        terms, damaged = [], []
        for member in draft.members:
            found = term(self._bucket, self._run, draft.fragment, member)
            (terms if isinstance(found, Term) else damaged).append(found)
        if damaged:
            return island.Reduced("", tuple(damaged))
        payload = outer.reduced(self._run, draft.fragment, terms)
        sha256 = records.sha256(payload)
        value = Gradient(draft.fragment, draft.number, sha256)
        name = records.gradient_name(draft)
        result = objects.create(self._bucket, self._run, name, value, payload)
        return island.FAILED if result == island.FAILED else island.Reduced(sha256)

    def _fetched(self, record: Record) -> bool | None:
        """The outer step is taken here too, beside the inner ones: Apply has it then."""
        try:
            gradient = gradient_of(self._ahead.read, self._run, record)
        except FileNotFoundError:
            return None
        after = apply(self._run, self.outer[record.fragment], record, gradient)
        self._after[records.gradient_name(record)] = after, after.digest()
        return True

    def _loaded(self, fragment: int) -> Ledger | None:
        found = objects.newest_snapshot(self._bucket, self._run, fragment)
        if found is None:
            return None
        ledger, payload = found
        name = records.snapshot_name(fragment, ledger.number)
        size = 8 * sum(outer.sizes_of(self._run, fragment))
        if len(payload) != size:
            raise Damaged(f"{name} is damaged: it is not whole")
        state = outer.from_bytes(payload)
        if state.digest() != ledger.digest:
            raise Damaged(f"{name} is damaged: its payload has another digest")
        self.outer[fragment] = state
        return ledger

    def _deleted(self, fragment: int) -> bool:
        names = objects.snapshots(self._bucket, fragment)[-2:]
        try:
            ledgers = [objects.read(self._bucket, self._run, name)[0] for name in names]
        except Damaged:  # who needs it says so
            return True
        folders = [f"{kind}/{fragment}" for kind in "ugs"]
        folders += ["d"] * (fragment == 0 and self._run.block_tokens > 0)
        names = [name for folder in folders for name in objects.listed(self._bucket, folder)]
        if doomed := rules.deletable(names, ledgers):
            self._bucket.delete(doomed)
        return True


def name_of(message: Message) -> str:
    """Of a message in the store."""
    return records.message_name(message.fragment, *rules.key_of(message))


def apply(run: Run, before: Outer, record: Record, gradient: np.ndarray | None) -> Outer:
    """The outer state after a record; one without members changes nothing."""
    return outer.stepped(run, before, gradient, record.scale) if record.members else before


def rejected(record: Record, reject: Reject) -> str:
    """The line on a message that a record rejects."""
    message = f"message {reject.incarnation}.{reject.seq} of island {reject.island}"
    where = f"record {record.number} of fragment {record.fragment}"
    return f"{where} rejects {message}: {reject.reason}"


def scaled(record: Record) -> str:
    """The line on a record that moves little."""
    members = ", ".join(sorted({member.island for member in record.members}))
    return (
        f"record {record.number} of fragment {record.fragment} takes {record.scale:.2g} of its "
        f"step: of the tokens that were expected so many came, from {members}"
    )


def merged(x: np.ndarray, theta: np.ndarray, alpha: float) -> np.ndarray:
    """diloco.outer.merge."""
    if alpha in (0, 1):
        return theta if alpha == 0 else x
    return x + np.float32(1 - alpha) * (theta - x)


def term(bucket: Bucket, run: Run, fragment: int, member: Any) -> Term | tuple[rules.Key, str]:
    """A member's values, or why they cannot count. Raises OSError."""
    key = rules.key_of(member)
    try:
        message, payload = objects.read(bucket, run, records.message_name(fragment, *key))
        values = wires.decode(run.wire, outer.sizes_of(run, fragment), payload)
    except FileNotFoundError:
        return key, "gone"
    except ValueError:  # Damaged, too
        return key, "sha256"
    if not keys.is_known(run, message):
        return key, "guest"
    if not np.isfinite(values).all():
        return key, "not finite"
    if message.norm != outer.norm(values):
        return key, "another norm"
    return Term(key[:2], member.weight, values)


def gradient_of(read: Read, run: Run, record: Record) -> np.ndarray:
    """What everyone applies. Raises OSError, Damaged."""
    name = records.gradient_name(record)
    value, payload = read(name)
    if value != Gradient(record.fragment, record.number, record.gradient):
        raise Damaged(f"{name} is damaged: it is not what its record names")
    return wires.decode(run.wire_down, outer.sizes_of(run, record.fragment), payload)
