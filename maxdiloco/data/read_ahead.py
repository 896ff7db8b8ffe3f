"""Batches read ahead: by Grain in a thread or in processes, and in many threads from a bucket.

An error is raised where its batch would have come, and close() waits for the threads. The order of
sequences and resuming are those of order.py, which know replicas whose number may change.
"""

import contextlib
import itertools
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import resource_tracker
from typing import Any, TypeVar

from maxdiloco.errors import ConfigError, LostPeerError

T = TypeVar("T")

# Requests under way at once for one batch, and for the batches after it. Our choice: at 20 ms a
# request they bring up to 3,200 sequences a second.
REQUESTS = 64
_MOST_BATCHES = 16


def batches_at_once(sequences: int) -> int:
    """How many batches of so many sequences have to be under way for REQUESTS of them."""
    return min(max(2, -(-REQUESTS // sequences)), _MOST_BATCHES)


def in_threads(read: Callable[[T], Any], items: Iterable[T], threads: int) -> Iterator[Any]:
    """read of each item, in their order, up to `threads` at once; 0: each when it is asked for.

    An error is raised where its result would have come; closing waits for the reads under way."""
    if not threads:
        yield from map(read, items)
        return
    left = iter(items)
    with ThreadPoolExecutor(threads) as pool:
        try:
            begun = deque(pool.submit(read, item) for item in itertools.islice(left, threads))
            while begun:
                found = begun.popleft().result()
                begun.extend(pool.submit(read, item) for item in itertools.islice(left, 1))
                yield found
        finally:
            pool.shutdown(cancel_futures=True)


def read_ahead(
    read: Callable[[int], Any],
    count: int,
    worker_count: int = 0,
    *,
    ahead: int = 1,
    at_once: int = 0,
    lost: str = "",
    setting: str = "",
    otherwise: str = "",
) -> Iterator[Any]:
    """read(0) to read(count - 1), each made before it is asked for. close() it after use.

    worker_count: processes that read, each up to `ahead` more than it reads; 0: a thread of this
    process, two batches ahead. at_once: reads under way in each process, of data that are slow to
    come; 0: one. lost: what is said of a process that is gone. setting, otherwise: key and value
    that ask for processes, and what else to do, for the error where none can be started.
    Raises, from the iterator, what read raises, LostPeerError when a process is gone, and
    ConfigError without a writable /dev/shm.
    """
    if at_once and not worker_count:
        return in_threads(read, range(count), at_once)
    # Here, not above: synthetic data have to work where Grain is not installed.
    import grain

    # No threads at this place: their close() does not wait for a read under way (Grain 0.2.18). A
    # process is ended with them.
    threads = grain.ReadOptions(num_threads=at_once, prefetch_buffer_size=at_once)
    batches = grain.MapDataset.range(count).map(read).to_iter_dataset(threads)
    if worker_count:
        options = grain.MultiprocessingOptions(worker_count, per_worker_buffer_size=ahead)
        return _from_processes(batches, options, lost, setting, otherwise)
    # A batch is in the buffer, another in the hands of the thread.
    iterator = iter(grain.experimental.ThreadPrefetchIterDataset(batches, prefetch_buffer_size=1))
    iterator.start_prefetch()
    return iterator


def _from_processes(batches, options, lost, setting, otherwise):
    from absl import flags

    try:
        multiprocessing.Event()  # of the semaphores that Grain makes for each process
    except OSError as error:
        raise ConfigError(
            f"{setting}: /dev/shm cannot be written ({error.strerror}), and processes share memory "
            f"there. Mount it writable and with free space{otherwise}."
        ) from error
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
