"""Several data sets read as one: in exact shares, or each by replicas of its own.

# K sources  N sequences asked for  L tokens
"""

import dataclasses
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from maxdiloco.data import interleave, order, pipeline
from maxdiloco.data.interleave import Interleave
from maxdiloco.data.order import Position, SourcesRead
from maxdiloco.data.pipeline import Batch, Dataset, TrainingData
from maxdiloco.data.text import TextWindows
from maxdiloco.errors import ConfigError, DataError

_PREFIX = "mixture "


def open_dataset(cfg, *, split: str, **options) -> TrainingData:
    """The data of a split that cfg names: pipeline.open_dataset, or a mixture of such.

    options: of pipeline.open_dataset.
    The eval split of a mixture is a Dataset: the held-out parts of its sources, each sequence
    once; eval_dataset_path takes their place.
    Raises DataError, one line, for a source that is missing, empty or unreadable.
    """
    if not cfg.dataset_mixture or (split == "eval" and cfg.eval_dataset_path):
        return pipeline.open_dataset(cfg, split=split, **options)
    entries = [dict(entry) for entry in cfg.dataset_mixture]
    if not cfg.dataset_per_replica:  # there the order in the list says which replica reads what
        entries = sorted(entries, key=lambda entry: entry["name"])
    names = tuple(entry["name"] for entry in entries)
    sources = tuple(_open_source(cfg, entry, split, options) for entry in entries)
    if split == "eval":
        windows = JoinedWindows(tuple(source.windows for source in sources))
        return Dataset(windows, pipeline.EVAL_SEED, f"dataset_mixture of {', '.join(names)}")
    shares = {}
    if not cfg.dataset_per_replica:
        weights = [Fraction(entry.get("weight", "1")) for entry in entries]
        shares = dict(zip(names, interleave.shares(weights), strict=True))
    return Mixture.of(names, sources, shares, cfg.data_shuffle_seed)


def source_configs(cfg) -> dict[str, Any]:
    """{key, or name in a mixture: the config with which the source is read} of dataset_path, or of
    all sources of dataset_mixture."""
    if not cfg.dataset_mixture:
        return {"dataset_path": cfg}
    entries = [dict(entry) for entry in cfg.dataset_mixture]
    return {f"dataset_mixture, source {entry['name']}": _of_source(cfg, entry) for entry in entries}


def _of_source(cfg, entry):
    of_entry = {key: entry[key] for key in ("dataset_type", "text_column") if key in entry}
    keys = {
        "dataset_path": entry["path"],
        "dataset_mixture": (),
        # Sources of one size have different permutations.
        "data_shuffle_seed": order.seed_of(entry["name"], cfg.data_shuffle_seed),
    }
    return type(cfg)(**vars(cfg) | keys | of_entry)


