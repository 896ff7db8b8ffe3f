"""Mixture of experts: a feed-forward layer of many, of which each token uses a few.

On a device tokens are sorted by expert, or in slots of a capacity.
"""
# B sequences  L tokens  T tokens of a device  D model  F hidden width of an expert  E experts
# K experts of a token  A = K T choices, in order of k, then of t; rows, sorted by expert
# C slots of an expert

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from maxdiloco.models import router
from maxdiloco.models.devices import on_each_device, split_axes
from maxdiloco.models.layers import Table, activated, feed_forward_table, mlp
from maxdiloco.models.remat import MLP_IN, ROUTED, keep
from maxdiloco.models.router import Usage
from maxdiloco.models.spec import ModelSpec
from maxdiloco.models.weights import Weight, factor
from maxdiloco.parallel.sharding import is_expert

f32 = jnp.float32
# Usage of a device has a leading dim of 1, a row for each part of the batch.
SUMS = [("batch", None) if name in ("counts", "share") else ("batch",) for name in Usage._fields]
# Rows of a tile of the kernel, as many as XLA:TPU's own kernels take: an expert's first and last
# tile are computed in full. The other sides fill less than half of a core's fast memory on v5e.
TILE_ROWS, TILE_SIDE = 128, 1024


def moe_table(spec: ModelSpec) -> Table:
    """Weights of a router, of E experts alike an MLP, and of shared experts for every token.

    The shared experts are one MLP of their joint width (arXiv 2401.06066, section 3.2).
    """
    E, F = spec.num_experts, spec.moe_mlp_dim
    table = {"router": factor("td,de->te", d=spec.emb_dim, e=E)}
    table |= feed_forward_table(spec, F, num_experts=E)
    if spec.router.logit_bias:
        table["router_bias"] = Weight((E,), ("router",))
    if spec.router.balance_bias:  # float32: bfloat16 has no room for its small steps
        table["routed_bias"] = Weight((E,), ("router",), dtype=f32)
    if spec.shared_experts:
        table["shared"] = feed_forward_table(spec, spec.shared_experts * F)
    return table


def moe(spec, w, x_BLD, real_BL) -> tuple[jax.Array, Usage]:
    """([B, L, D], Usage of the batch); x is normed. Padding gets nothing from the experts.

    real_BL: which tokens are not padding; None in generation: all are, and none is dropped.
    """
    drops_none = real_BL is None or spec.capacity_factor == -1
    if real_BL is None:
        real_BL = jnp.ones(x_BLD.shape[:2], bool)
    names = {name: entry.names for name, entry in moe_table(spec).items() if name != "shared"}
    # The experts come as they are stored; a router is gathered, see sharding.gathered.
    as_passed = {k: dims if is_expert(dims) else (None,) * len(dims) for k, dims in names.items()}
    rows = ("batch", "length", None)
    y_BLD, *sums = on_each_device(
        functools.partial(_on_device, spec, _splits(spec, names), drops_none),
        in_names=[rows, rows[:2], as_passed],
        out_names=[rows, *SUMS],
        rules=spec.rules,
    )(x_BLD, real_BL, {name: w[name] for name in names})
    if "shared" in w:
        y_BLD = y_BLD + mlp(spec, w["shared"], x_BLD)
    return y_BLD, Usage(*(jnp.sum(x_G, axis=0) for x_G in sums))


def _splits(spec, names):
    """Mesh axes of several devices over which experts, hidden dim and length are split.

    And weight -> [(dim, axes)], to gather. Called where the axes are not manual yet.
    """
    expert, mlp, length = (
        split_axes((name,), spec.rules)[0] for name in ("expert", "mlp", "length")
    )
    whole = {}
    for name, dims in names.items():
        if "stored_expert" in dims:
            stored = split_axes(dims, spec.rules)
            stored[dims.index("mlp")] = ()
            left = [tuple(axis for axis in over if axis not in expert) for over in stored]
            whole[name] = [(dim, over) for dim, over in enumerate(left) if over]
    return expert, mlp, length, whole


