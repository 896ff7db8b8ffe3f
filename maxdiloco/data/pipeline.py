"""Read batches of sequences for the replicas, in one global order.

    # R replicas  B sequences per replica  L tokens  N windows

A batch is {"tokens", "segment_ids"}, int32 [..., L], with one sequence for each requested row. A
process reads only its own rows.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from maxdiloco.data import order
from maxdiloco.data.order import Position
from maxdiloco.data.read_ahead import batches_at_once, read_ahead
from maxdiloco.data.synthetic import SyntheticWindows
from maxdiloco.data.windows import Request, TextWindows, open_text
from maxdiloco.errors import DataError

Batch = dict[str, np.ndarray]
LEAVES = ("tokens", "segment_ids")  # names of the leaves of a batch
Batches = AbstractContextManager[Iterator[Batch]]  # its exit ends the thread or processes
# Evaluation reads the same sample of all files for every data_shuffle_seed.
EVAL_SEED = 0


class Dataset:
    """A split of a data set. `mixture.Mixture` has the same methods for several data sets."""

    def __init__(self, windows: TextWindows | SyntheticWindows, seed: int | None, name: str):
        """Keep the windows.

        Args:
          windows: the windows in file order.
          seed: seed of the permutation of each epoch. None: file order.
          name: key and value, for messages.
        """
        self.windows, self.seed, self.name = windows, seed, name
        self.num_windows = windows.num_windows  # sequences in an epoch; None: endless
        self.computed = isinstance(windows, SyntheticWindows)  # no file is read
        # Requests to a bucket that may be in flight at the same time; 0: the files are local.
        self.requests = windows.requests

    @property
    def contents(self) -> str:
        """Return a hash that is equal in two processes or two runs with the same data."""
        return self.windows.contents()

    first_position = staticmethod(order.first_position)
    next_position = staticmethod(order.next_position)

    def check_size(self, position: Position) -> None:
        """Raise DataError if an epoch has too few sequences for one step."""
        M, B = position.M, position.B
        if self.num_windows is not None and self.num_windows < M * B:
            raise DataError(
                f"{self.name} has {self.num_windows} sequences of max_target_length="
                f"{self.windows.length}, but a step reads {M} replicas * {B} = {M * B}. Give more "
                "text, or lower max_target_length, per_device_batch_size or the number of replicas."
            )

    def last_step_of_epoch(self, position: Position) -> int:
        """Return the last step that reads only sequences of the first epoch, for steps=all.

        Raises:
          DataError: the data have no end, or are too short for a step.
        """
        if self.num_windows is None:
            why = f"steps=all is one epoch, but {self.name} has no end. Set steps to a number."
            raise DataError(why)
        self.check_size(position)
        left = self.num_windows - position.base
        return position.s0 - 1 + left // (position.M * position.B)

    def read(self, position: Position, step: int, replicas: ArrayLike, rows: ArrayLike) -> Batch:
        """Read rows of replicas in a step.

        Args:
          position: as for `order.indices`.
          step: as for `order.indices`.
          replicas: as for `order.indices`.
          rows: as for `order.indices`.

        Returns:
          Leaves [*shape of the rows, L].

        Raises:
          DataError: a file has changed.
        """
        return self.read_indices(order.indices(position, step, replicas, rows))

    def read_indices(self, indices: np.ndarray) -> Batch:
        """Read sequences by index in the order of all epochs; leaves [*shape of indices, L]."""
        tokens_NL, segments_NL = self.windows.read(self._windows(indices).reshape(-1))
        shape = (*indices.shape, self.windows.length)
        leaves = (tokens_NL.reshape(shape), segments_NL.reshape(shape))
        return dict(zip(LEAVES, leaves, strict=True))

    def metrics(self, position: Position, step: int) -> dict[str, float]:
        """Return the metrics of the data at the end of a step.

        The metrics are the number of tokens that all replicas have read, and the epoch. Packings
        that pad add the share of padding in the global batch.
        """
        first = position.base + position.sequences_before(step)
        end = first + position.M * position.B
        found = {"learning/tokens": end * self.windows.length}
        if self.num_windows is not None:
            found["data/epoch"] = end / self.num_windows
        if self.windows.padded:
            tokens = int(self.num_tokens(np.arange(first, end)).sum())
            found["data/padding"] = 1 - tokens / ((end - first) * self.windows.length)
        return found

    def num_tokens(self, indices_N: np.ndarray) -> np.ndarray:
        """Return the number of tokens of each sequence without padding, int64 [N]."""
        return self.windows.num_tokens(self._windows(indices_N))

    def summary(self, position: Position) -> list[str]:
        """Return log lines for the start of a run: text, length of an epoch, padding."""
        if self.num_windows is None:
            return [f"data: {self.name}, without end"]
        steps = self.num_windows / (position.M * position.B)
        return [
            f"data: {self.name}: {self.windows.documents.summary()}; {self.num_windows:,} "
            f"sequences of {self.windows.length} tokens to train on, {steps:,.1f} steps an epoch",
            *self.padding(),
        ]

    def padding(self) -> list[str]:
        """Return a log line with the share of padding in an epoch, for packings that pad."""
        if not self.windows.padded:
            return []
        count, length = self.num_windows, self.windows.length
        share = 1 - int(self.windows.num_tokens(np.arange(count)).sum()) / (count * length)
        return [f"{self.name}: {count:,} sequences an epoch, {share:.2%} of them padding"]

    def _windows(self, indices):
        return order.windows(indices, size=self.num_windows, seed=self.seed)


def open_dataset(request: Request) -> Dataset:
    """Open a split of a text. Sequences are read when a batch needs them."""
    windows, name = open_text(request)
    if request.split == "eval":
        return Dataset(windows, EVAL_SEED, name)
    return Dataset(windows, request.seed if request.shuffled else None, name)


def batches(
    dataset: Any,
    position: Position,
    *,
    steps: range,
    replicas: ArrayLike,
    rows: ArrayLike,
    worker_count: int = 0,
) -> Batches:
    """Open an iterator over the batches of steps, which are read ahead, for a `with`.

    Args:
      dataset: a Dataset or a Mixture.
      position: the reading position of the run.
      steps: consecutive steps.
      replicas: replica of each row that this process feeds. No other row is read.
      rows: numbers of these rows in their replicas, which broadcast with `replicas`.
      worker_count: number of processes that read text. 0: a thread of this process.

    Returns:
      A context manager of the batches, each as `Dataset.read` returns it.

    Raises:
      DataError: the data set is shorter than one step.
    """
    dataset.check_size(position)
    return _open(
        dataset,
        lambda number: dataset.read(position, steps[number], replicas, rows),
        len(steps),
        np.broadcast(replicas, rows).size,
        worker_count,
    )


def eval_batches(
    dataset: Dataset, *, batch_size: int, num_sequences: int, rows: ArrayLike | None = None
) -> Batches:
    """Open an iterator over batches for evaluation, for a `with`. Every call yields the same ones.

    Args:
      dataset: the data.
      batch_size: sequences of a batch over all processes.
      num_sequences: largest number of sequences to read. -1: all of the data.
      rows: rows of the batch that this process feeds. None: all.

    Returns:
      A context manager of batches with leaves [rows, L]. The last one is padded with segment 0,
      which has no loss.

    Raises:
      DataError: the data have no end, and num_sequences is -1.
    """
    ends = [end for end in (dataset.num_windows, num_sequences) if end not in (None, -1)]
    if not ends:
        raise DataError(
            f"eval_steps=-1 is all of the data, but {dataset.name} has no end. "
            "Set eval_steps to a number."
        )
    end = min(ends)
    rows_B = np.arange(batch_size) if rows is None else np.asarray(rows, np.int64)

    def read_number(number: int) -> Batch:
        indices_B = number * batch_size + rows_B
        within = indices_B < end
        shape = (len(indices_B), dataset.windows.length)
        batch = {name: np.zeros(shape, np.int32) for name in LEAVES}
        if within.any():
            for name, leaf in dataset.read_indices(indices_B[within]).items():
                batch[name][within] = leaf
        return batch

    return _open(dataset, read_number, -(-end // batch_size), len(rows_B))


def _open(dataset, read_number, count, sequences, worker_count=0):
    if dataset.computed:
        return closing(read_number(number) for number in range(count))
    at_once = batches_at_once(sequences) if dataset.requests else 0
    batches = read_ahead(
        read_number,
        count,
        worker_count,
        at_once=at_once,
        setting=f"grain_worker_count={worker_count}",
    )
    return closing(batches)
