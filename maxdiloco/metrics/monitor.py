"""The replicas' metrics at a log step, and whether any step up to it went wrong.

    # R replicas
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiloco.engine.calls import BESIDE, Call
from maxdiloco.engine.trainer import Trainer
from maxdiloco.errors import NumericsError
from maxdiloco.parallel.program import Program

NEVER = np.iinfo(np.int32).max


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
        # Programs apart from the step, so that the step carries no traffic for metrics.
        self._watch = Program("watch", _first_bad, on_compile=on_compile)
        everywhere = NamedSharding(trainer.mesh, P())
        self._fetch = Program(
            "log", lambda *trees: trees, out_shardings=everywhere, on_compile=on_compile
        )
        self._first_bad_R: Any = None
        self._last: Any = None

    @functools.cached_property
    def _metrics(self) -> Any:
        # On first use: tracing the step takes seconds.
        return self._trainer.abstract_metrics(self._batch)

    @property
    def _first_bad_like(self) -> jax.ShapeDtypeStruct:
        loss = self._metrics["loss"]
        return jax.ShapeDtypeStruct(loss.shape, jnp.int32, sharding=loss.sharding)

    def calls(self, *, log_period: int) -> list[Call]:
        """The programs of `add`, which run every step, and of `check`."""
        period = self._trainer.period
        seen = (self._metrics, self._first_bad_like)
        step = np.int32(0)
        log = [Call(self._fetch, seen, period / log_period, BESIDE)]
        if not self._stop_on_nan:
            return log
        watched = (self._first_bad_like, _watched(self._metrics), step)
        return [Call(self._watch, watched, period, BESIDE), *log]

    def add(self, t: int, metrics: Any) -> None:
        """Keep the metrics of inner step t, leaves [R], without waiting for them."""
        self._last = metrics
        if self._first_bad_R is None:
            like = self._first_bad_like
            never_R = np.full(like.shape, NEVER, like.dtype)
            self._first_bad_R = jax.make_array_from_callback(
                like.shape, like.sharding, lambda index: never_R[index]
            )
        if self._stop_on_nan:
            self._first_bad_R = self._watch(self._first_bad_R, _watched(metrics), np.int32(t))

    def check(self, state: Any, saved_steps: Callable[[], list[int]]) -> dict[str, np.ndarray]:
        """Metrics of the last step, leaves [R], the same in every process.

        saved_steps: gives the steps that have a checkpoint, for the error.
        Raises NumericsError for the first step that was not finite, in every process.
        """
        last, first_R = jax.tree.map(np.asarray, self._fetch(self._last, self._first_bad_R))
        if first_R.min() < NEVER:
            steps = saved_steps()
            saved = "no checkpoint was saved"
            if steps:
                saved = f"the last good checkpoint is that of step {max(steps)}"
            raise NumericsError(
                f"step {first_R.min()}: the loss or gradient of replica {first_R.argmin()} is "
                f"not finite; {saved}. Resume with a lower learning_rate, or with "
                f"nan_policy=skip."
            )
        self._trainer.check_finite(state)
        return last


def learning_metrics(metrics: dict[str, np.ndarray], learning_rate: float) -> dict[str, float]:
    """The metrics learning/* of a step. metrics: of Monitor.check, leaves [R]."""
    row = {"learning/loss": float(metrics["loss"].mean())}
    if metrics["loss"].size > 1:
        for m, loss in enumerate(metrics["loss"]):
            row[f"learning/loss_replica_{m}"] = float(loss)
    row["learning/lr"] = learning_rate
    for name in sorted(set(metrics) - {"loss", "tokens"}):
        row[f"learning/{name}"] = float(metrics[name].mean())
    return row


def _watched(metrics: Any) -> Any:
    return {name: metrics[name] for name in ("loss", "grad_norm")}
