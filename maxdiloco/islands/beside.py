"""An island beside the training steps: requests on threads, time, and lines on who comes and goes.

The thread that trains calls `ready` before an inner step and `stepped` after it: there alone the
driver takes and replaces values. All else happens while steps are under way.
"""

import bisect
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from maxdiloco.islands import core, rules
from maxdiloco.islands.driver import Driver
from maxdiloco.islands.island import Create, Island, Put, Reduce, Step, Stop
from maxdiloco.islands.records import Range

# Our choice. A request may be a fragment that is minutes on its way, or wait for a store that is
# away; signs of life have a thread of their own.
THREADS = 8
PAUSE_S = 0.02  # between two looks at the clock
DRAIN_S = 10.0  # for what is being stored at the end
PATIENCE_S = 30.0  # of a step, after which a line says what it waits for


class Beside:
    """A driver with threads. say: for lines; any thread calls it."""

    def __init__(self, driver: Driver, pace: rules.Pace, say: Callable[[str], None]):
        self.driver = driver
        # Of the data that it has leased, whole, in the order of reading; and where each ends.
        self._granted, self._ends = list[Range](), list[int]()
        self._pace, self._say = pace, say
        self._company, self._known = Company(driver.state.name), set[tuple[int, int]]()
        lock = threading.Lock()  # around every event
        self._changed, self._wanted = threading.Condition(lock), threading.Condition(lock)
        self._flying, self._closing = list[Any](), False
        self._waited_for = set[str]()
        self._error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._guarded, args=target, daemon=True)
            for target in [(self._tick,), (self._work, True), *[(self._work, False)] * THREADS]
        ]
        for thread in self._threads:
            thread.start()

    @property
    def stop(self) -> Stop | None:
        """Why the island is over, if it is."""
        return self.driver.stop

    def joined(self) -> None:
        """Wait until the island has caught up with the log, or is over."""
        self._until(lambda: self.driver.state.phase == "in")

    def ready(self) -> None:
        """Wait until the next inner step may begin, or the island is over; say for what."""
        began = self.driver.state.now

        def may_step():
            state: Island = self.driver.state
            if self.driver.may_step():
                return True
            what = waits_for(state) if state.now - began >= PATIENCE_S else ""
            if what and what not in self._waited_for:
                self._waited_for.add(what)
                self._say(f"island {state.name} waits for {what}")
            return False

        self._until(may_step)

    def stepped(self, tokens: int) -> None:
        """An inner step is done."""
        with self._changed:
            self.driver.deliver(Step(tokens))
            self._look_around()

    def leased(self, start: int, stop: int) -> list[Range]:
        """What the tokens from start to before stop of its own are, counted from its beginning.

        Waits until they are leased; nothing once the island is over.
        """
        with self._changed:
            while self._closing or not self._ends or self._ends[-1] < stop:
                if self._over():
                    return []
                self._changed.wait(PAUSE_S)
            found, place = [], bisect.bisect_right(self._ends, start)
            while start < stop:
                lease, end = self._granted[place], min(stop, self._ends[place])
                before = self._ends[place] - lease.stop  # from its tokens to those of the block
                found.append(lease._replace(start=start - before, stop=end - before))
                start, place = end, place + 1
            return found

    def close(self, *, drain: bool) -> None:
        """End the threads. drain: wait a while for what is being stored."""
        with self._changed:
            if drain and not self._closing and self._error is None:
                self._changed.wait_for(self._has_stored, DRAIN_S)
            self._closing = True
            self._changed.notify_all()
            self._wanted.notify_all()
        self._threads[0].join()

    def leave(self, *, drain: bool) -> None:
        """End the threads, as `close`, and the island."""
        self.close(drain=drain)
        self._threads[1].join(DRAIN_S)  # that of signs of life, of which this is the last
        self.driver.leave()

    def _has_stored(self) -> bool:
        under_way = [*self._flying, *self.driver.requests]
        return not any(isinstance(request, Create | Reduce) for request in under_way)

    def _over(self) -> bool:
        if self._error is not None:
            raise self._error
        return self._closing or self.stop is not None

    def _until(self, done: Callable[[], bool]) -> None:
        with self._changed:
            while True:
                self.driver.tick()
                self._look_around()
                if self._over() or done():
                    return
                self._changed.wait(PAUSE_S)

    def _guarded(self, target: Callable[..., None], *args: Any) -> None:
        try:
            target(*args)
        finally:
            self._error = self._error or sys.exception()

    def _tick(self) -> None:
        with self._changed:
            while not self._closing:
                self.driver.tick(within=True)
                self._look_around()
                self._changed.wait(PAUSE_S)

    def _work(self, of_life: bool) -> None:
        """Carry out requests; of_life: those with signs of life, else the others."""
        with self._wanted:
            while not self._closing:
                own = (r for r in self.driver.requests if isinstance(r, Put) == of_life)
                if (request := next(own, None)) is None:
                    self._wanted.wait()
                    continue
                self.driver.requests.remove(request)
                self._flying.append(request)
                self._wanted.release()
                try:
                    answer = self.driver.carried_out(request)
                finally:
                    self._wanted.acquire()
                    self._flying.remove(request)
                self.driver.deliver(answer)
                self._look_around()

    def _look_around(self) -> None:
        """After an event, with the lock."""
        state = self.driver.state
        for lease in state.leases:
            if lease[:2] not in self._known:
                self._known.add(lease[:2])
                self._granted.append(lease)
                self._ends.append(sum(self._ends[-1:]) + lease.stop - lease.start)
        self.driver.said += self._company.lines(state, self._pace)
        said, self.driver.said = self.driver.said, []
        for line in said:
            self._say(line)
        self._changed.notify_all()
        if self.driver.requests:
            self._wanted.notify_all()


