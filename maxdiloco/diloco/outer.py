"""Outer gradient of a fragment, mean over replicas, outer step, merge.

Streaming DiLoCo (arXiv 2501.18512) Algorithm 2, lines 7, 8, 11 and 12, and the eager mean of arXiv
2502.12996. Functions of pytrees; all leaves of a fragment are treated alike. Sums, differences and
the outer parameters are float32, whatever the replicas compute in.
"""

# R replicas (M of them): the first dim where there is one; the other dims are any

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax

AGGREGATIONS = ("mean", "radial_directional_mean")
ADAM_B2 = 0.95  # our choice: a mean over about 20 rounds, each of H inner steps
# Our choice. An outer gradient is a distance in parameter space, mostly below 0.01. With a small
# eps Adam moves every parameter by about the outer learning rate, however little the replicas
# moved it; with 0.1 the step stays proportional to the outer gradient.
ADAM_EPS = 0.1


def outer_gradient(outer_p: Any, inner_p: Any) -> Any:
    """Outer minus inner parameters of a fragment, float32: Algorithm 2, line 7.

    Old minus new, because the outer optimizer subtracts. outer_p, inner_p: one replica's view,
    equal shapes, any float dtype, before any outer update of the step.
    """
    return jax.tree.map(lambda o, i: _float32(o) - _float32(i), outer_p, inner_p)


def add_residual(g: Any, residual: Any) -> Any:
    """Add the error-feedback residual of earlier sends to an outer gradient.

    1-bit SGD (Seide et al. 2014) and arXiv 1901.09847; for outer gradients MuLoCo (arXiv
    2505.23725) and SparseLoCo (2508.15706), which lets the residual decay. It does not decay here:
    all values that were received add up to all outer gradients minus the residual.

    Args:
      g: outer gradient of a fragment, float32.
      residual: what earlier sends of this replica lost, same shapes, float32.

    Returns:
      What the replica encodes and sends, same shapes, float32.
    """
    return jax.tree.map(jnp.add, g, residual)


def new_residual(wanted: Any, decoded: Any, residual: Any, bad: Any) -> Any:
    """Compute the error-feedback residual after a send.

    Args:
      wanted: values before they were encoded, the result of `add_residual`.
      decoded: values that every receiver decodes, same shapes.
      residual: the residual before the send, same shapes.
      bad: bool leaves that broadcast to these shapes: True where `wanted` is not finite. Receivers
        drop such a send, and the residual stays as it was.

    Returns:
      wanted - decoded, or the old residual where `bad`.
    """
    return jax.tree.map(lambda w, d, e, b: jnp.where(b, e, w - d), wanted, decoded, residual, bad)


def ordered_mean(term: Callable[[Any], tuple[Any, Any]], num_replicas: int) -> tuple[Any, Any]:
    """Unweighted mean over the replicas, float32, and a note about each: Algorithm 2, line 8.

    term(r): (leaves [...], note) of replica r, which may be traced. A loop calls it, so the values
    of one replica exist at a time. The sum is g[0] + g[1] + ... in this order, so its bits do not
    depend on how a reduction is compiled. Returns (leaves [...], note leaves [M, ...]).
    """

    def add(total, r):
        values, note = term(r)
        return jax.tree.map(lambda t, x: t + _float32(x), total, values), note

    values, note = term(0)
    total, notes_R = jax.tree.map(_float32, values), jax.tree.map(lambda x: x[None], note)
    if num_replicas > 1:
        total, rest = jax.lax.scan(add, total, jnp.arange(1, num_replicas))
        notes_R = jax.tree.map(lambda n, r: jnp.concatenate([n, r]), notes_R, rest)
    # Times the rounded inverse: XLA turns a division by a constant into it in some programs only.
    return jax.tree.map(lambda t: t * jnp.float32(1 / num_replicas), total), notes_R


