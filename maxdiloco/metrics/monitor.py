"""The replicas' metrics at a log step, whether any step up to it went wrong, and the way to a row.

# R replicas  S replicas that devices of this process hold
"""

import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from maxdiloco.cluster import agree
from maxdiloco.cluster.deadlines import Deadlines
from maxdiloco.cluster.payloads import CONTROL
from maxdiloco.engine.calls import BESIDE, Call
from maxdiloco.engine.trainer import Trainer, abstract_metrics
from maxdiloco.errors import NumericsError
from maxdiloco.parallel.program import Program

if TYPE_CHECKING:
    from maxdiloco.cluster.messages import Mailbox

Metrics = Mapping[str, np.ndarray]  # of replicas
Values = Mapping[str, float]

NEVER = np.iinfo(np.int32).max
# Steps whose losses stay on the devices before the older half is read: those so far back are done.
_MOST_STEPS = 256  # our choice
_SUMMED = ("loss", "skipped")  # over the steps of a row, where the step has them


def _first_bad(first_R, loss_R, grad_norm_R, t):
    finite_R = jnp.isfinite(loss_R) & jnp.isfinite(grad_norm_R)
    return jnp.where(finite_R, first_R, jnp.minimum(first_R, t))


class Monitor:
    """Watches every step without waiting for it; `check` waits.

    batch: a step's, as ShapeDtypeStructs. stop_on_nan: whether a loss or gradient norm that is not
    finite ends the run. on_compile: of Program.
    """

    def __init__(self, trainer: Trainer, batch: Any, *, stop_on_nan: bool, on_compile: Callable):
        self._trainer = trainer
        self._batch = batch
        self._stop_on_nan = stop_on_nan
        # Apart from the step, so that the step carries no traffic for metrics.
        self._watch = Program("watch", _first_bad, on_compile=on_compile)
        self._first_bad_R: Any = None
        self._last: Any = None
        # Since the last row: _summed of each step, [R] on the devices; sums of steps before, [S].
        self._steps: list[dict[str, Any]] = []
        self._sums_S: dict[str, Any] = {}

    @functools.cached_property
    def _metrics(self) -> Any:
        # On first use: tracing the step takes seconds.
        return abstract_metrics(self._trainer, self._batch)

    @functools.cached_property
    def _summed(self) -> list[str]:
        return [name for name in _SUMMED if name in self._metrics]

    @functools.cached_property
    def _owner_R(self) -> np.ndarray:
        """The process that reports a replica: the first that holds it."""
        loss = self._metrics["loss"]
        owner_R = np.full(loss.shape, NEVER)
        for device, (index,) in loss.sharding.devices_indices_map(loss.shape).items():
            owner_R[index] = np.minimum(owner_R[index], device.process_index)
        return owner_R

    @functools.cached_property
    def replicas(self) -> dict[int, list[int]]:
        """{process: the replicas whose metrics `check` gives it}, of all processes; each once."""
        owners = np.unique(self._owner_R).tolist()
        return {owner: np.flatnonzero(self._owner_R == owner).tolist() for owner in owners}

    @functools.cached_property
    def _held(self) -> list[int]:
        """The replicas whose metrics this process can read, ascending."""
        R = self._owner_R.size
        here = self._metrics["loss"].sharding.addressable_devices_indices_map((R,)).values()
        return sorted({m for (index,) in here for m in range(*index.indices(R))})

    @functools.cached_property
    def _own(self) -> np.ndarray:
        """Which of those this process reports."""
        return self._owner_R[self._held] == jax.process_index()

    def calls(self) -> list[Call]:
        """The program of `add`, which runs every step; `check` runs none."""
        if not self._stop_on_nan:
            return []
        loss = self._metrics["loss"]
        first_R = jax.ShapeDtypeStruct(loss.shape, jnp.int32, sharding=loss.sharding)
        watched = (first_R, loss, self._metrics["grad_norm"], np.int32(0))
        return [Call(self._watch, watched, self._trainer.period, BESIDE)]

    def add(self, t: int, metrics: Any) -> None:
        """Keep the metrics of inner step t, leaves [R], without waiting for them."""
        self._last = metrics
        self._steps.append({name: metrics[name] for name in self._summed})
        if len(self._steps) > _MOST_STEPS:
            self._add_up(_MOST_STEPS // 2)
        if self._first_bad_R is None:
            like = self._metrics["loss"]
            never_R = np.full(like.shape, NEVER, np.int32)
            self._first_bad_R = jax.make_array_from_callback(
                like.shape, like.sharding, lambda index: never_R[index]
            )
        if self._stop_on_nan:
            watched = metrics["loss"], metrics["grad_norm"], np.int32(t)
            self._first_bad_R = self._watch(self._first_bad_R, *watched)

    def check(
        self, state: Any, saved_steps: Callable[[], list[int]], *, together: bool = False
    ) -> dict[str, np.ndarray]:
        """Metrics of the last step, leaves [replicas of this process]; waits for the step.

        saved_steps: gives the steps that have a checkpoint. together: all processes are here.
        Raises NumericsError for the first step that was not finite, of a replica held here; in
        every process if they are together.
        """
        last, first_S = _read((self._last, self._first_bad_R))
        step, replica = min(zip(first_S.tolist(), self._held, strict=True))
        if together:
            step, replica = min(zip(agree.from_all(step), agree.from_all(replica), strict=True))
        if step < NEVER:
            saved = saved_steps()
            last = f"the last good checkpoint is that of step {max(saved)}" if saved else ""
            raise NumericsError(
                f"step {step}: the loss or gradient of replica {replica} is not finite; "
                f"{last or 'no checkpoint was saved'}. Resume with a lower learning_rate, or with "
                f"nan_policy=skip."
            )
        self._trainer.check_finite(state, exchanges_only=True)
        return {name: values_S[self._own] for name, values_S in last.items()}

    def take_row(self, steps: int) -> dict[str, np.ndarray]:
        """Of the `steps` since it was last taken, float32 [replicas of this process].

        "loss": mean of those that were not skipped, NaN without any; with skip "skipped": how many.
        """
        self._add_up(len(self._steps))
        sums_S, self._sums_S = self._sums_S, {}
        taken_S = steps - sums_S.get("skipped", np.float64(0))
        with np.errstate(invalid="ignore"):
            sums_S["loss"] = sums_S["loss"] / taken_S
        return {name: sum_S[self._own].astype(np.float32) for name, sum_S in sums_S.items()}

    def sums(self) -> dict[str, list[float]]:
        """Of each replica since the row was taken, [R]. All processes call it."""
        self._add_up(len(self._steps))
        own_R, found = self._owner_R == jax.process_index(), {}
        for name in self._summed:
            sum_R = np.zeros(own_R.size)
            sum_S = np.broadcast_to(self._sums_S.get(name, 0.0), len(self._held))
            sum_R[own_R] = sum_S[self._own]
            found[name] = agree.from_owners(sum_R, own_R).tolist()
        return found

    def resume(self, sums: Mapping[str, Any]) -> None:
        """Go on from what `sums` gave, of a run with another number of replicas perhaps."""
        for name in set(_SUMMED).intersection(sums):
            of_R = sums[name]
            self._sums_S[name] = np.array([of_R[m % len(of_R)] for m in self._held])

    def _add_up(self, count: int) -> None:
        """Read the oldest steps and add them to the sums, one after the other."""
        read, self._steps = self._steps[:count], self._steps[count:]
        for step in _read(read) if read else ():
            step["loss"] = np.where(step.get("skipped", 0), 0, step["loss"])
            for name, value_S in step.items():
                self._sums_S[name] = self._sums_S.get(name, 0.0) + value_S.astype(np.float64)


def _read(tree: Any) -> Any:
    """What this process's devices hold of arrays [R] of one sharding: [S], of the replicas held."""

    def slots(x: jax.Array) -> list[jax.Array]:
        """The values of each slot; several devices may have the same ones."""
        parts = {part.index[0].indices(x.shape[0])[0]: part.data for part in x.addressable_shards}
        return [parts[first] for first in sorted(parts)]

    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(map(np.concatenate, jax.device_get([*map(slots, leaves)])))


def learning_metrics(metrics: dict[str, np.ndarray], learning_rate: float) -> dict[str, float]:
    """The metrics learning/* and moe/* of a row: means of metrics [R] over the replicas."""
    loss_R = metrics["loss"]
    if "skipped" in metrics and not np.isnan(loss_R).all():
        loss_R = loss_R[~np.isnan(loss_R)]  # of replicas that took a step
    row = {"learning/loss": float(loss_R.mean())}
    if metrics["loss"].size > 1:
        for m, loss in enumerate(metrics["loss"]):
            row[f"learning/loss_replica_{m}"] = float(loss)
    row["learning/lr"] = learning_rate
    for name in sorted(set(metrics) - {"loss", "tokens"}):
        row[name if "/" in name else f"learning/{name}"] = float(metrics[name].mean())
    return row


class Rows:
    """The rows of a run; every process adds the same steps, and process 0 writes them in order.

    No process waits for another at a log step.
    process: this one. replicas: {process: replicas whose metrics it reads}, the same everywhere,
    each replica once, some of them process 0's. mailbox: None where process 0 reads all replicas.
    write(step, metrics, values): called in process 0; metrics, leaves [R], may be None.
    """

    def __init__(
        self,
        process: int,
        replicas: Mapping[int, Sequence[int]],
        *,
        mailbox: "Mailbox | None",
        write: Callable[[int, Metrics | None, Values], None],
    ):
        self._process = process
        self._replicas = {peer: list(rows) for peer, rows in sorted(replicas.items()) if rows}
        self._mailbox = mailbox
        self._write = write
        self._waiting: deque[tuple[int, Metrics | None, Values]] = deque()
        self._deadlines = Deadlines()  # of the work from one row to the next

    def add(self, step: int, metrics: Metrics | None, values: Values) -> None:
        """Add the metrics of this process's replicas in their order; process 0 adds `values`.

        Never waits. Raises LostPeerError.
        """
        self._deadlines.worked()
        if self._process == 0:
            self._waiting.append((step, metrics, values))
        elif metrics is not None and self._process in self._replicas:
            parts = [metrics[name].tobytes() for name in sorted(metrics)]
            self._mailbox.put(0, _key(step), parts, CONTROL)

    def write_complete(self) -> None:
        """Write the rows that are complete, up to the first that is not. Raises LostPeerError."""
        while self._waiting:
            step, metrics, _ = self._waiting[0]
            if not all(self._mailbox.arrived(p, _key(step)) for p in self._peers(metrics)):
                return
            self._write_first()

    def write_all(self) -> None:
        """Wait for what is missing and write all rows. Raises LostPeerError (see Deadlines)."""
        while self._waiting:
            self._write_first()

    def _peers(self, metrics: Metrics | None) -> list[int]:
        return [] if metrics is None else [peer for peer in self._replicas if peer]

    def _write_first(self) -> None:
        step, metrics, values = self._waiting[0]
        what = f"its part of the row of step {step}"
        parts = {
            peer: self._deadlines.receive(self._mailbox, peer, _key(step), what)
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
