"""Goodput of training on a million chips that fail: a published table, and our islands.

    PYTHONPATH=. python benchmarks/goodput.py [name=value ...]

A discrete-event simulation; nothing is trained. Chips are interrupted at random, once a year each.
Goodput is the work that counts, as a share of what all chips would do without interruptions. First
the simulation is held against the table of Decoupled DiLoCo (arXiv 2604.21428), for two sets of
assumptions that both reproduce it. Then the state machine of our islands, the one that training
uses, runs inside the same simulation. Writes table.md. OWN has the names and their defaults.
"""

import heapq
import itertools
import pathlib
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks.bandwidth_model import markdown
from benchmarks.link.command import divided, guarded, help_text, number
from maxdiloco.errors import ConfigError
from maxdiloco.islands import records
from maxdiloco.islands import state_machine as machine
from maxdiloco.islands.island import SNAPSHOT_EVERY
from maxdiloco.islands.prefetch import MAX_RECORDS
from maxdiloco.islands.records import Leaf, LogState, Message, Record, Run
from maxdiloco.islands.rules import Timing
from maxdiloco.islands.state_machine import StateMachine

OWN = {
    "islands": "2,8,16,64",
    "minutes": "40",  # simulated for each row of islands
    "seed": "0",
    "out": "runs/goodput",
}
YEAR_S = 365 * 24 * 3600.0
TABLE_S = 20 * 24 * 3600.0  # of a row of the published table: at least 66,000 interruptions
# Goodput by chips and method, as published [%]; a number is one of learners.
PUBLISHED = {
    1_200_000: {"data parallel": 27, "elastic": 58, 2: 70, 8: 88, 16: 93},
    2_400_000: {"data parallel": 18, "elastic": 40, 8: 80, 16: 86},
}
STANDS, RESTARTS = "it stands still", "it starts again"
CASES = ((STANDS, SNAPSHOT_EVERY), (RESTARTS, SNAPSHOT_EVERY), (RESTARTS, 8))
# Steps and clock of the simulated islands [s]; the published table has no counterpart.
STEP_S, TICK_S, LOAD_TICK_S = 5.0, 5.0, 0.1
TOKENS = 10_000  # of an island's step while all of its chips work
WARM_UP_S = 600.0  # not counted
PERIOD_S = 60.0  # islands_period_seconds
REQUEST_S, TRANSFER_S = 0.1, 2.0  # a request to the store; a message, a gradient or a snapshot


class Assumptions(NamedTuple):
    """Recovery times, which the published table leaves out; fitted to the table.

    Attributes:
      restart_s: for which data parallelism stands still after an interruption.
      elastic_s: for which an elastic job stands still, and then continues without the slice.
      learner_s: as elastic_s, of a learner of Decoupled DiLoCo.
      exchange: share of its time for which such a learner waits for the exchange.
      slice_chips: that an interruption takes away from an elastic job.
      repair_s: until they are back.
    """

    restart_s: float
    elastic_s: float
    learner_s: float
    exchange: float
    slice_chips: int
    repair_s: float


ASSUMPTIONS = {
    "slices are away for 18 min": Assumptions(68.0, 18.9, 18.9, 0.0, 1024, 1080.0),
    "learners stand still for longer": Assumptions(68.0, 19.0, 24.0, 0.01, 1024, 0.0),
}


class Chips:
    """The chips of one job: when they are interrupted, and how many are away.

    An interruption while the job stands still is part of what it already waits for.
    """

    def __init__(self, rng: random.Random, chips: float, given: Assumptions):
        self._rng, self._rate = rng, chips / YEAR_S
        self._slice, self._repair_s = given.slice_chips / chips, given.repair_s
        self._back: list[float] = []

    def next_interruption(self, now: float) -> float:
        """Return its time."""
        return now + self._rng.expovariate(self._rate)

    def interrupt(self, now: float) -> None:
        """Take a slice away."""
        if self._repair_s:
            heapq.heappush(self._back, now + self._repair_s)

    def present(self, now: float) -> float:
        """Return the share of the chips that is not away."""
        while self._back and self._back[0] <= now:
            heapq.heappop(self._back)
        return max(0.0, 1.0 - self._slice * len(self._back))


def goodput_of_job(chips: Chips, pause_s: float, until_s: float) -> float:
    """Return the goodput of one job that stands still for pause_s after an interruption."""
    now = worked = running_from = 0.0
    while now < until_s:
        at = chips.next_interruption(now)
        worked += max(0.0, at - running_from) * chips.present(running_from)
        chips.interrupt(at)
        running_from = at + pause_s if at >= running_from else running_from
        now = at
    return worked / now


def published_row(method: str | int, chips: int, given: Assumptions, seed: int) -> float:
    """Return the goodput of a row of the published table. method: as in PUBLISHED."""
    rng = random.Random(f"{seed} {method} {chips}")
    if method == "data parallel":
        whole = Chips(rng, chips, given._replace(repair_s=0.0))
        return goodput_of_job(whole, given.restart_s, TABLE_S)
    if method == "elastic":
        return goodput_of_job(Chips(rng, chips, given), given.elastic_s, TABLE_S)
    learner = Chips(rng, chips / method, given)  # they are alike and do not wait for each other
    return (1 - given.exchange) * goodput_of_job(learner, given.learner_s, TABLE_S * method)


