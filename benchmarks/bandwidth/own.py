"""What the schedules of this trainer need of a link, sustained: in a run without end."""

from typing import NamedTuple

from benchmarks.bandwidth.simulator import LAYERS, H
from benchmarks.bandwidth.tables import SIZES, Size
from maxdiloco.aot.wait import data_parallel, exposed_s, least_gbps, utilisation
from maxdiloco.diloco import quantize
from maxdiloco.diloco.schedule import Schedule, offsets
from maxdiloco.engine.chunks import steps_to_owners
from maxdiloco.exchange.owners import REDUCED


class Mode(NamedTuple):
    """A mode of this trainer. lag: steps until a fragment is used, as Schedule.lag says.

    owned: whether slices own parts of a fragment, whose means they send to all.
    """

    name: str
    schedule: Schedule
    wire: str
    carrier: str
    owned: bool = False


def modes(size: Size) -> list[Mode]:
    """What a table of our own has: fragments of LAYERS layers."""
    spread = offsets(size.layers // LAYERS, H)
    out = []
    for wire in ("float32", "float4_e3m0"):
        out.append(Mode("DiLoCo", Schedule(H, 0, (0,)), wire, "program"))
        for tau in (1, 5):
            overlapped = Schedule(H, tau, spread)
            out.append(Mode(f"streaming, tau={tau}", overlapped, wire, "program"))
        eager = Schedule(H, 0, spread, overlap="eager")
        out += [Mode("eager", eager, wire, carrier) for carrier in ("program", "host")]
        out.append(Mode("streaming, tau=5, owners", overlapped, wire, "program", owned=True))
        out.append(Mode("eager, owners", eager, wire, "host", owned=True))
    return out


def bits_per_parameter(wire: str) -> float:
    """Scales included."""
    many = 1 << 20
    elements = quantize.encoded_size(wire, many)
    return 8 * quantize.wire_format(wire).dtype.itemsize * elements / many


def sustained(size: Size, mode: Mode, *, replicas: int, gbps: float) -> float:
    """Utilisation of a run without end, a replica a slice.

    A replica's fragment leaves to each of the others; with owners a part, and the mean of a part.
    program: in max_chunks chunks, one a step.
    """
    schedule, to_owners = mode.schedule, 0
    a_bit = size.parameters / schedule.P * (replicas - 1) / (gbps * 1e9)  # of every parameter [s]
    trains = [bits_per_parameter(mode.wire) * a_bit]
    if mode.owned:
        reduced = quantize.finer(mode.wire, REDUCED)
        trains = [bits_per_parameter(wire) * a_bit / replicas for wire in (mode.wire, reduced)]
        parts, means = trains
        to_owners = steps_to_owners(schedule.max_chunks, to_owners=parts, shared=means)
    chunks, steps = [], (to_owners, schedule.max_chunks - to_owners)[-len(trains) :]
    if mode.carrier == "program" and schedule.max_chunks:
        chunks = [s / n for s, n in zip(trains, steps, strict=True) for _ in range(n)] * schedule.P
    waited = exposed_s(
        [sum(trains)] * schedule.P,
        chunks,
        trains[1:] * schedule.P,
        H=schedule.H,
        lag=schedule.lag,
        scatter_steps=to_owners,
        step_s=size.step_s,
    )
    return utilisation(size.step_s, waited, schedule.H)


def rows(replicas: int) -> list[tuple[str, ...]]:
    """Gbit/s of one replica's link for 99 %, and how many times less than data parallelism."""
    names = [size.name for size in SIZES]
    times = [f"{name}, times less" for name in names]
    out = [("mode, H=100", "wire", "carrier", *(f"{name}, Gbit/s" for name in names), *times)]
    base = [least_gbps(lambda g, s=size: data_parallel(*s[1:], gbps=g)) for size in SIZES]
    out.append(("data parallel", "bfloat16", "", *map(_three, base), "1", "1", "1"))
    for of_sizes in zip(*map(modes, SIZES), strict=True):
        need = [
            least_gbps(lambda g, s=size, m=mode: sustained(s, m, replicas=replicas, gbps=g))
            for size, mode in zip(SIZES, of_sizes, strict=True)
        ]
        less = [f"{b / n:,.0f}" for b, n in zip(base, need, strict=True)]
        mode = of_sizes[0]
        out.append((mode.name, mode.wire, mode.carrier, *map(_three, need), *less))
    return out


def _three(value: float) -> str:
    return f"{value:.3g}"
