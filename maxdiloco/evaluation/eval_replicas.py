"""The loss of each replica on held-out sequences, and of the mean of their parameters.

Beside the loss of theta they tell a bad outer step from replicas that train badly.

    # R replicas  B sequences of one evaluation batch, over all devices  L tokens
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiloco.engine.calls import BESIDE, Call
from maxdiloco.engine.trainer import Trainer
from maxdiloco.evaluation.held_out import Evaluation
from maxdiloco.flags.config import Config
from maxdiloco.models.loss import next_tokens
from maxdiloco.models.transformer import Model
from maxdiloco.parallel.program import Program
from maxdiloco.parallel.replicas import (
    broadcast,
    map_fn,
    reduce_mean,
    without_singleton_vmap,
)
from maxdiloco.parallel.sharding import spec


class ReplicaEvaluation:
    """Two programs: the losses of all replicas on one batch, and the mean of their parameters.

    Each slice evaluates its own replicas on all sequences, so that tokens and losses alone travel
    between slices. with_mean: the mean's loss too, for which all parameters do.
    """

    def __init__(
        self,
        evaluation: Evaluation,
        trainer: Trainer,
        model: Model,
        *,
        with_mean: bool,
        on_compile: Callable,
    ):
        self._evaluation, self._trainer, self._model = evaluation, trainer, model
        self._with_mean = with_mean
        mesh = trainer.mesh
        self._each = Program(
            "evaluate replicas",
            self._sums,
            out_shardings=NamedSharding(mesh, P()),
            on_compile=on_compile,
        )
        self._mean = Program(
            "mean of the replicas",
            self._mean_of,
            out_shardings=jax.tree.map(lambda x: x.sharding, trainer.abstract_eval_params),
            on_compile=on_compile,
        )

    def _sums(self, params_R, batch, bytes_V):
        """Cross entropy of each replica [R], and the targets that count."""
        mesh, R = self._trainer.mesh, self._trainer.num_replicas
        rows = spec(("batch", "length"), self._model.spec.rules, without=("diloco",))
        every = NamedSharding(mesh, P("diloco", *rows))
        batch_R = jax.tree.map(
            lambda x_BL: jax.lax.with_sharding_constraint(broadcast(x_BL, R), every), batch
        )

        def loss(params, batch):
            return self._model.loss(params, batch)[1]["cross_entropy"]

        loss_R = map_fn(without_singleton_vmap(loss), mesh=mesh, num_replicas=R)(params_R, batch_R)
        _, counts_BL = next_tokens(batch["tokens"], batch["segment_ids"])
        count = jnp.sum(counts_BL, dtype=jnp.int32)
        return loss_R, jnp.broadcast_to(count, (R,)), jnp.zeros((R,), jnp.int32)

    def _mean_of(self, params_R):
        """The mean as the evaluation takes parameters: once, or for each slot of `diloco`."""
        like = self._trainer.abstract_eval_params
        return jax.tree.map(
            lambda x_R, x: jnp.broadcast_to(reduce_mean(x_R), x.shape), params_R, like
        )

    def calls(self, runs: float) -> list[Call]:
        """The programs of an evaluation. runs: evaluations in a period."""
        params_R = self._trainer.abstract_state.params
        found = self._evaluation.calls(params_R, runs, program=self._each)
        if self._with_mean:
            found.append(Call(self._mean, (params_R,), runs, BESIDE))
        return found

    def __call__(self, state: Any, dataset: Any) -> dict[str, float]:
        """eval/loss_replica_0 ..., and eval/loss_mean_of_replicas, on a data set."""
        totals = self._evaluation.totals(state.params, dataset, program=self._each)
        row = {f"eval/loss_replica_{m}": total.loss for m, total in enumerate(totals)}
        if self._with_mean:
            mean = self._mean(state.params)
            row["eval/loss_mean_of_replicas"] = self._evaluation(mean, dataset).loss
        return row


def of_run(
    cfg: Config, evaluation: Evaluation, trainer: Trainer, model: Model, *, on_compile: Callable
) -> ReplicaEvaluation | None:
    """What eval_replicas asks for of a trainer with replicas; None for none."""
    if cfg.eval_replicas == "none":
        return None
    return ReplicaEvaluation(
        evaluation, trainer, model, with_mean=cfg.eval_replicas == "mean", on_compile=on_compile
    )
