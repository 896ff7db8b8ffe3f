"""The map over replicas: one replica's view, nothing shared, wherever replicas lie."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from maxdiloco.parallel.replicas import broadcast, map_fn, reduce_mean, without_singleton_vmap


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_map_fn_is_a_loop_over_replicas(devices, slots):
    """M=4 replicas on 1, 2 or 4 slots of the mesh: fn on each, and no replica sees another."""
    mesh = Mesh(np.array(devices[: 2 * slots]).reshape(slots, 2), ("diloco", "fsdp"))

    def fn(x, y):
        return {"sum": (x * y).sum(), "x": x + 1}

    x_R = np.random.default_rng(0).normal(size=(4, 3, 2)).astype(np.float32)
    y_R = np.random.default_rng(1).normal(size=(4, 3, 2)).astype(np.float32)
    out = jax.jit(map_fn(fn, mesh=mesh, num_replicas=4))(x_R, y_R)
    np.testing.assert_allclose(out["sum"], [(x_R[m] * y_R[m]).sum() for m in range(4)], rtol=1e-6)
    np.testing.assert_array_equal(out["x"], x_R + 1)


@pytest.mark.parametrize("M", [2, 4])
def test_without_singleton_vmap_has_no_replica_dim(devices, M):
    """One replica a slot: a host callback that refuses vmap works; two a slot: it is refused."""
    mesh = Mesh(np.array(devices[:2]), ("diloco",))

    def heavy(x, y):
        like = jax.ShapeDtypeStruct((3,), x.dtype)
        callback = jax.pure_callback(lambda v: 2 * v, like, x, vmap_method=None)
        return {"out": callback + y}

    mapped = jax.jit(map_fn(without_singleton_vmap(heavy), mesh=mesh, num_replicas=M))
    x_R = np.arange(3.0 * M, dtype=np.float32).reshape(M, 3)
    if M == 2:
        np.testing.assert_array_equal(mapped(x_R, x_R)["out"], 3 * x_R)
    else:
        with pytest.raises(NotImplementedError):
            mapped(x_R, x_R)


@pytest.mark.parametrize("M", [2, 4])
def test_the_heavy_part_is_traced_once(devices, M):
    """For its call, for the rule of its vmap and for its shapes. Tracing a gradient takes long."""
    mesh = Mesh(np.array(devices[:2]), ("diloco",))
    seen = []

    def heavy(x):
        seen.append(x.shape)
        return 2 * x

    light = without_singleton_vmap(heavy)

    def fn(x):
        return light(jnp.zeros(jax.eval_shape(light, x).shape) + x)

    x_R = np.ones((M, 3), np.float32)
    np.testing.assert_array_equal(jax.jit(map_fn(fn, mesh=mesh, num_replicas=M))(x_R), 2 * x_R)
    assert seen == [(3,)]


def test_broadcast_copies_and_mean_is_summed_in_order():
    """1e8 + 1 - 1e8 in float32 is 0 in this order and would be 1 in another: (1e8 - 1e8) + 1."""
    np.testing.assert_array_equal(broadcast(jnp.arange(3.0), 2), [[0, 1, 2], [0, 1, 2]])
    assert float(reduce_mean(jnp.float32([1e8, 1, -1e8]))) == 0
    assert float(reduce_mean(jnp.float32([1e8, -1e8, 1]))) == pytest.approx(1 / 3)
