"""Products with float32 results, for models/product.py, the head and attention.

The gain: benchmarks/log/2026-11-22.md, "CPU, one device", the table of products in ms of CPU time.
"""

import jax
import jax.numpy as jnp

f32 = jnp.float32


def float32_product(
    equation: str, x: jax.Array, w: jax.Array, precision: str, float32_factors: bool
) -> jax.Array:
    """einsum with a float32 result; float32_factors: of factors made float32 first."""
    if float32_factors:
        x, w = x.astype(f32), w.astype(f32)
    return jnp.einsum(equation, x, w, precision=precision, preferred_element_type=f32)
