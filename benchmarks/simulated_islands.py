"""Run the state machines of islands in a discrete-event simulation, over a store in memory.

goodput.py uses the world. tests/islands has a world of its own over the same store, with more
faults and with checks of the protocol.
"""

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from maxdiloco.islands import records
from maxdiloco.islands import state_machine as machine
from maxdiloco.islands.executor import MAX_RECORDS
from maxdiloco.islands.records import Message, Record, Run
from maxdiloco.islands.rules import Timing
from maxdiloco.islands.state_machine import StateMachine


class MemoryStore:
    """The objects of a log, as Python values.

    Attributes:
      objects: {name: object}.
    """

    def __init__(self):
        """Begin empty."""
        self.objects: dict[str, Any] = {}
        self._listed_from: dict[str, dict[str, float]] = defaultdict(dict)  # by folder and name

    def put(self, name: str, body: Any, listed_from: float = 0.0) -> None:
        """Store an object. listed_from: time from which listings have a new name [s]."""
        self.objects[name] = body
        self._listed_from[_folder(name)].setdefault(name, listed_from)

    def delete(self, name: str) -> None:
        """Delete an object if it is there."""
        self.objects.pop(name, None)
        self._listed_from[_folder(name)].pop(name, None)

    def listed(self, folder: str, now: float = math.inf) -> list[str]:
        """Return the names that a listing has at a time [s]. folder: ends with a slash."""
        return [name for name, since in self._listed_from[folder].items() if since <= now]

    def answer(self, action: Any, now: float = math.inf) -> Any:
        """Return the answer to an action of a state machine that needs no payload.

        Args:
          action: any except Reduce, FetchGradient and Delete.
          now: time of listings [s].
        """
        match action:
            case machine.Create(name, body):
                if name in self.objects:
                    return machine.EXISTS
                self.put(name, body)
                return machine.CREATED
            case machine.PutHeartbeat(name, body):
                return self.put(name, body)
            case machine.Get(name) | machine.GetMessage(name):
                return self.objects.get(name)
            case machine.ListHeartbeats():
                return {name[3:]: self.objects[name] for name in self.listed("hb/", now)}
            case machine.LoadSnapshot(fragment):
                names = self.listed(f"s/{fragment}/", now)
                return self.objects[max(names, key=records.number_of)] if names else None
        raise TypeError(action)


def _folder(name: str) -> str:
    return name[: name.rfind("/") + 1]


def run_settings(*, sync_period: int, fragments: int, snapshot_every: int) -> Run:
    """Return a run that does not end. A fragment has one value, which no simulation computes."""
    return Run(
        settings=(),
        wire="float4_e3m0",
        wire_down="int8",
        aggregation="mean",
        outer_optimizer="nesterov",
        outer_lr=0.7,
        outer_momentum=0.6,
        fragments=((records.Leaf(1, 1),),) * fragments,
        islands_min=1,
        sync_period=sync_period,
        overlap_steps=0,
        alpha=0.0,
        tokens=2**60,
        block_tokens=0,
        eval_tokens=0,
        snapshot_every=snapshot_every,
        keys=(),
    )


class Island:
    """A program of the simulation.

    Attributes:
      name, index: of the island.
      machine: state machine of the running program.
      stopped_until: until when the island stands still [s].
    """

    def __init__(self, world: "World", name: str, index: int):
        """Start the first program."""
        self.world, self.name, self.index = world, name, index
        self.stopped_until = 0.0
        self.begin()

    def begin(self, after: int = 0) -> None:
        """Start a program, without the progress that the last one has not sent.

        Args:
          after: see StateMachine.
        """
        world = self.world
        initial = tuple(_digest(fragment, 0) for fragment, _ in enumerate(world.run.fragments))
        nonce = str(next(world.count))
        self.machine = StateMachine(world.run, world.timing, self.name, nonce, initial, after=after)
        self.stepping: object | None = None  # the step that is running

    def stop(self, pause_s: float, *, restarts: bool) -> bool:
        """Let the island stand still; False if it does already. restarts: its program ends."""
        now = self.world.now
        if now < self.stopped_until:
            return False
        self.stopped_until = now + pause_s
        self.stepping = None  # the running step is lost
        if restarts:
            self.begin()
        self.world.later(pause_s, lambda: self.world.step(self))
        return True


