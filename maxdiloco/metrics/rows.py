"""Rows of metrics on their way to process 0; no process waits for another at a log step.

    # R replicas
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from maxdiloco.processes.mailbox import WORDS, Mailbox
from maxdiloco.processes.patience import Patience

Metrics = Mapping[str, np.ndarray]
Values = Mapping[str, float]


class Rows:
    """The rows of a run; every process adds the same steps, and process 0 writes them in order.

    process: this one. replicas: {process: replicas whose metrics it reads}, the same everywhere,
    each replica once, some of them process 0's. mailbox: None where process 0 reads all replicas.
    write(step, metrics, values): called in process 0; metrics, leaves [R], may be None.
    """

    def __init__(
        self,
        process: int,
        replicas: Mapping[int, Sequence[int]],
        *,
        mailbox: Mailbox | None,
        write: Callable[[int, Metrics | None, Values], None],
    ):
        self._process = process
        self._replicas = {peer: list(rows) for peer, rows in sorted(replicas.items()) if rows}
        self._mailbox = mailbox
        self._write = write
        self._waiting: deque[tuple[int, Metrics | None, Values]] = deque()
        self._patience = Patience()  # from one row to the next

    def add(self, step: int, metrics: Metrics | None, values: Values) -> None:
        """Add the metrics of this process's replicas in their order; process 0 adds `values`.

        Never waits. Raises LostPeerError.
        """
        self._patience.worked()
        if self._process == 0:
            self._waiting.append((step, metrics, values))
        elif metrics is not None and self._process in self._replicas:
            parts = [metrics[name].tobytes() for name in sorted(metrics)]
            self._mailbox.put(0, _key(step), parts, WORDS)

    def write_complete(self) -> None:
        """Write the rows that are complete, up to the first that is not. Raises LostPeerError."""
        while self._waiting:
            step, metrics, _ = self._waiting[0]
            if not all(self._mailbox.arrived(p, _key(step)) for p in self._peers(metrics)):
                return
            self._write_first()

    def write_all(self) -> None:
        """Wait for what is missing and write all rows. Raises LostPeerError (see Patience)."""
        while self._waiting:
            self._write_first()

    def _peers(self, metrics: Metrics | None) -> list[int]:
        return [] if metrics is None else [peer for peer in self._replicas if peer]

    def _write_first(self) -> None:
        step, metrics, values = self._waiting[0]
        what = f"its part of the row of step {step}"
        parts = {
            peer: self._patience.receive(self._mailbox, peer, _key(step), what)
            for peer in self._peers(metrics)
        }
        self._waiting.popleft()
        self._write(step, metrics and self._of_all(metrics, parts), values)

    def _of_all(self, own: Metrics, parts: Mapping[int, bytearray]) -> Metrics:
        """The metrics of all replicas, leaves [R]. parts: what the other processes have sent."""
        size = sum(map(len, self._replicas.values()))
        found = {name: np.empty(size, values.dtype) for name, values in own.items()}
        starts = dict.fromkeys(parts, 0)
        for name, values_R in sorted(found.items()):
            values_R[self._replicas[0]] = own[name]
            for peer, data in parts.items():
                replicas = self._replicas[peer]
                part = np.frombuffer(data, values_R.dtype, len(replicas), starts[peer])
                values_R[replicas], starts[peer] = part, starts[peer] + part.nbytes
        return found


def _key(step: int) -> tuple[str, int]:
    return "row", step
