"""Compare `islands_period_seconds=auto` with fixed periods in a simulation.

    PYTHONPATH=. python benchmarks/islands_period.py [name=value ...]

The state machines of the islands run over a store in memory. Each island has a link of its own with
a limited rate in each direction, on which transfers follow each other. A storm has 120 faults an
hour of four kinds of benchmarks/link/storm.py: a kill, an island that stands still past its
death, a link that is cut, and a store that does not answer. A calm run has no faults. The table
shows the committed tokens, as a share of those that the islands could train without faults. All
columns of a row have the same faults. OWN has the names and their defaults.
"""

import functools
import random
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.bandwidth_model import markdown
from benchmarks.link.command import guarded, help_text, number, numbers, without_keys
from benchmarks.link.storm import AWAY_S, CUT_S, DOWN_S, STOPPED_S
from benchmarks.simulated_islands import Island, World, goodput, is_transfer, run_settings
from maxdiloco.islands import state_machine as machine
from maxdiloco.islands.island import timing_of

OWN = {
    "minutes": "30",  # simulated for each cell
    "boxes": "3",  # islands
    "step_ms": "400,300,200",  # time of an inner step, by island
    "mbit": "20,100",  # rates of a link, a row for each
    "megabytes": "0.15,1",  # messages of all fragments, a row for each
    "periods": "2,5,10,20,60",  # fixed ones [s]
    "faults_per_hour": "120",  # of a storm
    "seeds": "0,1",  # the table has the mean
}
FRAGMENTS, SYNC_PERIOD = 2, 20
TOKENS = 256  # of a step
DEAD_S = 11.0
RESTART_S = DOWN_S + 5  # a start loads and compiles for about 5 s
REQUEST_S = 0.05
TICK_S, LOAD_TICK_S = 0.25, 0.02
WARM_UP_S = 60.0  # not counted
# Size of a transfer, relative to the message of a fragment with 4 bits a value. A start reads a
# snapshot and the gradients of 32 records, the mean of a long run, at every period.
GRADIENT, START = 2, 16 + 32 * 2


class Links:
    """The links of the islands, with outages of a link or of the store."""

    def __init__(self, count: int, bytes_per_s: float, message_bytes: float):
        self._rate, self._message_bytes = bytes_per_s, message_bytes
        self._free_at = [[0.0, 0.0] for _ in range(count)]  # up, down
        self.away_until = [0.0] * count

    def delay(self, island: Island, action: Any, now: float) -> float:
        """Return the time until the answer to a request [s]."""
        start = max(now, self.away_until[island.index])
        up, down = _messages(action, loads=island.machine.phase == machine.LOAD)
        done = start + REQUEST_S
        for direction, messages in enumerate((up, down)):
            if messages:
                free_at = max(start, self._free_at[island.index][direction])
                free_at += messages * self._message_bytes / self._rate
                self._free_at[island.index][direction] = free_at
                done = max(done, free_at)
        return done - now


def _messages(action: Any, *, loads: bool) -> tuple[float, float]:
    """Return the sizes of a request and of its answer, in messages of a fragment."""
    match action:
        case machine.Reduce(draft):
            return GRADIENT, len(draft.members)
        case machine.FetchGradient():
            return 0, GRADIENT * (not loads)
        case machine.LoadSnapshot():
            return 0, START
    return int(is_transfer(action)), 0


def cell(
    period: float | str,
    mbit: float,
    megabytes: float,
    faults_per_hour: float,
    seed: int,
    options: dict,
) -> tuple[float, float]:
    """Return the goodput of a run, and the mean period of its last half [s]."""
    rng, count = random.Random(seed), number("boxes", options)
    steps_s = [ms / 1000 for ms in numbers("step_ms", options)]
    links = Links(count, mbit * 125_000, megabytes * 1e6 / FRAGMENTS)
    world = World(
        run_settings(sync_period=SYNC_PERIOD, fragments=FRAGMENTS, snapshot_every=64),
        timing_of(period, DEAD_S),
        count,
        step_of=lambda island: (steps_s[island.index % len(steps_s)], TOKENS),
        delay_of=links.delay,
        tick_s=TICK_S,
        load_tick_s=LOAD_TICK_S,
    )
    end_s = 60 * number("minutes", options, float)
    for island in world.islands:
        world.later(rng.random() * TICK_S, functools.partial(world.tick, island))
    fault_s = 3600 / faults_per_hour if faults_per_hour else 2 * end_s
    for at in range(1, int((end_s - WARM_UP_S) / fault_s)):
        kind, hit = rng.choice(("kill", "stop", "store away", "link")), rng.randrange(count)
        world.later(WARM_UP_S + at * fault_s, functools.partial(fault, world, links, kind, hit))
    periods: list[float] = []

    def note_periods() -> None:
        periods.extend(island.machine.timing.period for island in world.islands)
        world.later(10.0, note_periods)

    world.later(end_s / 2, note_periods)
    world.run_until(end_s)
    speeds = [TOKENS / steps_s[i % len(steps_s)] for i in range(count)]
    return goodput(world, speeds, WARM_UP_S), sum(periods) / len(periods)


def fault(world: World, links: Links, kind: str, hit: int) -> None:
    """Let a fault begin now."""
    match kind:
        case "kill" | "stop":
            pause_s = RESTART_S if kind == "kill" else STOPPED_S
            world.islands[hit].stop(pause_s, restarts=kind == "kill")
        case "store away":
            links.away_until = [max(old, world.now + AWAY_S) for old in links.away_until]
        case "link":
            links.away_until[hit] = max(links.away_until[hit], world.now + CUT_S)


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; returns its exit code."""
    return guarded(_main, argv, usage=help_text(__doc__, OWN))


def _main(argv: Sequence[str]) -> int:
    options = without_keys(argv, OWN)
    fixed = numbers("periods", options)
    titles = (*(f"{period:g} s" for period in fixed), "auto", "its period", "auto / best")
    rows = [("", "Mbit/s", "MB", *titles)]
    for storm in (False, True):
        faults = float(options["faults_per_hour"]) * storm
        for mbit in numbers("mbit", options):
            for megabytes in numbers("megabytes", options):
                means = []
                for period in (*fixed, "auto"):
                    cells = [
                        cell(period, mbit, megabytes, faults, int(seed), options)
                        for seed in numbers("seeds", options)
                    ]
                    means.append([sum(each) / len(cells) for each in zip(*cells, strict=True)])
                shares = [share for share, _ in means]
                rows.append((
                    "storm" if storm else "calm", f"{mbit:g}", f"{megabytes:g}",
                    *(f"{share:.1%}" for share in shares), f"{means[-1][1]:.1f} s",
                    f"{shares[-1] / max(shares[:-1]):.3f}",
                ))  # fmt: skip
    print(markdown(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