def _on_device(spec, splits, drops_none, x_BLD, real_BL, w):
    """One device's tokens through all experts, its own and those of other devices."""
    over_experts, over_mlp, over_length, whole = splits
    w = _gathered(w, whole, over_mlp)
    x_TD, real_T = x_BLD.reshape(-1, x_BLD.shape[-1]), real_BL.reshape(-1)
    # float32: a choice between experts must not hang on bfloat16's rounding.
    factors = x_TD.astype(f32), w["router"].astype(f32)
    logits_TE = jnp.einsum("td,de->te", *factors, precision="highest")
    if "router_bias" in w:
        logits_TE = logits_TE + w["router_bias"].astype(f32)
    choice = router.choose(spec, logits_TE, w.get("routed_bias"))
    experts_TK = jnp.where(real_T[:, None], choice.experts_TK, spec.num_experts)
    tokens, dropped = (x_TD, experts_TK, choice.weights_TK), jnp.int32(0)
    if not drops_none:
        y_TD, dropped = in_slots(spec, w, *tokens, over_experts)
    elif not over_experts:
        y_TD = _dropless(spec, w, *tokens, 0)
    else:
        tokens = [jax.lax.all_gather(x, over_experts, tiled=True) for x in tokens]
        first = jax.lax.axis_index(over_experts) * w["w_up"].shape[0]
        y_TD = _dropless(spec, w, *tokens, first)
        y_TD = jax.lax.psum_scatter(y_TD, over_experts, tiled=True)
    if over_mlp:
        y_TD = jax.lax.psum(y_TD, over_mlp)
    used = router.usage(choice, logits_TE, real_T, dropped)
    if over_length:
        used = jax.lax.psum(used, over_length)
    return [y_TD.reshape(x_BLD.shape), *(x[None] for x in used)]


def _gathered(w, whole, over_mlp):
    """The experts' weights, whole but for the split over experts and over the hidden dim.

    The gradient of the gather is a reduce-scatter. The last bias is with the first of the partial
    sums over the hidden dim.
    """
    for name, dims in whole.items():
        for dim, axes in dims:
            w[name] = jax.lax.all_gather(w[name], axes, axis=dim, tiled=True)
    if over_mlp and "w_out_bias" in w:
        w["w_out_bias"] = jnp.where(jax.lax.axis_index(over_mlp) == 0, w["w_out_bias"], 0)
    return w


class Rows(NamedTuple):
    """Choices sorted by expert, earlier tokens first; after them those of experts elsewhere.

    order_A: choice of each row. inverse_A: row of each choice. sizes_E: rows of each expert here.
    """

    order_A: jax.Array
    inverse_A: jax.Array
    sizes_E: jax.Array


