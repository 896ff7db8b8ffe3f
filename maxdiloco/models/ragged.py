"""Products of rows that are sorted by expert, each with the matrix of its expert."""
# A rows  E experts  D width in  F width out

import functools

import jax
import jax.numpy as jnp

from maxdiloco.models.spec import ModelSpec

f32 = jnp.float32
# Rows of a tile of the kernel, as many as XLA:TPU's own kernels take: an expert's first and last
# tile are computed in full. The other sides fill less than half of a core's fast memory on v5e.
TILE_ROWS, TILE_SIDE = 128, 1024


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def ragged(spec: ModelSpec, x_AD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """[A, F]: consecutive rows, sizes_E of them, times the matrix of their expert.

    Rows after the last group come out as anything.
    spec.ragged_kernel: "megablox" takes JAX's Pallas kernels for the gradients. XLA:TPU of jax 0.10
    has a kernel for the product. It takes it for the gradient in x too, but copies the matrices for
    it, and multiplies every row by every expert in the other gradient (benchmarks/log).
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


def _backward(spec, factors, d_AF):
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


ragged.defvjp(lambda spec, *factors: (ragged(spec, *factors), factors), _backward)


def gradients_by_kernel(
    precision, x_AD, w_EDF, sizes_E, d_AF, *, interpret=False
) -> tuple[jax.Array, jax.Array]:
    """[A, D]: each row of d times its expert's matrix, transposed, 0 after the last group; and
    [E, D, F]: of each group of rows the sum of x times d, zeros of a group without rows.

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
    here_A1 = (jnp.arange(A) < jnp.sum(sizes_E))[:, None]
    return jnp.where(here_A1, dx_AD, 0), dw_EDF.astype(w_EDF.dtype)
