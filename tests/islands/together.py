"""Islands of one process over one bucket, in an order that a seed chooses."""

import random

import numpy as np

from maxdiloco.islands import rules, runtime
from maxdiloco.islands.executor import Executor
from maxdiloco.islands.records import Leaf, Run
from maxdiloco.storage import store

PACE = rules.Timing(
    period=1.0, dead=4.0, grace=0.5, takeover=0.2, beat=0.3, list=0.3, poll=0.02, max_poll=0.2
)


def a_run(**changes):
    """Two fragments; leaves of one block and a bit, of two tensors, and of a vocabulary."""
    fragments = ((Leaf(300, 1), Leaf(4, 2)), (Leaf(6, 0),))
    run = Run(
        (), "float32", "float32", "mean", "nesterov", 0.7, 0.6, fragments, 1, 4, 1, 0.5,
        10**9, 0, 0, 4, (),
    )  # fmt: skip
    return run._replace(**changes)


def rounding(run, before, terms):
    """The bound of islands/outer_step.py, [N] float64, for one step from `before`.

    terms: of different islands.
    """
    weights = sum(term.weight for term in terms)
    mean = sum(term.weight * np.abs(term.values.astype(np.float64)) for term in terms) / weights
    lr, b = run.outer_lr, run.outer_momentum
    reach = np.abs(before.theta) + lr * (1 + b) * (mean + b * np.abs(before.trace))
    return (len(terms) + 8) * 2.0**-24 * reach


def start_values(run):
    rng = np.random.default_rng(7)
    return [np.float32(rng.normal(size=sum(leaf.size for leaf in F))) for F in run.fragments]


def movement(place, t, run):
    """What the inner step t of an island adds to its values, by fragment."""
    rng = np.random.default_rng((place, t))
    return [np.float32(rng.normal(size=sum(leaf.size for leaf in F)) / 8) for F in run.fragments]


class Together:
    """Islands by name, a clock of their own, and the loop that a program would have."""

    def __init__(self, bucket, run, names, seed, keys=None, pace=PACE):
        self.rng, self.now, self.bucket, self.run = random.Random(seed), 0.0, bucket, run
        self.keys, self.pace, self.names = keys or {}, pace, list(names)
        self.islands = {name: self.make(name) for name in names}

    def make(self, name):
        island = Executor(
            self.bucket, self.run, self.pace, name, start_values(self.run),
            key=self.keys.get(name), clock=lambda: self.now,
        )  # fmt: skip
        island.state.nonce = str(self.rng.random())  # as the seed has it, not a random one
        return island

    def step(self, name):
        """Take an inner step of one island."""
        island = self.islands[name]
        moved = movement(self.names.index(name), island.state.t + 1, self.run)
        island.x = [x + change for x, change in zip(island.x, moved, strict=True)]
        island.step_done(8)

    def serve(self, seconds):
        """Let time pass, and carry out the requests of all islands."""
        self.now += seconds
        for island in self.islands.values():
            island.tick()
            while island.work():
                pass

    def event(self, steps):
        """One step, request or tick of one island."""
        self.now += self.rng.random() * 0.01
        name, island = self.rng.choice(list(self.islands.items()))
        if island.stop is not None:
            return
        if island.state.t < steps and island.state.may_step() and self.rng.random() < 0.3:
            self.step(name)
        elif island.requests and self.rng.random() < 0.7:
            self.rng.shuffle(island.requests)
            island.work()
        else:
            island.tick()

    def until(self, done, steps=10**6):
        for _ in range(200_000):
            if done(self.islands.values()):
                return
            self.event(steps)
        raise AssertionError([island.state for island in self.islands.values()])

    def until_records(self, number):
        """Until each log of each island has so many."""
        self.until(lambda islands: min(heads(islands), default=0) >= number)

    def until_stopped(self):
        self.until(lambda islands: all(island.stop for island in islands))


def heads(islands):
    return [log.state.number for island in islands for log in island.state.logs if log.state]


def begun(run, names, records, seed=0, bucket=None, keys=None):
    """Islands whose logs have so many records, over a bucket of their own where none is given."""
    together = Together(bucket or store.in_memory(), run, names, seed, keys)
    together.until_records(records)
    return together


def with_threads(run, name="a", bucket=None, say=print):
    """An island with threads of its own, once it has joined. To be closed."""
    executor = Executor(bucket or store.in_memory(), run, PACE, name, start_values(run))
    one = runtime.Runtime(executor, runtime.LeasedData(), say)
    one.join()
    return one


def in_lockstep(bucket, run, names, steps):
    """Train islands of one speed; returns them in the order of their names.

    An inner step takes a second. Fragment p is sent at steps p H / P (mod H), as by DiLoCo's own
    schedule, and what follows from it is done in the same second: each record has a message of
    every island, and is known by the time at which it is to be merged.
    """
    # Of half a second less than H steps: the time at which an island joined delays no message.
    pace = PACE._replace(period=run.sync_period - 0.5, max_poll=0.05)
    assert run.islands_min == len(names)
    group = Together(bucket, run, names, 0, pace=pace)
    while not all(one.state.phase == "train" for one in group.islands.values()):
        group.serve(0.001)
        assert group.now < 0.1
    for t in range(1, steps + 1):
        group.now = t
        for name in names:
            group.islands[name].tick(within_step=True)
            group.step(name)
        while group.now < t + 0.4:
            group.serve(0.01)
    return list(group.islands.values())
