"""Products of rows that are sorted by expert, as Triton kernels for GPUs.

XLA:GPU of jax 0.10 multiplies every row by every expert's matrix. Here a tile of rows belongs to
one expert, as in MegaBlocks (arXiv 2211.15841). The kernel reads at run time where the groups
begin.
"""
# A rows  E experts  D width in  F width out  T tiles of rows  r, d, f sides of a tile

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

f32 = jnp.float32
SMALLEST = 16  # smallest side of a tile that a GPU's matrix units accept
# Sides of a tile of the result, and of a step of the sum. They follow from the registers and the
# shared memory that the compiler reports (benchmarks/results/gpu.md).
SIDE, INNER = 128, 64
MANY_ROWS = 256  # mean rows of an expert from which tiles have SIDE rows instead of half of them


def fits(x: jax.ShapeDtypeStruct, w: jax.ShapeDtypeStruct) -> bool:
    """Tell whether the kernels accept rows [A, D] and matrices [E, D, F] of these shapes."""
    half = all(a.dtype in (jnp.bfloat16, jnp.float16) for a in (x, w))
    return half and all(side % SMALLEST == 0 for side in w.shape[1:])


def tiles_of(sizes_E: jax.Array, num_rows: int, rows: int) -> tuple[jax.Array, ...]:
    """Cut the rows of each expert into tiles, the first tile at its first row.

    Args:
      sizes_E: rows of each expert.
      num_rows: A.
      rows: rows of a tile.

    Returns:
      The expert of each tile, its first row and the row after its expert's last row; int32 [T].
      There are num_rows // rows + E tiles, enough for any sizes_E; unused ones have no rows.
    """
    E = sizes_E.shape[0]
    index_T = jnp.arange(num_rows // rows + E, dtype=jnp.int32)
    tiles_E, ends_E = (sizes_E + rows - 1) // rows, jnp.cumsum(sizes_E)
    until_E = jnp.cumsum(tiles_E)
    expert_T = jnp.sum(until_E <= index_T[:, None], axis=1, dtype=jnp.int32)
    used_T, expert_T = expert_T < E, jnp.minimum(expert_T, E - 1)
    before_T = index_T - (until_E - tiles_E)[expert_T]
    start_T = (ends_E - sizes_E)[expert_T] + before_T * rows
    ranges = (jnp.where(used_T, row_T, 0) for row_T in (start_T, ends_E[expert_T]))
    return expert_T, *(row_T.astype(jnp.int32) for row_T in ranges)


def rows_by_matrices(x_AD, w_EDF, sizes_E, *, transposed=False, interpret=False) -> jax.Array:
    """Multiply consecutive groups of rows by the matrices of their experts.

    Args:
      x_AD: rows, sorted by expert; sizes and types as in `fits`.
      w_EDF: matrices.
      sizes_E: rows of each expert.
      transposed: rows are [A, F], the matrices are transposed, and the result is [A, D].
      interpret: run the kernel as array code, for tests without a GPU.

    Returns:
      [A, F], 0 after the last group.
    """
    A, (E, *sides) = x_AD.shape[0], w_EDF.shape
    inner, outer = reversed(sides) if transposed else sides
    rows = SIDE if A >= MANY_ROWS * E else SIDE // 2
    tiles = tiles_of(sizes_E, A, rows)
    side, step = math.gcd(outer, SIDE), math.gcd(inner, INNER)
    out_AF = pl.pallas_call(
        functools.partial(_rows_kernel, rows, side, step, inner, transposed),
        grid=(outer // side, len(tiles[0])),
        out_shape=jax.ShapeDtypeStruct((A, outer), x_AD.dtype),
        compiler_params=triton.CompilerParams(num_warps=8 if rows == SIDE else 4, num_stages=3),
        interpret=interpret,
        name="rows_by_matrices",
    )(*tiles, x_AD, w_EDF)
    return jnp.where((jnp.arange(A) < jnp.sum(sizes_E))[:, None], out_AF, 0)


def _rows_kernel(
    rows, side, step, inner, transposed, expert_ref, start_ref, end_ref, x_ref, w_ref, out_ref
):
    """Compute one tile of rows, `side` columns of the result."""
    tile = pl.program_id(1)
    expert, start, end = expert_ref[tile], start_ref[tile], end_ref[tile]
    inside_r1 = (start + jnp.arange(rows) < end)[:, None]
    rows_r, columns_f = pl.ds(start, rows), pl.ds(pl.program_id(0) * side, side)

    def add(i, sum_rf):
        inner_d = pl.ds(i * step, step)
        x_rd = triton.load(x_ref.at[rows_r, inner_d], mask=inside_r1, other=0.0)
        if transposed:
            w_df = w_ref[expert, columns_f, inner_d].T
        else:
            w_df = w_ref[expert, inner_d, columns_f]
        return sum_rf + triton.dot(x_rd, w_df)

    # A tile without rows multiplies nothing.
    steps = (start < end).astype(jnp.int32) * (inner // step)
    sum_rf = jax.lax.fori_loop(0, steps, add, jnp.zeros((rows, side), f32))
    triton.store(out_ref.at[rows_r, columns_f], sum_rf.astype(out_ref.dtype), mask=inside_r1)


def matrices_gradient(x_AD, d_AF, sizes_E, dtype, *, interpret=False) -> jax.Array:
    """Compute the gradient of the matrices.

    Args:
      x_AD: rows, sorted by expert.
      d_AF: gradient of their products.
      sizes_E: rows of each expert.
      dtype: type of the result.
      interpret: run the kernel as array code, for tests without a GPU.

    Returns:
      [E, D, F], zeros for a group without rows.
    """
    (A, D), F, E = x_AD.shape, d_AF.shape[1], sizes_E.shape[0]
    side_d, side_f = math.gcd(D, SIDE), math.gcd(F, SIDE)
    ends_E = jnp.cumsum(sizes_E).astype(jnp.int32)
    return pl.pallas_call(
        functools.partial(_gradient_kernel, side_d, side_f),
        grid=(F // side_f, D // side_d, E),
        in_specs=[
            pl.BlockSpec(),
            pl.BlockSpec(),
            pl.BlockSpec((A, side_d), lambda f, d, e: (0, d)),
            pl.BlockSpec((A, side_f), lambda f, d, e: (0, f)),
        ],
        out_specs=pl.BlockSpec((None, side_d, side_f), lambda f, d, e: (e, d, f)),
        out_shape=jax.ShapeDtypeStruct((E, D, F), dtype),
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=3),
        interpret=interpret,
        name="matrices_gradient",
    )(ends_E - sizes_E, ends_E, x_AD, d_AF)


def _gradient_kernel(side_d, side_f, start_ref, end_ref, x_ref, d_ref, out_ref):
    """Compute one tile of an expert's gradient, over all rows of the expert."""
    expert = pl.program_id(2)
    start, end = start_ref[expert], end_ref[expert]

    def add(i, sum_df):
        first = start + i * INNER
        inside_r1 = (first + jnp.arange(INNER) < end)[:, None]
        x_rd = triton.load(x_ref.at[pl.ds(first, INNER), :], mask=inside_r1, other=0.0)
        d_rf = triton.load(d_ref.at[pl.ds(first, INNER), :], mask=inside_r1, other=0.0)
        return sum_df + triton.dot(x_rd.T, d_rf)

    steps = pl.cdiv(end - start, INNER)
    sum_df = jax.lax.fori_loop(0, steps, add, jnp.zeros((side_d, side_f), f32))
    out_ref[...] = sum_df.astype(out_ref.dtype)
