"""Read results ahead of their use: in one thread, in many threads, or in processes of Grain.

Many threads are for buckets, whose latency is high. An error is raised instead of its batch, and
close() waits for the threads. The order of sequences is not decided here, see order.py.
"""

import contextlib
import itertools
import multiprocessing
import os
import queue
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

# Concurrent requests for one batch and the batches after it. At 20 ms a request, they return up to
# 3,200 sequences per second.
REQUESTS = 64
_MOST_BATCHES = 16
_AHEAD = 2  # batches that one thread reads ahead: one is ready, the next is being read


def batches_at_once(sequences: int) -> int:
    """Return how many batches to read concurrently, so that about REQUESTS requests are in flight.

    Args:
      sequences: sequences of a batch, one request each.
    """
    return min(max(2, -(-REQUESTS // sequences)), _MOST_BATCHES)


def in_thread(read: Callable[[T], Any], items: Iterable[T]) -> Iterator[Any]:
    """Yield read(item) for each item, in order; one thread reads up to _AHEAD results ahead.

    An error is raised instead of its result. Closing waits for the read in progress.

    Returning a ready result costs 0.06 ms. The futures of `in_threads` need 0.09 ms. Grain's
    ThreadPrefetchIterDataset needs 0.15 ms, and 0.3 s to import.
    """
    results: queue.SimpleQueue = queue.SimpleQueue()
    room, closed, end = threading.Semaphore(_AHEAD), threading.Event(), object()

    def read_all() -> None:
        try:
            for item in items:
                room.acquire()
                if closed.is_set():
                    return
                results.put(read(item))
        finally:
            results.put(end)

    with ThreadPoolExecutor(1, thread_name_prefix="read-ahead") as pool:
        try:
            reading = pool.submit(read_all)
            while (result := results.get()) is not end:
                room.release()
                yield result
            reading.result()  # raises the error of a read
        finally:
            closed.set()
            room.release()


def in_threads(read: Callable[[T], Any], items: Iterable[T], threads: int) -> Iterator[Any]:
    """Yield read(item) for each item, in order, from several threads.

    An error is raised instead of its result. Closing waits for the reads in progress.

    Args:
      read: the function to call.
      items: the argument of each call.
      threads: number of concurrent calls. 0: each item is read when its result is needed.
    """
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
    setting: str = "",
) -> Iterator[Any]:
    """Return an iterator over read(0) to read(count - 1), which are read ahead.

    Close it after use. The iterator raises the errors of `read`.

    Args:
      read: the function to call.
      count: number of results.
      worker_count: number of processes that read. 0: threads of this process.
      ahead: number of results that each process reads ahead.
      at_once: concurrent reads in each process, for data with a high latency. 0: one.
      setting: key and value that request processes, for messages.

    Raises:
      LostPeerError: a process died.
      ConfigError: processes are requested, and /dev/shm cannot be written.
    """
    if not worker_count:
        items = range(count)
        return in_threads(read, items, at_once) if at_once else in_thread(read, items)
    import grain  # imported here, because the import costs 0.3 s

    # The threads of a worker process need no clean-up, since they end with the process.
    threads = grain.ReadOptions(num_threads=at_once, prefetch_buffer_size=at_once)
    batches = grain.MapDataset.range(count).map(read).to_iter_dataset(threads)
    options = grain.MultiprocessingOptions(worker_count, per_worker_buffer_size=ahead)
    return _from_processes(batches, options, setting)


def _from_processes(batches, options, setting):
    from absl import flags

    try:
        multiprocessing.Event()  # fails as the semaphores would that Grain makes for each process
    except OSError as error:
        raise ConfigError(
            f"{setting}: /dev/shm cannot be written ({error.strerror}), and processes share memory "
            "there. Mount it writable and with free space."
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
            raise LostPeerError(
                f"{setting}: a process that reads text is gone: killed, or out of memory or of "
                "space in /dev/shm. Give the machine more, or use fewer processes; the same "
                "command resumes."
            ) from error


@contextlib.contextmanager
def _ctrl_c_blocked():
    """Block SIGINT in processes that are started inside the `with`, until _begin_process."""
    # multiprocessing's tracker removes shared memory that is left after an error, and would print a
    # warning. Started later, it would unblock SIGINT in this thread.
    sys.warnoptions.append("ignore:resource_tracker")  # passed to the process of the tracker
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
    """Ignore SIGINT and SIGTERM, which the trainer handles, and exit when the trainer exits.

    A tokenizer in the process uses one core, since there is a process for each core.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    trainer = multiprocessing.parent_process()

    def end():
        trainer.join()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()
