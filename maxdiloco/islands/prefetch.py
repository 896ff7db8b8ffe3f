"""Read records ahead while an island catches up with a log.

The island follows the log record by record. Without this file it would wait twice for each: for the
record, and for the gradient that it names. Both never change, so later ones are read concurrently.
"""

import contextlib
import dataclasses
from concurrent.futures import Future
from typing import Any

from maxdiloco.islands import outer_step, records
from maxdiloco.islands.log_store import Read
from maxdiloco.islands.records import Damaged, Run

# Limits on the records of a fragment that are read ahead, and on the bytes of their gradients. With
# more bytes the bandwidth limits the speed, not the latency.
MAX_RECORDS, MAX_BYTES = 8, 1 << 26


@dataclasses.dataclass(frozen=True)
class ReadAhead:
    """A request for a record and its gradient, in addition to the state machine's requests.

    It is not a NamedTuple, because a tuple would equal the machine's own request for the record.
    """

    name: str


class Prefetch:
    """Records and gradients that are read ahead. Any thread may call the methods."""

    def __init__(self, run: Run, read: Read):
        """Keep the run, and the function that reads an object."""
        self._run, self._read = run, read
        self._reads: dict[str, Future[tuple[Any, bytes]]] = {}
        self._ends: dict[int, int] = {}  # by fragment: number of a record that was absent

    def after(self, name: str) -> list[ReadAhead]:
        """Return further requests after the read of a record; none for other names."""
        if name[0] != "c":
            return []
        fragment, first = records.fragment_of(name), records.number_of(name) + 1
        size = outer_step.payload_size(
            self._run.wire_down, outer_step.sizes_of(self._run, fragment)
        )
        end = first + min(MAX_RECORDS, MAX_BYTES // size)
        end = min(end, self._ends.get(fragment, end))
        names = [records.record_name(fragment, number) for number in range(first, end)]
        names = [each for each in names if each not in self._reads]
        self._reads |= {each: Future() for each in names}
        return [ReadAhead(each) for each in names]

    def carry_out(self, request: ReadAhead) -> None:
        """Read a record and its gradient, unless `read` was called first."""
        future = self._reads.get(request.name)
        if future is None or not future.set_running_or_notify_cancel():
            return
        try:
            found = record, _ = self._read(request.name)
        except (OSError, Damaged) as error:
            if isinstance(error, FileNotFoundError):
                fragment, end = records.fragment_of(request.name), records.number_of(request.name)
                self._ends[fragment] = min(end, self._ends.get(fragment, end))
            future.set_exception(error)
            return
        if not record.members:
            future.set_result(found)
            return
        name = records.gradient_name(record)
        gradient = self._reads[name] = Future()  # before another thread can ask for it
        gradient.set_running_or_notify_cancel()
        future.set_result(found)
        try:
            gradient.set_result(self._read(name))
        except (OSError, Damaged) as error:
            gradient.set_exception(error)

    def read(self, name: str) -> tuple[Any, bytes]:
        """Return an object, read ahead or read now. Raises OSError, Damaged."""
        future = self._reads.pop(name, None)
        if future is not None and not future.cancel():
            with contextlib.suppress(OSError, Damaged):
                return future.result()
        return self._read(name)
