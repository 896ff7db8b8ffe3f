"""What the replicas' metrics say at a log step, and whether any step before it went wrong.

    # R replicas
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxdiloco.algorithm import DiLoCo
from maxdiloco.errors import NumericsError
from maxdiloco.parallel.replicas import fetch

NEVER = np.iinfo(np.int32).max


def _first_bad(first_R, metrics, t):
    finite_R = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
    return jnp.where(finite_R, first_R, jnp.minimum(first_R, t))


class Monitor:
    """Watches every step without waiting for it; `check` and `row` wait.

    stop_on_nan: whether a loss or gradient norm that is not finite ends the run.
    """

    def __init__(self, trainer: Any, *, stop_on_nan: bool):
        self._trainer = trainer
        self._stop = stop_on_nan
        self._update = jax.jit(_first_bad)
        self._first_R: Any = None
        self._last: Any = None

    def add(self, t: int, metrics: Any) -> None:
        """Take in the metrics of inner step t, leaves [R]."""
        self._last = metrics
        if self._stop:
            if self._first_R is None:
                self._first_R = jnp.full_like(metrics["loss"], NEVER, jnp.int32)
            watched = {name: metrics[name] for name in ("loss", "grad_norm")}
            self._first_R = self._update(self._first_R, watched, np.int32(t))

    def check(self, state: Any, saved_steps: Callable[[], list[int]]) -> None:
        """Raise NumericsError for the first step that was not finite, on every process.

        saved_steps: asked, when it comes to that, for the steps that have a checkpoint.
        """
        if self._first_R is not None:
            first_R = fetch(self._first_R, self._trainer.mesh)
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

    def row(self, state: Any, learning_rate: float) -> dict[str, float]:
        """The learning/ and diloco/ metrics of the last step."""
        last = fetch(self._last, self._trainer.mesh)
        row = {"learning/loss": float(last["loss"].mean())}
        if last["loss"].size > 1:
            for m, loss in enumerate(last["loss"]):
                row[f"learning/loss_replica_{m}"] = float(loss)
        row["learning/lr"] = learning_rate
        for name in sorted(set(last) - {"loss", "tokens"}):
            row[f"learning/{name}"] = float(last[name].mean())
        if isinstance(self._trainer, DiLoCo):
            row["diloco/drift"] = float(self._trainer.drift(state).mean())
            row |= outer_metrics(np.asarray(state.gram))
        return row


def outer_metrics(gram_RR: np.ndarray) -> dict[str, float]:
    """Norm of the mean outer gradient and mean pairwise cosine, from its inner products.

    Of the fragment that was synchronised last; empty before the first synchronisation.
    """
    M = len(gram_RR)
    norms_R = np.sqrt(np.diag(gram_RR))
    if not norms_R.any():
        return {}
    row = {"diloco/outer_grad_norm": float(np.sqrt(max(gram_RR.sum(), 0.0)) / M)}
    pairs = np.triu_indices(M, k=1)
    scale = np.outer(norms_R, norms_R)[pairs]
    if M > 1 and scale.all():
        row["diloco/outer_grad_cosine"] = float((gram_RR[pairs] / scale).mean())
    return row
