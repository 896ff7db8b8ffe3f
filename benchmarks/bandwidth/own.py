"""What the schedules of this trainer need of a link, sustained: in a run without end."""

from collections.abc import Callable
from typing import NamedTuple

from benchmarks.bandwidth.simulator import LAYERS, H, data_parallel, utilisation
from benchmarks.bandwidth.tables import SIZES, TARGETS, Size
from maxdiloco.diloco import quantize
from maxdiloco.diloco.schedule import Schedule, offsets

PERIODS = 5  # that are simulated; the last one counts
ENDLESS = 200  # steps of data parallelism
BFLOAT16 = 16.0  # bits


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

    A replica's fragment leaves to each of the others. program: a step that carries a chunk ends
    when it has arrived; without overlap the fragment is waited for. host: the fragment leaves at
    once and is waited for when it is used. However late that is, a period takes as long as its
    bytes.
    """
    schedule = mode.schedule
    bits = bits_per_parameter(mode.wire) * size.parameters / schedule.P * (replicas - 1)
    seconds = bits / (gbps * 1e9)
    now = link = 0.0
    arrives: dict[int, float] = {}
    marks = []
    for t in range(1, PERIODS * H + 1):
        start, now = now, now + size.step_s
        if mode.carrier == "program" and schedule.carrying(t):
            now = max(now, start + seconds / schedule.max_chunks)
        if mode.carrier == "host" and schedule.lag:
            now = max(now, arrives.pop(t - schedule.lag, now))
        if schedule.sends(t):
            link = max(link, now) + seconds
            arrives[t] = link
            if not schedule.lag:
                now = link
        marks.append(now)
    return H * size.step_s / max(marks[-1] - marks[-1 - H], schedule.P * seconds)


def baseline(size: Size, gbps: float) -> float:
    """Utilisation of data parallelism: bfloat16 gradients once a step, as the papers count."""
    per_layer = BFLOAT16 * size.parameters / size.layers
    sends = data_parallel(size.layers, ENDLESS)
    return utilisation(size, sends, steps=ENDLESS, bits_per_layer=per_layer, gbps=gbps)


def rows(replicas: int) -> list[tuple[str, ...]]:
    """Gbit/s of one replica's link for 99 %, and how many times less than data parallelism."""
    names = [size.name for size in SIZES]
    times = [f"{name}, times less" for name in names]
    out = [("mode, H=100", "wire", "carrier", *(f"{name}, Gbit/s" for name in names), *times)]
    base = [least_exactly(lambda g, s=size: baseline(s, g)) for size in SIZES]
    out.append(("data parallel", "bfloat16", "", *map(_three, base), "1", "1", "1"))
    for of_sizes in zip(*map(modes, SIZES), strict=True):
        need = [
            least_exactly(lambda g, s=size, m=mode: sustained(s, m, replicas=replicas, gbps=g))
            for size, mode in zip(SIZES, of_sizes, strict=True)
        ]
        less = [f"{b / n:,.0f}" for b, n in zip(base, need, strict=True)]
        mode = of_sizes[0]
        out.append((mode.name, mode.wire, mode.carrier, *map(_three, need), *less))
    return out


def _three(value: float) -> str:
    return f"{value:.3g}"


def least_exactly(at: Callable[[float], float], target: float = TARGETS[-1]) -> float:
    """The least bandwidth that reaches the target, to one in a thousand [Gbit/s]."""
    low, high = 1e-4, 1e6
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if at(middle) >= target else (middle, high)
    return high
