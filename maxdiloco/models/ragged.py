"""Products of rows that are sorted by expert, each with the matrix of its expert."""
# A rows  E experts  D width in  F width out

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from maxdiloco.models.spec import ModelSpec

f32 = jnp.float32
# Rows of a tile of the kernel, as many as XLA:TPU's own kernels take: an expert's first and last
# tile are computed in full. The other sides fill less than half of a core's fast memory on v5e.
TILE_ROWS, TILE_SIDE = 128, 1024


class _Options(NamedTuple):
    """precision: of the products. preferred: type of their sums. kernel: see ragged."""

    precision: str
    preferred: DTypeLike | None
    kernel: str


def ragged(x_AD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array, spec: ModelSpec) -> jax.Array:
    """[A, F]: consecutive rows, sizes_E of them, times the matrix of their expert.

    Rows after the last group come out as anything.
    spec.ragged_kernel: "megablox" takes JAX's Pallas kernels for the gradients. XLA:TPU of jax 0.10
    has a kernel for the product. It takes it for the gradient in x too, but copies the matrices for
    it, and multiplies every row by every expert in the other gradient (benchmarks/log).
    "triton" takes the kernels of triton_ragged.py for all three, where they fit. "" takes XLA's,
    which on a CPU and a GPU multiply every row by every expert.
    """
    preferred = f32 if spec.float32_products else None  # see models/product.py
    kernel = spec.ragged_kernel
    if kernel == "triton":
        from maxdiloco.models import triton_ragged

        kernel = kernel if triton_ragged.fits(x_AD, w_EDF) else ""
    options = _Options(spec.precision, preferred, kernel)
    return _ragged(options, x_AD, w_EDF, sizes_E)


def _plain(options, x_AD, w_EDF, sizes_E):
    if options.kernel == "triton":
        from maxdiloco.models import triton_ragged

        return triton_ragged.rows_by_matrices(x_AD, w_EDF, sizes_E)
    out = jax.lax.ragged_dot(
        x_AD,
        w_EDF,
        sizes_E,
        precision=options.precision,
        preferred_element_type=options.preferred,
    )
    return out.astype(x_AD.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ragged(options, x_AD, w_EDF, sizes_E):
    return _one_by_one(functools.partial(_plain, options))(x_AD, w_EDF, sizes_E)


def _ragged_backward(options, factors, d_AF):
    def backward(x_AD, w_EDF, sizes_E, d_AF):
        if options.kernel == "triton":
            from maxdiloco.models import triton_ragged

            dx_AD = triton_ragged.rows_by_matrices(d_AF, w_EDF, sizes_E, transposed=True)
            return dx_AD, triton_ragged.matrices_gradient(x_AD, d_AF, sizes_E, w_EDF.dtype)
        if options.kernel == "megablox":
            dx_AD = rows_gradient_by_kernel(options.precision, d_AF, w_EDF, sizes_E)
            dw_EDF = gradient_by_kernel(options.precision, x_AD, d_AF, sizes_E)
            return dx_AD, dw_EDF.astype(w_EDF.dtype)
        _, pull = jax.vjp(lambda x, w: _plain(options, x, w, sizes_E), x_AD, w_EDF)
        return pull(d_AF)

    return (*_one_by_one(backward)(*factors, d_AF), None)


_ragged.defvjp(
    lambda options, *factors: (_ragged(options, *factors), factors), _ragged_backward
)


def rows_gradient_by_kernel(
    precision: str,
    d_AF: jax.Array,
    w_EDF: jax.Array,
    sizes_E: jax.Array,
    *,
    interpret: bool = False,
) -> jax.Array:
    """[A, D]: each row of d times the transposed matrix of its expert; 0 after the last group.

    interpret: as of gradient_by_kernel.
    """
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    (A, F), D = d_AF.shape, w_EDF.shape[1]
    tiling = (TILE_ROWS, min(F, TILE_SIDE), min(D, TILE_SIDE))
    with jax.default_matmul_precision(precision):
        dx_AD = gmm(
            jnp.pad(d_AF, ((0, -A % TILE_ROWS), (0, 0))), w_EDF, sizes_E, d_AF.dtype, tiling,
            transpose_rhs=True, interpret=interpret,
        )[:A]  # fmt: skip
    return jnp.where((jnp.arange(A) < jnp.sum(sizes_E))[:, None], dx_AD, 0)


def gradient_by_kernel(
    precision: str, x_AD: jax.Array, d_AF: jax.Array, sizes_E: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """[E, D, F]: of each group of rows the sum of x times d, zeros of a group without rows.

    interpret: run the kernel as array code, for tests without a TPU.
    """
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    A, D, F = *x_AD.shape, d_AF.shape[1]
    missing = ((0, -A % TILE_ROWS), (0, 0))
    x_AD, d_AF = jnp.pad(x_AD, missing), jnp.pad(d_AF, missing)
    tiling = (TILE_ROWS, min(D, TILE_SIDE), min(F, TILE_SIDE))
    with jax.default_matmul_precision(precision):
        return tgmm(x_AD.T, d_AF, sizes_E, x_AD.dtype, tiling, interpret=interpret)


def _one_by_one(fn: Callable) -> Callable:
    """fn; a vmap over it, of the replicas of a slot, calls it for each.

    XLA:TPU of jax 0.10 compiles no ragged product with a batch dim.
    """
    wrapped = jax.custom_batching.custom_vmap(fn)

    @wrapped.def_vmap
    def _(size, in_batched, *args):
        calls = [
            wrapped(*(x[i] if batched else x for x, batched in zip(args, in_batched, strict=True)))
            for i in range(size)
        ]
        out = jax.tree.map(lambda *parts: jnp.stack(parts), *calls)
        return out, jax.tree.map(lambda _: True, out)

    return wrapped
