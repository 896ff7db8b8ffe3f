"""Run an island concurrently with the training steps: threads, clock, leased data, log lines.

The training thread calls `wait_to_step` before an inner step and `step_done` after it. The executor
reads and replaces the island's values only in these calls. All other work runs concurrently.
"""

import bisect
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from maxdiloco.islands import rules
from maxdiloco.islands.executor import Executor
from maxdiloco.islands.records import Range
from maxdiloco.islands.state_machine import TRAIN, Create, PutHeartbeat, Reduce, StateMachine

# A request may transfer a fragment for minutes, or wait for an unavailable store. So heartbeats
# have their own thread.
THREADS = 8
PAUSE_S = 0.02  # between two ticks
DRAIN_S = 10.0  # for requests in flight at the end
WAIT_LINE_S = 30.0  # after which a waiting island logs the reason
MEANWHILE_S = 1.0  # between two calls of `meanwhile`


class LeasedData:
    """The data that an island has leased, in reading order. Any thread may call the methods.

    Attributes:
      begun: inner steps before this start of the island.
      ranges: leases, each with its full length.
    """

    def __init__(self, begun: int = 0):
        """Begin without leases."""
        self.begun, self.ranges = begun, list[Range]()
        self._ends, self._known = list[int](), set[tuple[int, int]]()
        self._changed, self._ended, self._closed = threading.Condition(), False, False

    @property
    def tokens(self) -> int:
        """Number of tokens in all leases so far."""
        return self._ends[-1] if self._ends else 0

    def extend(self, leases: Iterable[Range]) -> None:
        """Add the new leases among these. A lease has its full length when it first appears."""
        with self._changed:
            for lease in leases:
                if lease[:2] not in self._known:
                    self._known.add(lease[:2])
                    self._ends.append(self.tokens + lease.stop - lease.start)
                    self.ranges.append(lease)
            self._changed.notify_all()

    def read(self, start: int, stop: int) -> list[Range]:
        """Return the ranges of the island's own tokens from `start` to before `stop`.

        Waits until they are leased. Returns [] if they never will be, or the data are closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self.tokens >= stop)
            if self._closed or self.tokens < stop:
                return []
            found, i = [], bisect.bisect_right(self._ends, start)
            while start < stop:
                lease, end = self.ranges[i], min(stop, self._ends[i])
                before = self._ends[i] - lease.stop  # offset from own tokens to tokens of the block
                found.append(lease._replace(start=start - before, stop=end - before))
                start, i = end, i + 1
            return found

    def end(self) -> None:
        """End all waits, because no lease follows."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def close(self) -> None:
        """End all reads, because no step follows. Leased data are not read either."""
        self._closed = True
        self.end()