def radial_directional_mean(
    term: Callable[[Any], Any],
    mean: Any,
    num_replicas: int,
    *,
    norm: Callable[[Any], Any],
    spread: Callable[[Any], Any],
) -> Any:
    """Average norms and directions separately.

    Decoupled DiLoCo (arXiv 2604.21428): a tensor v of M replicas becomes mean(|v|) * u / |u| with
    u = mean(v / |v|), 0 / 0 = 0. Outer gradients of replicas are nearly orthogonal, so their mean
    shrinks with the root of M; this does not. term(r): leaves of replica r; mean: their
    ordered_mean, which stays where a norm is 0 (u may be, too) or above what float32 holds.
    norm(leaves): norms of the tensors in each leaf, 0 for a leaf that is averaged plainly;
    spread(norms): leaves with the norm of its tensor at every value.
    """
    alone = jax.lax.optimization_barrier  # else the order of a sum depends on the program it is in

    def norms(leaves):
        return alone(norm(alone(leaves)))

    radius, _ = ordered_mean(lambda r: (norms(term(r)), ()), num_replicas)

    def equally_long(r):
        values = term(r)
        factors = jax.tree.map(lambda a, n: jnp.where(n > 0, a / n, 0), radius, norms(values))
        scaled = jax.tree.map(jnp.multiply, values, spread(factors))
        # A compiler may contract product and sum, in some programs only.
        return alone(scaled), ()

    total, _ = ordered_mean(equally_long, num_replicas)
    length = norms(total)
    known = jax.tree.map(lambda n: jnp.isfinite(n) & (n > 0), length)
    factors = jax.tree.map(lambda k, a, n: jnp.where(k, a / n, 0), known, radius, length)
    return alone(jax.tree.map(
        lambda k, t, f, m: jnp.where(k, t * f, m), spread(known), total, spread(factors), mean
    ))  # fmt: skip


def eager_own_term(stale: Any, own: Any, r: jax.Array | int, m: jax.Array | int) -> Any:
    """Choose the term of replica r in the mean that replica m uses in eager mode.

    Eager updates (arXiv 2502.12996), Algorithm 3: replica m uses (g_m(t) + sum over j != m of
    g_j(t-H)) / M. It is the ordered mean in which term m is the fresh one; nothing is subtracted.

    Args:
      stale: outer gradient of replica r of the round before, after encode and decode.
      own: outer gradient of replica m of this round, after encode and decode too: with a value that
        was not encoded, the outer parameters of the replicas drift apart.
      r: replica of the term, 0..M-1; may be traced.
      m: replica that computes the mean, 0..M-1; may be traced.
    """
    return jax.tree.map(lambda old, fresh: jnp.where(m == r, fresh, old), stale, own)


def outer_update(
    optimizer: optax.GradientTransformation, outer_p: Any, outer_opt: Any, mean_g: Any
) -> tuple[Any, Any]:
    """One step of the outer optimizer on a fragment: Algorithm 2, line 11.

    outer_p: of the round before. outer_opt: never opened. mean_g: leaves shaped like outer_p,
    float32. Returns (outer_p, outer_opt).
    """
    updates, outer_opt = optimizer.update(mean_g, outer_opt, outer_p)
    return optax.apply_updates(outer_p, updates), outer_opt


def update_ratio(before: Any, after: Any) -> jax.Array:
    """Norm of an outer update of a fragment relative to that of theta; 0 where theta was 0."""
    old, new = jax.tree.leaves(before), jax.tree.leaves(after)
    moved = sum(jnp.sum((n - o) ** 2) for o, n in zip(old, new, strict=True))
    size = sum(jnp.sum(o**2) for o in old)
    return jnp.sqrt(moved / jnp.where(size > 0, size, 1))


def merge(inner_p: Any, outer_p: Any, *, alpha: float) -> Any:
    """Mix a replica's fragment with the updated outer fragment: Algorithm 2, line 12.

    inner_p, outer_p: one replica's view, equal shapes. alpha: a plain number in [0, 1], the weight
    of the replica's own value; 1 ignores the others, 0 takes theirs, and both are exact, bit for
    bit. Mixed in float32. Returns leaves of inner_p's dtypes.
    """

    def mix(i, o):
        if alpha in (0, 1):
            return (i if alpha == 1 else o).astype(i.dtype)
        # One product, not two: a compiler may contract either of two into a multiply-add.
        mixed = _float32(i) + (1 - alpha) * (_float32(o) - _float32(i))
        return mixed.astype(i.dtype)

    return jax.tree.map(mix, inner_p, outer_p)


# The outer optimizers by name, functions of (lr, momentum). The learning rate is constant and no
# gradient is clipped (arXiv 2503.09799, sec. 3). A momentum of 0 keeps no trace in the state.
Make = Callable[[float, float], optax.GradientTransformation]
OPTIMIZERS: Mapping[str, Make] = MappingProxyType({
    # SGD with Nesterov momentum, m' = b m + g, theta' = theta - lr (g + b m'): the choice of DiLoCo
    # (arXiv 2311.08105) and its successors.
    "nesterov": lambda lr, momentum: optax.sgd(lr, momentum=momentum or None, nesterov=True),
    # Plain (heavy-ball) momentum, theta' = theta - lr m'; lr 1 without it averages the parameters.
    "sgd": lambda lr, momentum: optax.sgd(lr, momentum=momentum or None),
    "adam": lambda lr, momentum: optax.adam(lr, b1=momentum, b2=ADAM_B2, eps=ADAM_EPS),
})  # fmt: skip


def _float32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)  # sums and differences of bfloat16 parameters drift
