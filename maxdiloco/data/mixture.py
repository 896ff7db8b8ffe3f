"""Mixtures: read several data sets as one, in exact shares or each by its own replicas.

# K sources  N sequences  L tokens
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike

from maxdiloco.data import order, packing, pipeline
from maxdiloco.data.order import Interleave, Position, SourcesRead
from maxdiloco.data.pipeline import Batch, Dataset
from maxdiloco.data.windows import Request, TextWindows
from maxdiloco.errors import ConfigError, DataError

_PREFIX = "mixture "


class Mixture:
    """Several sources with the methods of a `pipeline.Dataset`.

    A source is read in its own order, epoch after epoch. Index i of the run belongs to the same
    source for any M, B, hosts and processes. A random permutation for each step assigns the step's
    indices to rows. Otherwise a replica could read a single source in all steps.
    """

    def __init__(
        self, names: Sequence[str], sources: Sequence[Dataset], shares: dict[str, int], seed: int
    ):
        """Compute the order of the sources.

        Args:
          names: names of the sources.
          sources: the K sources.
          shares: sequences of each source in a period, by name. Empty: replica m reads only source
            m mod K.
          seed: seed of the order of rows within a step.
        """
        self.names, self.sources, self.shares, self.seed = names, sources, shares, seed
        self._named = list(zip(names, sources, strict=True))
        self.by_share = Interleave([shares[name] for name in names]) if shares else None
        self.name = f"dataset_mixture of {', '.join(names)}"
        self.computed = False
        self.requests = max(source.requests for source in sources)

    @property
    def contents(self) -> str:
        """Return the hashes of the sources with their names, without weights (Dataset)."""
        return _PREFIX + " ".join(sorted(f"{name}={data.contents}" for name, data in self._named))

    def first_position(self, M: int, B: int) -> Position:
        """Return the position of a new run, which has read no source."""
        read = dict.fromkeys(self.names, 0)
        read = SourcesRead(begun=0, read=read, shares=self.shares, order=list(self.names))
        return dataclasses.replace(order.first_position(M, B), sources=read)

    def next_position(self, position: Position, step: int, M: int, B: int) -> Position:
        """Return the position of a run that resumes at `step` (order.next_position).

        Every source continues with its next unread sequence. This also holds if the weights, M or
        the order of the sources have changed.
        """
        moved, state = order.next_position(position, step, M, B), position.sources
        same = self.shares == state["shares"] and list(self.names) == state["order"]
        if same and (self.shares or moved is position):
            return moved
        if moved is position:
            base = position.base + position.sequences_before(step)
            moved = dataclasses.replace(position, base=base, s0=step)
        read = self._sequences_read(position, step)
        sources = SourcesRead(
            begun=moved.base, read=read, shares=self.shares, order=list(self.names)
        )
        return dataclasses.replace(moved, sources=sources)

    def check_size(self, position: Position) -> None:
        """Check that each source is long enough for a step.

        Raises:
          DataError: a source has fewer sequences than one step reads of it.
          ConfigError: a source is not read by any replica.
        """
        K, M, B = len(self.sources), position.M, position.B
        if not self.shares and M < K:
            raise ConfigError(
                f"dataset_per_replica=true: {M} replicas leave source {self.names[M]} unread, one "
                f"of {K}. Use enable_diloco=true with num_diloco_replicas={K} or more, or fewer "
                f"sources."
            )
        for k, (name, source) in enumerate(self._named):
            of_step = self._replicas_of(k, M) * B
            if self.shares:
                of_step = -(-M * B * self.shares[name] // sum(self.shares.values()))
            if source.num_windows < of_step:
                raise DataError(
                    f"{source.name} has {source.num_windows} sequences of max_target_length="
                    f"{source.windows.length}, but a step of {M} replicas * {B} reads {of_step} of "
                    f"it. Give it more text or less weight, or lower max_target_length or "
                    f"per_device_batch_size."
                )

    def last_step_of_epoch(self, position: Position) -> int:
        """Return the last step before any source repeats a sequence, for steps=all."""
        self.check_size(position)
        M, B, state = position.M, position.B, position.sources
        left_K = [source.num_windows - state["read"][name] for name, source in self._named]
        if not self.shares:
            steps = (left // (self._replicas_of(k, M) * B) for k, left in enumerate(left_K))
            return position.s0 - 1 + min(steps)
        ends = [
            self.by_share.index_of(k, max(0, left))
            for k, left in enumerate(left_K)
            if self.shares[self.names[k]]
        ]
        return position.s0 - 1 + (state["begun"] + min(ends) - position.base) // (M * B)

    def read(self, position: Position, step: int, replicas: ArrayLike, rows: ArrayLike) -> Batch:
        """Read rows of a step (Dataset)."""
        source, number = self.places(position, step, replicas, rows)
        length = self.sources[0].windows.length
        batch = {name: np.zeros((*source.shape, length), np.int32) for name in pipeline.LEAVES}
        for k, mine in _by_source(source):
            for name, leaf in self.sources[k].read_indices(number[mine]).items():
                batch[name][mine] = leaf
        return batch

    def places(
        self, position: Position, step: int, replicas: ArrayLike, rows: ArrayLike
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each row, and its index in the order of all epochs of the source."""
        replicas, rows = np.broadcast_arrays(replicas, rows)
        M, B, state = position.M, position.B, position.sources
        read_K = np.array([state["read"][name] for name in self.names], np.int64)
        if not self.shares:
            source, rank = replicas % len(self.sources), replicas // len(self.sources)
            group = self._replicas_of(source, M)
            number = ((step - position.s0) * group + rank) * B + rows
        else:
            flat = (replicas * B + rows).reshape(-1)
            drawn = order.permute(flat, size=M * B, seed=self.seed, epoch=step)
            index = order.indices(position, step, *np.divmod(drawn, B)).reshape(rows.shape)
            source, number = self.by_share.at(index - state["begun"])
        return source, read_K[source] + number

    def metrics(self, position: Position, step: int) -> dict[str, float]:
        """Return the tokens and epochs read of each source, and the step's share of padding."""
        length = self.sources[0].windows.length
        read = self._sequences_read(position, step + 1)
        found = {f"data/tokens_{name}": float(read[name] * length) for name in self.names}
        found["learning/tokens"] = (position.base + position.sequences_before(step + 1)) * length
        for name, source in self._named:
            found[f"data/epoch_{name}"] = read[name] / source.num_windows
        if any(source.windows.padded for source in self.sources):
            rows = np.ix_(range(position.M), range(position.B))
            source, number = self.places(position, step, *rows)
            tokens = [self.sources[k].num_tokens(number[mine]) for k, mine in _by_source(source)]
            found["data/padding"] = 1 - int(np.concatenate(tokens).sum()) / (source.size * length)
        return found

    def summary(self, position: Position) -> list[str]:
        """Return log lines: the text, padding, sequences and share of each source."""
        total = sum(self.shares.values())
        lines = [f"data: {s.name}: {s.windows.documents.summary()}" for s in self.sources]
        lines += [line for source in self.sources for line in source.padding()]
        for k, (name, source) in enumerate(self._named):
            part = f"replicas {k}, {k + len(self.sources)}, ..."
            if self.shares:
                part = f"{self.shares[name] / total:.4%} of the sequences read"
            lines.append(f"source {name}: {source.num_windows:,} sequences an epoch; {part}")
        return lines

    def _sequences_read(self, position, step):
        """Return the sequences of each source that are read before `step`, by name."""
        state = position.sources
        names, steps = state["order"], step - position.s0
        if state["shares"]:
            by_share = self.by_share  # computing a period of 100,000 costs 0.4 s
            if state["shares"] != self.shares or names != list(self.names):
                by_share = Interleave([state["shares"][name] for name in names])
            index = position.base + position.sequences_before(step) - state["begun"]
            new_K = by_share.before(index).tolist()
        else:
            new_K = [
                steps * self._replicas_of(k, position.M) * position.B for k in range(len(names))
            ]
        new = dict(zip(names, new_K, strict=True))
        return {name: state["read"][name] + new[name] for name in self.names}

    def _replicas_of(self, source, M):
        """Return how many of M replicas read a source."""
        return (M - source - 1) // len(self.sources) + 1


