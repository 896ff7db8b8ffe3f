"""The order of sequences: compute which sequence, of which source, each row of a step reads.

    # K sources  T sequences of a period  N indices

The order is a pure function of the position and of (seed, epoch). It does not depend on hosts,
devices or processes.
"""

import dataclasses
import heapq
import math
import zlib
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, TypedDict

import numpy as np

# splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014).
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = 2**64 - 1
# Four rounds make a pseudorandom permutation (Luby, Rackoff 1988); two more for tiny sets.
_ROUNDS = 6
# Longest period of a mixture, in sequences. Weights that no period up to this length represents
# exactly are rounded to it: a share is off by 1e-5 at most. Its table costs 0.4 s.
LONGEST_PERIOD = 100_000


class SourcesRead(TypedDict):
    """Progress in the sources of a mixture."""

    begun: int  # index at which the present shares began
    read: dict[str, int]  # sequences of each source read before that index
    shares: dict[str, int]  # sequences in a period; empty if each replica reads one source
    order: list[str]  # names of the sources in the order of dataset_mixture


@dataclasses.dataclass(frozen=True)
class Position:
    """Reading position: row b of replica m in step s reads index base + ((s - s0)*M + m)*B + b."""

    base: int  # index of the first sequence of step s0
    s0: int  # first step of this part of the run, 1-based
    M: int  # replicas
    B: int  # sequences of a replica in a step
    sources: SourcesRead | None = None  # progress in the sources of a mixture

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, for the JSON of a checkpoint."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def sequences_before(self, step: int) -> int:
        """Return the number of sequences read in steps s0 to step - 1."""
        return (step - self.s0) * self.M * self.B


def first_position(M: int, B: int) -> Position:
    """Return the position of a new run: step 1 begins with the first sequence."""
    return Position(base=0, s0=1, M=M, B=B)


def next_position(position: Position, step: int, M: int, B: int) -> Position:
    """Return the position of a run that resumes at `step` with M replicas and batch size B.

    With the same M and B the position is unchanged. Otherwise its base is the first sequence that
    no earlier step has read, so no sequence of an epoch is left out or read twice.
    """
    if (M, B) == (position.M, position.B):
        return position
    base = position.base + position.sequences_before(step)
    return dataclasses.replace(position, base=base, s0=step, M=M, B=B)


def indices(position: Position, step: int, replicas, rows) -> np.ndarray:
    """Return the indices that a step reads, int64 (Algorithm 2, line 3).

    Args:
      position: the reading position of the run.
      step: 1-based, position.s0 or later.
      replicas: numbers below M.
      rows: numbers below B, which broadcast with `replicas`. Two arrays of equal length are pairs
        (m, b); np.ix_(replicas, rows) selects all rows of each replica.

    Returns:
      Indices in the order of all epochs: epoch e begins at index e * (sequences of an epoch).
    """
    replicas, rows = np.asarray(replicas, np.int64), np.asarray(rows, np.int64)
    assert step >= position.s0
    assert np.all((0 <= replicas) & (replicas < position.M))
    assert np.all((0 <= rows) & (rows < position.B))
    first = ((step - position.s0) * position.M + replicas) * position.B
    return position.base + first + rows


def windows(indices: np.ndarray, *, size: int | None, seed: int | None) -> np.ndarray:
    """Return the windows at indices.

    Args:
      indices: indices in the order of all epochs.
      size: windows of an epoch. None: endless.
      seed: seed of the permutation of each epoch. None: file order.
    """
    if size is None:
        return indices
    epochs, numbers = np.divmod(indices, size)
    if seed is None:
        return numbers
    permuted = np.empty_like(numbers)
    for epoch in np.unique(epochs):
        in_epoch = epochs == epoch
        permuted[in_epoch] = permute(numbers[in_epoch], size=size, seed=seed, epoch=int(epoch))
    return permuted


