"""A thread whose error, whatever it is, reaches someone."""

import contextlib
import threading
from collections.abc import Callable


def reporting_thread(
    name: str, body: Callable[[], None], fail: Callable[[BaseException], None]
) -> threading.Thread:
    """Run `body` in a daemon thread; an error that ends it goes to `fail` and is not printed."""

    def report(kind, error, trace) -> bool:
        if error is not None:
            fail(error)
        return True

    def run() -> None:
        with contextlib.ExitStack() as stack:
            stack.push(report)
            body()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
