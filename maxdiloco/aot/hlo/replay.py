"""Replays a scheduled TPU program against one link per device: how much of the traffic is exposed.

An instruction takes the compiler's `estimated_cycles` at the chip's clock, and a Pallas kernel
the least time that hlo/kernels.py finds. A transfer takes its bytes at the rate of the link, which
carries one after the other. There is no host and no latency.
A collective inside the slice that the schedule waits for takes its bytes at the rate of the ICI
links. Everything else without an estimate takes no time: the replay hides too little, never too
much.

Whether a `send-done` waits until the other slice has the data, or only until its buffer may be used
again, no documentation says and no TPU was asked. The compiler puts it anywhere between send and
recv-done, so both readings are offered: Link.send_done_waits.
"""

from typing import NamedTuple

from maxdiloco.aot.hlo import collectives, kernels
from maxdiloco.aot.hlo.loops import trip_count
from maxdiloco.aot.hlo.reader import Computation, Instruction, Module
from maxdiloco.aot.hlo.transfers import rendezvous_of, transfers
from maxdiloco.parallel.chips import Chip

# Opcodes that take no time without an estimate: they name or start something, are scalar
# bookkeeping, or wait for traffic inside the slice. Any other opcode is an error.
UNTIMED = frozenset({
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "bitcast-convert",
    "after-all", "partition-id", "replica-id", "opt-barrier", "copy", "copy-start", "copy-done",
    "slice-start", "slice-done", "dynamic-slice-start", "dynamic-slice-done",
    "dynamic-update-slice-start", "dynamic-update-slice-done", "custom-call", "custom-call-start",
    "custom-call-done", "fusion", "convolution", "dot", "sort", "gather", "scatter", "reduce",
    "reduce-window", "select-and-scatter", "dynamic-slice", "dynamic-update-slice", "slice",
    "pad", "concatenate", "transpose", "reshape", "broadcast", "iota", "reverse", "map", "abs",
    "add", "and", "ceil", "clamp", "compare", "convert", "cosine", "divide", "exponential",
    "exponential-minus-one", "floor", "is-finite", "log", "log-plus-one", "maximum", "minimum",
    "multiply", "negate", "not", "or", "power", "remainder", "rsqrt", "round-nearest-even",
    "select", "shift-left", "shift-right-arithmetic", "shift-right-logical", "sign", "sine",
    "sqrt", "cbrt", "subtract", "tan", "tanh", "logistic", "atan2", "xor", "rng",
    "rng-bit-generator", "all-gather", "all-reduce", "all-to-all", "reduce-scatter",
    "collective-permute", "all-gather-start", "all-gather-done", "all-reduce-start",
    "all-reduce-done", "collective-permute-start", "collective-permute-done", "async-update",
    "async-done", "call-done",
})  # fmt: skip


class Link(NamedTuple):
    """Rates of one device.

    gbps_per_device: its share of the DCN [1e9 bits per second]. clock_hz: of the compiler's cycles
    (1.5e9 on v5e). ici_gbps: of all its ICI links together, one way; with None a collective inside
    the slice takes no time. peak_flops: of the matrix unit [1/s]; with None a Pallas kernel
    takes no time. send_done_waits: whether it waits for the whole transfer, as a recv-done does, or
    for nothing.
    """

    gbps_per_device: float
    clock_hz: float
    ici_gbps: float | None = None
    peak_flops: float | None = None
    send_done_waits: bool = True

    @classmethod
    def of(cls, chip: Chip, gbps: float) -> "Link":
        """The rates of a chip with a share of the DCN [Gbit/s]."""
        return cls(gbps, chip.clock_hz, chip.ici_gbps, chip.peak_flops)


class Timing(NamedTuple):
    """One transfer between slices, in all its runs.

    start, done: of its first and its last run [seconds from the start of the program]. busy:
    seconds on the link. waited: seconds that the device waits for it.
    """

    start: float
    done: float
    busy: float
    waited: float


class Replay(NamedTuple):
    """One run of a program. seconds: waits included. transfers: by rendezvous."""

    seconds: float
    transfers: dict[str, Timing]

    @property
    def waited(self) -> float:
        """Seconds that the device waits for other slices: exposed time."""
        return sum(timing.waited for timing in self.transfers.values())

    @property
    def busy(self) -> float:
        """Seconds that the link is busy."""
        return sum(timing.busy for timing in self.transfers.values())