def permute(numbers: np.ndarray, *, size: int, seed: int, epoch: int) -> np.ndarray:
    """Return the images of numbers under a permutation of 0..size-1, without a table.

    The permutation is a Feistel network over the next even number of bits. A result that is not
    below `size` goes through it again (cycle walking).

    Args:
      numbers: int64 [N], from 0 to size - 1.
      size: number of elements.
      seed: seed of the permutation.
      epoch: number of the epoch; each epoch has another permutation.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = [_mix_int(_mix_int(_mix_int(seed) + epoch) + r) for r in range(_ROUNDS)]
    images = _feistel(numbers.astype(np.uint64), keys, half)
    outside = images >= size
    while outside.any():
        images[outside] = _feistel(images[outside], keys, half)
        outside = images >= size
    return images.astype(np.int64)


def seed_of(name: str, seed: int) -> int:
    """Derive a seed from a name; the empty name returns `seed` unchanged."""
    return seed + (zlib.crc32(name.encode()) << 32)


def _feistel(values, keys, half):
    mask, shift = np.uint64(2**half - 1), np.uint64(half)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + np.uint64(key)) & mask)
    return (left << shift) | right


def _mix(values):
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MIX_1)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_MIX_2)
    return values ^ (values >> np.uint64(31))


def _mix_int(value: int) -> int:
    return int(_mix(np.array([(value + _GAMMA) & _MASK], np.uint64))[0])


def shares(weights_K: Sequence[Fraction]) -> tuple[int, ...]:
    """Return the sequences of each source in a period.

    The result has the smallest whole numbers in proportion to the weights. If they add up to more
    than LONGEST_PERIOD, they are rounded by largest remainder, a positive weight to 1 at least.

    Args:
      weights_K: weights of the sources, not negative, at least one positive.
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


class Interleave:
    """A periodic order of sources, scheduled by earliest deadline first.

    After any n indices, the number of sequences of source k differs from its share of n by less
    than one: proportionate fairness (Baruah, Cohen, Plaxton, Varvel 1996) on one processor.
    Sequence j of a source with share a is due at indices floor(j*T/a) to ceil((j+1)*T/a) - 1.
    """

    def __init__(self, share_K: Sequence[int]):
        """Compute one period. share_K: sequences of each source in the period; their sum is T."""
        T = sum(share_K)
        released = [(0, k, 0) for k, share in enumerate(share_K) if share]
        due: list[tuple[int, int, int]] = []
        source_T, number_T = np.empty(T, np.int64), np.empty(T, np.int64)
        for place in range(T):
            while released and released[0][0] <= place:
                _, k, number = heapq.heappop(released)
                heapq.heappush(due, (-(-(number + 1) * T // share_K[k]), k, number))
            _, k, number = heapq.heappop(due)
            source_T[place], number_T[place] = k, number  # number: sequences of source k before
            if number + 1 < share_K[k]:
                heapq.heappush(released, ((number + 1) * T // share_K[k], k, number + 1))
        self._source_T, self._number_T = source_T, number_T
        self._share_K = np.array(share_K, np.int64)

    def at(self, indices_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source at each index, and the sequence number in that source, int64 [N]."""
        period_N, place_N = np.divmod(indices_N, len(self._source_T))
        source_N = self._source_T[place_N]
        return source_N, period_N * self._share_K[source_N] + self._number_T[place_N]

    def before(self, index: int) -> np.ndarray:
        """Return the number of sequences of each source before an index, int64 [K]."""
        period, place = divmod(index, len(self._source_T))
        part_K = np.bincount(self._source_T[:place], minlength=len(self._share_K))
        return period * self._share_K + part_K

    def index_of(self, source: int, number: int) -> int:
        """Return the index of the number-th sequence of a source whose share is not 0."""
        period, number = divmod(number, int(self._share_K[source]))
        place = np.flatnonzero(self._source_T == source)[number]
        return period * len(self._source_T) + int(place)
