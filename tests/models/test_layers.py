"""A layer's MLP in bfloat16 on a CPU."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiloco.models.layers import activated


def spec(wide, *activations, limit=0.0):
    return SimpleNamespace(
        mlp_activations=activations, mlp_activations_limit=limit, float32_products=wide
    )


@pytest.mark.parametrize("limit", [0.0, 1.5])
@pytest.mark.parametrize("activations", [("silu", "linear"), ("gelu",), ("quick_gelu", "plus_one")])
def test_hidden_values_and_gradients_are_rounded_once(activations, limit):
    """Against float32 of the same values. Control: bfloat16 rounded after every operation."""
    rng = np.random.default_rng(0)
    inputs = [jnp.asarray(2 * rng.normal(size=(8, 64)), jnp.bfloat16) for _ in activations]

    def value_and_gradients(wide, *inputs):
        how = spec(wide, *activations, limit=limit)
        value, pull = jax.vjp(lambda *x: activated(how, *x), *inputs)
        return value, *pull(jnp.ones_like(value))

    exact = value_and_gradients(False, *(x.astype(jnp.float32) for x in inputs))
    exact = [x.astype(jnp.bfloat16) for x in exact]
    found, rounded = (value_and_gradients(wide, *inputs) for wide in (True, False))
    assert {x.dtype for x in found} == {jnp.dtype(jnp.bfloat16)}
    assert all(map(np.array_equal, found, exact))
    assert not all(map(np.array_equal, rounded, exact))
