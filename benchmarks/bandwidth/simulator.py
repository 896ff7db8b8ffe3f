"""The papers' simulator of compute utilisation (2501.18512, sec. 3.1), and its tables' sources.

Values that the papers do not state were fitted to their tables.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.bandwidth.tables import TARGETS, Size
from maxdiloco.planning.link_model import Clock

GRID = np.logspace(-1, 3, 50)  # every published value is one of these, printed with one decimal
H = 100
LAYERS = 3  # of a fragment, 2501.18512 section 3.2


class Send(NamedTuple):
    """Layers that leave after a step, and the step whose forward needs them."""

    step: int
    layers: Sequence[int]
    needed: int


def layered_utilisation(
    size: Size,
    sends: Iterable[Send],
    *,
    steps: int,
    bits_per_layer: float,
    gbps: float,
    latency_s: float = 0.0,
) -> float:
    """Time of the computation / time of the run, in (0, 1].

    A step is a forward, a backward for activations and a backward for weights of every layer, of
    equal length. A layer is sent after its backward for weights, and has to have arrived before its
    forward in a later step. The papers have no latency.
    """
    unit, seconds = size.step_s / (3 * size.layers), bits_per_layer / (gbps * 1e9)
    leaving: dict[int, list[Send]] = {}
    for send in sends:
        leaving.setdefault(send.step, []).append(send)
    clock = Clock()
    for step in range(1, steps + 1):
        for layer in range(size.layers):
            if (step, layer) in clock.arrives:
                clock.wait((step, layer))
            clock.now += unit
        for layer in reversed(range(size.layers)):
            clock.now += 2 * unit
            for send in leaving.get(step, ()):
                if layer in send.layers:
                    clock.send((send.needed, layer), seconds, latency_s=latency_s)
    return steps * size.step_s / clock.now


def data_parallel(layers: int, steps: int) -> list[Send]:
    """Every layer in every step."""
    return diloco(layers, steps, period=1)


def diloco(layers: int, steps: int, *, period: int = H) -> list[Send]:
    """Every layer once in a period, waited for at once."""
    return [Send(step, range(layers), step + 1) for step in range(period, steps + 1, period)]


def streaming(layers: int, steps: int, *, lag: int, eager: bool = False) -> list[Send]:
    """Fragments of every P-th layer, each once in a period; lag: tau, or H for eager updates.

    Spacing, fitted: H // P from one to the next, and floor(p * H / P) for eager updates.
    """
    P = layers // LAYERS
    firsts = [p * H // P if eager else (p + 1) * (H // P) for p in range(P)]
    return [
        Send(step, range(p, layers, P), step + 1 + lag)
        for p, first in enumerate(firsts)
        for step in range(first or H, steps + 1, H)
    ]


def least_gbps(
    utilisation_at: Callable[[float], float], targets: Sequence[float] = TARGETS
) -> list[float]:
    """The first bandwidth of GRID at which a utilisation reaches each target; inf for none."""
    reached = [utilisation_at(gbps) for gbps in GRID]
    return [
        next((g for g, value in zip(GRID, reached, strict=True) if value >= target), np.inf)
        for target in targets
    ]


def printed(gbps: float) -> str:
    """As the papers print it."""
    return "inf" if np.isinf(gbps) else f"{round(gbps, 2):.1f}"


def computed(size: Size, sends: list[Send], steps: int, bits: float, share: float) -> list[float]:
    """A row of a published table. bits: of a parameter on the wire."""
    per_layer = share * bits * size.parameters / size.layers
    return least_gbps(
        lambda gbps: layered_utilisation(
            size, sends, steps=steps, bits_per_layer=per_layer, gbps=gbps
        )
    )
