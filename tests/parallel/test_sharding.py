"""Logical names to mesh axes; the map over replicas: one replica's view, nothing shared."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from models.tiny_model import mesh_of

from maxdiloco.errors import ConfigError
from maxdiloco.parallel import sharding
from maxdiloco.parallel.replicas import broadcast, map_fn, reduce_mean, without_singleton_vmap


def test_rules_are_overridable_and_a_mesh_axis_serves_one_dim():
    """embed and mlp both on fsdp: the first dim that asks gets it."""
    rules = sharding.rules_with([["mlp", "fsdp"]])
    assert sharding.spec(("embed", "mlp"), rules) == P(("fsdp", "context"), None)
    rules = sharding.rules_with([["vocab", ["fsdp", "tensor"]], ["embed", []]])
    assert sharding.spec(("vocab", "embed"), rules) == P(("fsdp", "tensor"), None)
    with pytest.raises(ConfigError, match="logical_axis_rules .*headz"):
        sharding.rules_with([["headz", "tensor"]])


def test_constrain_leaves_out_manual_axes(devices):
    """Under the map over replicas `diloco` is manual; rows are spread over the other axes."""
    mesh = mesh_of(devices, diloco=2, fsdp=2, tensor=2)

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
    assert sharding.constrain(x, ("batch", None), sharding.DEFAULT_RULES) is x  # without a mesh


def test_dims_that_do_not_divide_are_refused(devices):
    mesh, shapes = mesh_of(devices, fsdp=2), {"w": jax.ShapeDtypeStruct((3, 4), np.float32)}
    with pytest.raises(ConfigError, match=r"fsdp parallelism 2 .*embed=3"):
        sharding.parameter_shardings({"w": ("embed", "mlp")}, shapes, mesh, sharding.DEFAULT_RULES)


# --- the map over replicas ----------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_map_fn_is_a_loop_over_replicas(devices, slots):
    """M=4 replicas on 1, 2 or 4 slots of the mesh: fn on each, and no replica sees another."""
    mesh = mesh_of(devices, diloco=slots, fsdp=2)

    def fn(x, y):
        return {"sum": (x * y).sum(), "x": x + 1}

    x_R = np.random.default_rng(0).normal(size=(4, 3, 2)).astype(np.float32)
    y_R = np.random.default_rng(1).normal(size=(4, 3, 2)).astype(np.float32)
    out = jax.jit(map_fn(fn, mesh=mesh))(x_R, y_R)
    np.testing.assert_allclose(out["sum"], [(x_R[m] * y_R[m]).sum() for m in range(4)], rtol=1e-6)
    np.testing.assert_array_equal(out["x"], x_R + 1)


def test_without_singleton_vmap_has_no_replica_dim(devices):
    """One replica a slot: a host callback that refuses vmap works; two a slot: it is refused."""
    mesh = Mesh(np.array(devices[:2]), ("diloco",))

    def heavy(x, y):
        like = jax.ShapeDtypeStruct((3,), x.dtype)
        callback = jax.pure_callback(lambda v: 2 * v, like, x, vmap_method=None)
        return {"out": callback + y}

    def mapped(x_R):
        light = without_singleton_vmap(heavy)
        return jax.jit(map_fn(light, mesh=mesh))(x_R, x_R)

    x_R = np.arange(12, dtype=np.float32).reshape(4, 3)
    np.testing.assert_array_equal(mapped(x_R[:2])["out"], 3 * x_R[:2])
    with pytest.raises(NotImplementedError):
        mapped(x_R)


@pytest.mark.parametrize("M", [2, 4])
def test_the_heavy_part_is_traced_once(devices, M):
    """For its call, for the rule of its vmap and for its shapes. Tracing a gradient takes long."""
    mesh = mesh_of(devices, diloco=2)
    seen = []

    def heavy(x):
        seen.append(x.shape)
        return 2 * x

    light = without_singleton_vmap(heavy)

    def fn(x):
        return light(jnp.zeros(jax.eval_shape(light, x).shape) + x)

    x_R = np.ones((M, 3), np.float32)
    np.testing.assert_array_equal(jax.jit(map_fn(fn, mesh=mesh))(x_R), 2 * x_R)
    assert seen == [(3,)]


def test_broadcast_copies_and_mean_is_summed_in_order():
    """1e8 + 1 - 1e8 in float32 is 0 in this order and would be 1 in another: (1e8 - 1e8) + 1."""
    np.testing.assert_array_equal(broadcast(jnp.arange(3.0), 2), [[0, 1, 2], [0, 1, 2]])
    assert float(reduce_mean(jnp.float32([1e8, 1, -1e8]))) == 0
    assert float(reduce_mean(jnp.float32([1e8, -1e8, 1]))) == pytest.approx(1 / 3)
