"""The replicas' metrics at a log step, and whether any step up to it went wrong.

    # R replicas  S replicas that devices of this process hold
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxdiloco.engine.calls import BESIDE, Call
from maxdiloco.engine.trainer import Trainer
from maxdiloco.errors import NumericsError
from maxdiloco.parallel.program import Program
from maxdiloco.processes import agree

NEVER = np.iinfo(np.int32).max
# Losses that stay on the devices before the older half is read: a step that is so far back is done.
_MOST_LOSSES = 256  # our choice


def _first_bad(first_R, metrics, t):
    finite_R = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
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
        # Since the last row: losses [R] on the devices, and the sum of those before them, [S].
        self._losses: list[Any] = []
        self._loss_sum_S: Any = np.float64(0)

    @functools.cached_property
    def _metrics(self) -> Any:
        # On first use: tracing the step takes seconds.
        return self._trainer.abstract_metrics(self._batch)

    @functools.cached_property
    def _held_by(self) -> dict[int, list[int]]:
        """{process: replicas whose metrics it can read, ascending}, of all processes."""
        loss, held = self._metrics["loss"], defaultdict(set)
        for device, (index, *_) in loss.sharding.devices_indices_map(loss.shape).items():
            held[device.process_index].update(range(*index.indices(loss.shape[0])))
        return {process: sorted(held[process]) for process in sorted(held)}

    @functools.cached_property
    def replicas(self) -> dict[int, list[int]]:
        """{process: the replicas whose metrics `check` gives it}, of all processes; each once."""
        owned, reported = {}, set()
        for process, held in self._held_by.items():
            owned[process] = [m for m in held if m not in reported]
            reported.update(held)
        return {process: own for process, own in owned.items() if own}

    @functools.cached_property
    def _held(self) -> list[int]:
        """The replicas whose metrics this process can read, ascending."""
        return self._held_by.get(jax.process_index(), [])

    @functools.cached_property
    def _own(self) -> np.ndarray:
        """Which of those this process reports."""
        return np.isin(self._held, self.replicas.get(jax.process_index(), []))

    def calls(self) -> list[Call]:
        """The program of `add`, which runs every step; `check` runs none."""
        if not self._stop_on_nan:
            return []
        loss = self._metrics["loss"]
        first_R = jax.ShapeDtypeStruct(loss.shape, jnp.int32, sharding=loss.sharding)
        watched = (first_R, _watched(self._metrics), np.int32(0))
        return [Call(self._watch, watched, self._trainer.period, BESIDE)]

    def add(self, t: int, metrics: Any) -> None:
        """Keep the metrics of inner step t, leaves [R], without waiting for them."""
        self._last = metrics
        self._losses.append(metrics["loss"])
        if len(self._losses) > _MOST_LOSSES:
            self._add_up(_MOST_LOSSES // 2)
        if self._first_bad_R is None:
            like = self._metrics["loss"]
            never_R = np.full(like.shape, NEVER, np.int32)
            self._first_bad_R = jax.make_array_from_callback(
                like.shape, like.sharding, lambda index: never_R[index]
            )
        if self._stop_on_nan:
            self._first_bad_R = self._watch(self._first_bad_R, _watched(metrics), np.int32(t))

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
        self._trainer.check_exchanges(state)
        return {name: values_S[self._own] for name, values_S in last.items()}

    def take_mean_loss(self, steps: int) -> np.ndarray:
        """Mean loss of the `steps` since it was last taken, float32 [replicas of this process]."""
        self._add_up(len(self._losses))
        mean_S, self._loss_sum_S = self._loss_sum_S / steps, np.float64(0)
        return mean_S[self._own].astype(np.float32)

    def loss_sums(self) -> list[float]:
        """Sum of each replica's losses since the mean was taken, [R]. All processes call it."""
        self._add_up(len(self._losses))
        R = self._metrics["loss"].shape[0]
        sum_R, replicas = np.zeros(R), np.array(self._held)[self._own]
        sum_R[replicas] = np.broadcast_to(self._loss_sum_S, len(self._held))[self._own]
        return agree.from_owners(sum_R, np.isin(np.arange(R), replicas)).tolist()

    def resume_losses(self, sum_R: Sequence[float]) -> None:
        """Go on from what `loss_sums` gave, of a run with another number of replicas perhaps."""
        self._loss_sum_S = np.array([sum_R[m % len(sum_R)] for m in self._held])

    def _add_up(self, count: int) -> None:
        """Read the oldest losses and add them to the sum, one step after the other."""
        read, self._losses = self._losses[:count], self._losses[count:]
        for loss_S in _read(read) if read else ():
            self._loss_sum_S = self._loss_sum_S + loss_S.astype(np.float64)


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
    row = {"learning/loss": float(metrics["loss"].mean())}
    if metrics["loss"].size > 1:
        for m, loss in enumerate(metrics["loss"]):
            row[f"learning/loss_replica_{m}"] = float(loss)
    row["learning/lr"] = learning_rate
    for name in sorted(set(metrics) - {"loss", "tokens"}):
        row[name if "/" in name else f"learning/{name}"] = float(metrics[name].mean())
    return row


def _watched(metrics: Any) -> Any:
    return {name: metrics[name] for name in ("loss", "grad_norm")}