class Runtime:
    """The threads that carry out an executor's requests and ticks."""

    def __init__(
        self,
        executor: Executor,
        data: LeasedData,
        say: Callable[[str], None],
        meanwhile: Callable[[], None] = lambda: None,
    ):
        """Start the threads.

        Args:
          executor: carries out the actions of the island.
          data: receives the leases.
          say: logs a line; any thread may call it.
          meanwhile: called every MEANWHILE_S by a thread that waits for a step.
        """
        self.executor, self.data = executor, data
        self._say, self._meanwhile = say, meanwhile
        self._members = Members(executor.state.name)
        lock = threading.Lock()  # around every event
        self._changed, self._wanted = threading.Condition(lock), threading.Condition(lock)
        self._in_flight, self._closing = list[Any](), False
        self._waited_for = set[str]()
        self._error: BaseException | None = None
        targets = [(self._tick,), (self._work, True), *[(self._work, False)] * THREADS]
        self._threads = [
            threading.Thread(target=self._guarded, args=target, daemon=True) for target in targets
        ]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Wait until the island has caught up with the log, or has ended."""
        self._wait_until(lambda: self.executor.state.phase == TRAIN)

    def wait_to_step(self, tokens: int = 0) -> None:
        """Wait until the next inner step may begin, or the island has ended.

        Args:
          tokens: number of this island's tokens that have to be leased.
        """
        began = self.executor.state.now

        def may_step():
            state = self.executor.state
            if state.may_step() and self.data.tokens >= tokens:
                return True
            line = wait_line(state) if state.now - began >= WAIT_LINE_S else ""
            if line and line not in self._waited_for:
                self._waited_for.add(line)
                self._say(line)
            return False

        self._wait_until(may_step)

    def step_done(self, tokens: int) -> None:
        """Note an inner step."""
        with self._changed:
            self.executor.step_done(tokens)
            self._after_event()

    def close(self, *, drain: bool) -> None:
        """End the threads. drain: wait a while for requests in flight."""
        with self._changed:
            if drain and not self._closing and self._error is None:
                self._changed.wait_for(self._has_stored, DRAIN_S)
            self._closing = True
            self._changed.notify_all()
            self._wanted.notify_all()
        self.data.close()
        self._threads[0].join()

    def leave(self, *, drain: bool) -> None:
        """End the threads like `close`, and put a last heartbeat."""
        self.close(drain=drain)
        self._threads[1].join(DRAIN_S)  # the thread for heartbeats; this one is the last
        self.executor.leave()

    def _has_stored(self) -> bool:
        requests = [*self._in_flight, *self.executor.requests]
        return not any(isinstance(request, Create | Reduce) for request in requests)

    def _wait_until(self, done: Callable[[], bool]) -> None:
        called = time.monotonic()
        while True:
            with self._changed:
                self.executor.tick()
                self._after_event()
                if self._error is not None:
                    raise self._error
                if self._closing or self.executor.stop is not None or done():
                    return
                self._changed.wait(PAUSE_S)
            if time.monotonic() - called >= MEANWHILE_S:
                self._meanwhile()
                called = time.monotonic()

    def _guarded(self, target: Callable[..., None], *args: Any) -> None:
        try:
            target(*args)
        finally:
            self._error = self._error or sys.exception()

    def _tick(self) -> None:
        with self._changed:
            while not self._closing:
                self.executor.tick(within_step=True)
                self._after_event()
                self._changed.wait(PAUSE_S)

    def _work(self, of_heartbeats: bool) -> None:
        """Carry out requests: only heartbeats, or all except heartbeats."""
        with self._wanted:
            while not self._closing:
                requests = self.executor.requests
                own = (one for one in requests if isinstance(one, PutHeartbeat) == of_heartbeats)
                if (request := next(own, None)) is None:
                    self._wanted.wait()
                    continue
                requests.remove(request)
                self._in_flight.append(request)
                self._wanted.release()
                try:
                    answer = self.executor.carry_out(request)
                finally:
                    self._wanted.acquire()
                    self._in_flight.remove(request)
                self.executor.deliver(answer)
                self._after_event()

    def _after_event(self) -> None:
        """Pass on leases and lines, and wake the threads. The caller holds the lock."""
        executor = self.executor
        self.data.extend(executor.state.leases)
        said, executor.said = executor.said + self._members.lines(executor.state), []
        for line in said:
            self._say(line)
        if executor.stop is not None:
            self.data.end()
        self._changed.notify_all()
        if executor.requests:
            self._wanted.notify_all()


def wait_line(state: StateMachine) -> str:
    """Return a log line on the reason for which an island waits."""
    start = f"island {state.name} waits for"
    for fragment, log in enumerate(state.logs):
        if not log.undecided or log.record is not None:
            continue
        islands, least = {island for island, *_ in log.inbox}, state.run.islands_min
        if not all(own.stored for own in log.undecided):
            return f"{start} its message of fragment {fragment} to be in the store"
        if len(islands) < least:
            messages = f"messages of fragment {fragment} of {least} islands"
            return f"{start} {messages}, and has {len(islands)}"
        return f"{start} the next record of fragment {fragment}"
    return f"{start} a block of the data"


class Members:
    """The other islands, for log lines when one joins or leaves."""

    def __init__(self, name: str):
        """Keep the name of this island."""
        self._name = name
        self._present: dict[str, int] = {}  # incarnations
        self._gone: set[str] = set()

    def lines(self, state: StateMachine) -> list[str]:
        """Return log lines on the changes since the last call."""
        if state.phase != TRAIN:
            return []
        before, self._present, found = self._present, {}, []
        for name in state.alive() - {self._name}:
            peer = state.peers[name]
            if peer.changed_at > peer.since or name in before:  # the first heartbeat may be old
                self._present[name] = peer.heartbeat.incarnation
        for name in sorted(before.keys() - self._present.keys()):
            self._gone.add(name)
            dead = f"is considered dead: no heartbeat for {state.timing.dead:g} s"
            has_left = state.peers[name].heartbeat.left
            found.append(f"island {name} {'has left' if has_left else dead}")
        for name, incarnation in sorted(self._present.items() - before.items()):
            if name in before:
                what = "has started again"
            else:
                what = "has returned" if name in self._gone else "has joined"
            start = f" as incarnation {incarnation}" if incarnation > 1 else ""
            found.append(f"island {name} {what}{start}")
        return found


def metrics(state: StateMachine) -> dict[str, float]:
    """Return the islands/* metrics of a row, on the log of fragment 0 and this island in it."""
    log = state.logs[0].state
    own = (one.tokens for one in log.watermarks if one.island == state.name)
    found = {
        "islands/alive": len(state.alive() | {state.name}),
        "islands/progress": rules.progress(state.run, log),
        "islands/records": log.number,
        "islands/committed_tokens": log.tokens,
        "islands/own_tokens": sum(own),
        "islands/period_seconds": state.timing.period,
        "islands/undecided": sum(len(each.undecided) for each in state.logs),
    }
    return {name: float(value) for name, value in found.items()}
