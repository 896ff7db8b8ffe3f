"""Products of rows that are sorted by expert with the matrices of their experts, and gradients."""
# A rows  E experts  D width in  F width out

import functools
from types import ModuleType

import jax
import jax.numpy as jnp

from maxdiloco.models.kernels.matmul import Products

# Rows of a tile of the Pallas TPU kernel, equal to the ones of XLA:TPU's own kernels. They are few
# because an expert's first and last tile are computed in full. The tiles with the other sides use
# less than half of a core's fast memory on v5e.
TILE_ROWS, TILE_SIDE = 128, 1024

# Used for the replicas of a mesh position: XLA:TPU of jax 0.10 cannot compile a ragged product with
# a batch dimension.
_one_by_one = jax.custom_batching.sequential_vmap


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def grouped_matmul(
    kernel: str, products: Products, x_AD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array
) -> jax.Array:
    """Multiply consecutive groups of rows by one matrix each.

    Args:
      kernel: "megablox" computes the gradients with JAX's Pallas kernels, and the product with a
        kernel of XLA:TPU (jax 0.10). XLA's own gradient in x copies the matrices, and its other
        gradient multiplies every row by every expert (benchmarks/results/experts.md). "triton"
        computes all three products with triton_grouped.py, if its tiles fit. "xla" is
        jax.lax.ragged_dot, which on a CPU and a GPU multiplies every row by every expert.
      products: types and precision.
      x_AD: rows, sorted by group.
      w_EDF: a matrix of each group.
      sizes_E: rows of each group, int32.

    Returns:
      [A, F]. Rows after the last group are undefined.
    """
    return _one_by_one(functools.partial(_forward, kernel, products))(x_AD, w_EDF, sizes_E)


def _triton(kernel: str, x_AD, w_EDF) -> ModuleType | None:
    """Return triton_grouped if its kernels are to be used; importing Pallas is slow."""
    if kernel != "triton":
        return None
    from maxdiloco.models.kernels import triton_grouped

    return triton_grouped if triton_grouped.fits(x_AD, w_EDF) else None


def _forward(kernel, products, x_AD, w_EDF, sizes_E):
    if triton := _triton(kernel, x_AD, w_EDF):
        return triton.rows_by_matrices(x_AD, w_EDF, sizes_E)
    out = jax.lax.ragged_dot(
        x_AD,
        w_EDF,
        sizes_E,
        precision=products.precision,
        preferred_element_type=products.result_type,
    )
    return out.astype(x_AD.dtype)


def _backward(kernel, products, factors, d_AF):
    @_one_by_one
    def backward(x_AD, w_EDF, sizes_E, d_AF):
        if triton := _triton(kernel, x_AD, w_EDF):
            dx_AD = triton.rows_by_matrices(d_AF, w_EDF, sizes_E, transposed=True)
            return dx_AD, triton.matrices_gradient(x_AD, d_AF, sizes_E, w_EDF.dtype)
        if kernel == "megablox":
            return megablox_gradients(products.precision, x_AD, w_EDF, sizes_E, d_AF)
        _, pull = jax.vjp(lambda x, w: _forward(kernel, products, x, w, sizes_E), x_AD, w_EDF)
        return pull(d_AF)

    return (*backward(*factors, d_AF), None)


grouped_matmul.defvjp(
    lambda kernel, products, *factors: (grouped_matmul(kernel, products, *factors), factors),
    _backward,
)


def megablox_gradients(
    precision: str,
    x_AD: jax.Array,
    w_EDF: jax.Array,
    sizes_E: jax.Array,
    d_AF: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Compute both gradients of a grouped product by jax.experimental's Pallas TPU kernels.

    Args:
      precision: precision of the products.
      x_AD: rows, sorted by group.
      w_EDF: a matrix of each group.
      sizes_E: rows of each group, int32.
      d_AF: gradient of the product.
      interpret: run the kernels as array code, for tests without a TPU.

    Returns:
      The gradient of the rows [A, D], undefined after the last group. The gradient of the matrices
      [E, D, F], zeros for a group without rows.
    """
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

    (A, D), F = x_AD.shape, d_AF.shape[1]
    side_D, side_F = min(D, TILE_SIDE), min(F, TILE_SIDE)
    x_AD, d_AF = (jnp.pad(a, ((0, -A % TILE_ROWS), (0, 0))) for a in (x_AD, d_AF))  # whole tiles
    with jax.default_matmul_precision(precision):
        dx_AD = gmm(
            d_AF,
            w_EDF,
            sizes_E,
            d_AF.dtype,
            tiling=(TILE_ROWS, side_F, side_D),
            transpose_rhs=True,
            interpret=interpret,
        )[:A]
        dw_EDF = tgmm(
            x_AD.T,
            d_AF,
            sizes_E,
            x_AD.dtype,
            tiling=(TILE_ROWS, side_D, side_F),
            interpret=interpret,
        )
    return dx_AD, dw_EDF.astype(w_EDF.dtype)
