"""The experts' products on one device: tokens sorted by expert, or in slots of a capacity."""
# T tokens of a device  D model  E experts  K experts of a token  F hidden width of an expert
# A = K T choices, in order of k, then of t  C slots of an expert  N devices that share the experts

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from maxdiloco.models.ragged import ragged
from maxdiloco.models.spec import ModelSpec

f32 = jnp.float32
Weights = dict[str, jax.Array]
Hidden = Callable[[Callable[[str], jax.Array]], jax.Array]


def sorted_by_expert(keys_A: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The order that sorts choices by expert, earlier tokens first, and its inverse."""
    order_A = jnp.argsort(keys_A, stable=True)
    return order_A, jnp.argsort(order_A)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def dispatch(K: int, x_TD: jax.Array, order_A: jax.Array, inverse_A: jax.Array) -> jax.Array:
    """[A, D]: the token of each choice in sorted order.

    The gradient gathers by the inverse, where that of an index would be a scatter.
    """
    return x_TD[order_A % x_TD.shape[0]]


def _dispatch_forward(K, x_TD, order_A, inverse_A):
    return dispatch(K, x_TD, order_A, inverse_A), inverse_A


def _dispatch_backward(K, inverse_A, d_AD):
    d_KTD = d_AD[inverse_A].reshape(K, -1, d_AD.shape[-1])
    return jnp.sum(d_KTD, axis=0, dtype=f32).astype(d_AD.dtype), None, None


dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@jax.custom_vjp
def undo(x_AD: jax.Array, order_A: jax.Array, inverse_A: jax.Array) -> jax.Array:
    """[A, D]: values in sorted order, back in the order of the choices."""
    return x_AD[inverse_A]


undo.defvjp(
    lambda x_AD, order_A, inverse_A: (x_AD[inverse_A], order_A),
    lambda order_A, d_AD: (d_AD[order_A], None, None),
)


def dropless(
    spec: ModelSpec,
    hidden: Hidden,
    w: Weights,
    x_TD: jax.Array,
    experts_TK: jax.Array,
    weights_TK: jax.Array,
    first: jax.Array | int,
) -> jax.Array:
    """[T, D] float32: the weighted sum of what this device's experts make of each token.

    Experts first to first + E are here, E = w["w_up"].shape[0]; choices of others give 0. hidden:
    makes the hidden values [A, F] of product(name), which is x times a matrix plus its bias.
    """
    T, K = experts_TK.shape
    E = w["w_up"].shape[0]
    keys_A = experts_TK.T.reshape(-1) - first
    keys_A = jnp.where((keys_A >= 0) & (keys_A < E), keys_A, E)
    order_A, inverse_A = sorted_by_expert(keys_A)
    sizes_E = jnp.sum(keys_A[:, None] == jnp.arange(E), axis=0, dtype=jnp.int32)
    sorted_A = jnp.minimum(keys_A[order_A], E - 1)
    here_A1 = (jnp.arange(T * K) < jnp.sum(sizes_E))[:, None]

    def product(x_AD, name):
        out = ragged(x_AD, w[name], sizes_E, spec)
        bias = w.get(f"{name}_bias")
        return out if bias is None else out + bias[sorted_A].astype(out.dtype)

    x_AD = dispatch(K, x_TD, order_A, inverse_A)
    hidden_AF = jnp.where(here_A1, hidden(functools.partial(product, x_AD)), 0)
    out_AD = jnp.where(here_A1, product(hidden_AF, "w_out"), 0)
    out_KTD = undo(out_AD, order_A, inverse_A).reshape(K, T, -1)
    return jnp.sum(out_KTD.astype(f32) * weights_TK.T[..., None], axis=0)


def capacity(spec: ModelSpec, tokens: int) -> int:
    """Slots of an expert for the tokens of one device (arXiv 2101.03961, eq. 3)."""
    even = tokens * spec.num_experts_per_tok / spec.num_experts
    return min(tokens, max(1, math.ceil(even * spec.capacity_factor)))


def in_slots(
    spec: ModelSpec,
    hidden: Hidden,
    w: Weights,
    x_TD: jax.Array,
    experts_TK: jax.Array,
    weights_TK: jax.Array,
    axes: tuple[str, ...],
) -> tuple[jax.Array, jax.Array]:
    """dropless, but an expert takes `capacity` choices of each device; those after them give 0.

    First choices come before second ones, earlier tokens before later ones. axes: of the mesh,
    over which tokens travel to the devices of their experts and back, by an all-to-all each.
    Returns the sum and how many choices of real experts were dropped.
    """
    T, K = experts_TK.shape
    E, C = spec.num_experts, capacity(spec, T)
    keys_A = experts_TK.T.reshape(-1)  # E for padding
    order_A, inverse_A = sorted_by_expert(keys_A)
    sizes_E = jnp.sum(keys_A[:, None] == jnp.arange(E), axis=0, dtype=jnp.int32)
    starts_E = jnp.cumsum(sizes_E) - sizes_E
    places_EC = starts_E[:, None] + jnp.arange(C)
    filled_EC = jnp.arange(C) < sizes_E[:, None]
    tokens_EC = order_A[jnp.where(filled_EC, places_EC, 0)] % T
    x_ECD = jnp.where(filled_EC[..., None], x_TD[tokens_EC], 0)
    if axes:
        x_ECD = jax.lax.all_to_all(x_ECD, axes, split_axis=0, concat_axis=1, tiled=True)
    out_ECD = _of_slots(spec, hidden, w, x_ECD)
    if axes:
        out_ECD = jax.lax.all_to_all(out_ECD, axes, split_axis=1, concat_axis=0, tiled=True)
    safe_A = jnp.minimum(keys_A, E - 1)
    rank_A = inverse_A - starts_E[safe_A]
    kept_A = (keys_A < E) & (rank_A < C)
    out_AD = out_ECD[safe_A, jnp.where(kept_A, rank_A, 0)]
    out_KTD = jnp.where(kept_A[:, None], out_AD, 0).reshape(K, T, -1)
    total_TD = jnp.sum(out_KTD.astype(f32) * weights_TK.T[..., None], axis=0)
    return total_TD, jnp.sum((keys_A < E) & ~kept_A)


def _of_slots(spec, hidden, w, x_ECD):
    """[E, C, D]: what each expert makes of its slots."""
    preferred = f32 if spec.float32_products else None

    def product(x, name):
        out = jnp.einsum(
            "eci,eio->eco", x, w[name], precision=spec.precision, preferred_element_type=preferred
        ).astype(x.dtype)
        bias = w.get(f"{name}_bias")
        return out if bias is None else out + bias[:, None].astype(out.dtype)

    return product(hidden(functools.partial(product, x_ECD)), "w_out")
