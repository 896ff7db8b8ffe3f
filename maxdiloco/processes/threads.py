"""A thread whose error, whatever it is, reaches someone."""

import contextlib
import threading
from collections.abc import Callable
from types import TracebackType


class ReportingThread(threading.Thread):
    """Runs `body` at once; an error that ends it goes to `fail` and is not printed.

    Such a thread does not keep the interpreter alive.
    """

    def __init__(
        self, name: str, body: Callable[[], None], fail: Callable[[BaseException], None]
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._body, self._fail = body, fail
        self.start()

    def run(self) -> None:
        """The thread."""
        with contextlib.ExitStack() as stack:
            stack.push(self._report)
            self._body()

    def _report(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is not None:
            self._fail(error)
        return True
