"""The metrics of the replicas' steps: their sums since the last row, and whether any went wrong.

Letters: R replicas, S replicas that devices of this process hold.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxdiloco.cluster import agree
from maxdiloco.engine.calls import OUTSIDE, Call
from maxdiloco.engine.trainer import Trainer, abstract_metrics
from maxdiloco.errors import NumericsError
from maxdiloco.parallel.program import Program

NEVER = np.iinfo(np.int32).max
# Steps whose losses stay on the devices before the older half is read: those that are 128 steps
# back are done, so that reading them does not wait.
_MAX_STEPS = 256
_SUMMED = ("loss", "skipped")  # over the steps of a row, if the step has them


def _first_bad(first, loss, grad_norm, t):
    """Return the first step [R] that was not finite, NEVER if there is none."""
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    return jnp.where(finite, first, jnp.minimum(first, t))


class Monitor:
    """Watches every step without waiting for it; `check` waits."""

    def __init__(self, trainer: Trainer, batch: Any, *, stop_on_nan: bool, on_compile: Callable):
        """Build the program that adds up metrics.

        Args:
          trainer: whose steps they are.
          batch: of a step, as ShapeDtypeStructs.
          stop_on_nan: whether a loss or gradient norm that is not finite ends the run.
          on_compile: of Program.
        """
        self._trainer = trainer
        self._batch = batch
        self._stop_on_nan = stop_on_nan
        # Separate from the step, so that the step has no traffic for metrics.
        self._watch = Program("watch", _first_bad, on_compile=on_compile)
        self._first_bad: Any = None  # [R]
        self._last: Any = None  # metrics of the last step, leaves [R]
        # Since the last row: metrics of the newest steps, [R] on the devices, and sums of the steps
        # before them, [S].
        self._steps: list[dict[str, Any]] = []
        self._sums: dict[str, Any] = {}

    @functools.cached_property
    def _metrics(self) -> Any:
        # Computed on first use: tracing the step takes seconds.
        return abstract_metrics(self._trainer, self._batch)

    @functools.cached_property
    def _summed(self) -> list[str]:
        return [name for name in _SUMMED if name in self._metrics]

    @functools.cached_property
    def _owner(self) -> np.ndarray:
        """The process that reports each replica [R]: the first that holds it."""
        loss = self._metrics["loss"]
        owner = np.full(loss.shape, NEVER)
        for device, (index,) in loss.sharding.devices_indices_map(loss.shape).items():
            owner[index] = np.minimum(owner[index], device.process_index)
        return owner

    @functools.cached_property
    def replicas(self) -> dict[int, list[int]]:
        """{process: the replicas whose metrics `check` returns there}, of all processes."""
        owners = np.unique(self._owner).tolist()
        return {owner: np.flatnonzero(self._owner == owner).tolist() for owner in owners}

    @functools.cached_property
    def _held(self) -> list[int]:
        """The replicas whose metrics this process can read, ascending."""
        R = self._owner.size
        here = self._metrics["loss"].sharding.addressable_devices_indices_map((R,)).values()
        return sorted({m for (index,) in here for m in range(*index.indices(R))})

    @functools.cached_property
    def _own(self) -> np.ndarray:
        """Which of the held replicas this process reports, [S]."""
        return self._owner[self._held] == jax.process_index()

    def calls(self) -> list[Call]:
        """Return the program of `add`, which runs every step; `check` runs none."""
        if not self._stop_on_nan:
            return []
        loss = self._metrics["loss"]
        first = jax.ShapeDtypeStruct(loss.shape, jnp.int32, sharding=loss.sharding)
        watched = (first, loss, self._metrics["grad_norm"], np.int32(0))
        return [Call(self._watch, watched, self._trainer.period, OUTSIDE)]

    def add(self, t: int, metrics: Any) -> None:
        """Keep the metrics of inner step t, leaves [R], without waiting for them."""
        self._last = metrics
        self._steps.append({name: metrics[name] for name in self._summed})
        if len(self._steps) > _MAX_STEPS:
            self._add_up(_MAX_STEPS // 2)
        if self._first_bad is None:
            like = self._metrics["loss"]
            never = np.full(like.shape, NEVER, np.int32)
            self._first_bad = jax.make_array_from_callback(
                like.shape, like.sharding, lambda index: never[index]
            )
        if self._stop_on_nan:
            watched = metrics["loss"], metrics["grad_norm"], np.int32(t)
            self._first_bad = self._watch(self._first_bad, *watched)

    def check(
        self, state: Any, saved_steps: Callable[[], list[int]], *, together: bool = False
    ) -> dict[str, np.ndarray]:
        """Wait for the last step and return its metrics, leaves [replicas this process reports].

        Args:
          state: after the step.
          saved_steps: returns the steps that have a checkpoint.
          together: whether all processes call this now.

        Raises:
          NumericsError: a step of a replica held here was not finite; in every process if they
            are together.
        """
        last, first_bad = _read((self._last, self._first_bad))
        step, replica = min(zip(first_bad.tolist(), self._held, strict=True))
        if together:
            step, replica = min(zip(agree.from_all(step), agree.from_all(replica), strict=True))
        if step < NEVER:
            saved = saved_steps()
            last = f"step {max(saved)} has the last good checkpoint" if saved else ""
            raise NumericsError(
                f"step {step}: the loss or gradient of replica {replica} is not finite; "
                f"{last or 'no checkpoint was saved'}. Resume with a lower learning_rate, or with "
                f"nan_policy=skip."
            )
        self._trainer.check_finite(state, exchanges_only=True)
        return {name: values[self._own] for name, values in last.items()}

    def read_row(self, steps: int) -> dict[str, np.ndarray]:
        """Return the losses since the last row, and begin a new one.

        Args:
          steps: how many steps the row has.

        Returns:
          float32 [replicas that this process reports]. "loss": mean of the steps that were not
          skipped, NaN without any. "skipped", with nan_policy=skip: how many steps were.
        """
        self._add_up(len(self._steps))
        sums, self._sums = self._sums, {}
        trained = steps - sums.get("skipped", np.float64(0))
        with np.errstate(invalid="ignore"):
            sums["loss"] = sums["loss"] / trained
        return {name: values[self._own].astype(np.float32) for name, values in sums.items()}

    def sums(self) -> dict[str, list[float]]:
        """Return the sums since the last row of each replica, [R]. All processes call it."""
        self._add_up(len(self._steps))
        own, found = self._owner == jax.process_index(), {}
        for name in self._summed:
            all_sums = np.zeros(own.size)
            held_sums = np.broadcast_to(self._sums.get(name, 0.0), len(self._held))
            all_sums[own] = held_sums[self._own]
            found[name] = agree.from_owners(all_sums, own).tolist()
        return found

    def resume(self, sums: Mapping[str, Any]) -> None:
        """Continue from the result of `sums`, of a run that may have other replicas."""
        for name in set(_SUMMED).intersection(sums):
            saved = sums[name]
            self._sums[name] = np.array([saved[m % len(saved)] for m in self._held])

    def _add_up(self, count: int) -> None:
        """Read the oldest `count` steps and add them to the sums, one after the other."""
        read, self._steps = self._steps[:count], self._steps[count:]
        for step in _read(read) if read else ():
            step["loss"] = np.where(step.get("skipped", 0), 0, step["loss"])
            for name, values in step.items():
                self._sums[name] = self._sums.get(name, 0.0) + values.astype(np.float64)


def _read(tree: Any) -> Any:
    """Read the entries of arrays [R] on this process's devices, as [S]; they share a sharding."""

    def positions(x: jax.Array) -> list[jax.Array]:
        """Return the values of each mesh position; several devices may have the same ones."""
        parts = {part.index[0].indices(x.shape[0])[0]: part.data for part in x.addressable_shards}
        return [parts[first] for first in sorted(parts)]

    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(map(np.concatenate, jax.device_get([*map(positions, leaves)])))
