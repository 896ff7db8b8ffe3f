"""The Triton kernels of models/triton.py: what one program of the grid does.

Exponents are of base 2, which is what a GPU computes; log normalisers are natural.
"""
# q, k rows of a block of queries, of keys  H head dim of queries and keys  E head dim of values

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

f32 = jnp.float32
LOG2_E = 1.4426950408889634  # of one e-fold, in bits
SMALLEST = 16  # side of a tile that a GPU's matrix units take


class Tiles(NamedTuple):
    """Of one kernel. own: rows it keeps. other: rows that pass by. warps, stages: Triton's."""

    own: int
    other: int
    warps: int
    stages: int


def tiles(kernel: str, head_dim: int, length: int) -> Tiles:
    """Of the kernel `forward`, `d_queries` or `d_keys_values`.

    As FlashAttention-2's by head dim, smaller where a block of a GPU has no room for them: our
    choice from the registers and the shared memory that the compiler reports
    (benchmarks/log).
    """
    small, wide = head_dim <= 64, head_dim > 128
    if kernel == "forward":
        found = Tiles(128, 64, 4, 3) if small else Tiles(128, 64, 8, 2)
        found = Tiles(64, 32, 8, 2) if wide else found
    else:
        found = Tiles(128, 32, 4, 3) if small else Tiles(64, 64, 8, 2)
        found = Tiles(32, 32, 8, 1) if wide else found
    fits = math.gcd(length, 1024)
    return found._replace(own=min(found.own, fits), other=min(found.other, fits))


def forward(
    softmax_config, sizes, dims, q_ref, k_ref, v_ref, first_ref, sink_ref, context_ref, lse_ref
):
    """A block of queries of one head meets the keys that some query of it sees."""
    H, E = dims
    q_qH = _load(q_ref, H)
    start = pl.program_id(0) * sizes.own
    rows_q = start + jnp.arange(sizes.own)
    first_q = first_ref[pl.ds(start, sizes.own)]

    def meet(masked, j, carry):
        top_q, total_q, sums_qE = carry
        columns = pl.ds(j * sizes.other, sizes.other)
        logits_qk, _ = _logits(softmax_config, H, q_qH, _load(k_ref.at[columns], H))
        if masked:
            columns_k = j * sizes.other + jnp.arange(sizes.other)
            logits_qk = jnp.where(_seen(rows_q, first_q, columns_k), logits_qk, -jnp.inf)
        higher_q = jnp.maximum(top_q, jnp.max(logits_qk, axis=1))
        # Of a row that has seen no key yet; its sums are 0 and 2^(-inf) is 0.
        base_q = jnp.where(higher_q == -jnp.inf, 0.0, higher_q)
        weights_qk = jnp.exp2(logits_qk - base_q[:, None])
        shrunk_q = jnp.exp2(top_q - base_q)
        total_q = total_q * shrunk_q + jnp.sum(weights_qk, axis=1)
        v_kE = _load(v_ref.at[columns], E)
        sums_qE = sums_qE * shrunk_q[:, None] + triton.dot(weights_qk.astype(v_kE.dtype), v_kE)
        return higher_q, total_q, sums_qE

    top, total = -jnp.inf, 0.0
    if sink_ref is not None:
        top, total = sink_ref[0].astype(f32) * LOG2_E, 1.0
    sums_qE = jnp.zeros((sizes.own, padded(E)), f32)
    carry = jnp.full((sizes.own,), top, f32), jnp.full((sizes.own,), total, f32), sums_qE
    top_q, total_q, sums_qE = _over_keys(meet, carry, first_ref, start, sizes)
    lse_ref[...] = (top_q + jnp.log2(total_q)) / LOG2_E
    _store(context_ref, sums_qE / total_q[:, None], E)


def d_queries(
    softmax_config, sizes, dims, q_ref, k_ref, v_ref, d_ref, lse_ref, mean_ref, first_ref, dq_ref
):
    """The gradient of a block of queries of one head, from the keys that some of them see."""
    H, E = dims
    q_qH, d_qE = _load(q_ref, H), _load(d_ref, E)
    lse_q, mean_q = lse_ref[...] * LOG2_E, mean_ref[...]
    start = pl.program_id(0) * sizes.own
    rows_q = start + jnp.arange(sizes.own)
    first_q = first_ref[pl.ds(start, sizes.own)]

    def meet(masked, j, dq_qH):
        columns = pl.ds(j * sizes.other, sizes.other)
        k_kH, v_kE = _load(k_ref.at[columns], H), _load(v_ref.at[columns], E)
        logits_qk, slope_qk = _logits(softmax_config, H, q_qH, k_kH)
        weights_qk = jnp.exp2(logits_qk - lse_q[:, None])
        if masked:
            columns_k = j * sizes.other + jnp.arange(sizes.other)
            weights_qk = jnp.where(_seen(rows_q, first_q, columns_k), weights_qk, 0.0)
        d_weights_qk = triton.dot(d_qE, v_kE.T)
        d_logits_qk = weights_qk * (d_weights_qk - mean_q[:, None]) * slope_qk
        return dq_qH + triton.dot(d_logits_qk.astype(k_kH.dtype), k_kH)

    dq_qH = jnp.zeros((sizes.own, padded(H)), f32)
    dq_qH = _over_keys(meet, dq_qH, first_ref, start, sizes)
    _store(dq_ref, dq_qH / softmax_config.divisor_of(H), H)


