"""Which source of a mixture a sequence comes from: exact shares over any stretch.

# K sources  T sequences of a period  N indices asked for
"""

import dataclasses
import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

# Weights are rounded to this many parts when no smaller period has them exactly: our choice; a
# table of it is made in 0.4 s, and a share is off by 1e-5 at most.
LONGEST_PERIOD = 100_000


def shares(weights_K: Sequence[Fraction]) -> tuple[int, ...]:
    """Sequences of each source in a period: the smallest whole numbers in proportion to weights.

    weights: not negative, one of them positive. Where these numbers add up to more than
    LONGEST_PERIOD they are rounded by largest remainder, a positive weight to 1 at least.
    """
    scale = math.lcm(*(weight.denominator for weight in weights_K))
    whole = [int(weight * scale) for weight in weights_K]
    divisor = math.gcd(*whole)
    whole = [number // divisor for number in whole]
    total = sum(whole)
    if total <= LONGEST_PERIOD:
        return tuple(whole)
    ideal = [Fraction(number * LONGEST_PERIOD, total) for number in whole]
    rounded = [max(int(share), 1) if share else 0 for share in ideal]
    by_remainder = sorted(range(len(ideal)), key=lambda k: rounded[k] - ideal[k])
    for k in by_remainder[: max(0, LONGEST_PERIOD - sum(rounded))]:
        rounded[k] += 1
    return tuple(rounded)


@dataclasses.dataclass(frozen=True)
class Interleave:
    """A period of the order of sources, repeated: index i belongs to a source and its number there.

    After any n indices source k has had less than one sequence more or fewer than its share of n.
    source_T: source of each index of a period. number_T: how many of that source come before.
    share_K: sequences of each source in a period.
    """

    source_T: np.ndarray
    number_T: np.ndarray
    share_K: np.ndarray

    @classmethod
    def of(cls, share_K: Sequence[int]) -> "Interleave":
        """The order for these shares.

        Sequence j of a source with share a of T is due in places floor(j*T/a) to
        ceil((j+1)*T/a) - 1, and the earliest deadline goes first: proportionate fairness (Baruah,
        Cohen, Plaxton, Varvel 1996) on one processor, where that order meets every deadline.
        """
        T = sum(share_K)
        released = [(0, k, 0) for k, share in enumerate(share_K) if share]
        due: list[tuple[int, int, int]] = []
        source_T, number_T = np.empty(T, np.int64), np.empty(T, np.int64)
        for place in range(T):
            while released and released[0][0] <= place:
                _, k, number = heapq.heappop(released)
                heapq.heappush(due, (-(-(number + 1) * T // share_K[k]), k, number))
            _, k, number = heapq.heappop(due)
            source_T[place], number_T[place] = k, number
            if number + 1 < share_K[k]:
                heapq.heappush(released, ((number + 1) * T // share_K[k], k, number + 1))
        return cls(source_T, number_T, np.array(share_K, np.int64))

    def at(self, indices_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sources of indices, and their numbers there, int64 [N]."""
        period_N, place_N = np.divmod(indices_N, len(self.source_T))
        source_N = self.source_T[place_N]
        return source_N, period_N * self.share_K[source_N] + self.number_T[place_N]

    def before(self, index: int) -> np.ndarray:
        """Sequences of each source before an index, int64 [K]."""
        period, place = divmod(index, len(self.source_T))
        part_K = np.bincount(self.source_T[:place], minlength=len(self.share_K))
        return period * self.share_K + part_K

    def index_of(self, source: int, number: int) -> int:
        """The index of a source's number-th sequence; its share is not 0."""
        period, number = divmod(number, int(self.share_K[source]))
        place = np.flatnonzero(self.source_T == source)[number]
        return period * len(self.source_T) + int(place)
