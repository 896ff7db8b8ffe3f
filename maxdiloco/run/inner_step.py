"""One inner step of one replica: Streaming DiLoCo (arXiv 2501.18512) Algorithm 2, lines 4-5."""
# A micro-batches  B sequences per replica  L tokens

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from maxdiloco.models import router
from maxdiloco.models.model import Model
from maxdiloco.parallel import replicas, sharding

f32 = jnp.float32


def make(
    model: Model,
    optimizer: optax.GradientTransformation,
    *,
    accumulation: int,
    nan_policy: str,
    skips_empty: bool = False,
) -> Callable[[Any, Any, Any], tuple[Any, Any, dict[str, jax.Array]]]:
    """Build the function that takes an inner step of one replica.

    Streaming DiLoCo (arXiv 2501.18512) Algorithm 2, line 5, with the gradient of line 4. With
    routed_bias, a step ends with model.rebalance.

    Args:
      model: the model.
      optimizer: the inner optimizer. Its update receives the batch's "learning_rate".
      accumulation: micro-batches A of a step; micro-batch a holds rows a*B/A to (a+1)*B/A. Summed
        token losses are divided by all tokens of the step, so A does not change their gradient. The
        routers' losses are means of a micro-batch.
      nan_policy: `stop` applies every update. `skip` keeps parameters and optimizer state if the
        loss or the gradient norm is not finite.
      skips_empty: whether to leave out the last micro-batches that have no segments. Their number
        may differ from step to step, without compiling again.

    Returns:
      inner_step(params, opt_state, batch) -> (params, opt_state, metrics). The batch has leaves
      [B, L], and "learning_rate" [1]. The metrics are float32 scalars. "loss" is the mean
      cross-entropy without the z-loss [nats per token], and "z_loss" the mean z-loss. "grad_norm"
      is the norm before clipping. "tokens" is the number of targets that count. With `skip`,
      "skipped" is 0 or 1. With experts there are also moe/* and the weighted losses of
      models/router.py. A batch in which no target counts has loss and gradient 0.
    """
    gradient = replicas.without_singleton_vmap(jax.value_and_grad(model.loss, has_aux=True))
    accumulate = functools.partial(
        _accumulate_filled if skips_empty else _accumulate,
        gradient,
        accumulation=accumulation,
        rules=model.config.rules,
    )
    if skips_empty:  # a vmap would make the number of iterations an array
        accumulate = replicas.without_singleton_vmap(accumulate)
    update = optax.with_extra_args_support(optimizer).update

    def inner_step(params, opt_state, batch):
        learning_rate = batch["learning_rate"][0]
        batch = {name: leaf for name, leaf in batch.items() if name != "learning_rate"}
        if accumulation == 1:
            (_, aux), grads = gradient(params, batch)
        else:
            aux, grads = accumulate(params, batch)
        scale = 1 / jnp.maximum(aux["tokens"], 1)
        grads = jax.tree.map(lambda g: g.astype(f32) * scale, grads)
        metrics = {
            "loss": aux["cross_entropy"] * scale,
            "z_loss": aux["z_loss"] * scale,
            "grad_norm": optax.tree.norm(grads),
            "tokens": aux["tokens"],
        }
        metrics |= {name: aux[name] * scale for name in router.LOSSES if name in aux}
        updates, new_opt_state = update(grads, opt_state, params, learning_rate=learning_rate)
        new_params = optax.apply_updates(params, updates)
        if router.COUNTS in aux:
            metrics |= router.metrics(aux, model.config.num_experts_per_tok)
            if model.config.router.balance_bias:
                new_params = model.rebalance(new_params, aux[router.COUNTS])
        new = new_params, new_opt_state
        if nan_policy == "skip":
            finite = jnp.isfinite(metrics["grad_norm"]) & jnp.isfinite(metrics["loss"])
            new = jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, (params, opt_state))
            metrics["skipped"] = 1 - finite.astype(f32)
        return *new, metrics

    return inner_step


def _accumulate(gradient, params, batch, *, accumulation, rules):
    """Return the sums of aux and, in float32, of the gradients over the micro-batches."""

    def add(sums, micro_batch):
        return _added(gradient, params, sums, micro_batch), None

    batch_ABL = _split(batch, accumulation, rules)
    return jax.lax.scan(add, _zeros(gradient, params, batch_ABL), batch_ABL)[0]


def _accumulate_filled(gradient, params, batch, *, accumulation, rules):
    """Return the same sums, over the micro-batches up to the last one that has segments."""

    def add(a, sums):
        micro_batch = jax.tree.map(lambda x_ABL: x_ABL[a], batch_ABL)
        return _added(gradient, params, sums, micro_batch)

    batch_ABL = _split(batch, accumulation, rules)
    filled_A = jnp.any(batch_ABL["segment_ids"] > 0, axis=(1, 2))
    count = jnp.max(jnp.where(filled_A, jnp.arange(1, accumulation + 1), 0))
    return jax.lax.fori_loop(0, count, add, _zeros(gradient, params, batch_ABL))


def _split(batch, accumulation, rules):
    """Split leaves [B, L] into micro-batches: [A, B / A, L]."""

    def split(x_BL):
        x_ABL = x_BL.reshape(accumulation, -1, *x_BL.shape[1:])
        # Shard the rows of each micro-batch over the devices again.
        return sharding.constrain(x_ABL, (None, "batch", "length"), rules)

    return jax.tree.map(split, batch)


def _zeros(gradient, params, batch_ABL):
    """Return the sums of no micro-batch."""
    first = jax.tree.map(lambda x_ABL: x_ABL[0], batch_ABL)
    (_, aux), grads = jax.eval_shape(gradient, params, first)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, f32), (aux, grads))


def _added(gradient, params, sums, micro_batch):
    """Add a micro-batch to the sums."""
    (_, aux), grads = gradient(params, micro_batch)
    return jax.tree.map(lambda s, x: s + x.astype(f32), sums, (aux, grads))
