"""The embedding: what is gathered of a table that is split, and what its gradient sums."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tiers import full

from maxdiloco.models.kernels.token_lookup import look_up

V, D, B, L = 8, 16, 8, 96  # many tokens for each row: their sum does not fit bfloat16
RULES = (("vocab", ("tensor",)), ("embed", ("fsdp",)), ("batch", ("fsdp",)), ("length", ()))


def inputs(mesh):
    table = jax.random.normal(jax.random.key(0), (V, D))
    tokens = jax.random.randint(jax.random.key(1), (B, L), 0, V)
    weights = jax.random.normal(jax.random.key(2), (B, L, D)) + 1
    specs = P("tensor", "fsdp"), P("fsdp"), P("fsdp")
    args = zip((table, tokens, weights), specs, strict=True)
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in args]


def program(mesh, dtype, scale=1.0):
    """Of (table, tokens, weights): rows in bfloat16, and the gradient of a sum of them."""
    spec = dataclasses.replace(
        tiny_model.build().config, rules=RULES, dtype=jnp.dtype(dtype), embedding_multiplier=scale
    )

    def weighted(table, tokens, weights):
        x = look_up(spec, table, tokens).astype(jnp.bfloat16)
        return jnp.sum(x.astype(jnp.float32) * weights), x

    def run(*args):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return jax.grad(weighted, has_aux=True)(*args)

    return jax.jit(run)


@pytest.mark.parametrize(("tensor", "scale"), [full(1, 1.0), full(1, 22.6), (2, 22.6)])
def test_a_table_is_gathered_in_the_activations_dtype_to_the_same_bits(devices, tensor, scale):
    """As bytes on the link; the control is the table gathered in float32 and rounded after."""
    mesh = tiny_model.mesh_of(devices, fsdp=4 // tensor, tensor=tensor)
    args = inputs(mesh)
    found = {}
    for dtype, name in ((jnp.bfloat16, "bf16"), (jnp.float32, "f32")):
        run = program(mesh, dtype, scale)
        text = run.lower(*args).as_text()
        gathers = [line for line in text.splitlines() if '"stablehlo.all_gather"' in line]
        assert len(gathers) == 1 and f"x{name}>" in gathers[0], gathers
        found[name] = [np.asarray(x).tobytes() for x in run(*args)]
    assert found["bf16"] == found["f32"]


def test_the_gradient_of_a_row_is_summed_in_the_tables_dtype(devices):
    """By hand, in float32; a sum in bfloat16 is the control."""
    mesh = tiny_model.mesh_of(devices, fsdp=4)
    args = inputs(mesh)
    gradient, _ = program(mesh, jnp.bfloat16)(*args)
    _, tokens, weights = map(np.asarray, args)
    rounded = np.asarray(jnp.asarray(weights).astype(jnp.bfloat16))
    exact, drifted = np.zeros((V, D), np.float32), np.zeros((V, D), rounded.dtype)
    np.add.at(exact, tokens, rounded.astype(np.float32))
    np.add.at(drifted, tokens, rounded)
    np.testing.assert_allclose(gradient, exact, rtol=1e-5)  # the order of a sum of float32
    assert np.abs(drifted.astype(np.float32) / exact - 1).max() > 1e-2