class World:
    """Islands over a store.

    Attributes:
      now: time [s].
      store: the store.
      islands: the islands.
      committed: (time [s], fragment, tokens) of each record.
    """

    def __init__(
        self,
        run: Run,
        timing: Timing,
        count: int,
        *,
        step_of: Callable[[Island], tuple[float, int]],
        delay_of: Callable[[Island, Any, float], float],
        tick_s: float,
        load_tick_s: float,
    ):
        """Start the islands.

        Args:
          run: settings of the run.
          timing: times of each island.
          count: number of islands.
          step_of: island -> (seconds, tokens) of its next inner step.
          delay_of: (island, action, time) -> seconds until the answer to a request.
          tick_s, load_tick_s: time between two ticks while an island trains, and before [s].
        """
        self.run, self.timing = run, timing
        self._step_of, self._delay_of = step_of, delay_of
        self._tick_s, self._load_tick_s = tick_s, load_tick_s
        self.now, self.count, self._queue = 0.0, itertools.count(), list[Any]()
        self.store = MemoryStore()
        self._waiting: dict[str, list[Callable[[], None]]] = {}  # by the object's name
        self.committed: list[tuple[float, int, int]] = []
        self.islands = [Island(self, f"i{index}", index) for index in range(count)]

    def later(self, delay: float, call: Callable[[], None]) -> None:
        """Call this after a delay [s]."""
        heapq.heappush(self._queue, (self.now + delay, next(self.count), call))

    def run_until(self, end_s: float) -> None:
        """Let time pass."""
        while self.now < end_s:
            self.now, _, call = heapq.heappop(self._queue)
            call()

    def tick(self, island: Island) -> None:
        """Pass on the time to an island now, and again after each pause."""
        trains = island.machine.phase == machine.TRAIN
        self.later(self._tick_s if trains else self._load_tick_s, lambda: self.tick(island))
        self._deliver(island, island.machine, machine.Tick(self.now))

    def step(self, island: Island) -> None:
        """Begin the next step of an island, if there is none and the machine permits it."""
        stopped = self.now < island.stopped_until
        if stopped or island.stepping is not None or not island.machine.may_step():
            return
        seconds, tokens = self._step_of(island)
        island.stepping = step = object()

        def end() -> None:
            if island.stepping is step:
                island.stepping = None
                self._deliver(island, island.machine, machine.StepDone(tokens))

        self.later(seconds, end)

    def _deliver(self, island: Island, to: StateMachine, event: Any) -> None:
        """Deliver an event to a program, if it still runs, once its island does not stand still."""
        if to is not island.machine:
            return
        if self.now < island.stopped_until:
            if not isinstance(event, machine.Tick):
                left_s = island.stopped_until - self.now
                self.later(left_s, lambda: self._deliver(island, to, event))
            return
        for action in to.handle(event):
            self._carry_out(island, to, action)
        self.step(island)

    def _carry_out(self, island: Island, to: StateMachine, action: Any) -> None:
        """Carry out an action on the island's values now, and a request to the store later."""
        match action:
            case machine.Pack(message):
                packed = message._replace(norm=1.0, sha256="0")
                self._deliver(island, to, machine.Answer(action, packed))
            case machine.Apply(record):
                digest = _digest(record.fragment, record.number)
                self._deliver(island, to, machine.Answer(action, digest))
            case machine.Stop(again=again):
                island.begin(after=to.incarnation if again else 0)
            case machine.Begin() | machine.Evaluate() | machine.Say():
                pass
            case _:
                self._request(island, to, action)

    def _request(self, island: Island, to: StateMachine, action: Any) -> None:
        delay = self._delay_of(island, action, self.now)
        if to.phase == machine.LOAD and not isinstance(action, machine.LoadSnapshot):
            delay /= MAX_RECORDS  # a newcomer reads several records at once

        def answer() -> None:
            self._deliver(island, to, machine.Answer(action, self._answer(action)))

        absent = isinstance(action, machine.Get | machine.GetMessage)
        if absent and action.name not in self.store.objects and to.phase == machine.TRAIN:
            # One request that waits replaces many that are repeated.
            self._waiting.setdefault(action.name, []).append(
                lambda: self.later(self._delay_of(island, action, self.now), answer)
            )
            return
        self.later(delay, answer)

    def _answer(self, action: Any) -> Any:
        """Return the store's answer. Nothing is deleted."""
        match action:
            case machine.Reduce(draft):
                return machine.Reduced(records.gradient_name(draft))
            case machine.FetchGradient() | machine.Delete():
                return True
        answer = self.store.answer(action)
        if isinstance(action, machine.Create) and answer == machine.CREATED:
            for wake in self._waiting.pop(action.name, ()):
                wake()
            if isinstance(record := action.body, Record):
                tokens = sum(one.tokens for one in record.members)
                self.committed.append((self.now, record.fragment, tokens))
        return answer


def is_transfer(action: Any) -> bool:
    """Return whether a request transfers values: a message, a gradient or a snapshot."""
    bulk = machine.Reduce | machine.FetchGradient | machine.LoadSnapshot
    return isinstance(action, bulk) or isinstance(getattr(action, "body", None), Message)


def _digest(fragment: int, number: int) -> str:
    return f"{fragment} {number}"


def goodput(world: World, tokens_a_second: Sequence[float], since_s: float) -> float:
    """Return the committed tokens of fragment 0 as a share of those without interruptions.

    It is measured from the first record after `since_s` to the last one: a record has the tokens of
    a period, so that one more or less in a fixed time would count as much. 0 below two records.
    """
    found = [one for one in world.committed if one[0] >= since_s and one[1] == 0]
    if len(found) < 2:
        return 0.0
    seconds = found[-1][0] - found[0][0]
    return sum(tokens for *_, tokens in found[1:]) / (sum(tokens_a_second) * seconds)