def _by_source(source: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each source number that occurs in an array, and the mask of its entries."""
    for k in np.unique(source).tolist():
        yield k, source == k


def changed_sources(before: str, after: str) -> list[str]:
    """Return the names of the sources that differ between the `contents` of two mixtures."""
    parts = [set(text.removeprefix(_PREFIX).split()) for text in (before, after)]
    return sorted({part.partition("=")[0] for part in parts[0] ^ parts[1] if "=" in part})


class JoinedWindows:
    """The windows of several sources, end to end."""

    def __init__(self, sources: Sequence[TextWindows]):
        """Keep the sources."""
        self.sources, self.length = sources, sources[0].length
        self._starts = packing.starts_of([source.num_windows for source in sources])
        self.num_windows = int(self._starts[-1])
        self.requests = max(source.requests for source in sources)

    def read(self, windows_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and segment ids, int32 [N, L] (TextWindows)."""
        tokens_NL = np.zeros((len(windows_N), self.length), np.int32)
        segments_NL = np.zeros_like(tokens_NL)
        for k, mine in _by_source(np.searchsorted(self._starts, windows_N, side="right") - 1):
            own_N = windows_N[mine] - self._starts[k]
            tokens_NL[mine], segments_NL[mine] = self.sources[k].read(own_N)
        return tokens_NL, segments_NL

    def contents(self) -> str:
        """Return the hashes of the sources."""
        return " ".join(source.contents() for source in self.sources)


TrainingData = Dataset | Mixture  # the data that training steps read


def open_mixture(
    requests: Mapping[str, Request], *, seed: int, weights: Mapping[str, Fraction] | None
) -> TrainingData:
    """Open several sources as one.

    Args:
      requests: {name of the source: its split}. Without weights, replica m reads source m mod K.
      seed: seed of the order of rows within a step.
      weights: {name of the source: weight}. None: each replica reads one source.

    Returns:
      A Mixture. For the eval split, a Dataset of all held-out parts, each sequence once.

    Raises:
      DataError: a source cannot be opened. The message has the source's name.
    """
    names, sources = tuple(requests), []
    for name, request in requests.items():
        named = f"dataset_mixture, source {name}"
        try:
            source = pipeline.open_dataset(request)
        except DataError as error:
            raise DataError(f"{named}: {error}") from error
        sources.append(Dataset(source.windows, source.seed, named))
    if requests[names[0]].split == "eval":
        windows = JoinedWindows([source.windows for source in sources])
        return Dataset(windows, pipeline.EVAL_SEED, f"dataset_mixture of {', '.join(names)}")
    if not weights:
        return Mixture(names, sources, {}, seed)
    share_K = order.shares([weights[name] for name in names])
    return Mixture(names, sources, dict(zip(names, share_K, strict=True)), seed)
