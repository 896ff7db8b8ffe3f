"""Batches of sequences for the replicas: one global order, resumable, each process its own rows.

    # R replicas  B sequences per replica  L tokens  N windows

A batch is {"tokens": int32 [..., L], "segment_ids": int32 [..., L]}; the dims before L are those
of the rows asked for.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing

import numpy as np
from numpy.typing import ArrayLike

from maxdiloco.data import order
from maxdiloco.data.line_index import LineIndex
from maxdiloco.data.order import Position
from maxdiloco.data.read_ahead import read_ahead
from maxdiloco.data.synthetic import SyntheticWindows
from maxdiloco.data.text import TextWindows, open_text
from maxdiloco.errors import DataError

Batch = dict[str, np.ndarray]
Batches = AbstractContextManager[Iterator[Batch]]  # leaving it ends the thread or processes
# Evaluation reads the same sample of all files, whatever data_shuffle_seed is.
_EVAL_SEED = 0


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A split of a data set.

    windows: the sequences in file order. seed: of the permutation of each epoch, None: file order.
    name: its flag and value, for messages.
    """

    windows: TextWindows | SyntheticWindows
    seed: int | None
    name: str

    @property
    def num_windows(self) -> int | None:
        """Sequences in an epoch; None: endless."""
        return self.windows.num_windows

    @property
    def fingerprint(self) -> str:
        """Equal in two processes or two runs when they have the same data (text.fingerprint)."""
        return self.windows.fingerprint()


def open_dataset(cfg, *, split: str, index: LineIndex | None = None) -> Dataset:
    """The data of a split, "train" or "eval", that cfg names.

    Lists folders and reads through the .jsonl files that index does not know; text is read when
    a batch needs it.
    Raises DataError, one line, for data that are missing, empty or unreadable.
    """
    if cfg.dataset_type == "synthetic":
        windows = SyntheticWindows(
            cfg.data_shuffle_seed, split, cfg.vocab_size, cfg.max_target_length
        )
        return Dataset(windows, None, "dataset_type=synthetic")
    windows, name = open_text(cfg, split=split, index=index)
    if split == "eval":
        return Dataset(windows, _EVAL_SEED, name)
    return Dataset(windows, cfg.data_shuffle_seed if cfg.enable_data_shuffling else None, name)


def check_size(dataset: Dataset, position: Position) -> None:
    """Raise DataError when an epoch has too few sequences for one step."""
    M, B = position.M, position.B
    if dataset.num_windows is not None and dataset.num_windows < M * B:
        raise DataError(
            f"{dataset.name} has {dataset.num_windows} sequences of max_target_length="
            f"{dataset.windows.length}, but a step reads {M} replicas * {B} = {M * B}. Give more "
            "text, or lower max_target_length, per_device_batch_size or the number of replicas."
        )


def last_step_of_epoch(dataset: Dataset, position: Position) -> int:
    """The last step whose sequences are all of the first epoch: what steps=-1 means.

    From step 1 on that is N // (M*B), and it stays right when M or B have changed since.
    Raises DataError for data without an end or too short for a step.
    """
    if dataset.num_windows is None:
        raise DataError(
            f"steps=-1 is one epoch, but {dataset.name} has no end. Set steps to a number."
        )
    check_size(dataset, position)
    left = dataset.num_windows - position.base
    return position.s0 - 1 + left // (position.M * position.B)


def read(
    dataset: Dataset,
    position: Position,
    step: int,
    *,
    replicas: ArrayLike,
    rows: ArrayLike,
) -> Batch:
    """What some rows of some replicas read in a step; read at once, not ahead.

    step: 1-based, position.s0 or later. replicas, rows: numbers below position.M and .B, arrays
    that broadcast against each other (order.indices); leaves are [*their shape, L].
    Raises DataError when a file has changed.
    """
    return _read_indices(dataset, order.indices(position, step, replicas, rows))


def batches(
    dataset: Dataset,
    position: Position,
    *,
    steps: range,
    replicas: ArrayLike,
    rows: ArrayLike,
    worker_count: int = 0,
) -> Batches:
    """The batches of steps, read ahead, each as `read` returns it; for a `with`.

    steps: consecutive, 1-based, the first not before position.s0. replicas, rows: those that
    this process feeds, as for `read`; no other row is read. worker_count: processes that read
    text; 0: a thread of this one.
    Raises DataError when the data set is shorter than one step.
    """
    check_size(dataset, position)
    replicas, rows = np.asarray(replicas), np.asarray(rows)

    def read_number(number: int) -> Batch:
        return read(dataset, position, steps[number], replicas=replicas, rows=rows)

    return _open(dataset, read_number, len(steps), worker_count)


def eval_batches(
    dataset: Dataset, *, batch_size: int, num_sequences: int, rows: ArrayLike | None = None
) -> Batches:
    """Batches for evaluation, the same each time, leaves [rows, L]; for a `with`.

    batch_size: sequences in a batch, over all processes. num_sequences: at most so many; -1: all
    of the data. rows: those that this process feeds; None: all. Each sequence is read once; the
    last batch is padded with segment 0, which has no loss.
    Raises DataError for num_sequences=-1 of endless data.
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
        return _read_padded(dataset, number * batch_size + rows_B, end=end)

    return _open(dataset, read_number, -(-end // batch_size))


def _open(
    dataset: Dataset, read_number: Callable[[int], Batch], count: int, worker_count: int = 0
) -> Batches:
    if isinstance(dataset.windows, SyntheticWindows):  # no file to wait for
        return closing(read_number(number) for number in range(count))
    return closing(read_ahead(read_number, count, worker_count))


def _read_indices(dataset: Dataset, indices: np.ndarray) -> Batch:
    windows = indices
    if dataset.num_windows is not None:
        windows = order.windows(indices, size=dataset.num_windows, seed=dataset.seed)
    tokens_NL, segments_NL = dataset.windows.read(windows.reshape(-1))
    shape = (*indices.shape, dataset.windows.length)
    return {"tokens": tokens_NL.reshape(shape), "segment_ids": segments_NL.reshape(shape)}


def _read_padded(dataset: Dataset, indices_B: np.ndarray, *, end: int) -> Batch:
    within = indices_B < end
    shape = (len(indices_B), dataset.windows.length)
    batch = {name: np.zeros(shape, np.int32) for name in ("tokens", "segment_ids")}
    if within.any():
        for name, leaf in _read_indices(dataset, indices_B[within]).items():
            batch[name][within] = leaf
    return batch