class Island:
    """A program of the simulation: a state machine, and the chips of its island."""

    def __init__(self, world: "World", name: str, chips: Chips):
        self.world, self.name, self.chips = world, name, chips
        self.stopped_until = 0.0
        self.begin()

    def begin(self, after: int = 0) -> None:
        """Start the program anew, and lose the unsent progress."""
        world, fragments = self.world, range(len(self.world.run.fragments))
        initial = tuple(_digest(fragment, 0) for fragment in fragments)
        nonce = str(next(world.count))
        self.machine = StateMachine(world.run, world.timing, self.name, nonce, initial, after=after)
        self.stepping: object | None = None  # the step that is running

    def interrupt(self, pause_s: float, *, restarts: bool) -> None:
        """Let the island stand still; restarts: its program ends."""
        now = self.world.now
        self.chips.interrupt(now)
        if now < self.stopped_until:
            return
        self.stopped_until = now + pause_s
        self.stepping = None  # the step that was running is lost
        if restarts:
            self.begin()
        self.world.later(pause_s, lambda: self.world.step(self))


class World:
    """Islands over a store that does not fail; their chips do."""

    def __init__(
        self,
        seed: str,
        count: int,
        chips: int,
        given: Assumptions,
        *,
        restarts: bool,
        snapshot_every: int,
    ):
        rng = random.Random(seed)
        self.now, self.count, self.queue = 0.0, itertools.count(), []
        self.objects: dict[str, Any] = {}
        self.waiting: dict[str, list[Callable[[], None]]] = {}  # by the object's name
        self.islands = count
        self.timing = Timing(period=PERIOD_S, beat=10.0, list=10.0)
        self.run = Run(
            settings=(),
            wire="float4_e3m0",
            wire_down="float8_e4m3fn",
            aggregation="mean",
            outer_optimizer="nesterov",
            outer_lr=0.7,
            outer_momentum=0.6,
            fragments=((Leaf(1, 1),),),
            islands_min=1,
            sync_period=round(PERIOD_S / STEP_S),
            overlap_steps=0,
            alpha=0.0,
            tokens=2**60,
            block_tokens=0,
            eval_tokens=0,
            snapshot_every=snapshot_every,
            keys=(),
        )
        self.committed: list[tuple[float, int]] = []
        for index in range(count):
            island = Island(self, f"i{index}", Chips(rng, chips / count, given))
            self.later(rng.random() * TICK_S, lambda island=island: self.tick(island))
            self.interrupt_later(island, given.elastic_s, restarts=restarts)

    def later(self, delay: float, call: Callable[[], None]) -> None:
        """Call this after a delay."""
        heapq.heappush(self.queue, (self.now + delay, next(self.count), call))

    def goodput(self, until_s: float) -> float:
        """Run, and return the committed tokens as a share of those that all chips could read."""
        while self.now < until_s:
            self.now, _, call = heapq.heappop(self.queue)
            call()
        tokens = sum(tokens for at, tokens in self.committed if at >= WARM_UP_S)
        return tokens * STEP_S / (self.islands * TOKENS * (until_s - WARM_UP_S))

    def interrupt_later(self, island: Island, pause_s: float, *, restarts: bool) -> None:
        """Interrupt an island at its next time, and so on."""

        def interrupt() -> None:
            island.interrupt(pause_s, restarts=restarts)
            self.interrupt_later(island, pause_s, restarts=restarts)

        at = island.chips.next_interruption(self.now)
        heapq.heappush(self.queue, (at, next(self.count), interrupt))

    def tick(self, island: Island) -> None:
        """Tell an island the time, every TICK_S."""
        trains = island.machine.phase == machine.TRAIN
        self.later(TICK_S if trains else LOAD_TICK_S, lambda: self.tick(island))
        self.deliver(island, island.machine, machine.Tick(self.now))

    def deliver(self, island: Island, to: StateMachine, event: Any) -> None:
        """Deliver an event to a program, if it still runs, once its island does not stand still."""
        if to is not island.machine:
            return
        if self.now < island.stopped_until:
            if not isinstance(event, machine.Tick):
                left_s = island.stopped_until - self.now
                self.later(left_s, lambda: self.deliver(island, to, event))
            return
        for action in to.handle(event):
            self.carry_out(island, to, action)
        self.step(island)

    def step(self, island: Island) -> None:
        """Begin the next step of an island, if there is none and the machine lets it."""
        stopped = self.now < island.stopped_until
        if stopped or island.stepping is not None or not island.machine.may_step():
            return
        done = machine.StepDone(round(TOKENS * island.chips.present(self.now)))
        island.stepping = step = object()

        def end() -> None:
            if island.stepping is step:
                island.stepping = None
                self.deliver(island, island.machine, done)

        self.later(STEP_S, end)

    def carry_out(self, island: Island, to: StateMachine, action: Any) -> None:
        """Carry out an action on the island's values now, and one on the store later."""
        match action:
            case machine.Pack(message):
                packed = message._replace(norm=1.0, sha256="0")
                self.deliver(island, to, machine.Answer(action, packed))
            case machine.Apply(record):
                digest = _digest(record.fragment, record.number)
                self.deliver(island, to, machine.Answer(action, digest))
            case machine.Stop(again=again):
                island.begin(after=to.incarnation if again else 0)
            case machine.Begin() | machine.Evaluate() | machine.Say():
                pass
            case _:
                bulk = isinstance(
                    action, machine.Reduce | machine.FetchGradient | machine.LoadSnapshot
                ) or isinstance(getattr(action, "body", None), Message)
                delay = REQUEST_S + TRANSFER_S * bulk
                if to.phase == machine.LOAD and not isinstance(action, machine.LoadSnapshot):
                    delay /= MAX_RECORDS  # a newcomer reads several records at once

                def answer() -> None:
                    result = self.of_store(action)
                    self.deliver(island, to, machine.Answer(action, result))

                absent = isinstance(action, machine.Get | machine.GetMessage)
                if absent and action.name not in self.objects and to.phase == machine.TRAIN:
                    # One request that waits stands for many that ask again and again.
                    self.waiting.setdefault(action.name, []).append(answer)
                    return
                self.later(delay, answer)

    def of_store(self, action: Any) -> Any:
        """Return the store's answer. Nothing is deleted."""
        objects = self.objects
        match action:
            case machine.Create(name, body):
                if name in objects:
                    return machine.EXISTS
                objects[name] = body
                for answer in self.waiting.pop(name, ()):
                    self.later(REQUEST_S, answer)
                if isinstance(body, Record):
                    self.committed.append((self.now, sum(one.tokens for one in body.members)))
                return machine.CREATED
            case machine.PutHeartbeat(name, body):
                objects[name] = body
                return True
            case machine.Get(name) | machine.GetMessage(name):
                return objects.get(name)
            case machine.ListIncarnations(island):
                mine = [name for name in objects if name.startswith(f"i/{island}/")]
                return max(map(records.number_of, mine), default=0)
            case machine.ListHeartbeats():
                return {name[3:]: body for name, body in objects.items() if name[:3] == "hb/"}
            case machine.Reduce(draft):
                return machine.Reduced(records.gradient_name(draft))
            case machine.FetchGradient() | machine.Delete():
                return True
            case machine.LoadSnapshot(fragment):
                found = [
                    body
                    for body in objects.values()
                    if isinstance(body, LogState) and body.fragment == fragment
                ]
                return max(found, key=lambda state: state.number, default=None)
        raise TypeError(action)


