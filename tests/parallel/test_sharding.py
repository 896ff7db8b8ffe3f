"""One table from logical names to mesh axes, for parameters and activations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from models.tiny_model import mesh_of

from maxdiloco.errors import ConfigError
from maxdiloco.parallel import sharding


@pytest.fixture(scope="module")
def mesh(devices):
    return mesh_of(devices, diloco=2, fsdp=2, tensor=2)


def test_rules_are_overridable_and_a_mesh_axis_serves_one_dim():
    """embed and mlp both on fsdp: the first dim that asks gets it."""
    rules = sharding.rules_with([["mlp", "fsdp"]])
    assert sharding.spec(("embed", "mlp"), rules) == P(("fsdp", "context"), None)
    rules = sharding.rules_with([["vocab", ["fsdp", "tensor"]], ["embed", []]])
    assert sharding.spec(("vocab", "embed"), rules) == P(("fsdp", "tensor"), None)


def test_unknown_logical_name_is_refused():
    with pytest.raises(ConfigError, match=r"logical_axis_rules entry .*headz.* Names: batch"):
        sharding.rules_with([["headz", "tensor"]])


def test_constrain_leaves_out_manual_axes(mesh):
    """Under the map over replicas `diloco` is manual; rows are spread over the other axes."""

    def view(x_BD):
        return sharding.constrain(x_BD * 2, ("batch", "embed_act"), sharding.DEFAULT_RULES)

    mapped = jax.jit(
        jax.shard_map(view, mesh=mesh, in_specs=P("diloco"), out_specs=P("diloco"),
                      axis_names={"diloco"}, check_vma=False)
    )  # fmt: skip
    x = jnp.arange(32.0).reshape(8, 4)
    np.testing.assert_array_equal(mapped(x), 2 * x)
    lines = mapped.lower(x).as_text().splitlines()
    constraints = [line for line in lines if "sharding_constraint" in line]
    assert constraints and not any("diloco" in line for line in constraints)


def test_constrain_without_a_mesh_returns_the_array():
    x = jnp.ones((2, 2))
    assert sharding.constrain(x, ("batch", None), sharding.DEFAULT_RULES) is x


def test_dims_that_do_not_divide_are_refused(mesh):
    shapes = {"w": jax.ShapeDtypeStruct((3, 4), np.float32)}
    with pytest.raises(ConfigError, match=r"fsdp parallelism 2 does not divide dim 0 \(embed=3\)"):
        sharding.parameter_shardings(
            {"w": ("embed", "mlp")}, shapes, mesh, sharding.DEFAULT_RULES
        )
