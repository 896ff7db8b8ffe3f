"""Batches read ahead by Grain: in a thread of this process, or in processes of their own.

An error is raised where its batch would have come, and close() waits for the thread. The order of
sequences and resuming are those of order.py, which know replicas whose number may change.
"""

import contextlib
import itertools
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from typing import Any

from maxdiloco.errors import LostPeerError


def read_ahead(
    read: Callable[[int], Any], count: int, worker_count: int = 0, *, ahead: int = 1, lost: str = ""
) -> Iterator[Any]:
    """read(0) to read(count - 1), each made before it is asked for. close() it after use.

    worker_count: processes that read, each up to `ahead` more than it reads; 0: a thread of this
    process, two batches ahead. lost: what is said of a process that is gone.
    Raises, from the iterator, what read raises, and LostPeerError when a process is gone.
    """
    # Here, not above: synthetic data have to work where Grain is not installed.
    import grain

    # No threads at this place: their close() does not wait for a read under way (Grain 0.2.18).
    no_threads = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    batches = grain.MapDataset.range(count).map(read).to_iter_dataset(no_threads)
    if worker_count:
        options = grain.MultiprocessingOptions(worker_count, per_worker_buffer_size=ahead)
        return _from_processes(batches, options, lost)
    # A batch is in the buffer, another in the hands of the thread.
    iterator = iter(grain.experimental.ThreadPrefetchIterDataset(batches, prefetch_buffer_size=1))
    iterator.start_prefetch()
    return iterator


def _from_processes(batches, options, lost):
    from absl import flags

    # Grain reads absl flags to start processes, and only absl programs parse them.
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    batches = batches.mp_prefetch(options, worker_init_fn=_begin_process)
    with contextlib.ExitStack() as stack:
        try:
            with _ctrl_c_blocked():
                iterator = stack.enter_context(contextlib.closing(iter(batches)))
                first = list(itertools.islice(iterator, 1))
            yield from first
            yield from iterator
        except RuntimeError as error:
            if "terminated unexpectedly" not in str(error):
                raise
            raise LostPeerError(lost) from error


@contextlib.contextmanager
def _ctrl_c_blocked():
    """Processes started inside inherit the mask: a Ctrl-C before _begin_process is not theirs."""
    # multiprocessing's tracker removes the shared memory that an error leaves, and would warn of it
    # on the terminal. At its first use it would unblock SIGINT in the thread.
    sys.warnoptions.append("ignore:resource_tracker")  # an option of the command that it starts
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions.pop()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _begin_process(_index, _count):
    """Leave signals of a terminal or a cluster to the trainer; end when it is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    trainer = multiprocessing.parent_process()

    def end():
        trainer.join()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()