def _digest(fragment: int, number: int) -> str:
    return f"{fragment} {number}"


def published_table(seed: int) -> list[tuple[str, ...]]:
    """Return the rows of the published table, with what each set of assumptions gives."""
    rows = [("chips", "method", "published", *ASSUMPTIONS)]
    for chips, methods in PUBLISHED.items():
        for method, published in methods.items():
            name = f"{method} learners" if isinstance(method, int) else method
            found = (published_row(method, chips, given, seed) for given in ASSUMPTIONS.values())
            cells = (f"{100 * each:.1f} %" for each in found)
            rows.append((f"{chips:,}", name, f"{published} %", *cells))
    return rows


def islands_table(counts: Sequence[int], minutes: float, seed: int) -> list[tuple[str, ...]]:
    """Return the rows of our islands."""
    rows = [("chips", "islands", "after an interruption", "snapshot", *ASSUMPTIONS)]
    for chips, count in itertools.product(PUBLISHED, counts):
        for what, snapshot_every in CASES:
            found = []
            for given in ASSUMPTIONS.values():
                restarts = what == RESTARTS
                world = World(
                    f"{seed} {chips} {count}",
                    count,
                    chips,
                    given,
                    restarts=restarts,
                    snapshot_every=snapshot_every,
                )
                # Many islands cost more to simulate, and there is more of them to average over.
                length_s = 60 * minutes * min(1.0, 16 / count)
                found.append(f"{100 * world.goodput(WARM_UP_S + length_s):.1f} %")
            every = f"each {snapshot_every} records"
            rows.append((f"{chips:,}", str(count), what, every, *found))
    return rows


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; returns its exit code."""
    return guarded(_main, argv, usage=help_text(__doc__, OWN))


def _main(argv: Sequence[str]) -> int:
    own, keys = divided(argv, OWN)
    if keys:
        raise ConfigError(f"{', '.join(keys)}: nothing is trained. Use {', '.join(OWN)}.")
    minutes, seed = number("minutes", own, float), number("seed", own, least=0)
    counts = [number("islands", {"islands": each}) for each in own["islands"].split(",")]
    parts = []
    for title, rows in (
        ("Published", published_table(seed)),
        ("Our islands", islands_table(counts, minutes, seed)),
    ):
        parts += [f"{title}\n", markdown(rows)]
    text = "\n".join(parts)
    out = pathlib.Path(own["out"])
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.md").write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