def d_keys_values(
    softmax_config,
    sizes,
    dims,
    num_groups,
    q_ref,
    k_ref,
    v_ref,
    d_ref,
    lse_ref,
    mean_ref,
    last_ref,
    dk_ref,
    dv_ref,
):
    """The gradients of a block of keys of one head, from the queries, of G heads, that see some."""
    H, E = dims
    k_kH, v_kE = _load(k_ref, H), _load(v_ref, E)
    start = pl.program_id(0) * sizes.own
    columns_k = start + jnp.arange(sizes.own)
    last_k = last_ref[pl.ds(start, sizes.own)]

    def meet(group, masked, i, carry):
        dk_kH, dv_kE = carry
        rows = pl.ds(i * sizes.other, sizes.other)
        q_qH, d_qE = _load(q_ref.at[rows, group], H), _load(d_ref.at[rows, group], E)
        lse_q, mean_q = lse_ref[group, rows] * LOG2_E, mean_ref[group, rows]
        # Keys are the rows, so that no weight is transposed.
        logits_kq, slope_kq = _logits(softmax_config, H, k_kH, q_qH)
        weights_kq = jnp.exp2(logits_kq - lse_q[None])
        if masked:
            rows_q = i * sizes.other + jnp.arange(sizes.other)
            seen_kq = (columns_k[:, None] <= rows_q[None]) & (rows_q[None] <= last_k[:, None])
            weights_kq = jnp.where(seen_kq, weights_kq, 0.0)
        dv_kE += triton.dot(weights_kq.astype(d_qE.dtype), d_qE)
        d_weights_kq = triton.dot(v_kE, d_qE.T)
        d_logits_kq = weights_kq * (d_weights_kq - mean_q[None]) * slope_kq
        dk_kH += triton.dot(d_logits_kq.astype(q_qH.dtype), q_qH)
        return dk_kH, dv_kE

    end = start + sizes.own
    low, high = start // sizes.other, last_ref[end - 1] // sizes.other + 1
    # All keys of the block are seen by the queries from its end to the last of its first key.
    low_all, high_all = pl.cdiv(end - 1, sizes.other), (last_ref[start] + 1) // sizes.other

    def of_head(group, carry):
        return _in_three(functools.partial(meet, group), carry, low, low_all, high_all, high)

    carry = jnp.zeros((sizes.own, padded(H)), f32), jnp.zeros((sizes.own, padded(E)), f32)
    dk_kH, dv_kE = jax.lax.fori_loop(0, num_groups, of_head, carry)
    _store(dk_ref, dk_kH / softmax_config.divisor_of(H), H)
    _store(dv_ref, dv_kE, E)


def _over_keys(meet, carry, first_ref, start, sizes):
    """meet over the blocks of keys that the queries from `start` on see."""
    end = start + sizes.own
    low, high = first_ref[start] // sizes.other, pl.cdiv(end, sizes.other)
    # All queries see the keys from the first of the last query to the first query itself.
    low_all = pl.cdiv(first_ref[end - 1], sizes.other)
    high_all = (start + 1) // sizes.other
    return _in_three(meet, carry, low, low_all, high_all, high)


def _in_three(meet, carry, low, low_all, high_all, high):
    """Blocks low to high; no mask is needed from low_all to high_all, if that is anything."""
    low_all = jnp.minimum(low_all, high)
    high_all = jnp.maximum(high_all, low_all)
    masked, whole = functools.partial(meet, True), functools.partial(meet, False)
    carry = jax.lax.fori_loop(low, low_all, masked, carry)
    carry = jax.lax.fori_loop(low_all, high_all, whole, carry)
    return jax.lax.fori_loop(high_all, high, masked, carry)


def _logits(softmax_config, head_dim, a_aH, b_bH):
    """a b^T as exponents of 2, and the derivative of the logits by the scaled products."""
    logits_ab = triton.dot(a_aH, b_bH.T)
    scale = 1 / softmax_config.divisor_of(head_dim)
    if not softmax_config.soft_cap:
        return logits_ab * (scale * LOG2_E), 1.0
    capped_ab = jnp.tanh(logits_ab * (scale / softmax_config.soft_cap))
    return capped_ab * (softmax_config.soft_cap * LOG2_E), 1 - capped_ab * capped_ab


def _seen(rows_q, first_q, columns_k):
    return (columns_k[None] <= rows_q[:, None]) & (columns_k[None] >= first_q[:, None])


def padded(dim):
    """Triton's arrays have sizes that are powers of 2, and its matrix units sum over 16 at least.

    With fewer they take the features once more: compiled, q k is twice what it is.
    """
    return max(SMALLEST, pl.next_power_of_2(dim))


def _load(ref, dim):
    if ref.shape[-1] == dim:
        return ref[...]
    inside = (jnp.arange(ref.shape[-1]) < dim)[None]
    return triton.load(ref, mask=inside, other=0.0)


def _store(ref, x, dim):
    inside = None if ref.shape[-1] == dim else (jnp.arange(ref.shape[-1]) < dim)[None]
    triton.store(ref, x.astype(ref.dtype), mask=inside)
