"""Compute the bandwidth that this trainer's schedules need, sustained: in a run without end."""

from typing import NamedTuple

from benchmarks.bandwidth.simulator import LAYERS, H
from benchmarks.bandwidth.tables import SIZES, Size
from maxdiloco.diloco import quantize
from maxdiloco.diloco.schedule import Schedule, offsets
from maxdiloco.engine.layout import divide_steps
from maxdiloco.engine.reduce_scatter import MEAN_DTYPE
from maxdiloco.planning.link_model import data_parallel, exposed_s, least_gbps, utilisation


class Mode(NamedTuple):
    """A mode of this trainer. lag: steps until a fragment is used, from Schedule.lag.

    reduce_scatter: whether slices average parts of a fragment, and send their means to all.
    """

    name: str
    schedule: Schedule
    wire: str
    transport: str
    reduce_scatter: bool = False


def modes(size: Size) -> list[Mode]:
    """The content of a table of our own: fragments of LAYERS layers."""
    spread = offsets(size.layers // LAYERS, H)
    out = []
    for wire in ("float32", "float4_e3m0"):
        out.append(Mode("DiLoCo", Schedule(H, 0, (0,)), wire, "xla"))
        for tau in (1, 5):
            overlapped = Schedule(H, tau, spread)
            out.append(Mode(f"streaming, tau={tau}", overlapped, wire, "xla"))
        eager = Schedule(H, 0, spread, round_overlap="eager")
        out += [Mode("eager", eager, wire, transport) for transport in ("xla", "host")]
        name = "streaming, tau=5, reduce-scatter"
        out.append(Mode(name, overlapped, wire, "xla", reduce_scatter=True))
    return out


def bits_per_parameter(wire: str) -> float:
    """Scales included."""
    many = 1 << 20
    elements = quantize.encoded_size(wire, many)
    return 8 * quantize.wire_format(wire).dtype.itemsize * elements / many


def sustained_utilisation(size: Size, mode: Mode, *, replicas: int, gbps: float) -> float:
    """Utilisation of a run without end, a replica a slice.

    A replica's fragment leaves to each of the others; with reduce-scatter a part, and the mean
    of a part.
    xla: in max_chunks chunks, one a step.
    """
    schedule, scatter_steps = mode.schedule, 0
    a_bit = size.parameters / schedule.P * (replicas - 1) / (gbps * 1e9)  # of every parameter [s]
    trains = [bits_per_parameter(mode.wire) * a_bit]
    if mode.reduce_scatter:
        reduced = quantize.finer(mode.wire, MEAN_DTYPE)
        trains = [bits_per_parameter(wire) * a_bit / replicas for wire in (mode.wire, reduced)]
        parts, means = trains
        scatter_steps = divide_steps(schedule.max_chunks, scattered=parts, gathered=means)
    chunks, steps = [], (scatter_steps, schedule.max_chunks - scatter_steps)[-len(trains) :]
    if mode.transport == "xla" and schedule.max_chunks:
        chunks = [s / n for s, n in zip(trains, steps, strict=True) for _ in range(n)] * schedule.P
    waited = exposed_s(
        [sum(trains)] * schedule.P,
        chunks,
        trains[1:] * schedule.P,
        H=schedule.H,
        lag=schedule.lag,
        scatter_steps=scatter_steps,
        step_s=size.step_s,
    )
    return utilisation(size.step_s, waited, schedule.H)


def rows(replicas: int) -> list[tuple[str, ...]]:
    """Gbit/s of one replica's link for 99 %, and how many times less than data parallelism."""
    names = [size.name for size in SIZES]
    times = [f"{name}, times less" for name in names]
    out = [("mode, H=100", "wire", "transport", *(f"{name}, Gbit/s" for name in names), *times)]
    base = [least_gbps(lambda g, s=size: data_parallel(*s[1:], gbps=g)) for size in SIZES]
    out.append(("data parallel", "bfloat16", "", *map(_three, base), "1", "1", "1"))
    for of_sizes in zip(*map(modes, SIZES), strict=True):
        need = [
            least_gbps(
                lambda g, s=size, m=mode: sustained_utilisation(s, m, replicas=replicas, gbps=g)
            )
            for size, mode in zip(SIZES, of_sizes, strict=True)
        ]
        less = [f"{b / n:,.0f}" for b, n in zip(base, need, strict=True)]
        mode = of_sizes[0]
        out.append((mode.name, mode.wire, mode.transport, *map(_three, need), *less))
    return out


def _three(value: float) -> str:
    return f"{value:.3g}"