def _open_source(cfg, entry, split, options):
    name = entry["name"]
    try:
        source = pipeline.open_dataset(_of_source(cfg, entry), split=split, **options)
    except DataError as error:
        raise DataError(f"dataset_mixture, source {name}: {error}") from error
    return dataclasses.replace(source, name=f"dataset_mixture, source {name}")


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Sources of sequences (pipeline.TrainingData).

    names, sources: K each. shares: of each source in a period of the interleave, by name; empty:
    replica m reads source m mod K alone. by_share: the order of sources for shares, else None.
    seed: of the order of rows within a step.

    A source's sequences are read in its own order, epoch after epoch. Index i of the run belongs
    to one source whatever M, B, hosts and processes are. Which row of a step reads which of the
    step's indices is drawn for each step: otherwise a replica could meet one source only.
    """

    names: tuple[str, ...]
    sources: tuple[Dataset, ...]
    shares: dict[str, int]
    seed: int
    by_share: Interleave | None
    computed: bool = False

    @classmethod
    def of(cls, names, sources, shares: dict[str, int], seed: int) -> "Mixture":
        """With the order of sources that the shares give."""
        by_share = Interleave.of([shares[name] for name in names]) if shares else None
        return cls(names, sources, shares, seed, by_share)

    @property
    def name(self) -> str:
        """For messages."""
        return f"dataset_mixture of {', '.join(self.names)}"

    @property
    def fingerprint(self) -> str:
        """Those of the sources with their names, not their weights; see changed_sources."""
        return self._joined(data.fingerprint for data in self.sources)

    @property
    def contents(self) -> str:
        """Those of the sources with their names, not their weights; see changed_sources."""
        return self._joined(data.contents for data in self.sources)

    def _joined(self, of_sources):
        pairs = zip(self.names, of_sources, strict=True)
        return _PREFIX + " ".join(sorted(f"{name}={text}" for name, text in pairs))

    def first_position(self, M: int, B: int) -> Position:
        """No source is read yet."""
        read = SourcesRead(begun=0, read=dict.fromkeys(self.names, 0), shares=self.shares)
        return dataclasses.replace(order.first_position(M, B), sources=read)

    def next_position(self, position: Position, step: int, M: int, B: int) -> Position:
        """Every source goes on with its next unread sequence, also with other weights or M."""
        moved = order.next_position(position, step, M, B)
        if self.shares:
            if self.shares == position.sources.shares:
                return moved
            base = position.base + position.sequences_before(step)
            moved = dataclasses.replace(moved, base=base, s0=step)
        elif moved is position:
            return position
        read = self._sequences_read(position, step)
        sources = SourcesRead(begun=moved.base, read=read, shares=self.shares)
        return dataclasses.replace(moved, sources=sources)

    def check_size(self, position: Position) -> None:
        """No source has fewer sequences than a step reads of it.

        Raises DataError, and ConfigError where a source has no replica.
        """
        K, M, B = len(self.sources), position.M, position.B
        if not self.shares and M < K:
            raise ConfigError(
                f"dataset_per_replica=true: {M} replicas leave source {self.names[M]} unread, one "
                f"of {K}. Use enable_diloco=true with num_diloco_replicas={K} or more, or fewer "
                f"sources."
            )
        for k, (name, source) in enumerate(zip(self.names, self.sources, strict=True)):
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
        """Before a sequence of any source is read a second time; the others may be in mid-epoch."""
        self.check_size(position)
        M, B, state = position.M, position.B, position.sources
        left = {
            name: source.num_windows - state.read[name]
            for name, source in zip(self.names, self.sources, strict=True)
        }
        if not self.shares:
            steps = [
                left[name] // (self._replicas_of(k, M) * B) for k, name in enumerate(self.names)
            ]
            return position.s0 - 1 + min(steps)
        ends = [
            self.by_share.index_of(k, max(0, left[name]))
            for k, name in enumerate(self.names)
            if self.shares[name]
        ]
        return position.s0 - 1 + (state.begun + min(ends) - position.base) // (M * B)

    def read(self, position: Position, step: int, replicas: ArrayLike, rows: ArrayLike) -> Batch:
        """Rows of a step (pipeline.TrainingData)."""
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
        """Source of each row, and its place in the order of all epochs of that source."""
        replicas, rows = np.broadcast_arrays(
            np.asarray(replicas, np.int64), np.asarray(rows, np.int64)
        )
        M, B, state = position.M, position.B, position.sources
        read_K = np.array([state.read[name] for name in self.names], np.int64)
        if not self.shares:
            source, rank = replicas % len(self.sources), replicas // len(self.sources)
            group = self._replicas_of(source, M)
            number = ((step - position.s0) * group + rank) * B + rows
        else:
            flat = (replicas * B + rows).reshape(-1)
            drawn = order.permute(flat, size=M * B, seed=self.seed, epoch=step)
            index = order.indices(position, step, *np.divmod(drawn, B)).reshape(rows.shape)
            source, number = self.by_share.at(index - state.begun)
        return source, read_K[source] + number

    def metrics(self, position: Position, step: int) -> dict[str, float]:
        """Tokens and epochs read of each source, padding included; the step's share of padding."""
        length = self.sources[0].windows.length
        read = self._sequences_read(position, step + 1)
        found = {f"data/tokens_{name}": float(read[name] * length) for name in self.names}
        for name, source in zip(self.names, self.sources, strict=True):
            found[f"data/epoch_{name}"] = read[name] / source.num_windows
        if any(source.windows.padded for source in self.sources):
            source, number = self.places(
                position, step, *np.ix_(range(position.M), range(position.B))
            )
            tokens = sum(
                int(self.sources[k].num_tokens(number[mine]).sum())
                for k, mine in _by_source(source)
            )
            found["data/padding"] = 1 - tokens / (source.size * length)
        return found

    def summary(self, position: Position) -> list[str]:
        """Files, documents and bytes of each source (TrainingData)."""
        return [f"data: {s.name}: {s.windows.documents.summary()}" for s in self.sources]

    def description(self) -> list[str]:
        """Sequences and share of each source."""
        total = sum(self.shares.values())
        lines = [line for source in self.sources for line in source.description()]
        for k, (name, source) in enumerate(zip(self.names, self.sources, strict=True)):
            part = f"replicas {k}, {k + len(self.sources)}, ..."
            if self.shares:
                part = f"{self.shares[name] / total:.4%} of what is read"
            lines.append(f"source {name}: {source.num_windows:,} sequences an epoch; {part}")
        return lines

    def _sequences_read(self, position, step):
        """Sequences of each source read before `step`, by name."""
        state = position.sources
        if state.shares:
            by_share = self.by_share
            if state.shares != self.shares:
                by_share = Interleave.of([state.shares[name] for name in self.names])
            index = position.base + position.sequences_before(step) - state.begun
            new_K = by_share.before(index).tolist()
        else:
            steps, K = step - position.s0, len(self.names)
            new_K = [steps * self._replicas_of(k, position.M) * position.B for k in range(K)]
        new = zip(self.names, new_K, strict=True)
        return {name: state.read[name] + count for name, count in new}

    def _replicas_of(self, source, M):
        """How many of M replicas read a source."""
        return (M - source - 1) // len(self.sources) + 1


