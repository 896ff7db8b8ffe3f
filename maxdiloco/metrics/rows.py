"""The rows of a run: their metrics, which process 0 collects from all processes.

Letters: R replicas.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from maxdiloco.cluster.deadlines import Deadlines
from maxdiloco.cluster.payloads import CONTROL

if TYPE_CHECKING:
    from maxdiloco.cluster.messages import Messenger

Metrics = Mapping[str, np.ndarray]  # of replicas, leaves [R]
Values = Mapping[str, float]


def learning_metrics(metrics: Metrics, learning_rate: float) -> dict[str, float]:
    """Return the metrics learning/* and moe/* of a row: means of metrics [R] over the replicas.

    A replica that skipped all steps since the previous row has no loss and is left out.
    """
    losses = metrics["loss"]
    if "skipped" in metrics and not np.isnan(losses).all():
        losses = losses[~np.isnan(losses)]
    row = {"learning/loss": float(losses.mean())}
    if metrics["loss"].size > 1:
        for replica, loss in enumerate(metrics["loss"]):
            row[f"learning/loss_replica_{replica}"] = float(loss)
    row["learning/lr"] = learning_rate
    for name in sorted(set(metrics) - {"loss", "tokens"}):
        row[name if "/" in name else f"learning/{name}"] = float(metrics[name].mean())
    return row


class RowCollector:
    """Collects the rows of a run. Every process adds the same steps, process 0 writes them.

    No process waits for another at a log step.
    """

    def __init__(
        self,
        process: int,
        replicas: Mapping[int, Sequence[int]],
        *,
        messenger: "Messenger | None",
        write: Callable[[int, Metrics | None, Values], None],
    ):
        """Start without rows.

        Args:
          process: number of this process.
          replicas: {process: replicas whose metrics it reads}, the same in all processes. Each
            replica occurs once, and process 0 has at least one.
          messenger: to the other processes; None if process 0 reads all replicas.
          write: called as write(step, metrics, values), in process 0; metrics may be None.
        """
        self._process = process
        self._replicas = {peer: list(rows) for peer, rows in sorted(replicas.items()) if rows}
        self._messenger = messenger
        self._write = write
        self._waiting: deque[tuple[int, Metrics | None, Values]] = deque()
        self._deadlines = Deadlines()  # of the work from one row to the next

    def add(self, step: int, metrics: Metrics | None, values: Values) -> None:
        """Add a step, without waiting.

        Args:
          step: beyond the step that was added last.
          metrics: of the replicas that this process reads, in their order; None for a row without.
          values: the rest of the row; used in process 0 only.

        Raises:
          LostPeerError: process 0 cannot be reached.
        """
        self._deadlines.record_work()
        if self._process == 0:
            self._waiting.append((step, metrics, values))
        elif metrics is not None and self._process in self._replicas:
            parts = [metrics[name].tobytes() for name in sorted(metrics)]
            self._messenger.put(0, _key(step), parts, CONTROL)

    def write_complete(self) -> None:
        """Write the rows that are complete, up to the first that is not. Raises LostPeerError."""
        while self._waiting:
            step, metrics, _ = self._waiting[0]
            if not all(self._messenger.has_message(p, _key(step)) for p in self._peers(metrics)):
                return
            self._write_first()

    def write_all(self) -> None:
        """Wait for the missing parts and write all rows. Raises LostPeerError."""
        while self._waiting:
            self._write_first()

    def _peers(self, metrics: Metrics | None) -> list[int]:
        return [] if metrics is None else [peer for peer in self._replicas if peer]

    def _write_first(self) -> None:
        step, metrics, values = self._waiting[0]
        what = f"its part of the row of step {step}"
        parts = {
            peer: self._deadlines.receive(self._messenger, peer, _key(step), what)
            for peer in self._peers(metrics)
        }
        self._waiting.popleft()
        self._write(step, metrics and self._join(metrics, parts), values)

    def _join(self, own: Metrics, parts: Mapping[int, bytearray]) -> Metrics:
        """Join the metrics of process 0 and of other processes to [R], for all replicas.

        Args:
          own: metrics of process 0.
          parts: bytes from each other process, one metric after the other by name.
        """
        size = sum(map(len, self._replicas.values()))
        found = {name: np.empty(size, values.dtype) for name, values in own.items()}
        starts = dict.fromkeys(parts, 0)
        for name, values in sorted(found.items()):
            values[self._replicas[0]] = own[name]
            for peer, data in parts.items():
                replicas = self._replicas[peer]
                part = np.frombuffer(data, values.dtype, len(replicas), starts[peer])
                values[replicas], starts[peer] = part, starts[peer] + part.nbytes
        return found


def _key(step: int) -> tuple[str, int]:
    return "row", step
