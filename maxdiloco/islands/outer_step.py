"""The outer step of a fragment in numpy float32: payloads, weighted mean, optimizer, digest.

Every machine computes the same bits: all operations are elementwise, with correctly rounded
results, and sums have a fixed order. A compiled program or a library's sum promises neither.

With a mean as aggregation, one step differs from exact arithmetic by at most
    (M + 8) 2^-24 (|theta| + lr (1 + b) (a + b |m|)),  a = sum of w_i |g_i| / sum of w_i
for outer parameters (theta), M members, rate lr, momentum b and trace m. The reason is that a value
is rounded at most M + 8 times. The difference from diloco/outer.py on any device is at most half of
this bound.

    # N values of a fragment  T tensors of a leaf
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from maxdiloco.diloco import quantize
from maxdiloco.islands import records
from maxdiloco.islands.records import Leaf, Record, Run

WIRES = quantize.NAMES
# A mean is not sparse, and it has no error feedback, so that two bits are too few.
WIRES_DOWN = ("float32", "bfloat16", "int8", "float4_e3m0")
OPTIMIZERS = ("nesterov", "sgd")  # diloco/outer.py has their formulas
AGGREGATIONS = ("mean", "radial_directional_mean")


def problem(run: Run) -> str:
    """Return the error in a run.json; "" if outer steps can be computed with it."""
    values = run._asdict()
    for key, known in (
        ("wire", WIRES), ("wire_down", WIRES_DOWN), ("aggregation", AGGREGATIONS),
        ("outer_optimizer", OPTIMIZERS),
    ):  # fmt: skip
        if values[key] not in known:
            return f"{key}={values[key]} is unknown: expected one of {', '.join(known)}"
    for key in ("sync_period", "snapshot_every", "tokens", "islands_min"):
        if values[key] < 1:
            return f"{key}={values[key]} is not valid: expected an integer >= 1"
    if run.overlap_steps >= run.sync_period:
        period = f"sync_period={run.sync_period}"
        return f"overlap_steps={run.overlap_steps} is too large: expected less than {period}"
    leaves = [leaf for fragment in run.fragments for leaf in fragment]
    if not all(run.fragments) or any(n < 1 or n % max(tensors, 1) for n, tensors in leaves):
        return "fragments has a leaf without values, or tensors of unequal sizes"
    return "" if leaves else "fragments is empty"


class Outer(NamedTuple):
    """Outer parameters and the optimizer's trace, [N] float32 each; never written to."""

    theta: np.ndarray
    trace: np.ndarray

    def digest(self) -> str:
        """Return the sha256 of the values."""
        return records.sha256(self.to_bytes())

    def to_bytes(self) -> bytes:
        """Return the payload of a snapshot: little-endian float32."""
        return self.theta.astype("<f4").tobytes() + self.trace.astype("<f4").tobytes()


def fresh(theta: np.ndarray) -> Outer:
    """Return the outer state before the first record."""
    theta = np.array(theta, np.float32)
    return Outer(theta, np.zeros_like(theta))


def from_bytes(payload: bytes) -> Outer:
    """Return the outer state of Outer.to_bytes."""
    return Outer(*np.split(np.frombuffer(payload, "<f4").astype(np.float32), 2))


class Term(NamedTuple):
    """The message of a member: (island, incarnation), weight, and values [N]."""

    source: tuple[str, int]
    weight: float
    values: np.ndarray


def aggregate(run: Run, fragment: int, terms: Sequence[Term]) -> np.ndarray:
    """Rule 5: return the gradient of a record, the weighted mean of its islands [N].

    Messages of one island are consecutive, so their sum is the island's progress. With equal
    weights the mean is diloco.outer.ordered_mean. The other aggregation is the same module's
    radial_directional_mean, with weights.
    """
    weight_of: dict[tuple[str, int], float] = {}
    progress_of: dict[tuple[str, int], np.ndarray] = {}
    for source, weight, values in terms:
        weight_of[source] = weight
        earlier = progress_of.get(source)
        progress_of[source] = values if earlier is None else earlier + values
    weights, progress = [*weight_of.values()], [*progress_of.values()]
    mean = _weighted_mean(weights, progress)
    if run.aggregation == "mean":
        return mean
    parts, start = [], 0
    for leaf in run.fragments[fragment]:
        own = slice(start, start + leaf.size)
        parts.append(_radial_directional_mean(leaf, weights, [x[own] for x in progress], mean[own]))
        start += leaf.size
    return np.concatenate(parts)


