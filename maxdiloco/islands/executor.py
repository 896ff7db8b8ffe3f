"""Carry out the actions of an island's state machine, on a store and on numpy arrays.

This file has no threads, and waits only for the store; runtime.py has the threads. The caller takes
the inner steps. The values of a fragment are one array [N]: its leaves, flattened and concatenated.
"""

import contextlib
import functools
import secrets
import time
from collections.abc import Callable, MutableSequence, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from maxdiloco.errors import ConfigError
from maxdiloco.islands import log_store, outer_step, records, rules, signatures
from maxdiloco.islands import state_machine as machine
from maxdiloco.islands.outer_step import Outer
from maxdiloco.islands.records import Damaged, Gradient, Heartbeat, LogState, Message, Record, Run
from maxdiloco.islands.rules import Timing
from maxdiloco.islands.state_machine import StateMachine
from maxdiloco.storage.store import Bucket, Version

# Limits on the records that are read ahead of a fragment, and on the bytes of their gradients. With
# more bytes the bandwidth limits the speed, not the latency.
MAX_RECORDS, MAX_BYTES = 8, 1 << 26


class Executor:
    """An island over a store, without threads.

    Attributes:
      state: the state machine.
      outer: the outer state of each fragment.
      x: the island's values of each fragment; the caller may replace them between two calls.
      requests: requests to the store that `carry_out` handles.
      said: log lines for the user.
      evaluations: numbers of the evaluations that this island makes.
      moments: "kept" or "zero", for the moments of the inner optimizer; "" before training begins.
      norm: L2 norm of the last message.
      finite: whether all messages were finite.
      stop: why the island has ended; None while it runs.
    """

    def __init__(
        self,
        bucket: Bucket,
        run: Run,
        timing: Timing,
        name: str,
        outer_params: Sequence[np.ndarray],
        *,
        x: MutableSequence[np.ndarray] | None = None,
        error_feedback: bool = False,
        moments_of: int | None = None,
        after: int = 0,
        key: bytes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Begin with outer parameters for each fragment, which count if this island begins the run.

        Args:
          bucket: the store.
          run: see StateMachine.
          timing: see StateMachine.
          name: see StateMachine.
          outer_params: values by fragment.
          x: the island's values by fragment; None: the executor keeps them.
          error_feedback: whether the encoding error of a message stays for the next one also after
            a merge, which replaces x.
          moments_of: see StateMachine.
          after: see StateMachine.
          key: private key of 32 bytes to sign with; None: messages are not signed.
          clock: returns the time [s].

        Raises:
          ConfigError: outer steps cannot be computed with this run.
        """
        if wrong := outer_step.problem(run):
            raise ConfigError(f"{wrong}. Islands cannot run with it. Set another value.")
        self._bucket, self._run, self._key, self._clock = bucket, run, key, clock
        self.outer = [outer_step.fresh(values) for values in outer_params]
        self.x = [each.theta for each in self.outer] if x is None else x
        self.sent: list[dict[int, np.ndarray]] = [{} for _ in outer_params]
        # With error feedback: the encoding error of the last message, and the residual to add next.
        self._error_feedback = error_feedback
        self._error: list[Any] = [np.float32(0)] * len(outer_params)
        self._residual: list[Any] = [np.float32(0)] * len(outer_params)
        # Undecided messages and new snapshots of this island, and their payloads.
        self._own: dict[str, tuple[Any, bytes]] = {
            records.snapshot_name(fragment, 0): (None, each.to_bytes())
            for fragment, each in enumerate(self.outer)
        }
        # By fragment: sha256 and payload of the gradient that this island computed last.
        self._computed: dict[int, tuple[str, bytes]] = {}
        self._ahead: dict[str, tuple[Any, bytes]] = {}  # read before they are requested
        self._heartbeats: dict[str, tuple[Version, Heartbeat]] = {}
        self._small = [False] * len(outer_params)  # whether the last record had a small scale
        self._after: dict[str, tuple[Outer, str]] = {}  # outer state and digest, by gradient
        self.requests: list[Any] = []
        self.said: list[str] = []
        self.evaluations: list[int] = []
        self.moments, self.norm, self.finite = "", 0.0, True
        self.stop: machine.Stop | None = None
        digests = tuple(each.digest() for each in self.outer)
        nonce = secrets.token_hex(8)
        self.state = StateMachine(run, timing, name, nonce, digests, moments_of, after)

    def tick(self, *, within_step: bool = False) -> None:
        """Let time pass. within_step: an inner step is running, so x stays as it is."""
        self.deliver(machine.Tick(self._clock(), within_step))

    def step_done(self, tokens: int) -> None:
        """Note an inner step, whose values are in `x`."""
        self.deliver(machine.StepDone(tokens))

    def work(self) -> bool:
        """Carry out the oldest request; return False without one."""
        if not self.requests:
            return False
        self.deliver(self.carry_out(self.requests.pop(0)))
        return True

    def carry_out(self, request: Any) -> machine.Answer:
        """Carry out a request, and return the event to deliver. Threads may do so concurrently."""
        result: Any
        try:
            result = self._request(request)
        except OSError as error:
            is_absent = isinstance(error, FileNotFoundError) and isinstance(request, machine.Read)
            result = None if is_absent else machine.FAILED
        except Damaged as error:
            result = machine.Damage(str(error))
            if isinstance(request, machine.Get) and request.name.startswith("d/"):
                result = records.Lease(request.name, "", 0, "")  # nobody reads this block
        return machine.Answer(request, result)

    def deliver(self, event: Any) -> None:
        """Handle an event; one at a time.

        The answer to an action may stop the machine, which then ignores all answers. The actions
        that are left would change values that the machine no longer follows, so they are dropped.
        """
        for action in self.state.handle(event):
            if self.stop is not None:
                return
            match action:
                case machine.Pack(message):
                    self.deliver(machine.Answer(action, self._packed(message)))
                case machine.Apply():
                    self.deliver(machine.Answer(action, self._applied(action)))
                case machine.Begin(moments):
                    self.moments = moments
                    self._own.clear()
                    self._ahead.clear()
                    for fragment, each in enumerate(self.outer):
                        self.x[fragment] = each.theta
                case machine.Evaluate(number):
                    self.evaluations.append(number)
                case machine.Say(line):
                    self.said.append(line)
                case machine.Stop():
                    self.stop = action
                    self.requests.clear()
                case _:
                    self.requests.append(action)

    def leave(self) -> None:
        """Put a last heartbeat once the program ends, so that nobody waits for this island."""
        s = self.state
        was_replaced = self.stop is not None and self.stop.why == machine.REPLACED
        if s.beats and not was_replaced and s.failing_since is None:
            sent = s.stored_messages()
            last = Heartbeat(s.name, s.incarnation, s.beats + 1, sent, 0.0, left=True)
            with contextlib.suppress(OSError):  # without it the others wait until it is dead
                self._request(machine.PutHeartbeat(f"hb/{s.name}", last))

    # -- on arrays ---------------------------------------------------------------------------------

    def _packed(self, message: Message) -> Message:
        """Rule 10: encode the unsent progress."""
        fragment, wire = message.fragment, self._run.wire
        sizes, sent = outer_step.sizes_of(self._run, fragment), self.sent[fragment]
        wanted = rules.unsent(self.outer[fragment].theta, sent.values(), self.x[fragment])
        wanted = wanted + self._residual[fragment]
        payload = outer_step.encode(wire, sizes, wanted)
        values = sent[message.seq] = outer_step.decode(wire, sizes, payload)
        norm = outer_step.norm(values)
        self.finite = bool(np.isfinite(wanted).all() and np.isfinite(norm))
        self.norm = norm if self.finite else 0.0
        self._error[fragment] = wanted - values
        sha256 = records.sha256(payload)
        message = message._replace(norm=self.norm, finite=self.finite, sha256=sha256)
        message = signatures.signed(message, self._key)
        self._own[records.name_of_message(message)] = message, payload
        return message

    def _applied(self, action: machine.Apply) -> str:
        """Rule 6: apply a record to x. The outer step was taken when the gradient was fetched."""
        record, fragment, run = action.record, action.record.fragment, self._run
        before, sent = self.outer[fragment], self.sent[fragment]
        if record.members:
            after, digest = self._after.pop(records.gradient_name(record))
        else:
            after, digest = before, before.digest()
        for seq in (*action.committed, *action.returned):
            key = self.state.name, self.state.incarnation, seq
            del self._own[records.message_name(fragment, *key)]
        committed = [sent.pop(seq) for seq in action.committed]
        for seq in action.returned:
            del sent[seq]
        if action.how == "shift":
            x = self.x[fragment]
            self.x[fragment] = rules.rebase(x, before.theta, after.theta, committed)
        elif action.how == "merge":
            x = self.x[fragment] if run.alpha else after.theta  # reading x may be a transfer
            self.x[fragment] = outer_step.merged(x, after.theta, run.alpha)
            if self._error_feedback:
                self._residual[fragment] = self._error[fragment]
        self.outer[fragment] = after
        if action.how != "load":
            self._log_record(record)
        if action.keep:
            name = records.snapshot_name(fragment, record.number)
            self._own[name] = None, after.to_bytes()
        return digest

    def _log_record(self, record: Record) -> None:
        self.said += reject_lines(record)
        is_small = record.scale < rules.SMALL_SCALE
        if is_small and not self._small[record.fragment]:
            self.said.append(scale_line(record))
        self._small[record.fragment] = is_small

    # -- on the store ------------------------------------------------------------------------------

    def _request(self, action: Any) -> Any:
        bucket, run = self._bucket, self._run
        match action:
            case machine.Create(name, body):
                _, payload = self._own.get(name, (None, b""))
                created = log_store.create(bucket, run, name, body, payload)
                if name[0] == "s":
                    self._own.pop(name, None)
                return machine.CREATED if created else machine.EXISTS
            case machine.PutHeartbeat(name, body):
                body = signatures.signed(body, self._key)
                return bucket.put(name, log_store.encoded(run, name, body))
            case machine.Get(name):
                return self._got(name)
            case machine.GetMessage(name):
                return log_store.read_header(bucket, run, name)
            case machine.ListHeartbeats():
                return log_store.heartbeats(bucket, run, self._heartbeats)
            case machine.Reduce(draft):
                return self._reduced(draft)
            case machine.FetchGradient(record):
                return self._fetched(record)
            case machine.LoadSnapshot(fragment):
                return self._loaded(fragment)
            case machine.Delete(fragment):
                return self._deleted(fragment)
        raise AssertionError(action)

    def _reduced(self, draft: Record) -> machine.Reduced:
        try:
            payload = log_store.compute_gradient(self._read, self._run, draft)
        except log_store.Unusable as error:
            return machine.Reduced("", error.members)
        value = Gradient(draft.fragment, draft.number, records.sha256(payload))
        if outer_step.has_gradient(self._run, draft):
            name = records.gradient_name(draft)
            log_store.create(self._bucket, self._run, name, value, payload)
        self._computed[draft.fragment] = value.sha256, payload
        return machine.Reduced(value.sha256)

    def _fetched(self, record: Record) -> bool:
        """Read a gradient, and take the outer step while inner steps are running."""
        sha256, payload = self._computed.pop(record.fragment, ("", b""))
        if sha256 == record.gradient:  # a draft with the same members has the same gradient
            sizes = outer_step.sizes_of(self._run, record.fragment)
            gradient = outer_step.decode(self._run.wire_down, sizes, payload)
        else:
            gradient = log_store.read_gradient(self._read, self._run, record)
        after = outer_step.stepped(self._run, self.outer[record.fragment], record, gradient)
        self._after[records.gradient_name(record)] = after, after.digest()
        return True

    def _read(self, name: str) -> tuple[Any, bytes]:
        """Return an object that this island has, or read it."""
        found = self._own.get(name) or self._ahead.pop(name, None)
        return found or log_store.read(self._bucket, self._run, name)

    def _got(self, name: str) -> Any:
        """Read an object. An island that catches up reads the records after a record, too.

        Otherwise it would wait twice for each: for the record, and for its gradient.
        """
        if name in self._ahead:
            return self._ahead.pop(name)[0]
        value, _ = log_store.read(self._bucket, self._run, name)
        if isinstance(value, Record) and self.state.phase == machine.LOAD:
            sizes = outer_step.sizes_of(self._run, value.fragment)
            size = outer_step.payload_size(self._run.wire_down, sizes)
            first = value.number + 1
            later = range(first, first + min(MAX_RECORDS, MAX_BYTES // size))
            with ThreadPoolExecutor(MAX_RECORDS) as pool:
                list(pool.map(functools.partial(self._read_ahead, value.fragment), later))
        return value

    def _read_ahead(self, fragment: int, number: int) -> None:
        """Read a record, and its gradient or members. Absent objects are requested again later."""
        name = records.record_name(fragment, number)
        with contextlib.suppress(OSError, Damaged):
            record, _ = self._ahead[name] = log_store.read(self._bucket, self._run, name)
            for source in log_store.sources_of(self._run, record) if record.members else ():
                self._ahead[source] = log_store.read(self._bucket, self._run, source)

    def _loaded(self, fragment: int) -> LogState | None:
        names = log_store.snapshots(self._bucket, fragment)
        if not names:
            return None
        state, payload = log_store.read(self._bucket, self._run, names[-1])
        is_whole = len(payload) == 8 * sum(outer_step.sizes_of(self._run, fragment))
        if not is_whole or records.sha256(payload) != state.digest:
            raise Damaged(f"{names[-1]} is damaged: its payload has another size or digest")
        self.outer[fragment] = outer_step.from_bytes(payload)
        return state

    def _deleted(self, fragment: int) -> bool:
        """Rule 13: delete the objects that are no longer needed."""
        names = log_store.snapshots(self._bucket, fragment)[-2:]
        try:
            states = [log_store.read(self._bucket, self._run, name)[0] for name in names]
        except Damaged:  # an island that needs it reports it
            return True
        folders = [f"{kind}/{fragment}" for kind in "ugs"]
        folders += ["d"] * (fragment == 0 and self._run.block_tokens > 0)
        names = [name for folder in folders for name in log_store.listed(self._bucket, folder)]
        if found := rules.deletable(names, states):
            self._bucket.delete(found)
        return True


def reject_lines(record: Record) -> list[str]:
    """Return a line for each message that a record rejects."""
    where = f"record {record.number} of fragment {record.fragment}"
    return [
        f"{where} rejects message {one.incarnation}.{one.seq} of island {one.island}: {one.reason}"
        for one in record.rejected
    ]


def scale_line(record: Record) -> str:
    """Return the line for a record with a small scale."""
    members = ", ".join(sorted({member.island for member in record.members}))
    return (
        f"record {record.number} of fragment {record.fragment} takes {record.scale:.2g} of a full "
        f"step: that part of the expected tokens has come, from {members}"
    )
