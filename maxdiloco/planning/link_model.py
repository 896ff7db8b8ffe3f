"""Compute how long a device waits for its link to other slices.

The link carries one transfer after another. Only bytes and the given latency count. Headers,
packing and the compute of an exchange are left out.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Sequence

from maxdiloco.diloco.schedule import offsets

FULL = 0.99  # compute utilisation at which a choice fits a link (arXiv 2501.18512, Table 4)
PERIODS = 12  # to simulate; the length of a period is constant by then
HIDDEN = 0.02  # of a transfer's time; a smaller hidden part is not hidden by design
BFLOAT16 = 16.0  # bits of a gradient of data parallelism, as the papers count
ENDLESS = 200  # steps of data parallelism, whose last reduction is not waited for


@dataclasses.dataclass
class Clock:
    """The time of a device, when its link becomes free, and when each transfer arrives [s]."""

    now: float = 0.0
    free: float = 0.0
    arrives: dict[Hashable, float] = dataclasses.field(default_factory=dict)

    def send(self, name: Hashable, seconds: float, *, latency_s: float = 0.0) -> None:
        """Queue a transfer on the link. seconds: time on the link."""
        self.free = max(self.free, self.now) + seconds
        self.arrives[name] = self.free + latency_s

    def wait(self, name: Hashable) -> float:
        """Wait until a transfer has arrived, and return the waiting time [s]."""
        waited = max(0.0, self.arrives[name] - self.now)
        self.now += waited
        return waited


def exposed_s(
    fragments: Sequence[float],
    chunks: Sequence[float] = (),
    shared: Sequence[float] = (),
    always_exposed: Sequence[float] = (),
    *,
    H: int,
    lag: int,
    scatter_steps: int = 0,
    step_s: float,
    latency_s: float = 0.0,
) -> float:
    """Return the seconds that a period waits for its exchanges, in an endless run.

    Args:
      fragments: seconds of each on the link. Fragment p is sent after the steps t with
        t = floor(p H / P) (mod H) and used `lag` steps later.
      chunks: seconds of each chunk that compiled programs exchange, one concurrently with each
        step, which ends when the chunk has arrived. Without chunks an exchange is sent from host
        memory, after the exchanges that are on the link already.
      shared: with reduce-scatter the seconds of the means of each fragment. They are sent when its
        parts have arrived, `scatter_steps` steps after the send. () with all-gather.
      always_exposed: seconds that no step of the compiled programs hides.
      H: steps of a period.
      lag: steps between the send of a fragment and its use.
      scatter_steps: steps between the send of the parts and of the means.
      step_s: time of a step without an exchange.
      latency_s: latency of the link.
    """
    if not lag:
        return sum(seconds + latency_s for seconds in fragments) + latency_s * len(shared)
    if chunks:
        exposed = sum(max(0.0, seconds + latency_s - step_s) for seconds in chunks)
        return exposed + sum(seconds + latency_s for seconds in always_exposed)
    clock, waited = Clock(), 0.0
    before, last = (PERIODS - 1) * H, PERIODS * H
    firsts = [offset or H for offset in offsets(len(fragments), H)]
    sends = {t: p for p, first in enumerate(firsts) for t in range(first, last + 1, H)}
    at, ends = 0, (0, scatter_steps, lag)
    for t in sorted({t + end for t in sends for end in ends if t + end <= last}):
        clock.now, at = clock.now + (t - at) * step_s, t
        if (sent := t - scatter_steps) in sends:
            seconds = clock.wait((sent, "parts")) if shared else 0.0
            waited += seconds if t > before else 0.0
            clock.send(sent, (shared or fragments)[sends[sent]], latency_s=latency_s)
        if shared and t in sends:
            parts = fragments[sends[t]] - shared[sends[t]]
            clock.send((t, "parts"), parts, latency_s=latency_s)
        if t - lag in sends:
            seconds = clock.wait(t - lag)
            waited += seconds if t > before else 0.0
    # The queue of a link that is barely too slow grows for longer than is simulated.
    return max(waited, sum(fragments) - H * step_s)


def utilisation(step_s: float, exposed: float, H: int) -> float:
    """Return time of the H steps / time of the period. exposed: seconds of a period."""
    return H * step_s / (H * step_s + exposed)


def share(exposed: float, busy: float) -> float:
    """Return exposed / busy seconds of a link, in [0, 1]; 0 without transfers."""
    return min(1.0, exposed / busy) if busy else 0.0


def least_gbps(utilisation_at: Callable[[float], float]) -> float:
    """Return the least bandwidth for the utilisation FULL, with a precision of 0.1%.

    inf if the latency is too long. utilisation_at: returns the utilisation at a bandwidth.
    """
    low, high = 1e-14, 1e6
    if utilisation_at(high) < FULL:
        return math.inf
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if utilisation_at(middle) >= FULL else (middle, high)
    return high


def enough_gbps(gbps: float, programs: Iterable[tuple[float, float]]) -> float | None:
    """Return the bandwidth without exposed communication, in two digits; None if none suffices.

    An exchange that the program waits for by design, as with tau=0, is exposed on every link.

    Args:
      gbps: bandwidth of the programs' times [Gbit/s].
      programs: (busy, exposed) seconds of each program.
    """
    factor = 1.0
    for busy, exposed in programs:
        if exposed and busy - exposed <= HIDDEN * busy:
            return None
        factor = max(factor, busy / (busy - exposed) if exposed else 1.0)
    unit = 10.0 ** (math.floor(math.log10(gbps * factor)) - 1)
    return round(math.ceil(gbps * factor / unit - 1e-9) * unit, 6)


def enough_tau(tau: int, *, H: int, step_s: float, chunk_s: float, busy_s: float) -> int | None:
    """Return the tau whose steps are as long as a fragment's exchange; None if none suffices.

    Args:
      tau: current overlap steps.
      H: inner steps of a period.
      step_s: time of a step.
      chunk_s: time on the link of a fragment's share of a step with this tau.
      busy_s: time that the link is busy in a period.
    """
    enough = math.ceil(max(tau, 1) * chunk_s / step_s)
    return enough if busy_s <= H * step_s and tau < enough < H else None


def data_parallel(
    layers: int,
    parameters: float,
    step_s: float,
    *,
    gbps: float,
    latency_s: float = 0.0,
    bits: float = BFLOAT16,
) -> float:
    """Return the utilisation of data parallelism, which sends each gradient once a step.

    This is the simulator of arXiv 2501.18512, section 3.1 and supplement, with equal layers. The
    backward takes two thirds of a step, and each layer is sent after its own backward. The first
    layer is sent last, and the next step begins with it, so the step waits only for this layer.

    Args:
      layers: number of layers.
      parameters: number of parameters of the model.
      step_s: time of a step.
      gbps: bandwidth of all devices of a replica together [Gbit/s].
      latency_s: latency of the link; the papers have none.
      bits: bits of a gradient.
    """
    layer_s, backward_s = bits * parameters / layers / (gbps * 1e9), 2 * step_s / 3
    exposed = max(layer_s, layers * layer_s - backward_s * (1 - 1 / layers)) + latency_s
    return utilisation(step_s, exposed * (ENDLESS - 1), ENDLESS)