def _weighted_mean(weights: Sequence[float], arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return a mean, in the order of the arrays.

    Weights are relative to the largest one, so that equal weights change no bit.
    """
    most, total, found = max(weights), 0.0, None
    for weight, x in zip(weights, arrays, strict=True):
        total += weight
        scaled = x * np.float32(weight / most)
        found = scaled if found is None else found + scaled
    return found * np.float32(most / total)


def _radial_directional_mean(leaf: Leaf, weights, values, mean) -> np.ndarray:
    if leaf.tensors == 0:  # rows of a vocabulary: the mean
        return mean
    tensors = [x.reshape(leaf.tensors, -1) for x in values]
    norms = [_norms(x_TN) for x_TN in tensors]
    radius_T = _weighted_mean(weights, norms)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        factors = [np.where(n > 0, radius_T / n, np.float32(0)) for n in norms]
        equally_long = [x_TN * f[:, None] for x_TN, f in zip(tensors, factors, strict=True)]
        direction = _weighted_mean(weights, equally_long)
        length_T = _norms(direction)
        known_T = np.isfinite(length_T) & (length_T > 0)
        scaled = direction * np.where(known_T, radius_T / length_T, np.float32(0))[:, None]
    return np.where(known_T[:, None], scaled, mean.reshape(direction.shape)).reshape(-1)


def _norms(x_TN: np.ndarray) -> np.ndarray:
    """Return L2 norms [T]. Squares are added by halves, in an order that no library chooses."""
    squares = x_TN.astype(np.float64) ** 2
    while squares.shape[1] > 1:
        if squares.shape[1] % 2:
            squares = np.pad(squares, ((0, 0), (0, 1)))
        half = squares.shape[1] // 2
        squares = squares[:, :half] + squares[:, half:]
    return np.sqrt(squares[:, 0]).astype(np.float32)


def norm(x_N: np.ndarray) -> float:
    """Return the L2 norm that a message declares."""
    return float(_norms(np.asarray(x_N, np.float32)[None])[0])


def stepped(run: Run, outer: Outer, record: Record, gradient: np.ndarray | None) -> Outer:
    """Rule 5: return the outer state after a record. One without members changes nothing.

    Args:
      run: run.json of the log.
      outer: before the record.
      record: the record.
      gradient: its decoded gradient [N]; None without members.
    """
    if not record.members:
        return outer
    lr, b = np.float32(run.outer_lr), np.float32(run.outer_momentum)
    g = gradient * np.float32(record.scale)
    trace = b * outer.trace + g
    update = g + b * trace if run.outer_optimizer == "nesterov" else trace
    return Outer(outer.theta - lr * update, trace)


def merged(x: np.ndarray, theta: np.ndarray, alpha: float) -> np.ndarray:
    """Rule 6: return the island's values after a merge, as diloco.outer.merge."""
    if alpha in (0, 1):
        return theta if alpha == 0 else x
    return x + np.float32(1 - alpha) * (theta - x)


# -- payloads --------------------------------------------------------------------------------------


def sizes_of(run: Run, fragment: int) -> tuple[int, ...]:
    """Return the number of values of each leaf."""
    return tuple(leaf.size for leaf in run.fragments[fragment])


def has_gradient(run: Run, record: Record) -> bool:
    """Return whether the gradient of a record is an object of its own in the store.

    Otherwise each island computes it from the messages. That transfers no more bytes if the
    messages of the other members are not larger than the gradient.
    """
    sizes = sizes_of(run, record.fragment)
    others = (len(record.members) - 1) * payload_size(run.wire, sizes)
    return others > payload_size(run.wire_down, sizes)


def reduced(run: Run, fragment: int, terms: Sequence[Term]) -> bytes:
    """Return the payload of a record's gradient: the aggregate, encoded in wire_down."""
    return encode(run.wire_down, sizes_of(run, fragment), aggregate(run, fragment, terms))


def encode(wire: str, sizes: tuple[int, ...], x_N: np.ndarray) -> bytes:
    """Return the payload of a fragment, whose leaves have these sizes. Encodes each leaf."""
    leaves = np.split(np.asarray(x_N, np.float32), np.cumsum(sizes)[:-1])
    return b"".join(quantize.encode(wire, leaf).tobytes() for leaf in leaves)


def decode(wire: str, sizes: tuple[int, ...], payload: bytes) -> np.ndarray:
    """Return the values [N] of `encode`. Raises ValueError for a payload of another size."""
    if len(payload) != payload_size(wire, sizes):
        raise ValueError(
            f"{len(payload)} bytes are not a {wire} payload of leaves of {sizes} values: expected "
            f"{payload_size(wire, sizes)}"
        )
    codes = np.frombuffer(payload, quantize.wire_format(wire).dtype)
    ends = np.cumsum([quantize.encoded_size(wire, n) for n in sizes])
    leaves = zip(np.split(codes, ends[:-1]), sizes, strict=True)
    return np.concatenate([quantize.decode(wire, codes_K, n) for codes_K, n in leaves])


def payload_size(wire: str, sizes: tuple[int, ...]) -> int:
    """Return the bytes of a payload."""
    values = sum(quantize.encoded_size(wire, n) for n in sizes)
    return values * quantize.wire_format(wire).dtype.itemsize
