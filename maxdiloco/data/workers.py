"""Grain: batches read in a thread of this process or in processes of their own."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from maxdiloco.errors import LostPeerError


def open_reader(
    source: Sequence[Any], worker_count: int
) -> tuple[Iterator[Any], Callable[[], None]]:
    """Iterator over source, and what ends its processes.

    worker_count: processes; 0: none, source is read where the iterator is asked.
    Raises, from the iterator, what source raises, and LostPeerError for a process that is gone.
    """
    # Here, not above: synthetic data have to work where Grain is not installed.
    import grain
    from absl import flags

    # No threads of Grain's own: its close() does not wait for their end, that of Batches does.
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    data = grain.MapDataset.source(source).to_iter_dataset(options)
    if not worker_count:
        iterator = iter(data)
        return iterator, iterator.close
    # Grain reads absl flags to start workers, and only absl programs parse them.
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    # Through a pipe: close() leaks batches under way in shared memory (Grain 0.2.18).
    piped = grain.experimental.DatasetOptions(min_shm_size=2**62)
    data = grain.experimental.WithOptionsIterDataset(data, piped)
    data = data.mp_prefetch(
        grain.MultiprocessingOptions(num_workers=worker_count), worker_init_fn=_begin_worker
    )
    iterator = iter(data)
    return _watched(iterator, worker_count), iterator.close


def _begin_worker(index: int, count: int) -> None:
    """Leave signals of a terminal or a cluster to the trainer; end when it is gone."""
    del index, count  # what Grain passes
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    trainer = multiprocessing.parent_process()

    def end():
        trainer.join()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


def _watched(iterator, worker_count):
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            return
        except RuntimeError as error:
            if "terminated unexpectedly" not in str(error):
                raise
            raise LostPeerError(
                f"a process that reads text is gone (grain_worker_count={worker_count}): killed, "
                "or out of memory. Give the machine more, or lower grain_worker_count; the same "
                "command goes on."
            ) from error
        yield batch
