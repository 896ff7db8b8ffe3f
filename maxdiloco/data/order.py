"""Which sequence a row of a step reads: one global order, divided among the replicas.

A pure function of the position and of (seed, epoch), whatever the hosts, devices and processes.
"""

import dataclasses
import zlib
from typing import Any

import numpy as np

# splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014).
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = 2**64 - 1
# Four rounds make a pseudorandom permutation (Luby, Rackoff 1988); two more for tiny sets.
_ROUNDS = 6


@dataclasses.dataclass(frozen=True)
class SourcesRead:
    """How far the sources of a mixture are read, by name.

    begun: index at which the present shares began. read: sequences of each source before it.
    shares: sequences of each source in a period (interleave.shares); empty for replicas with
      sources of their own.
    """

    begun: int
    read: dict[str, int]
    shares: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Position:
    """Reading position: step s, replica m, row b reads index base + ((s - s0)*M + m)*B + b.

    base: index of the first sequence of step s0 (1-based); M replicas; B sequences per replica.
    sources: of a mixture, else None.
    """

    base: int
    s0: int
    M: int
    B: int
    sources: SourcesRead | None = None

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, for a checkpoint's JSON."""
        fields = dataclasses.asdict(self)
        if self.sources is None:
            del fields["sources"]
        return fields

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Position":
        """The position that `to_dict` wrote."""
        if "sources" in fields:
            fields = fields | {"sources": SourcesRead(**fields["sources"])}
        return cls(**fields)

    def sequences_before(self, step: int) -> int:
        """Sequences from step s0 to before `step`."""
        return (step - self.s0) * self.M * self.B


def first_position(M: int, B: int) -> Position:
    """Position of a new run: step 1 begins with the first sequence."""
    return Position(base=0, s0=1, M=M, B=B)


def next_position(position: Position, step: int, M: int, B: int) -> Position:
    """Position of a run that goes on with `step`, the next one to be done, with M and B.

    With the same M and B it is unchanged. Otherwise its base is the first sequence that no step
    before `step` has read, so that none is left out or read twice in an epoch.
    """
    if (M, B) == (position.M, position.B):
        return position
    base = position.base + position.sequences_before(step)
    return dataclasses.replace(position, base=base, s0=step, M=M, B=B)


def indices(position: Position, step: int, replicas, rows) -> np.ndarray:
    """Indices that a step reads, int64, counted on through the epochs: Algorithm 2, line 3.

    replicas, rows: numbers below M and B, arrays that broadcast against each other: two of equal
    length name pairs (m, b), np.ix_(replicas, rows) names all rows of each replica.
    """
    replicas, rows = np.asarray(replicas, np.int64), np.asarray(rows, np.int64)
    assert step >= position.s0
    assert np.all((0 <= replicas) & (replicas < position.M))
    assert np.all((0 <= rows) & (rows < position.B))
    first = ((step - position.s0) * position.M + replicas) * position.B
    return position.base + first + rows


def windows(indices: np.ndarray, *, size: int, seed: int | None) -> np.ndarray:
    """Windows of indices: index i is number i % size of epoch i // size.

    size: windows in an epoch. seed: of the permutation of each epoch; None: file order.
    """
    epochs, numbers = np.divmod(indices, size)
    if seed is None:
        return numbers
    permuted = np.empty_like(numbers)
    for epoch in np.unique(epochs):
        in_epoch = epochs == epoch
        permuted[in_epoch] = permute(numbers[in_epoch], size=size, seed=seed, epoch=int(epoch))
    return permuted


def permute(numbers: np.ndarray, *, size: int, seed: int, epoch: int) -> np.ndarray:
    """Images of numbers [n] under a permutation of 0..size-1, a pure function of (seed, epoch).

    A Feistel network over the next even number of bits; a result that is not below size goes
    through it again (cycle walking), so no table is kept, however many windows there are.
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
    """A seed of its own for something with a name; that of the empty name is `seed`."""
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
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)
