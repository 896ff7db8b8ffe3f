"""Stacked layers of equal shapes, run by a scan over blocks of unlike layers."""
# L layers  p layers of a block

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from maxdiloco.models.remat import checkpointed


def over_layers(
    body: Callable, x: jax.Array, stacked: Any, kinds: Sequence[Any], *, policy: str = "none"
) -> tuple[jax.Array, Any]:
    """x after every layer, and what the layers gave beside it, stacked.

    body: (kind, x, entry) -> (x, y); entry: the layer's part of `stacked`, a pytree of [L, ...].
    kinds: hashable, of each layer. Layers of one kind are a scan of one layer; kinds that repeat
    are a scan of one block, and what the blocks leave over runs after it. policy: of
    remat.checkpointed, layer by layer.
    """
    period = _period(kinds)
    if period == 1:
        layer = checkpointed(functools.partial(body, kinds[0]), policy, in_loop=True)
        return jax.lax.scan(layer, x, stacked)
    blocks, rest = divmod(len(kinds), period)
    whole, over = _split(stacked, [blocks * period, rest])
    whole = jax.tree.map(lambda w: w.reshape(blocks, period, *w.shape[1:]), whole)
    # A loop of one iteration is no loop to the compiler.
    first = _block(body, kinds[:period], policy, in_loop=blocks > 1)
    x, y = jax.lax.scan(first, x, whole)
    y = jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), y)
    if not rest:
        return x, y
    x, y_over = _block(body, kinds[:rest], policy, in_loop=False)(x, over)
    return x, jax.tree.map(lambda *parts: jnp.concatenate(parts), y, y_over)


def _period(kinds):
    """Length of the shortest block that the kinds repeat, from the first layer on."""
    sizes = range(1, len(kinds) + 1)
    return next(p for p in sizes if all(k == kinds[i % p] for i, k in enumerate(kinds)))


def _block(body, kinds, policy, *, in_loop):
    """(x, entries [p, ...]) -> (x, y [p, ...])."""

    def block(x, entries):
        ys = []
        for kind, entry in zip(kinds, _split(entries, [1] * len(kinds)), strict=True):
            layer = checkpointed(functools.partial(body, kind), policy, in_loop=in_loop)
            x, y = layer(x, jax.tree.map(lambda w: w[0], entry))
            ys.append(y)
        return x, jax.tree.map(lambda *y: jnp.stack(y), *ys)

    return block


def _split(tree, sizes):
    """The tree in parts of the first dim; the gradient joins them again, which costs one copy."""
    leaves, structure = jax.tree.flatten(tree)
    parts = [jax.lax.split(leaf, sizes, axis=0) for leaf in leaves]
    return [structure.unflatten([part[i] for part in parts]) for i in range(len(sizes))]
