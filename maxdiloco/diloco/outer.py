"""The outer step of a fragment: outer gradient, mean over replicas, outer optimizer, merge.

The module has lines 7, 8, 11 and 12 of Streaming DiLoCo (arXiv 2501.18512), Algorithm 2, as
functions of pytrees. It also has the eager mean of arXiv 2502.12996. The functions treat all leaves
of a fragment alike.
Sums, differences and the outer parameters are float32, also if the replicas have another dtype.
"""

# R replicas, M in number: the first dim of arrays that have it; the other dims are arbitrary

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax

AGGREGATIONS = ("mean", "radial_directional_mean")
ADAM_B2 = 0.95  # averages over about 20 rounds, each of H inner steps
# An outer gradient is a distance in parameter space, mostly below 0.01. With a small eps Adam moves
# every parameter by about the outer learning rate, even if the replicas hardly moved it. With 0.1
# the step stays proportional to the outer gradient.
ADAM_EPS = 0.1


def outer_gradient(outer_p: Any, inner_p: Any) -> Any:
    """Compute outer minus inner parameters of a fragment, float32: Algorithm 2, line 7.

    The sign is old minus new because the outer optimizer subtracts its gradient. `outer_p` are the
    outer parameters before any outer update of this step, and `inner_p` one replica's parameters
    of the same shapes; any float dtype.
    """
    return jax.tree.map(lambda o, i: _float32(o) - _float32(i), outer_p, inner_p)


def add_residual(g: Any, residual: Any) -> Any:
    """Add the error-feedback residual of earlier sends to an outer gradient.

    The method is from 1-bit SGD (Seide et al. 2014) and arXiv 1901.09847. MuLoCo (arXiv 2505.23725)
    and SparseLoCo (arXiv 2508.15706) use it for outer gradients. SparseLoCo lets the residual
    decay; here it does not decay. The sum of all received values therefore is the sum of all outer
    gradients minus the residual.

    Args:
      g: outer gradient of a fragment, float32.
      residual: encoding error of this replica's earlier sends, same shapes, float32.

    Returns:
      The values that the replica encodes and sends, same shapes, float32.
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
    """Average outer gradients over the replicas, unweighted, in float32: Algorithm 2, line 8.

    The sum is g[0] + g[1] + ... in this order, so its bits do not depend on how a reduction is
    compiled. A loop calls `term`, so only one replica's values exist at a time.

    Args:
      term: returns (leaves [...], note) of replica r, which may be traced. A note is any pytree.
      num_replicas: M.

    Returns:
      (mean, leaves [...]; the notes of all replicas, leaves [M, ...]).
    """

    def add(total, r):
        values, note = term(r)
        return jax.tree.map(lambda t, x: t + _float32(x), total, values), note

    values, note = term(0)
    total, notes_R = jax.tree.map(_float32, values), jax.tree.map(lambda x: x[None], note)
    if num_replicas > 1:
        total, rest = jax.lax.scan(add, total, jnp.arange(1, num_replicas))
        notes_R = jax.tree.map(lambda n, r: jnp.concatenate([n, r]), notes_R, rest)
    # XLA replaces a division by a constant by this product, but only in some programs.
    return jax.tree.map(lambda t: t * jnp.float32(1 / num_replicas), total), notes_R


def radial_directional_mean(
    term: Callable[[Any], Any],
    mean: Any,
    num_replicas: int,
    *,
    norm: Callable[[Any], Any],
    spread: Callable[[Any], Any],
) -> Any:
    """Average norms and directions of the replicas' outer gradients separately.

    Decoupled DiLoCo (arXiv 2604.21428): a tensor v of M replicas becomes mean(|v|) * u / |u| with
    u = mean(v / |v|), 0 / 0 = 0. The replicas' outer gradients are nearly orthogonal, so their
    plain mean shrinks with the square root of M; this mean does not.

    Args:
      term: returns the leaves of replica r, which may be traced.
      mean: the ordered_mean of the terms. It is the result for tensors whose norm, or norm of u, is
        0 or exceeds float32.
      num_replicas: M.
      norm: returns the norms of the tensors in each leaf, 0 for a leaf that is averaged plainly.
      spread: returns leaves in which every value is the norm of its tensor.
    """
    # Without barriers the order of a sum depends on the surrounding program.
    alone = jax.lax.optimization_barrier

    def norms(leaves):
        return alone(norm(alone(leaves)))

    radius, _ = ordered_mean(lambda r: (norms(term(r)), ()), num_replicas)

    def equally_long(r):
        values = term(r)
        factors = jax.tree.map(lambda a, n: jnp.where(n > 0, a / n, 0), radius, norms(values))
        scaled = jax.tree.map(jnp.multiply, values, spread(factors))
        # A compiler may contract product and sum, but only in some programs.
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
    g_j(t-H)) / M. It is computed as an ordered mean whose term m is g_m(t); nothing is subtracted.

    Args:
      stale: outer gradient of replica r of the previous round, after encode and decode.
      own: outer gradient of replica m of this round, also after encode and decode. With values that
        were not encoded, the outer parameters of the replicas would drift apart.
      r: replica of the term, 0..M-1; may be traced.
      m: replica that computes the mean, 0..M-1; may be traced.
    """
    return jax.tree.map(lambda old, fresh: jnp.where(m == r, fresh, old), stale, own)


