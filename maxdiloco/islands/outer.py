"""The outer state of a fragment on the host: mean, outer step, digest. numpy float32.

The same bits on every machine: all of it is elementwise, with correctly rounded results, and sums
are taken in a fixed order; a compiled program or a library's sum promises neither.

What one step gives differs from exact arithmetic, and from half the difference to diloco/outer.py
on any device, where the merge is a mean, by at most
    (M + 8) 2^-24 (|theta| + lr (1 + b) (a + b |m|)),  a = sum of w_i |g_i| / sum of w_i
for M members, rate lr, momentum b and trace m: no value goes through more than M + 8 roundings.

    # N values of a fragment  T tensors of a leaf
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from maxdiloco.islands import wires
from maxdiloco.islands.records import Leaf, Run

OPTIMIZERS = ("nesterov", "sgd")  # diloco/outer.py has their formulas
AGGREGATIONS = ("mean", "radial_directional_mean")


def problem(run: Run) -> str:
    """What is wrong with a run.json, "" if it can be computed with."""
    values = run._asdict()
    for key, known in (
        ("wire", wires.WIRES), ("wire_down", wires.DOWN), ("aggregation", AGGREGATIONS),
        ("outer_optimizer", OPTIMIZERS),
    ):  # fmt: skip
        if values[key] not in known:
            return f"{key}={values[key]} is none of {', '.join(known)}"
    for key in ("sync_period", "snapshot_every", "tokens", "islands_min"):
        if values[key] < 1:
            return f"{key}={values[key]} is below 1"
    if run.overlap_steps >= run.sync_period:
        return f"overlap_steps={run.overlap_steps} is not below sync_period={run.sync_period}"
    leaves = [leaf for fragment in run.fragments for leaf in fragment]
    if not all(run.fragments) or any(n < 1 or n % max(tensors, 1) for n, tensors in leaves):
        return "fragments has one without values, or tensors of unequal sizes"
    return "" if leaves else "fragments has none"


class Outer(NamedTuple):
    """theta and the optimizer's trace of a fragment, [N] float32 each; never written to."""

    theta: np.ndarray
    trace: np.ndarray

    def digest(self) -> str:
        """sha256 of the values."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def to_bytes(self) -> bytes:
        """The payload of a snapshot: little-endian float32."""
        return self.theta.astype("<f4").tobytes() + self.trace.astype("<f4").tobytes()


def fresh(theta: np.ndarray) -> Outer:
    """The state before the first record."""
    theta = np.array(theta, np.float32)
    return Outer(theta, np.zeros_like(theta))


def from_bytes(payload: bytes) -> Outer:
    """Of Outer.to_bytes."""
    return Outer(*np.split(np.frombuffer(payload, "<f4").astype(np.float32), 2))


class Term(NamedTuple):
    """A member's message: island and incarnation it is of, its weight, values [N]."""

    source: tuple[str, int]
    weight: float
    values: np.ndarray


def merged(run: Run, fragment: int, terms: Sequence[Term]) -> np.ndarray:
    """The gradient of a record: the weighted mean of the islands, [N]. Rule 5.

    Messages of one island follow each other, and their sum is its progress. Of equal weights it is
    diloco.outer.ordered_mean; the other aggregation is its radial_directional_mean with weights.
    """
    islands: dict[tuple[str, int], tuple[float, np.ndarray]] = {}
    for source, weight, values in terms:
        _, earlier = islands.get(source, (weight, None))
        islands[source] = weight, values if earlier is None else earlier + values
    most, total = max(w for w, _ in islands.values()), 0.0
    for weight, _ in islands.values():
        total += weight
    mean = _weighted_sum(islands.values(), most) * np.float32(most / total)
    if run.aggregation == "mean":
        return mean
    parts, start = [], 0
    for leaf in run.fragments[fragment]:
        own = slice(start, start + leaf.size)
        values = [(weight, values[own]) for weight, values in islands.values()]
        parts.append(
            _radial_directional_mean(leaf, values, mean[own], most, np.float32(most / total))
        )
        start += leaf.size
    return np.concatenate(parts)


def _weighted_sum(terms, most) -> np.ndarray:
    """Relative to the largest weight, so that equal weights change no bit."""
    total = None
    for weight, values in terms:
        scaled = values * np.float32(weight / most)
        total = scaled if total is None else total + scaled
    return total


def _radial_directional_mean(leaf: Leaf, terms, mean, most, inverse) -> np.ndarray:
    if leaf.tensors == 0:  # rows of a vocabulary: the mean
        return mean

    def tensors(x):
        return x.reshape(leaf.tensors, -1)

    norms = [_norms(tensors(x)) for _, x in terms]
    radius_T = _weighted_sum([(w, n) for (w, _), n in zip(terms, norms, strict=True)], most)
    radius_T = radius_T * inverse
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        factors = [np.where(n > 0, radius_T / n, np.float32(0)) for n in norms]
        equally_long = [
            (w, tensors(x) * f[:, None]) for (w, x), f in zip(terms, factors, strict=True)
        ]
        direction = _weighted_sum(equally_long, most) * inverse
        length_T = _norms(direction)
        known_T = np.isfinite(length_T) & (length_T > 0)
        scaled = direction * np.where(known_T, radius_T / length_T, np.float32(0))[:, None]
    return np.where(known_T[:, None], scaled, tensors(mean)).reshape(-1)


def _norms(x_TN: np.ndarray) -> np.ndarray:
    """L2 norms [T]: squares in float64, added by halves, so that no library chooses the order."""
    squares = x_TN.astype(np.float64) ** 2
    while squares.shape[1] > 1:
        if squares.shape[1] % 2:
            squares = np.pad(squares, ((0, 0), (0, 1)))
        half = squares.shape[1] // 2
        squares = squares[:, :half] + squares[:, half:]
    return np.sqrt(squares[:, 0]).astype(np.float32)


def norm(x_N: np.ndarray) -> float:
    """The norm that a message says, of all its values."""
    return float(_norms(np.asarray(x_N, np.float32)[None])[0])


def stepped(run: Run, outer: Outer, gradient: np.ndarray, scale: float) -> Outer:
    """One outer step with a record's gradient, which is scaled first. Rule 5."""
    lr, b = np.float32(run.outer_lr), np.float32(run.outer_momentum)
    g = gradient * np.float32(scale)
    trace = b * outer.trace + g
    update = g + b * trace if run.outer_optimizer == "nesterov" else trace
    return Outer(outer.theta - lr * update, trace)


def sizes_of(run: Run, fragment: int) -> tuple[int, ...]:
    """Values of each leaf."""
    return tuple(leaf.size for leaf in run.fragments[fragment])


def reduced(run: Run, fragment: int, terms: Sequence[Term]) -> bytes:
    """The payload of g/F/R: `merged`, encoded as all will decode it."""
    return wires.encode(run.wire_down, sizes_of(run, fragment), merged(run, fragment, terms))