def waits_for(s: Island) -> str:
    """What an island waits for that may not take its next step."""
    for fragment, log in enumerate(s.logs):
        if not log.own or log.record is not None:
            continue
        what, there = f"of fragment {fragment}", {island for island, *_ in log.inbox}
        if not all(own.stored for own in log.own):
            return f"its message {what} to be in the store"
        if len(there) < s.run.islands_min:
            least = s.run.islands_min
            return f"messages {what} of islands_min_members={least}, and has {len(there)}"
        return f"the next record {what}"
    return "a block of the data"


class Company:
    """Who else is there, for lines when that changes. name: this island's."""

    def __init__(self, name: str):
        self._name = name
        self._first: dict[str, Any] = {}  # signs of life; they may be of last week
        self._there: Mapping[str, int] = {}  # incarnations
        self._gone: set[str] = set()

    def lines(self, state: Island, pace: rules.Pace) -> list[str]:
        """What has changed since the last call."""
        if state.phase != "in":
            return []
        living = rules.alive(state.seen, core.watched(state), pace) - {self._name}
        beats = {name: state.seen[name].beat for name in living}
        there = {n: b.incarnation for n, b in beats.items() if self._first.setdefault(n, b) != b}
        if there == self._there:
            return []
        before, self._there, found = self._there, there, []
        for name in sorted(before.keys() - there.keys()):
            self._gone.add(name)
            dead = f"is thought dead: no sign of life for {pace.dead:g} s"
            has_left = state.seen[name].beat.left
            found.append(f"island {name} {'has left' if has_left else dead}")
        for name in sorted(there.keys() - before.keys()):
            word = "is back" if name in self._gone else "is there"
            found.append(f"island {name} {word}{_start(there[name])}")
        for name in sorted(there.keys() & before.keys()):
            if there[name] != before[name]:
                found.append(f"island {name} has started again{_start(there[name])}")
        return found


def _start(incarnation: int) -> str:
    return f", its start number {incarnation}" if incarnation > 1 else ""


def metrics(driver: Driver, pace: rules.Pace) -> dict[str, float]:
    """islands/* of a row: of the log of fragment 0, and of this island in it."""
    state: Island = driver.state
    ledger = state.logs[0].ledger
    living = rules.alive(state.seen, core.watched(state), pace)
    found: dict[str, Any] = {
        "islands/alive": len(living | {state.name}),
        "islands/progress": rules.progress(state.run, ledger),
        "islands/records": ledger.number,
        "islands/committed_tokens": ledger.tokens,
        "islands/own_tokens": sum(m.tokens for m in ledger.marks if m.island == state.name),
        "islands/undecided": sum(len(log.own) for log in state.logs),
    }
    return {name: float(value) for name, value in found.items()}
