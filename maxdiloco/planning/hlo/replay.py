"""Replay a scheduled TPU program with one link per device, to find the exposed traffic.

An instruction takes the compiler's `estimated_cycles` at the chip's clock. A Pallas kernel takes
the least time of its products (hlo/kernels.py) at the chip's peak. A transfer takes its bytes at
the rate of the link. A collective inside the slice that the schedule waits for takes its bytes at
the rate of the ICI links. Everything else takes no time: the replay hides too little, never too
much.

A `send-done` may wait until the other slice has the data, or only until its buffer may be used
again. No documentation tells which, and no TPU was asked: send_done_waits offers both.
"""

import copy
import dataclasses

from maxdiloco.parallel.chips import Chip
from maxdiloco.planning.hlo import kernels, traffic
from maxdiloco.planning.hlo.reader import CALLS, Computation, Instruction, Module, trip_count
from maxdiloco.planning.link_model import Clock

# Opcodes that take no time without an estimate: they name or start something, are scalar
# bookkeeping, or wait for traffic inside the slice. Any other opcode is an error.
UNTIMED = """
    parameter constant tuple get-tuple-element bitcast bitcast-convert after-all partition-id
    replica-id opt-barrier copy copy-start copy-done slice-start slice-done dynamic-slice-start
    dynamic-slice-done dynamic-update-slice-start dynamic-update-slice-done custom-call
    custom-call-start custom-call-done fusion convolution dot sort gather scatter reduce
    reduce-window select-and-scatter dynamic-slice dynamic-update-slice slice pad concatenate
    transpose reshape broadcast iota reverse map abs add and ceil clamp compare convert cosine
    divide exponential exponential-minus-one floor is-finite log log-plus-one maximum minimum
    multiply negate not or power remainder rsqrt round-nearest-even select shift-left
    shift-right-arithmetic shift-right-logical sign sine sqrt cbrt subtract tan tanh logistic atan2
    xor rng rng-bit-generator all-gather all-reduce all-to-all ragged-all-to-all reduce-scatter
    collective-permute
    all-gather-start all-gather-done all-reduce-start all-reduce-done collective-permute-start
    collective-permute-done async-update async-done call-done
"""


def replay(module: Module, chip: Chip, gbps: float, *, send_done_waits: bool = True) -> "Replay":
    """Run a scheduled program once. gbps: a device's share of the link [1e9 bits per second].

    A conditional takes the branch that waits longest; among equals, the shortest. Raises
    ValueError for an opcode it does not know.
    """
    played = Replay(module, chip, gbps, send_done_waits)
    played.run(module.entry)
    return played


@dataclasses.dataclass
class Replay:
    """One run of a module.

    Attributes:
      module: the program.
      chip: of the devices.
      gbps: rate of a device's link.
      send_done_waits: whether a send-done waits for the whole transfer.
      clock: the device's time and the link's.
      transfers: timing by rendezvous.
    """

    module: Module
    chip: Chip
    gbps: float
    send_done_waits: bool
    clock: Clock = dataclasses.field(default_factory=Clock)
    transfers: dict[str, traffic.Timing] = dataclasses.field(default_factory=dict)

    @property
    def waited(self) -> float:
        """Seconds that the device waits for other slices: exposed time."""
        return sum(timing.waited for timing in self.transfers.values())

    @property
    def busy(self) -> float:
        """Seconds that the link is busy."""
        return sum(timing.busy for timing in self.transfers.values())

    def branch(self) -> "Replay":
        """Return a run that continues from here, and leave this one unchanged."""
        clock, transfers = copy.deepcopy(self.clock), dict(self.transfers)
        return dataclasses.replace(self, clock=clock, transfers=transfers)

    def run(self, where: Computation) -> None:
        """Play all of a computation."""
        for item in where.instructions:
            self._play(where, item)

    def _play(self, where: Computation, item: Instruction) -> None:
        if item.opcode in ("send", "recv"):
            self._start(item)
        elif item.opcode in ("send-done", "recv-done"):
            name = traffic.rendezvous_of(where[item.operands[0]])
            waits = item.opcode == "recv-done" or self.send_done_waits
            waited = self.clock.wait(name) if waits else 0.0
            timing = self.transfers[name]
            timing = timing._replace(done=self.clock.now, waited=timing.waited + waited)
            self.transfers[name] = timing
        elif item.opcode == "while":
            trips = trip_count(self.module, where, item)
            self._loop(self.module.computation(item.attribute("body")), trips)
        elif item.opcode == "conditional":
            branches = [self.branch() for _ in item.called()]
            for branch, name in zip(branches, item.called(), strict=True):
                branch.run(self.module.computation(name))
            longest = max(branches, key=lambda branch: (branch.waited, -branch.clock.now))
            self.clock, self.transfers = longest.clock, longest.transfers
        elif item.opcode in CALLS:
            for name in item.called():
                self.run(self.module.computation(name))
        else:
            self.clock.now += self._own_seconds(where, item)

    def _own_seconds(self, where: Computation, item: Instruction) -> float:
        """Time of an instruction that calls nothing and waits for nothing."""
        cycles = item.estimated_cycles()
        if cycles is not None:
            return cycles / self.chip.clock_hz
        if item.opcode not in UNTIMED.split():
            raise ValueError(
                f"%{item.name} is a {item.opcode!r}, which this replay does not know: add it to "
                f"UNTIMED in hlo/replay.py if it moves nothing between slices."
            )
        if item.opcode in traffic.KINDS:
            return traffic.bytes_of(where, item) * 8 / (self.chip.ici_gbps * 1e9)
        if kernels.is_kernel(item):
            return (kernels.kernel_flops(where, item) or 0.0) / self.chip.peak_flops
        return 0.0

    def _start(self, item: Instruction) -> None:
        """Put the payload of a send on the link; a recv only makes room for a payload."""
        name, now = traffic.rendezvous_of(item), self.clock.now
        timing = self.transfers.setdefault(name, traffic.Timing(now, now))
        if item.opcode == "send":
            seconds = traffic.bytes_of_send(item) * 8 / (self.gbps * 1e9)
            self.clock.send(name, seconds)
            self.transfers[name] = timing._replace(busy=timing.busy + seconds)

    def _loop(self, body: Computation, trips: int) -> None:
        """A body that sends nothing takes as long at every trip."""
        once = self.branch()
        once.run(body)
        if once.transfers == self.transfers:
            self.clock.now += trips * (once.clock.now - self.clock.now)
        else:
            for _ in range(trips):
                self.run(body)
