"""How long training waits for the link: arithmetic on a schedule, in a run without end.

Only bytes and the latency that is given count: a link carries one fragment after the other, and
there is no header, no packing and no compute of the exchange.
"""

import math
from collections.abc import Callable, Sequence

from maxdiloco.diloco.schedule import offsets

PERIODS = 12  # that are simulated: every period is as long as the last by then
FULL = 0.99  # of compute utilisation: a link that gives it is filled (arXiv 2501.18512, Table 4)


def host_exposed_s(
    seconds: Sequence[float], *, H: int, lag: int, step_s: float, latency_s: float = 0.0
) -> float:
    """Seconds that a period waits for an exchange through host memory.

    A fragment leaves at once, behind those on the link, and is waited for when it is used.
    seconds: of each fragment on the link. Fragment p is sent after the steps t with
    t = floor(p H / P) (mod H) and used `lag` steps later.
    """
    clock = free = waited = 0.0
    before, last = (PERIODS - 1) * H, PERIODS * H
    firsts = [offset or H for offset in offsets(len(seconds), H)]
    sends = {t: p for p, first in enumerate(firsts) for t in range(first, last + 1, H)}
    arrives: dict[int, float] = {}
    now = 0
    for t in sorted({*sends, *(t + lag for t in sends if t + lag <= last)}):
        clock, now = clock + (t - now) * step_s, t
        if t in sends:
            free = max(free, clock) + seconds[sends[t]]
            arrives[t] = free + latency_s
        wait = max(0.0, arrives.pop(t - lag, clock) - clock)
        clock += wait
        waited += wait if t > before else 0.0
    # A link that is barely too slow fills its queue for longer than is simulated.
    return max(waited, sum(seconds) - H * step_s)


def program_exposed_s(seconds: Sequence[float], *, step_s: float, latency_s: float = 0.0) -> float:
    """Seconds that a period waits for an exchange inside compiled programs.

    A step that carries a chunk ends when the chunk has arrived. seconds: on the link, of each chunk
    that a period carries. Without overlap a chunk is a fragment, and no step carries it: step_s=0.
    """
    return sum(max(0.0, chunk_s + latency_s - step_s) for chunk_s in seconds)


def utilisation(step_s: float, exposed_s: float, H: int) -> float:
    """Time of the H steps of a period / time of the period."""
    return H * step_s / (H * step_s + exposed_s)


def least_gbps(at: Callable[[float], float], target: float = FULL) -> float:
    """The least bandwidth at which a utilisation reaches the target, to one in a thousand.

    Infinity where none does: the latency alone is too long.
    """
    low, high = 1e-14, 1e6
    if at(high) < target:
        return math.inf
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if at(middle) >= target else (middle, high)
    return high
