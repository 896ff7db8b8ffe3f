"""Applying stacked layers: a scan over repeating blocks of layers."""
# p layers of a block

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from maxdiloco.models.remat import apply_remat_policy


def scan_layers(
    body: Callable,
    x: Any,
    stacked: Any,
    kinds: Sequence[Any],
    *,
    policy: str,
    unrolled: bool = False,
) -> tuple[Any, Any]:
    """Apply every layer of a stack.

    If all layers are of one kind, the scan is over single layers. If kinds repeat, it is over the
    shortest repeating block, and the layers after the last whole block follow it.

    Args:
      body: (kind, x, entry) -> (x, y) of one layer, with its entry of `stacked`.
      x: input of the first layer.
      stacked: pytree with leaves [layers, ...].
      kinds: hashable kind of each layer.
      policy: remat policy of each layer, see remat.apply_remat_policy.
      unrolled: write out every iteration, without a loop.

    Returns:
      x after the last layer, and the layers' y, stacked.
    """
    sizes = range(1, len(kinds) + 1)
    period = next(p for p in sizes if all(k == kinds[i % p] for i, k in enumerate(kinds)))
    if period == 1:
        layer = apply_remat_policy(functools.partial(body, kinds[0]), policy, in_loop=not unrolled)
        return jax.lax.scan(layer, x, stacked, unroll=unrolled)
    blocks, rest = divmod(len(kinds), period)
    whole, over = _split(stacked, [blocks * period, rest])
    whole = jax.tree.map(lambda w: w.reshape(blocks, period, *w.shape[1:]), whole)
    # The compiler unrolls a loop of one iteration.
    first = _block(body, kinds[:period], policy, in_loop=blocks > 1 and not unrolled)
    x, y = jax.lax.scan(first, x, whole, unroll=unrolled)
    y = jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), y)
    if not rest:
        return x, y
    x, y_over = _block(body, kinds[:rest], policy, in_loop=False)(x, over)
    return x, jax.tree.map(lambda *parts: jnp.concatenate(parts), y, y_over)


def _block(body, kinds, policy, *, in_loop):
    """Return the function (x, entries [p, ...]) -> (x, y [p, ...]) that applies a block."""

    def block(x, entries):
        ys = []
        for kind, entry in zip(kinds, _split(entries, [1] * len(kinds)), strict=True):
            layer = apply_remat_policy(functools.partial(body, kind), policy, in_loop=in_loop)
            x, y = layer(x, jax.tree.map(lambda w: w[0], entry))
            ys.append(y)
        return x, jax.tree.map(lambda *y: jnp.stack(y), *ys)

    return block


def _split(tree, sizes):
    """Split the first dimension into parts; the gradient joins them, which costs one copy."""
    leaves, structure = jax.tree.flatten(tree)
    parts = [jax.lax.split(leaf, sizes, axis=0) for leaf in leaves]
    return [structure.unflatten([part[i] for part in parts]) for i in range(len(sizes))]
