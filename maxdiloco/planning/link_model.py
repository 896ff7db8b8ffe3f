"""How long a device waits for its link to other slices, which carries one transfer after another.

Only bytes count, and the latency that is given: no header, no packing, no compute of the exchange.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Sequence

from maxdiloco.diloco.schedule import offsets

FULL = 0.99  # compute utilisation at which a choice fits a link (arXiv 2501.18512, Table 4)
PERIODS = 12  # that are simulated: every period is as long as the last by then
HIDDEN = 0.02  # of a transfer's time: with less of it hidden, none is hidden by design. Our choice
BFLOAT16 = 16.0  # bits of a gradient of data parallelism, as the papers count
ENDLESS = 200  # steps of data parallelism, whose last reduction is not waited for


@dataclasses.dataclass
class Clock:
    """The time of a device [s]; when its link has carried all, and when each transfer arrives."""

    now: float = 0.0
    free: float = 0.0
    arrives: dict[Hashable, float] = dataclasses.field(default_factory=dict)

    def send(self, name: Hashable, seconds: float, *, latency_s: float = 0.0) -> None:
        """Put a transfer on the link, behind those that are there. seconds: on the link."""
        self.free = max(self.free, self.now) + seconds
        self.arrives[name] = self.free + latency_s

    def wait(self, name: Hashable) -> float:
        """Wait until a transfer has arrived; returns the seconds that it takes."""
        waited = max(0.0, self.arrives[name] - self.now)
        self.now += waited
        return waited


def exposed_s(
    fragments: Sequence[float],
    chunks: Sequence[float] = (),
    shared: Sequence[float] = (),
    alone: Sequence[float] = (),
    *,
    H: int,
    lag: int,
    scatter_steps: int = 0,
    step_s: float,
    latency_s: float = 0.0,
) -> float:
    """Return the seconds that a period waits for its exchanges, in a run without end.

    Args:
      fragments: seconds of each on the link. Fragment p is sent after the steps t with
        t = floor(p H / P) (mod H) and used `lag` steps later.
      chunks: seconds of each chunk that compiled programs exchange, one concurrently with each
        step, which ends when the chunk has arrived. Without chunks an exchange goes through host
        memory, after the exchanges that are on the link already.
      shared: with reduce-scatter the seconds of each fragment that its means take. They are sent
        when its parts have arrived, `scatter_steps` steps after the send. () with all-gather.
      alone: seconds that no step of the compiled programs hides.
      H: steps of a period.
      lag: steps between the send of a fragment and its use.
      scatter_steps: steps between the send of the parts and of the means.
      step_s: time of a step without an exchange.
      latency_s: of the link.
    """
    if not lag:
        return sum(seconds + latency_s for seconds in fragments) + latency_s * len(shared)
    if chunks:
        beside = sum(max(0.0, seconds + latency_s - step_s) for seconds in chunks)
        return beside + sum(seconds + latency_s for seconds in alone)
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
    # A link that is barely too slow fills its queue for longer than is simulated.
    return max(waited, sum(fragments) - H * step_s)


def utilisation(step_s: float, exposed: float, H: int) -> float:
    """Time of the H steps of a period / time of the period. exposed: seconds of a period."""
    return H * step_s / (H * step_s + exposed)


def share(exposed: float, busy: float) -> float:
    """Exposed over busy seconds of a link, in [0, 1]; 0 when nothing crosses."""
    return min(1.0, exposed / busy) if busy else 0.0


def least_gbps(at: Callable[[float], float]) -> float:
    """Return the least bandwidth for the utilisation FULL, to one in a thousand.

    inf: the latency is too long.
    """
    low, high = 1e-14, 1e6
    if at(high) < FULL:
        return math.inf
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if at(middle) >= FULL else (middle, high)
    return high


def enough_gbps(gbps: float, programs: Iterable[tuple[float, float]]) -> float | None:
    """The bandwidth at which nothing would be exposed, in two digits; None where none would do.

    programs: (busy, exposed) seconds of each at gbps. An exchange that the program waits for by
    design, as with tau=0, is exposed on every link.
    """
    factor = 1.0
    for busy, exposed in programs:
        if exposed and busy - exposed <= HIDDEN * busy:
            return None
        factor = max(factor, busy / (busy - exposed) if exposed else 1.0)
    unit = 10.0 ** (math.floor(math.log10(gbps * factor)) - 1)
    return round(math.ceil(gbps * factor / unit - 1e-9) * unit, 6)


def enough_tau(tau: int, *, H: int, step_s: float, chunk_s: float, busy_s: float) -> int | None:
    """The tau whose steps are as long as a fragment's exchange; None where no tau of H would do.

    chunk_s: on the link of a fragment's share of a step with this tau; busy_s: of a period.
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
    """Utilisation of data parallelism, which sends so many bits of each gradient once a step.

    Their simulator (arXiv 2501.18512, section 3.1 and supplement), whose layers are equal: the
    backward takes two thirds of a step, and each layer is sent after its own. The first layer
    leaves last, and the next step begins with it, so it alone is waited for.
    gbps: of all devices of a replica together [Gbit/s]. The papers have no latency.
    """
    layer_s, backward_s = bits * parameters / layers / (gbps * 1e9), 2 * step_s / 3
    exposed = max(layer_s, layers * layer_s - backward_s * (1 - 1 / layers)) + latency_s
    return utilisation(step_s, exposed * (ENDLESS - 1), ENDLESS)