def outer_update(
    optimizer: optax.GradientTransformation, outer_p: Any, outer_opt: Any, mean_g: Any
) -> tuple[Any, Any]:
    """Apply one step of the outer optimizer to a fragment: Algorithm 2, line 11.

    `outer_p` are the outer parameters of the previous round and `outer_opt` is the optimizer's
    state for this fragment. `mean_g` is the mean outer gradient, float32 and shaped like `outer_p`.
    Returns the new (outer_p, outer_opt).
    """
    updates, outer_opt = optimizer.update(mean_g, outer_opt, outer_p)
    return optax.apply_updates(outer_p, updates), outer_opt


def update_ratio(before: Any, after: Any) -> jax.Array:
    """Return |after - before| / |before| of a fragment; the numerator itself if |before| is 0."""
    old, new = jax.tree.leaves(before), jax.tree.leaves(after)
    moved = sum(jnp.sum((n - o) ** 2) for o, n in zip(old, new, strict=True))
    size = sum(jnp.sum(o**2) for o in old)
    return jnp.sqrt(moved / jnp.where(size > 0, size, 1))


def merge(inner_p: Any, outer_p: Any, *, alpha: float) -> Any:
    """Mix a replica's fragment with the updated outer fragment: Algorithm 2, line 12.

    Args:
      inner_p: one replica's parameters.
      outer_p: the updated outer parameters, same shapes.
      alpha: Python number in [0, 1], the weight of the replica's own values. 1 keeps them, and 0
        replaces them by the outer values, both bit for bit.

    Returns:
      The mixed leaves, computed in float32, in the dtypes of `inner_p`.
    """

    def mix(i, o):
        if alpha in (0, 1):
            return (i if alpha == 1 else o).astype(i.dtype)
        # A single product: of two, a compiler may contract either one into a multiply-add.
        mixed = _float32(i) + (1 - alpha) * (_float32(o) - _float32(i))
        return mixed.astype(i.dtype)

    return jax.tree.map(mix, inner_p, outer_p)


# Constructors of the outer optimizers, called with (lr, momentum). The learning rate is constant,
# without gradient clipping (arXiv 2503.09799, sec. 3). With momentum 0 the state has no trace.
Make = Callable[[float, float], optax.GradientTransformation]
OPTIMIZERS: Mapping[str, Make] = MappingProxyType({
    # SGD with Nesterov momentum, as in DiLoCo (arXiv 2311.08105) and its successors. The new trace
    # is m' = b m + g, and the outer parameters change by -lr (g + b m').
    "nesterov": lambda lr, momentum: optax.sgd(lr, momentum=momentum or None, nesterov=True),
    # Heavy-ball momentum: the outer parameters change by -lr m'. lr=1 with momentum=0 averages the
    # replicas' parameters.
    "sgd": lambda lr, momentum: optax.sgd(lr, momentum=momentum or None),
    "adam": lambda lr, momentum: optax.adam(lr, b1=momentum, b2=ADAM_B2, eps=ADAM_EPS),
})  # fmt: skip


def _float32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)  # sums and differences of bfloat16 parameters drift
