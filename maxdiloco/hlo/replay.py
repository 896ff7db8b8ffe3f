"""Replay a scheduled TPU program against one link per device: how much of the traffic is exposed.

Times are the compiler's `estimated_cycles` over a clock, and bytes over a link that carries one
transfer after the other; positions are those of the schedule. No host, no latency. Where the
compiler estimates nothing, an instruction takes no time, so too little hides a transfer, never too
much.
"""

from typing import NamedTuple

from maxdiloco.hlo.loops import trip_count
from maxdiloco.hlo.reader import Computation, Instruction, Module
from maxdiloco.hlo.transfers import rendezvous_of, transfers

# Instructions that take no time when they carry no estimate: they name or start something, are
# scalar bookkeeping, or wait for traffic inside the slice. Anything else is an error.
UNTIMED = (
    "parameter constant tuple get-tuple-element bitcast bitcast-convert after-all partition-id "
    "replica-id opt-barrier copy copy-start copy-done slice-start slice-done dynamic-slice-start "
    "dynamic-slice-done dynamic-update-slice-start dynamic-update-slice-done custom-call fusion "
    "convolution dot sort gather scatter reduce reduce-window select-and-scatter dynamic-slice "
    "dynamic-update-slice slice pad concatenate transpose reshape broadcast iota reverse map "
    "abs add and ceil clamp compare convert cosine divide exponential exponential-minus-one floor "
    "is-finite log log-plus-one maximum minimum multiply negate not or power remainder rsqrt "
    "round-nearest-even select shift-left shift-right-arithmetic shift-right-logical sign sine "
    "sqrt cbrt subtract tan tanh logistic atan2 xor rng rng-bit-generator "
    "all-gather all-reduce all-to-all reduce-scatter collective-permute all-gather-start "
    "all-gather-done all-reduce-start all-reduce-done collective-permute-start "
    "collective-permute-done async-update async-done"
)


class _Clock(NamedTuple):
    """Seconds: now, when the link is free, what was waited, what the link was busy."""

    now: float
    link: float
    waited: float
    busy: float
    arrives: dict[str, float]


class _Player(NamedTuple):
    module: Module
    seconds: dict[str, float]  # of each transfer on the link
    rendezvous: dict[tuple[str, str], str]  # of each send and recv
    clock_hz: float


def exposed_fraction(
    module: Module, *, num_slices: int, gbps_per_device: float, clock_hz: float
) -> float:
    """Seconds a device waits for other slices over the seconds its link is busy, in [0, 1].

    gbps_per_device: link, 1e9 bits per second. clock_hz: of the estimates (1.5e9 on v5e). Of the
    branches of a conditional the one that waits longest is taken, the shortest of those.
    Raises ValueError for a program without a transfer, and for what it does not know.
    """
    found = transfers(module)
    if not found:
        raise ValueError(
            "this program sends nothing to other slices, so no part of it is exposed or hidden. "
            "Ask `transfers` first."
        )
    seconds = {
        t.rendezvous: t.bytes_sent(num_slices) * 8 / (gbps_per_device * 1e9) for t in found
    }
    starts = {
        (computation.name, i.name): name
        for computation, i in module.reached()
        if (name := rendezvous_of(i))
    }
    player = _Player(module, seconds, starts, clock_hz)
    end = _run(player, module.entry, _Clock(0.0, 0.0, 0.0, 0.0, {}))
    return min(1.0, end.waited / end.busy)  # a sum of waits can round above the link's own


def _run(player: _Player, computation: Computation, clock: _Clock) -> _Clock:
    for instruction in computation.instructions:
        clock = _play(player, computation, instruction, clock)
    return clock


def _play(player: _Player, where: Computation, item: Instruction, clock: _Clock) -> _Clock:
    if item.opcode in ("send", "recv"):
        return _start(player, player.rendezvous[where.name, item.name], item.opcode, clock)
    if item.opcode in ("send-done", "recv-done"):
        key = (where.name, item.operands[0])
        arrival = clock.arrives[player.rendezvous[key]]
        waited = max(0.0, arrival - clock.now)
        return clock._replace(now=clock.now + waited, waited=clock.waited + waited)
    if item.opcode == "while":
        trips = trip_count(player.module, where, item)
        return _loop(player, player.module.computation(item.attribute("body")), trips, clock)
    if item.opcode == "conditional":
        branches = [_run(player, player.module.computation(n), clock) for n in item.called()]
        return max(branches, key=lambda end: (end.waited, -end.now))
    if item.opcode in ("call", "async-start"):
        for name in item.called():
            clock = _run(player, player.module.computation(name), clock)
        return clock
    cycles = item.estimated_cycles()
    if cycles is None and item.opcode not in UNTIMED.split():
        raise ValueError(
            f"%{item.name} is a {item.opcode!r}, which this replay does not know: add it to "
            f"UNTIMED in hlo/replay.py if it moves nothing between slices."
        )
    return clock._replace(now=clock.now + (cycles or 0) / player.clock_hz)


def _start(player: _Player, name: str, opcode: str, clock: _Clock) -> _Clock:
    """The send puts the payload on the link; the recv only makes room for what comes."""
    if opcode == "recv":
        return clock
    seconds = player.seconds[name]
    end = max(clock.now, clock.link) + seconds
    arrives = clock.arrives | {name: end}
    return clock._replace(link=end, busy=clock.busy + seconds, arrives=arrives)


def _loop(player: _Player, body: Computation, trips: int, clock: _Clock) -> _Clock:
    once = _run(player, body, clock)
    if once.busy == clock.busy and once.waited == clock.waited:
        return clock._replace(now=clock.now + trips * (once.now - clock.now))
    for _ in range(trips):
        clock = _run(player, body, clock)
    return clock
