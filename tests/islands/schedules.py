"""Many schedules of simulator.py, each of a seed.

By hand: PYTHONPATH=. python tests/islands/schedules.py schedules=1000000 first=0 processes=2
"""

import sys
import time
from concurrent.futures import ProcessPoolExecutor

from simulator import Broken, World


def run_schedule(seed, length=None):
    """One schedule. Raises Broken."""
    world = World(seed)
    world.run_events(world.rng.choice((50, 100, 200, 400)) if length is None else length)
    world.check_growth()
    world.check_batch()
    world.check_ledger()
    return world


def main(arguments):
    """Run schedules in several processes, and print each violation as seed and length."""
    given = dict(argument.split("=") for argument in arguments)
    first, number = int(given.get("first", 0)), int(given.get("schedules", 10_000))
    began, found = time.monotonic(), 0
    with ProcessPoolExecutor(int(given.get("processes", 1))) as pool:
        for seed, line in pool.map(verdict, range(first, first + number), chunksize=100):
            if line:
                found += 1
                print(f"seed {seed}: {line}", flush=True)
    print(f"{number} schedules, {found} violations, {time.monotonic() - began:.0f} s")
    return bool(found)


def verdict(seed):
    """(seed, what is violated or "")."""
    try:
        run_schedule(seed)
    except (Broken, ArithmeticError, LookupError, TypeError, ValueError) as error:
        return seed, f"{type(error).__name__}: {error}"  # a crash is a finding, too
    return seed, ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
