"""What the schedules of this trainer need of a link, sustained: in a run without end."""

from typing import NamedTuple

from benchmarks.bandwidth.simulator import LAYERS, H
from benchmarks.bandwidth.tables import SIZES, Size
from maxdiloco.aot.wait import data_parallel, exposed_s, least_gbps, utilisation
from maxdiloco.diloco import quantize
from maxdiloco.diloco.schedule import Schedule, offsets


class Mode(NamedTuple):
    """A mode of this trainer. lag: steps until a fragment is used, as Schedule.lag says."""

    name: str
    schedule: Schedule
    wire: str
    carrier: str


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
    return out


def bits_per_parameter(wire: str) -> float:
    """Scales included."""
    many = 1 << 20
    elements = quantize.encoded_size(wire, many)
    return 8 * quantize.wire_format(wire).dtype.itemsize * elements / many


def sustained(size: Size, mode: Mode, *, replicas: int, gbps: float) -> float:
    """Utilisation of a run without end.

    A replica's fragment leaves to each of the others. program: in max_chunks chunks, one a step.
    """
    schedule = mode.schedule
    bits = bits_per_parameter(mode.wire) * size.parameters / schedule.P * (replicas - 1)
    seconds, parts = bits / (gbps * 1e9), schedule.max_chunks * (mode.carrier == "program")
    waited = exposed_s(
        [seconds] * schedule.P,
        [seconds / parts] * (schedule.P * parts) if parts else (),
        H=schedule.H,
        lag=schedule.lag,
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