class _Clock(NamedTuple):
    """The time now, when the link is free, when each transfer arrives [s]; and their timings."""

    now: float
    link: float
    arrives: dict[str, float]
    timings: dict[str, Timing]

    def total(self) -> tuple[float, float]:
        timings = self.timings.values()
        return sum(t.waited for t in timings), sum(t.busy for t in timings)


class _Player(NamedTuple):
    module: Module
    seconds: dict[str, float]  # of each transfer on the link
    rendezvous: dict[tuple[str, str], str]  # of each send and recv
    link: Link


def replay(module: Module, link: Link) -> Replay:
    """Run a scheduled program once.

    A conditional takes the branch that waits longest; among equals, the shortest. Raises
    ValueError for an opcode it does not know.
    """
    seconds = {
        t.rendezvous: t.bytes_sent() * 8 / (link.gbps_per_device * 1e9)
        for t in transfers(module)
    }
    starts = {
        (computation.name, i.name): name
        for computation, i in module.reached()
        if (name := rendezvous_of(i))
    }
    player = _Player(module, seconds, starts, link)
    end = _run(player, module.entry, _Clock(0.0, 0.0, {}, {}))
    return Replay(end.now, end.timings)


def _run(player: _Player, computation: Computation, clock: _Clock) -> _Clock:
    for instruction in computation.instructions:
        clock = _play(player, computation, instruction, clock)
    return clock


def _play(player: _Player, where: Computation, item: Instruction, clock: _Clock) -> _Clock:
    if item.opcode in ("send", "recv"):
        return _start(player, player.rendezvous[where.name, item.name], item.opcode, clock)
    if item.opcode in ("send-done", "recv-done"):
        key = (where.name, item.operands[0])
        waits = item.opcode == "recv-done" or player.link.send_done_waits
        return _done(clock, player.rendezvous[key], waits)
    if item.opcode == "while":
        trips = trip_count(player.module, where, item)
        return _loop(player, player.module.computation(item.attribute("body")), trips, clock)
    if item.opcode == "conditional":
        branches = [_run(player, player.module.computation(n), clock) for n in item.called()]
        return max(branches, key=lambda end: (end.total()[0], -end.now))
    if item.opcode in ("call", "call-start", "async-start"):
        for name in item.called():
            clock = _run(player, player.module.computation(name), clock)
        return clock
    return clock._replace(now=clock.now + _seconds(player, where, item))


def _seconds(player: _Player, where: Computation, item: Instruction) -> float:
    """Time of one instruction."""
    cycles = item.estimated_cycles()
    if cycles is not None:
        return cycles / player.link.clock_hz
    if item.opcode not in UNTIMED:
        raise ValueError(
            f"%{item.name} is a {item.opcode!r}, which this replay does not know: add it to "
            f"UNTIMED in hlo/replay.py if it moves nothing between slices."
        )
    if item.opcode in collectives.KINDS and player.link.ici_gbps is not None:
        return collectives.bytes_of(where, item) * 8 / (player.link.ici_gbps * 1e9)
    if kernels.is_kernel(item) and player.link.peak_flops is not None:
        return (kernels.flops(where, item) or 0.0) / player.link.peak_flops
    return 0.0


def _start(player: _Player, name: str, opcode: str, clock: _Clock) -> _Clock:
    """A send puts the payload on the link; a recv only makes room for what arrives."""
    before = clock.timings.get(name, Timing(clock.now, clock.now, 0.0, 0.0))
    if opcode == "recv":
        return clock._replace(timings=clock.timings | {name: before})
    seconds = player.seconds[name]
    end = max(clock.now, clock.link) + seconds
    timings = clock.timings | {name: before._replace(busy=before.busy + seconds)}
    return clock._replace(link=end, arrives=clock.arrives | {name: end}, timings=timings)


def _done(clock: _Clock, name: str, waits: bool) -> _Clock:
    waited = max(0.0, clock.arrives[name] - clock.now) if waits else 0.0
    now, timing = clock.now + waited, clock.timings[name]
    timing = timing._replace(done=now, waited=timing.waited + waited)
    return clock._replace(now=now, timings=clock.timings | {name: timing})


def _loop(player: _Player, body: Computation, trips: int, clock: _Clock) -> _Clock:
    once = _run(player, body, clock)
    if once.total() == clock.total():
        return clock._replace(now=clock.now + trips * (once.now - clock.now))
    for _ in range(trips):
        clock = _run(player, body, clock)
    return clock
