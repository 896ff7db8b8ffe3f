"""Batches of sequences for the replicas: one global order, resumable, each process its own rows.

    # R replicas  B sequences per replica  L tokens  N windows

A batch is {"tokens": int32 [R, B, L], "segment_ids": int32 [R, B, L]}, for evaluation without R.
"""

import dataclasses
import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence
from multiprocessing import resource_tracker

import numpy as np

from maxdiloco.data import order
from maxdiloco.data.order import Position
from maxdiloco.data.prefetch import Batches
from maxdiloco.data.synthetic import SyntheticWindows
from maxdiloco.data.text import TextWindows, open_text
from maxdiloco.errors import DataError

Batch = dict[str, np.ndarray]
# Evaluation reads a sample of all files, the same one whatever data_shuffle_seed is.
_EVAL_SEED = 0


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A split of a data set.

    windows: the sequences in file order. seed: of the permutation of each epoch, None: file order.
    name: flag and value it came from, for messages.
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


def open_dataset(cfg, *, split: str) -> Dataset:
    """The data of a split, "train" or "eval", that cfg names.

    Reads folders and, of .jsonl files, the lines; text is read when a batch asks for it.
    Raises DataError, one line, for data that are missing, empty or unreadable.
    """
    if cfg.dataset_type == "synthetic":
        windows = SyntheticWindows(
            cfg.data_shuffle_seed, split, cfg.vocab_size, cfg.max_target_length
        )
        return Dataset(windows, None, "dataset_type=synthetic")
    windows, name = open_text(cfg, split=split)
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
    replicas: Sequence[int],
    rows: Sequence[int],
) -> Batch:
    """What some replicas read in some of their rows in a step, on the spot.

    step: 1-based, position.s0 or later. replicas, rows: numbers below position.M and .B.
    Returns leaves [len(replicas), len(rows), L]. Raises DataError when a file has changed.
    """
    indices_RB = order.indices(position, step, replicas, rows)
    return _read_indices(dataset, indices_RB)


def batches(
    dataset: Dataset,
    position: Position,
    *,
    steps: range,
    replicas: Sequence[int],
    rows: Sequence[int],
    worker_count: int = 0,
) -> Batches:
    """The batches of steps, read ahead, each as `read` returns it. Close it after use.

    steps: consecutive, 1-based, the first not before position.s0. replicas, rows: those that
    this process feeds. worker_count: processes that read text; 0: a thread of this one.
    Raises DataError when the data set is shorter than one step.
    """
    check_size(dataset, position)
    source = Steps(dataset, position, steps, tuple(replicas), tuple(rows))
    if isinstance(dataset.windows, SyntheticWindows):
        return Batches((source[i] for i in range(len(source))), count=len(source))
    iterator = _grain_iterator(source, worker_count)
    return Batches(iterator, count=len(source), close_source=iterator.close)


def eval_batches(
    dataset: Dataset, *, batch_size: int, num_batches: int, rows: Sequence[int] | None = None
) -> Batches:
    """Batches for evaluation, always the same, leaves [rows, L]. Close it after use.

    batch_size: sequences in a batch, over all processes. num_batches: at most so many; -1: all
    of the data. rows: those that this process feeds; None: all. Each sequence is read once; the
    last batch is filled up with padding (segment 0), which counts for nothing.
    Raises DataError for all of data without an end.
    """
    if dataset.num_windows is None:
        if num_batches < 0:
            raise DataError(
                f"eval_steps=-1 is all of the data, but {dataset.name} has no end. "
                "Set eval_steps to a number."
            )
        count = num_batches
    else:
        count = -(-dataset.num_windows // batch_size)
        count = count if num_batches < 0 else min(num_batches, count)
    rows_B = np.arange(batch_size) if rows is None else np.asarray(rows, np.int64)
    source = (_read_padded(dataset, number * batch_size + rows_B) for number in range(count))
    return Batches(source, count=count)


@dataclasses.dataclass(frozen=True)
class Steps:
    """The batches of steps as a sequence, what Grain reads from, here or in a worker process."""

    dataset: Dataset
    position: Position
    steps: range
    replicas: tuple[int, ...]
    rows: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, number: int) -> Batch:
        return read(
            self.dataset,
            self.position,
            self.steps[number],
            replicas=self.replicas,
            rows=self.rows,
        )


def _grain_iterator(source: Steps, worker_count: int) -> Iterator[Batch]:
    # Here, not above: synthetic data have to work where Grain is not installed.
    import grain
    from absl import flags

    # No threads of Grain's own: its close() does not wait for their end, that of Batches does.
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    data = grain.MapDataset.source(source).to_iter_dataset(options)
    if worker_count:
        # Grain reads absl flags to start workers, and only absl programs parse them.
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()
        # Through a pipe: close() leaks batches under way in shared memory (Grain 0.2.18).
        piped = grain.experimental.DatasetOptions(min_shm_size=2**62)
        data = grain.experimental.WithOptionsIterDataset(data, piped)
        # Here and not in a thread of Grain: it lets SIGINT through again (see prefetch).
        resource_tracker.ensure_running()
        data = data.mp_prefetch(
            grain.MultiprocessingOptions(num_workers=worker_count), worker_init_fn=_end_with_parent
        )
    return iter(data)


def _end_with_parent(worker: int, worker_count: int) -> None:
    """In a worker process: end when the trainer does, kill -9 included.

    Linux can send a signal instead (PR_SET_PDEATHSIG), but at the end of the thread that started
    the worker, and that is one of Grain's.
    """
    parent = multiprocessing.parent_process()

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="maxdiloco-parent", daemon=True).start()


def _read_indices(dataset: Dataset, indices: np.ndarray) -> Batch:
    windows = indices
    if dataset.num_windows is not None:
        windows = order.windows(indices, size=dataset.num_windows, seed=dataset.seed)
    tokens_NL, segments_NL = dataset.windows.read(windows.reshape(-1))
    shape = (*indices.shape, dataset.windows.length)
    return {"tokens": tokens_NL.reshape(shape), "segment_ids": segments_NL.reshape(shape)}


def _read_padded(dataset: Dataset, indices_B: np.ndarray) -> Batch:
    within = np.ones(len(indices_B), bool)
    if dataset.num_windows is not None:
        within = indices_B < dataset.num_windows
    shape = (len(indices_B), dataset.windows.length)
    batch = {name: np.zeros(shape, np.int32) for name in ("tokens", "segment_ids")}
    if within.any():
        for name, leaf in _read_indices(dataset, indices_B[within]).items():
            batch[name][within] = leaf
    return batch
