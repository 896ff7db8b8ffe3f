"""What the replicas' metrics say at a log step, and whether any step before it went wrong.

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
from maxdiloco.engine.diloco import DiLoCo
from maxdiloco.errors import NumericsError
from maxdiloco.exchange.collective import Sizes
from maxdiloco.parallel.program import Program

NEVER = np.iinfo(np.int32).max


def _first_bad(first_R, metrics, t):
    finite_R = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
    return jnp.where(finite_R, first_R, jnp.minimum(first_R, t))


class Monitor:
    """Watches every step without waiting for it; `check` and `row` wait.

    batch: ShapeDtypeStructs of a step's. stop_on_nan: whether a loss or gradient norm that is not
    finite ends the run. on_compile: of Program.
    """

    def __init__(self, trainer: Any, batch: Any, *, stop_on_nan: bool, on_compile: Callable):
        self._trainer = trainer
        self._batch = batch
        self._stop = stop_on_nan
        # Programs of their own, so that the training step carries no traffic for metrics.
        self._watch = Program("watch", _first_bad, on_compile=on_compile)
        everywhere = NamedSharding(trainer.mesh, P())
        self._fetch = Program(
            "log", lambda *trees: trees, out_shardings=everywhere, on_compile=on_compile
        )
        self._first_R: Any = None
        self._last: Any = None

    @functools.cached_property
    def _metrics(self) -> Any:
        # Traces the step, which takes seconds: not before something asks.
        return self._trainer.abstract_metrics(self._batch)

    @property
    def _first_like(self) -> jax.ShapeDtypeStruct:
        loss = self._metrics["loss"]
        return jax.ShapeDtypeStruct(loss.shape, jnp.int32, sharding=loss.sharding)

    def calls(self, *, period: int, log_period: int) -> list[Call]:
        """The programs of `add`, once a step, and of `row`. period: inner steps H."""
        seen = (self._metrics, self._first_like)
        step = np.int32(0)
        log = [Call(self._fetch, seen, period / log_period, BESIDE)]
        if not self._stop:
            return log
        watched = (self._first_like, _watched(self._metrics), step)
        return [Call(self._watch, watched, period, BESIDE), *log]

    def add(self, t: int, metrics: Any) -> None:
        """Take in the metrics of inner step t, leaves [R]."""
        self._last = metrics
        if self._first_R is None:
            like = self._first_like
            never_R = np.full(like.shape, NEVER, like.dtype)
            self._first_R = jax.make_array_from_callback(
                like.shape, like.sharding, lambda place: never_R[place]
            )
        if self._stop:
            self._first_R = self._watch(self._first_R, _watched(metrics), np.int32(t))

    def check(self, state: Any, saved_steps: Callable[[], list[int]]) -> dict[str, np.ndarray]:
        """Metrics of the last step, leaves [R], the same in every process.

        saved_steps: asked, when it comes to that, for the steps that have a checkpoint.
        Raises NumericsError for the first step that was not finite, in every process.
        """
        last, first_R = jax.tree.map(np.asarray, self._fetch(self._last, self._first_R))
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

    def row(
        self, state: Any, last: dict[str, np.ndarray], learning_rate: float
    ) -> dict[str, float]:
        """The learning/ and diloco/ metrics of the last step, from what `check` gave."""
        row = {"learning/loss": float(last["loss"].mean())}
        if last["loss"].size > 1:
            for m, loss in enumerate(last["loss"]):
                row[f"learning/loss_replica_{m}"] = float(loss)
        row["learning/lr"] = learning_rate
        for name in sorted(set(last) - {"loss", "tokens"}):
            row[f"learning/{name}"] = float(last[name].mean())
        if isinstance(self._trainer, DiLoCo):
            row |= outer_metrics(Sizes(*map(np.asarray, state.sizes)))
        return row


def _watched(metrics: Any) -> Any:
    return {name: metrics[name] for name in ("loss", "grad_norm")}


def outer_metrics(sizes: Sizes) -> dict[str, float]:
    """Norm of the mean outer gradient, mean pairwise cosine and drift, of one exchange.

    Of the fragment that was synchronised last; empty before the first synchronisation. The
    cosines are weighted by the product of the two norms, so that their sum follows from the norms
    of the replicas and of the mean: |sum g|^2 = sum |g_m|^2 + sum over pairs of 2 g_m g_n.
    """
    norm_R = np.asarray(sizes.norm_R, np.float64)
    M = norm_R.size
    if not norm_R.any():
        return {}
    row = {
        "diloco/outer_grad_norm": float(sizes.mean_norm),
        "diloco/drift": float(np.mean(sizes.drift_R)),
    }
    products = norm_R.sum() ** 2 - (norm_R**2).sum() if np.isfinite(norm_R).all() else 0.0
    if products > 0:
        inner = (M * float(sizes.mean_norm)) ** 2 - (norm_R**2).sum()
        row["diloco/outer_grad_cosine"] = float(np.clip(inner / products, -1, 1))
    return row