def _by_source(source: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Each source that occurs, and where."""
    for k in np.unique(source).tolist():
        yield k, source == k


def changed_sources(before: str, after: str) -> list[str]:
    """Names of the sources that two fingerprints do not share, for messages; one of no mixture
    has none."""
    parts = [set(text.removeprefix(_PREFIX).split()) for text in (before, after)]
    return sorted({part.partition("=")[0] for part in parts[0] ^ parts[1] if "=" in part})


@dataclasses.dataclass(frozen=True)
class JoinedWindows:
    """The windows of several sources one after the other."""

    sources: tuple[TextWindows, ...]

    @property
    def length(self) -> int:
        """L."""
        return self.sources[0].length

    @property
    def num_windows(self) -> int:
        """Of all sources."""
        return sum(source.num_windows for source in self.sources)

    @property
    def padded(self) -> bool:
        """Whether windows may hold padding."""
        return any(source.padded for source in self.sources)

    def read(self, windows_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and segment ids, int32 [N, L] (TextWindows)."""
        tokens_NL = np.zeros((len(windows_N), self.length), np.int32)
        segments_NL = np.zeros_like(tokens_NL)
        for source, mine, own_N in self._by_source(windows_N):
            tokens_NL[mine], segments_NL[mine] = source.read(own_N)
        return tokens_NL, segments_NL

    def num_tokens(self, windows_N: np.ndarray) -> np.ndarray:
        """Tokens in windows that are no padding, int64 [N]."""
        found_N = np.zeros(len(windows_N), np.int64)
        for source, mine, own_N in self._by_source(windows_N):
            found_N[mine] = source.num_tokens(own_N)
        return found_N

    def fingerprint(self) -> str:
        """Those of the sources."""
        return " ".join(source.fingerprint() for source in self.sources)

    def contents(self) -> str:
        """Those of the sources."""
        return " ".join(source.contents() for source in self.sources)

    def _by_source(self, windows_N):
        starts = np.cumsum([0, *(source.num_windows for source in self.sources)])
        number_N = np.searchsorted(starts, windows_N, side="right") - 1
        for k, mine in _by_source(number_N):
            yield self.sources[k], mine, windows_N[mine] - starts[k]