def _by_expert(experts_TK, first, E):
    """The expert of each choice, from `first`, E for one that is not here; and their Rows."""
    keys_A = experts_TK.T.reshape(-1) - first
    keys_A = jnp.where((keys_A >= 0) & (keys_A < E), keys_A, E)
    order_A = jnp.argsort(keys_A, stable=True)
    inverse_A = jnp.argsort(order_A)
    sizes_E = jnp.sum(keys_A[:, None] == jnp.arange(E), axis=0, dtype=jnp.int32)
    return keys_A, Rows(*(keep(x, ROUTED) for x in (order_A, inverse_A, sizes_E)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _to_rows(K, x_TD, rows):
    """[A, D] or [A]: what each row's choice is of, where each of x has K choices.

    The gradient gathers by the inverse, where that of an index would be a scatter.
    """
    return x_TD[rows.order_A % x_TD.shape[0]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _from_rows(K, x_AD, rows):
    """[T, D] or [T]: the sum of the rows of K choices, without those of experts elsewhere.

    One by one: XLA:TPU takes a reduction over K for five times as long (benchmarks/results). It
    would turn every row in memory to where the residual stream lies; so only their sum is turned.
    """
    x_KTD = x_AD[rows.inverse_A].reshape(K, -1, *x_AD.shape[1:])
    here_A = rows.inverse_A < jnp.sum(rows.sizes_E)
    here_KTD = here_A.reshape(*x_KTD.shape[:2], *[1] * (x_AD.ndim - 1))
    x_TD = sum(jnp.where(here_KTD[k], x_KTD[k], 0).astype(f32) for k in range(K))
    return with_layout_constraint(x_TD.astype(x_AD.dtype), Layout(tuple(range(x_AD.ndim))))


_to_rows.defvjp(
    lambda K, x_TD, rows: (_to_rows(K, x_TD, rows), rows),
    lambda K, rows, d_AD: (_from_rows(K, d_AD, rows), None),
)
_from_rows.defvjp(
    lambda K, x_AD, rows: (_from_rows(K, x_AD, rows), rows),
    lambda K, rows, d_TD: (_to_rows(K, d_TD, rows), None),
)


@jax.custom_vjp
def _for_both(x_AD):
    """For two products. XLA:TPU adds their gradients in half the time in float32."""
    return x_AD, x_AD


_for_both.defvjp(
    lambda x_AD: ((x_AD, x_AD), None),
    lambda _, d: ((d[0].astype(f32) + d[1].astype(f32)).astype(d[0].dtype),),
)


def _plus_bias(out, w, name, places, here=True, weights=1):
    """places: the expert of each row of the output. here: which rows have one. weights: of them."""
    if f"{name}_bias" not in w:
        return out
    return out + jnp.where(here, w[f"{name}_bias"][places] * weights, 0).astype(out.dtype)


def _dropless(spec, w, x_TD, experts_TK, weights_TK, first):
    """[T, D]: the weighted sum of what this device's experts make of each token.

    Experts first to first + E are here, E = w["w_up"].shape[0]; choices of others give 0. Hidden
    values are weighted in place of what comes of them, so no gradient needs the latter.
    """
    (T, K), E = experts_TK.shape, w["w_up"].shape[0]
    keys_A, rows = _by_expert(experts_TK, first, E)
    sorted_A = jnp.minimum(keys_A[rows.order_A], E - 1)
    here_A1 = (jnp.arange(T * K) < jnp.sum(rows.sizes_E))[:, None]
    weights_A1 = _to_rows(1, weights_TK.T.reshape(-1), rows)[:, None]

    def product(x_AD, name, weights=1):
        out = ragged(spec, x_AD, w[name], rows.sizes_E)
        return _plus_bias(out, w, name, sorted_A, here_A1, weights)

    x_AD = dict(zip(("w_up", "w_gate"), _for_both(_to_rows(K, x_TD, rows)), strict=True))
    hidden_AF = activated(spec, lambda name: keep(product(x_AD[name], name), MLP_IN))
    hidden_AF = (hidden_AF * weights_A1).astype(x_TD.dtype)
    return _from_rows(K, product(hidden_AF, "w_out", weights_A1), rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def ragged(spec: ModelSpec, x_AD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """[A, F]: consecutive rows, sizes_E of them, times the matrix of their expert.

    Rows after the last group come out as anything.
    spec.ragged_kernel: "megablox" takes JAX's Pallas kernels for the gradients. XLA:TPU of jax 0.10
    has a kernel for the product. It takes it for the gradient in x too, but copies the matrices for
    it, and multiplies every row by every expert in the other gradient (benchmarks/results).
    "triton" takes the kernels of triton_ragged.py for all three, where they fit. "" takes XLA's,
    which on a CPU and a GPU multiply every row by every expert.
    """
    return _one_by_one(functools.partial(_plain, spec))(x_AD, w_EDF, sizes_E)


# Of the replicas of a slot: XLA:TPU of jax 0.10 compiles no ragged product with a batch dim.
_one_by_one = jax.custom_batching.sequential_vmap


def _triton(spec, x_AD, w_EDF):
    """The module where its kernels are to be used, else None; Pallas takes long to import."""
    if spec.ragged_kernel != "triton":
        return None
    from maxdiloco.models import triton_ragged

    return triton_ragged if triton_ragged.fits(x_AD, w_EDF) else None


def _plain(spec, x_AD, w_EDF, sizes_E):
    if triton := _triton(spec, x_AD, w_EDF):
        return triton.rows_by_matrices(x_AD, w_EDF, sizes_E)
    preferred = f32 if spec.float32_products else None  # see models/product.py
    out = jax.lax.ragged_dot(
        x_AD, w_EDF, sizes_E, precision=spec.precision, preferred_element_type=preferred
    )
    return out.astype(x_AD.dtype)


def _ragged_backward(spec, factors, d_AF):
    @_one_by_one
    def backward(x_AD, w_EDF, sizes_E, d_AF):
        if triton := _triton(spec, x_AD, w_EDF):
            dx_AD = triton.rows_by_matrices(d_AF, w_EDF, sizes_E, transposed=True)
            return dx_AD, triton.matrices_gradient(x_AD, d_AF, sizes_E, w_EDF.dtype)
        if spec.ragged_kernel == "megablox":
            return gradients_by_kernel(spec.precision, x_AD, w_EDF, sizes_E, d_AF)
        _, pull = jax.vjp(lambda x, w: _plain(spec, x, w, sizes_E), x_AD, w_EDF)
        return pull(d_AF)

    return (*backward(*factors, d_AF), None)


ragged.defvjp(lambda spec, *factors: (ragged(spec, *factors), factors), _ragged_backward)


def gradients_by_kernel(
    precision, x_AD, w_EDF, sizes_E, d_AF, *, interpret=False
) -> tuple[jax.Array, jax.Array]:
    """[A, D]: each row of d times its expert's matrix, transposed, anything after the last group;
    and [E, D, F]: of each group of rows the sum of x times d, zeros of a group without rows.

    interpret: run the kernels as array code, for tests without a TPU.
    """
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

    (A, D), F = x_AD.shape, d_AF.shape[1]
    side_D, side_F = min(D, TILE_SIDE), min(F, TILE_SIDE)
    x_AD, d_AF = (jnp.pad(a, ((0, -A % TILE_ROWS), (0, 0))) for a in (x_AD, d_AF))  # whole tiles
    of_x = dict(tiling=(TILE_ROWS, side_F, side_D), transpose_rhs=True, interpret=interpret)
    of_w = dict(tiling=(TILE_ROWS, side_D, side_F), interpret=interpret)
    with jax.default_matmul_precision(precision):
        dx_AD = gmm(d_AF, w_EDF, sizes_E, d_AF.dtype, **of_x)[:A]
        dw_EDF = tgmm(x_AD.T, d_AF, sizes_E, x_AD.dtype, **of_w)
    return dx_AD, dw_EDF.astype(w_EDF.dtype)


def capacity(spec: ModelSpec, tokens: int) -> int:
    """Slots of an expert for the tokens of one device (arXiv 2101.03961, eq. 3)."""
    even = tokens * spec.num_experts_per_tok / spec.num_experts
    return min(tokens, max(1, math.ceil(even * spec.capacity_factor)))


def in_slots(spec, w, x_TD, experts_TK, weights_TK, axes):
    """The same sum, but an expert takes `capacity` choices of each device; those after them give 0.

    First choices come before second ones, earlier tokens before later ones. axes: of the mesh,
    over which an all-to-all takes tokens to the devices of their experts, and one takes them back.
    Returns the sum and how many choices of real experts were dropped.
    """
    T, E, C = len(x_TD), spec.num_experts, capacity(spec, len(x_TD))
    keys_A, (order_A, inverse_A, sizes_E) = _by_expert(experts_TK, 0, E)  # E for padding
    starts_E = jnp.cumsum(sizes_E) - sizes_E
    filled_EC = jnp.arange(C) < sizes_E[:, None]
    places_EC = jnp.where(filled_EC, starts_E[:, None] + jnp.arange(C), 0)
    tokens_EC = order_A[places_EC] % T
    x_ECD = jnp.where(filled_EC[..., None], x_TD[tokens_EC], 0)
    if axes:
        x_ECD = jax.lax.all_to_all(x_ECD, axes, split_axis=0, concat_axis=1, tiled=True)

    def product(x, name):
        preferred = f32 if spec.float32_products else None
        out = jnp.einsum(
            "eci,eio->eco", x, w[name], precision=spec.precision, preferred_element_type=preferred
        ).astype(x.dtype)
        return _plus_bias(out, w, name, (slice(None), None))

    hidden_ECF = activated(spec, lambda name: keep(product(x_ECD, name), MLP_IN))
    out_ECD = product(hidden_ECF, "w_out")
    if axes:
        out_ECD = jax.lax.all_to_all(out_ECD, axes, split_axis=1, concat_axis=0, tiled=True)
    safe_A = jnp.minimum(keys_A, E - 1)
    rank_A = inverse_A - starts_E[safe_A]
    kept_A = (keys_A < E) & (rank_A < C)
    out_AD = out_ECD[safe_A, jnp.where(kept_A, rank_A, 0)]
    out_AD = jnp.where(kept_A[:, None], out_AD, 0)
    out_KTD = out_AD.reshape(*weights_TK.T.shape, -1).astype(f32)
    y_TD = jnp.sum(out_KTD * weights_TK.T[..., None], axis=0)
    return y_TD.astype(x_TD.dtype), jnp.sum((keys_A < E) & ~kept_A)
