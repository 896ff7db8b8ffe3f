"""The whole algorithm in float64 NumPy, by brute force. Tests compare the library with it.

It is written from the contract (docs/development/algorithm-contract.md) and the papers: DiLoCo
(arXiv 2311.08105) Algorithm 1, Streaming DiLoCo (2501.18512) Algorithm 2 and eager updates
(2502.12996). It imports nothing of the package. One replica's parameters are a list of arrays in
tree order. A fragment is one boolean mask for each leaf, the schedule is a condition on the step,
and an optimizer is its formula.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Leaves = list[np.ndarray]
# An entry of `kinds`: None (of no layer), ("layers", axis, (layer of entry 0, of entry 1, ...)) or
# ("vocabulary", axis).
Kind = tuple | None


@dataclasses.dataclass(frozen=True)
class Settings:
    """One configuration. kinds: one entry a leaf in tree order, None means no leaf is stacked."""

    num_replicas: int
    sync_period: int
    num_fragments: int = 1
    overlap_steps: int = 0
    alpha: float = 0.0
    outer: str = "nesterov"  # nesterov | sgd | adam
    outer_lr: float = 0.7
    outer_momentum: float = 0.9  # b, and Adam's b1
    adam_b2: float = 0.999
    adam_eps: float = 1e-8
    round_overlap: str = "none"  # none | delayed | eager
    error_feedback: bool = False
    aggregation: str = "mean"  # mean | radial_directional_mean
    offsets: tuple[int, ...] | None = None
    sequential: bool = False
    num_nonlayer: int = 1
    kinds: tuple[Kind, ...] | None = None


# --- fragments --------------------------------------------------------------------------------


def deal(count: int, fragments: int, sequential: bool) -> list[int]:
    """Return the fragment of each of `count` items: i mod fragments, or contiguous runs."""
    if not sequential:
        return [i % fragments for i in range(count)]
    longer = count % fragments  # this many runs, the first ones, are longer by one
    runs = [count // fragments + (1 if p < longer else 0) for p in range(fragments)]
    return list(itertools.chain.from_iterable([p] * run for p, run in enumerate(runs)))


def fragment_of_each_value(shapes: Sequence[tuple[int, ...]], s: Settings) -> list[np.ndarray]:
    """Return the fragment of each value: for each leaf an integer array of its shape."""
    P, k = s.num_fragments, s.num_nonlayer
    kinds = s.kinds if s.kinds is not None else (None,) * len(shapes)
    homes = [np.full(shape, -1) for shape in shapes]
    layer_count = 1 + max(
        (max(kind[2]) for kind in kinds if kind and kind[0] == "layers"), default=-1
    )
    nonlayer_exists = any(not (kind and kind[0] == "layers") for kind in kinds)
    leaf_home = deal(len(shapes), P, s.sequential)
    if layer_count:
        first = k if nonlayer_exists else 0
        layer_home = (
            [first + p for p in deal(layer_count, P - first, s.sequential)] if P > 1 else []
        )
    for i, (shape, kind) in enumerate(zip(shapes, kinds, strict=True)):
        for index in np.ndindex(*shape):
            if P == 1:
                home = 0
            elif not layer_count:
                home = leaf_home[i]
            elif kind and kind[0] == "layers":
                home = layer_home[kind[2][index[kind[1]]]]
            elif kind and kind[0] == "vocabulary":
                home = index[kind[1]] % k
            else:
                home = 0
            homes[i][index] = home
    return homes


def masks(shapes: Sequence[tuple[int, ...]], s: Settings) -> list[list[np.ndarray]]:
    """Return boolean masks [P][leaf]; asserts a partition without an empty fragment."""
    homes = fragment_of_each_value(shapes, s)
    result = [[home == p for home in homes] for p in range(s.num_fragments)]
    for i in range(len(shapes)):
        count = sum(mask[i].astype(int) for mask in result)
        assert np.all(count == 1), f"leaf {i}: {count} is not one fragment for every value"
    for p, mask in enumerate(result):
        assert any(m.any() for m in mask), f"fragment {p} is empty"
    return result


# --- schedule ---------------------------------------------------------------------------------


def offset(p: int, s: Settings) -> int:
    """Return t_p = floor(p*H/P), or the offset of the settings mod H."""
    if s.offsets is not None:
        return s.offsets[p] % s.sync_period
    return (p * s.sync_period) // s.num_fragments


def is_sent(p: int, t: int, s: Settings) -> bool:
    """Return whether fragment p is sent after inner step t: t >= 1 and t = t_p (mod H)."""
    return t >= 1 and (t - offset(p, s)) % s.sync_period == 0


def is_applied(p: int, t: int, s: Settings) -> bool:
    """Return whether fragment p is applied after step t: it was sent after step t - tau."""
    return is_sent(p, t - s.overlap_steps, s)


# --- outer optimizers -------------------------------------------------------------------------


@dataclasses.dataclass
class OuterState:
    """State of the outer optimizer for one copy of theta, as full-size arrays."""

    first: Leaves  # momentum, or Adam's first moment
    second: Leaves  # Adam's second moment
    count: list[int]  # updates of each fragment so far


def outer_update(theta, state, p, mask, mean, s: Settings) -> None:
    """theta_p <- OuterOpt(theta_p, mean), in place. mask, mean: one entry a leaf.

    nesterov: m' = b m + g, theta' = theta - lr (g + b m')  (optax.sgd(..., nesterov=True))
    sgd:      m' = b m + g, theta' = theta - lr m'
    adam:     theta' = theta - lr m / (sqrt(v) + eps), both moments corrected for their zero start
    """
    state.count[p] += 1
    lr, b = s.outer_lr, s.outer_momentum
    for i, own in enumerate(mask):
        g = mean[i]
        if s.outer == "adam":
            state.first[i][own] = b * state.first[i][own] + (1 - b) * g
            state.second[i][own] = s.adam_b2 * state.second[i][own] + (1 - s.adam_b2) * g * g
            first = state.first[i][own] / (1 - b ** state.count[p])
            second = state.second[i][own] / (1 - s.adam_b2 ** state.count[p])
            theta[i][own] -= lr * first / (np.sqrt(second) + s.adam_eps)
            continue
        state.first[i][own] = b * state.first[i][own] + g
        direction = {"nesterov": g + b * state.first[i][own], "sgd": state.first[i][own]}[s.outer]
        theta[i][own] -= lr * direction


# --- the algorithm ----------------------------------------------------------------------------


class Oracle:
    """M replicas and their outer parameters, advanced one inner step at a time.

    inner_step(leaves, opt_state, batch) -> (leaves, opt_state, metrics): one replica's view.
    codec: encodes and decodes the values [n] of one leaf of one fragment of a replica's outer
    gradient. reduced: the same for the mean, with reduce-scatter; None: all-gather.
    """

    def __init__(
        self,
        s: Settings,
        inner_step: Callable,
        params: Leaves,
        opt_state: Any,
        codec: Callable[[np.ndarray], np.ndarray] = lambda values: values,
        reduced: Callable[[np.ndarray], np.ndarray] | None = None,
    ):
        self.s, self.inner_step, self.codec, self.reduced = s, inner_step, codec, reduced
        start = [np.array(leaf, np.float64) for leaf in params]
        self.masks = masks([leaf.shape for leaf in start], s)
        self.t = 0
        self.replicas = [[leaf.copy() for leaf in start] for _ in range(s.num_replicas)]
        self.opt_states = [opt_state for _ in range(s.num_replicas)]
        copies = s.num_replicas if s.round_overlap == "eager" else 1
        self.thetas = [[leaf.copy() for leaf in start] for _ in range(copies)]

        def zeros():
            return [np.zeros_like(leaf) for leaf in start]

        self.outer_states = [
            OuterState(zeros(), zeros(), [0] * s.num_fragments) for _ in range(copies)
        ]
        # [m][leaf]: the error-feedback residual of each replica, full size.
        self.residuals = [zeros() for _ in self.replicas]
        # [P][m][leaf]: the outer gradients as received, of each fragment's last send; zeros before.
        self.sent = [
            [[np.zeros(mask.sum()) for mask in fragment] for _ in range(s.num_replicas)]
            for fragment in self.masks
        ]

    def theta_of(self, m: int) -> Leaves:
        """The outer parameters of replica m: its own in eager mode, else the shared ones."""
        return self.thetas[m] if self.s.round_overlap == "eager" else self.thetas[0]

    def outer_params(self) -> Leaves:
        """theta, in eager mode the mean over replicas."""
        return [np.mean(leaf, axis=0) for leaf in zip(*self.thetas, strict=True)]

    def step(self, batches: Sequence[Any]) -> list[Any]:
        """One inner step of every replica and what is sent and applied after it."""
        self.t += 1
        metrics = []
        for m, batch in enumerate(batches):
            leaves, self.opt_states[m], metric = self.inner_step(
                self.replicas[m], self.opt_states[m], batch
            )
            self.replicas[m] = [np.array(leaf, np.float64) for leaf in leaves]
            metrics.append(metric)
        fragments = range(self.s.num_fragments)
        fresh = {p: self._outer_gradients(p) for p in fragments if is_sent(p, self.t, self.s)}
        if self.s.round_overlap == "none":
            for p, gradients in fresh.items():
                self.sent[p] = gradients
            for p in fragments:
                if is_applied(p, self.t, self.s):
                    self._apply(p, [self._merged(p, self.sent[p])])
            return metrics
        for p, gradients in fresh.items():
            stale, self.sent[p] = self.sent[p], gradients
            self._apply(p, self._one_round_late(p, gradients, stale))
        return metrics

    def _outer_gradients(self, p):
        """[m][leaf] of codec(theta_p - x_m,p): old minus new.

        With error feedback of codec(g + e), and e becomes g + e minus that: every term that any
        replica uses is what was sent, in eager mode a replica's own fresh one too.
        """
        received = []
        for m, replica in enumerate(self.replicas):
            leaves = zip(self.theta_of(m), replica, self.residuals[m], self.masks[p], strict=True)
            received.append([])
            for theta, x, residual, own in leaves:
                wanted = theta[own] - x[own]
                if self.s.error_feedback:
                    wanted = wanted + residual[own]
                sent = self.codec(wanted) if own.any() else np.zeros(0)
                if self.s.error_feedback:
                    residual[own] = wanted - sent
                received[m].append(sent)
        return received

    def _mean(self, gradients):
        """[leaf], from [m][leaf]: unweighted."""
        return [sum(leaf) / self.s.num_replicas for leaf in zip(*gradients, strict=True)]

    def _merged(self, p, gradients):
        """[leaf], from [m][leaf] of fragment p: the mean, or rda (2604.21428) of each tensor.

        A tensor is a leaf, or one layer of a stacked one; a vocabulary leaf has the mean.
        """
        mean = self._mean(gradients)
        if self.reduced:
            return [self.reduced(leaf) if leaf.size else leaf for leaf in mean]
        if self.s.aggregation == "mean":
            return mean
        kinds = self.s.kinds if self.s.kinds is not None else (None,) * len(mean)
        for i, (kind, own) in enumerate(zip(kinds, self.masks[p], strict=True)):
            if kind and kind[0] == "vocabulary":
                continue
            layers = np.indices(own.shape)[kind[1]][own] if kind else np.zeros(own.sum())
            for layer in np.unique(layers):
                terms = [leaves[i][layers == layer] for leaves in gradients]
                norms = [np.linalg.norm(term) for term in terms]
                units = [term / n if n else term for term, n in zip(terms, norms, strict=True)]
                direction = np.mean(units, axis=0)
                if length := np.linalg.norm(direction):
                    mean[i][layers == layer] = np.mean(norms) * direction / length
        return mean

    def _one_round_late(self, p, fresh, stale):
        """For each copy of theta the outer gradient [leaf] it uses.

        delayed: the mean of the round before. eager (2502.12996 Algorithm 3): replica m's own
        value of this round and the others' of the round before, over M.
        """
        if self.s.round_overlap == "delayed":
            return [self._merged(p, stale)]
        M = self.s.num_replicas
        if self.reduced:  # in the owners' mean of the round before, m's term is replaced
            mean = self._merged(p, stale)
            return [
                [x + (g - old) / M for x, old, g in zip(mean, stale[m], fresh[m], strict=True)]
                for m in range(M)
            ]
        return [self._mean([(fresh if j == m else stale)[j] for j in range(M)]) for m in range(M)]

    def _apply(self, p, means):
        """Algorithm 2, lines 11-12: one outer step for each copy of theta, then the merge."""
        for theta, state, mean in zip(self.thetas, self.outer_states, means, strict=True):
            outer_update(theta, state, p, self.masks[p], mean, self.s)
        alpha = self.s.alpha
        for m, replica in enumerate(self.replicas):
            for x, theta, own in zip(replica, self.theta_of(m), self.masks[p], strict=True):
                x[own] = alpha * x[own] + (1 - alpha) * theta[own]
