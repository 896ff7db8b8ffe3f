"""A program of simulator.py: state_machine.py with numbers of one value a fragment."""

from maxdiloco.islands import records
from maxdiloco.islands.records import Leaf, Run
from maxdiloco.islands.rules import Timing
from maxdiloco.islands.state_machine import StateMachine

TIMING = Timing(
    period=2.0, dead=6.0, grace=1.5, takeover=0.8, beat=1.5, list=2.0, poll=0.3, max_poll=1.5
)


def settings(rng, names):
    P = rng.choice((1, 1, 2))
    H = rng.choice((2, 4, 6))
    return Run(
        (), "float32", "float32", "mean", "nesterov", 0.7, 0.6, ((Leaf(1, 1),),) * P,
        1 if len(names) == 1 else rng.choice((1, 1, 2)), H,
        rng.choice((0, 1)) * (3 if H == 6 else 1), rng.choice((0.0, 0.5)), 10**9, 30,
        rng.choice((0, 40)), rng.choice((2, 3)), (),
    )  # fmt: skip


class Values:
    """A fragment at a program: theta, trace, x, undecided messages, and what it has not sent."""

    def __init__(self):
        self.theta, self.trace, self.x, self.sent, self.unsent = 0.0, 0.0, 0.0, {}, 0.0
        self.committed = 0

    def digest(self):
        return f"{self.theta!r} {self.trace!r}"

    def outer_step(self, run, record, gradient):
        if record.members:
            g = gradient * record.scale
            self.trace = run.outer_momentum * self.trace + g
            self.theta -= run.outer_lr * (g + run.outer_momentum * self.trace)


class Program:
    def __init__(self, world, name, step_time, earlier):
        self.world, self.name, self.step_time = world, name, step_time
        self.values = [Values() for _ in world.run.fragments]
        initial = tuple(value.digest() for value in self.values)
        nonce = str(next(world.count))
        after = earlier.state.incarnation if earlier is not None else 0
        self.state = StateMachine(world.run, world.timing, name, nonce, initial, after=after)
        self.living, self.joined, self.stepping = True, False, False
        self.gradients, self.frozen_until = {}, 0.0
        names = (records.snapshot_name(F, 0) for F in range(len(self.values)))
        self.payloads = dict.fromkeys(names, (0.0, 0.0))

    def moved(self, fragment):
        """An inner step, of this fragment's value."""
        t, place = self.state.t, self.world.names.index(self.name)
        size = ((t * 7 + place * 3 + fragment) % 5 - 2) / 8 - self.values[fragment].x / 16
        diverge = self.world.faults.diverge
        return size * (1000 if diverge and self.world.random() < diverge else 1)
