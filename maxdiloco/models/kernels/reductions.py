"""Reductions of the loss over the vocabulary."""
# V vocabulary

import jax
import jax.numpy as jnp


def logsumexp_in_one_pass(x: jax.Array, axis: int) -> jax.Array:
    """Compute the logsumexp over one axis with one reading of x.

    Maximum and sum are reduced together (arXiv 1805.02867, section 3). XLA:GPU reads all logits
    twice for jax.nn.logsumexp.

    Args:
      x: logits. Two entries of +inf give NaN.
      axis: the axis that is reduced.

    Returns:
      x without the axis. The function has no derivative.
    """
    start = (jnp.finfo(x.dtype).min, x.dtype.type(0))
    top, total = jax.lax.reduce((x, jnp.ones_like(x)), start, _joined, (axis % x.ndim,))
    return top + jnp.log(total)


def _joined(one, other):
    """Join (maximum, sum of exponentials relative to it) of two parts.

    The maximum of a part of -inf only is the least finite number.
    """
    (top, total), (top_other, total_other) = one, other
    least = jnp.finfo(top.dtype).min
    top, top_other = jnp.maximum(top, least), jnp.maximum(top_other, least)
    smaller = jnp.exp(-jnp.abs(top - top_other))
    is_top = top >= top_other
    factor, factor_other = jnp.where(is_top, 1, smaller), jnp.where(is_top, smaller, 1)
    return jnp.maximum(top, top_other), total * factor + total_other * factor_other


def gather_targets(logits_V: jax.Array, targets: jax.Array) -> jax.Array:
    """Read the logit of each target, 0 for a target outside the vocabulary.

    Args:
      logits_V: [..., V].
      targets: [...], int.

    Returns:
      [...].
    """
    found = jnp.take_along_axis(logits_V, targets[..., None], axis=-1, mode="fill", fill_value=0)
    return found[..., 0]


def mask_targets(logits_V: jax.Array, targets: jax.Array) -> jax.Array:
    """Compute the bits of gather_targets as a sum, which splits over a mesh and fuses.

    Args:
      logits_V: [..., V].
      targets: [...], int.

    Returns:
      [...].
    """
    return jnp.sum(jnp.where(is_target(targets, logits_V), logits_V, 0), axis=-1)


def is_target(targets: jax.Array, logits_V: jax.Array) -> jax.Array:
    """Mark each target's column in logits [..., V], bool."""
    return targets[..., None] == jnp.arange(logits_V.shape[-1], dtype=targets.dtype)
