"""What an island reads of a log before it asks for it, while it catches up.

It follows a log record by record, and would wait for the store twice for each: for the record, and
for the gradient that it names. Neither ever changes, so some of the next ones are read beside.
"""

import contextlib
import dataclasses
from concurrent.futures import Future
from typing import Any

from maxdiloco.islands import outer, records, wires
from maxdiloco.islands.objects import Read
from maxdiloco.islands.records import Damaged, Run

# Our choice: so many records of a fragment, and of gradients so many bytes, above which the link is
# what is waited for.
MOST_RECORDS, MOST_BYTES = 8, 1 << 26


@dataclasses.dataclass(frozen=True)
class Ahead:
    """A request beside those of the core, which ignores its answer: a record and its gradient.

    No tuple, which would be equal to the core's own request for the record.
    """

    name: str


class ReadAhead:
    """read: the object of a name; raises OSError, Damaged. Any thread calls it."""

    def __init__(self, run: Run, read: Read):
        self._run, self._read = run, read
        self._reads: dict[str, Future[tuple[Any, bytes]]] = {}
        self._ends: dict[str, int] = {}  # by folder: a record that was not there yet

    def after(self, name: str) -> list[Ahead]:
        """What is to be carried out beside the reading of a name; nothing where it is no record."""
        folder, number = records.numbers(name)
        if folder[0] != "c":
            return []
        sizes = outer.sizes_of(self._run, int(folder.split("/")[1]))
        count = min(MOST_RECORDS, MOST_BYTES // wires.payload_size(self._run.wire_down, sizes))
        end = min(number + 1 + count, self._ends.get(folder, number + 1 + count))
        names = [f"{folder}{n}" for n in range(number + 1, end)]
        names = [name for name in names if name not in self._reads]
        self._reads |= {name: Future() for name in names}
        return [Ahead(name) for name in names]

    def carry_out(self, request: Ahead) -> None:
        """Read a record, then its gradient, unless `read` was sooner."""
        future = self._reads.get(request.name)
        if future is None or not future.set_running_or_notify_cancel():
            return
        try:
            found = record, _ = self._read(request.name)
        except (OSError, Damaged) as error:
            if isinstance(error, FileNotFoundError):
                folder, number = records.numbers(request.name)
                self._ends[folder] = min(number, self._ends.get(folder, number))
            future.set_exception(error)
            return
        if not record.members:
            future.set_result(found)
            return
        name = records.gradient_name(record)
        gradient = self._reads[name] = Future()  # before the record can be asked for
        gradient.set_running_or_notify_cancel()
        future.set_result(found)
        try:
            gradient.set_result(self._read(name))
        except (OSError, Damaged) as error:
            gradient.set_exception(error)

    def read(self, name: str) -> tuple[Any, bytes]:
        """The object of this name, as it was read or is now. Raises OSError, Damaged."""
        future = self._reads.pop(name, None)
        if future is not None and not future.cancel():
            with contextlib.suppress(OSError, Damaged):
                return future.result()
        return self._read(name)
