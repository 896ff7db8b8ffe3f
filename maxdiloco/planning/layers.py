"""The papers' simulator of compute utilisation (2501.18512, section 3.1 and supplement).

A step is a forward, a backward for activations and a backward for weights of every layer, of equal
length. A layer's reduction is released after its backward for weights, waits for the link, which
carries one after the other, and has to have arrived before that layer's forward in a later step.
The papers have no latency.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

BFLOAT16 = 16.0  # bits of a gradient of data parallelism, as the papers count
ENDLESS = 200  # steps of data parallelism after which the first ones no longer count


class Size(NamedTuple):
    """A model. step_s: time of an inner step without any exchange [s]."""

    name: str
    layers: int
    parameters: float
    step_s: float


class Send(NamedTuple):
    """Layers that leave after a step, and the step whose forward needs them."""

    step: int
    layers: Sequence[int]
    needed: int


def utilisation(
    size: Size,
    sends: Iterable[Send],
    *,
    steps: int,
    bits_per_layer: float,
    gbps: float,
    latency_s: float = 0.0,
) -> float:
    """Time of the computation / time of the run, in (0, 1]."""
    unit = size.step_s / (3 * size.layers)
    leaving: dict[int, list[Send]] = {}
    for send in sends:
        leaving.setdefault(send.step, []).append(send)
    awaited: dict[int, dict[int, float]] = {}  # {step: {layer: when it has arrived}}
    now = link = 0.0
    for step in range(1, steps + 1):
        arrivals = awaited.pop(step, {})
        for layer in range(size.layers):
            now = max(now, arrivals.get(layer, now)) + unit
        # The backward ends at the first layer, so that one's reduction is released last.
        released = sorted(
            (now + 2 * unit * (size.layers - layer), layer, send.needed)
            for send in leaving.get(step, ())
            for layer in send.layers
        )
        for when, layer, needed in released:
            link = max(link, when) + bits_per_layer / (gbps * 1e9)
            awaited.setdefault(needed, {})[layer] = link + latency_s
        now += 2 * unit * size.layers
    return steps * size.step_s / now


def whole_model(layers: int, steps: int, *, period: int) -> list[Send]:
    """Every layer once in a period, waited for at once; period 1 is data parallelism."""
    sent = range(period, steps + 1, period)
    return [Send(step, range(layers), step + 1) for step in sent]


def data_parallel(size: Size, gbps: float, latency_s: float = 0.0) -> float:
    """Utilisation of data parallelism: bfloat16 gradients once a step, as the papers count.

    gbps: of all devices of a replica together [Gbit/s].
    """
    per_layer = BFLOAT16 * size.parameters / size.layers
    sends = whole_model(size.layers, ENDLESS, period=1)
    return utilisation(
        size, sends, steps=ENDLESS, bits_per_layer=per_layer, gbps=gbps, latency_s=latency_s
    )
