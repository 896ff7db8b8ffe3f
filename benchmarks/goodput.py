"""Goodput of training on a million chips that fail: a published table, and our islands.

    PYTHONPATH=. python benchmarks/goodput.py [name=value ...]

A discrete-event simulation; nothing is trained. Chips are interrupted at random, once a year each.
Goodput is the work that counts, as a share of the work of all chips without interruptions. First
the simulation is held against the table of Decoupled DiLoCo (arXiv 2604.21428), for two sets of
assumptions that both reproduce it. Then the state machine of our islands, the one that training
uses, runs inside the same simulation. Writes table.md. OWN has the names and their defaults.
"""

import functools
import heapq
import itertools
import pathlib
import random
import sys
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.bandwidth_model import markdown
from benchmarks.link.command import guarded, help_text, number, without_keys
from benchmarks.simulated_islands import Island, World, goodput, is_transfer, run_settings
from maxdiloco.islands.island import SNAPSHOT_EVERY
from maxdiloco.islands.rules import Timing

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

    An interruption while the job stands still is part of the wait that has begun.
    """

    def __init__(self, rng: random.Random, chips: float, assumptions: Assumptions):
        self._rng, self._rate = rng, chips / YEAR_S
        self._slice, self._repair_s = assumptions.slice_chips / chips, assumptions.repair_s
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


def published_row(method: str | int, chips: int, assumptions: Assumptions, seed: int) -> float:
    """Return the goodput of a row of the published table. method: as in PUBLISHED."""
    rng = random.Random(f"{seed} {method} {chips}")
    if method == "data parallel":
        whole = Chips(rng, chips, assumptions._replace(repair_s=0.0))
        return goodput_of_job(whole, assumptions.restart_s, TABLE_S)
    if method == "elastic":
        return goodput_of_job(Chips(rng, chips, assumptions), assumptions.elastic_s, TABLE_S)
    # The learners are alike and do not wait for each other.
    learner = Chips(rng, chips / method, assumptions)
    return (1 - assumptions.exchange) * goodput_of_job(
        learner, assumptions.learner_s, TABLE_S * method
    )


class Islands:
    """The islands of a row: their chips are interrupted, and the store does not fail."""

    def __init__(
        self,
        seed: str,
        count: int,
        chips: int,
        assumptions: Assumptions,
        *,
        restarts: bool,
        snapshot_every: int,
    ):
        rng = random.Random(seed)
        steps = round(PERIOD_S / STEP_S)
        self.world = World(
            run_settings(sync_period=steps, fragments=1, snapshot_every=snapshot_every),
            Timing(period=PERIOD_S, beat=10.0, list=10.0),
            count,
            step_of=self.step_of,
            delay_of=lambda island, action, now: REQUEST_S + TRANSFER_S * is_transfer(action),
            tick_s=TICK_S,
            load_tick_s=LOAD_TICK_S,
        )
        self.chips = []
        for island in self.world.islands:
            self.chips.append(Chips(rng, chips / count, assumptions))
            self.world.later(rng.random() * TICK_S, functools.partial(self.world.tick, island))
            self.interrupt_later(island, assumptions.elastic_s, restarts=restarts)

    def step_of(self, island: Island) -> tuple[float, int]:
        """Return seconds and tokens of the next step."""
        return STEP_S, round(TOKENS * self.chips[island.index].present(self.world.now))

    def goodput(self, until_s: float) -> float:
        """Run, and return the committed tokens as a share of those that all chips could read."""
        self.world.run_until(until_s)
        speed = TOKENS / STEP_S
        return goodput(self.world, [speed] * len(self.chips), WARM_UP_S)

    def interrupt_later(self, island: Island, pause_s: float, *, restarts: bool) -> None:
        """Interrupt an island at its next time, and so on."""
        chips, now = self.chips[island.index], self.world.now

        def interrupt() -> None:
            chips.interrupt(self.world.now)
            island.stop(pause_s, restarts=restarts)
            self.interrupt_later(island, pause_s, restarts=restarts)

        self.world.later(chips.next_interruption(now) - now, interrupt)


def published_table(seed: int) -> list[tuple[str, ...]]:
    """Return the rows of the published table, with the result of each set of assumptions."""
    rows = [("chips", "method", "published", *ASSUMPTIONS)]
    for chips, methods in PUBLISHED.items():
        for method, published in methods.items():
            name = f"{method} learners" if isinstance(method, int) else method
            found = (
                published_row(method, chips, assumptions, seed)
                for assumptions in ASSUMPTIONS.values()
            )
            cells = (f"{100 * each:.1f} %" for each in found)
            rows.append((f"{chips:,}", name, f"{published} %", *cells))
    return rows


def islands_table(counts: Sequence[int], minutes: float, seed: int) -> list[tuple[str, ...]]:
    """Return the rows of our islands."""
    rows = [("chips", "islands", "after an interruption", "snapshot", *ASSUMPTIONS)]
    for chips, count in itertools.product(PUBLISHED, counts):
        for what, snapshot_every in CASES:
            found = []
            for assumptions in ASSUMPTIONS.values():
                restarts = what == RESTARTS
                islands = Islands(
                    f"{seed} {chips} {count}",
                    count,
                    chips,
                    assumptions,
                    restarts=restarts,
                    snapshot_every=snapshot_every,
                )
                # Many islands cost more to simulate, and there is more of them to average over.
                length_s = 60 * minutes * min(1.0, 16 / count)
                found.append(f"{100 * islands.goodput(WARM_UP_S + length_s):.1f} %")
            every = f"each {snapshot_every} records"
            rows.append((f"{chips:,}", str(count), what, every, *found))
    return rows


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; returns its exit code."""
    return guarded(_main, argv, usage=help_text(__doc__, OWN))


def _main(argv: Sequence[str]) -> int:
    options = without_keys(argv, OWN)
    minutes, seed = number("minutes", options, float), number("seed", options, least=0)
    counts = [number("islands", {"islands": each}) for each in options["islands"].split(",")]
    parts = []
    for title, rows in (
        ("Published", published_table(seed)),
        ("Our islands", islands_table(counts, minutes, seed)),
    ):
        parts += [f"{title}\n", markdown(rows)]
    text = "\n".join(parts)
    out = pathlib.Path(options["out"])
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.md").write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
