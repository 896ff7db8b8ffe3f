"""Batches read ahead in a thread, and an end to it that leaves no thread behind."""

import collections
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

# Batches read ahead: one is used, one is ready. Our choice; reading is faster than training.
DEPTH = 2


class Batches:
    """Iterator over `count` batches of `source`, DEPTH of them read ahead in one thread.

    close() ends the thread and then calls close_source; leaving a `with` block does, too.
    An error in the source is raised where its batch would have been returned.
    """

    def __init__(
        self, source: Iterator[dict], *, count: int, close_source: Callable[[], None] | None = None
    ):
        self._source = source
        self._left = count
        self._close_source = close_source
        self._pool = ThreadPoolExecutor(
            1, thread_name_prefix="maxdiloco-data", initializer=_keep_ctrl_c_out
        )
        self._ahead = collections.deque()
        self._read_ahead()

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> dict:
        if not self._ahead:
            raise StopIteration
        batch = self._ahead.popleft().result()
        self._read_ahead()
        return batch

    def __enter__(self) -> "Batches":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """End the thread and the source; no batch is left. Again: nothing happens."""
        self._left = 0
        self._ahead.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._close_source is not None:
            self._close_source()
            self._close_source = None

    def _read_ahead(self):
        while self._left and len(self._ahead) < DEPTH:
            self._ahead.append(self._pool.submit(next, self._source))
            self._left -= 1


def _keep_ctrl_c_out() -> None:
    # Threads and processes that this one starts take its signal mask over: what Ctrl-C means is
    # the trainer's affair, and readers that it ended would print tracebacks and fail a last step.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
