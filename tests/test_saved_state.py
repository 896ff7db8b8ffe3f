"""A state out of a checkpoint: with the same M and mesh, and with others."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiloco import DiLoCo, saved_state
from maxdiloco.saved_state import Origin

PARAMS = {"w": np.arange(6, dtype=np.float32).reshape(3, 2)}


def inner_step(params, opt_state, batch):
    return jax.tree.map(lambda p: p - batch * p, params), opt_state + batch, {}


def trained(M, steps, **options):
    algorithm = DiLoCo(
        inner_step, num_replicas=M, layer_axis={"w": 0}, **(dict(sync_period=3) | options)
    )
    state = algorithm.init(jax.tree.map(jnp.asarray, PARAMS), jnp.zeros(()))
    for _ in range(steps):
        state, _ = algorithm.step(state, np.arange(1, M + 1, dtype=np.float32) / 10)
    return algorithm, state


def origin_of(source, state):
    return Origin(**saved_state.note_of(source, state), same_rules=True)


def moved(source, state, target):
    """What a checkpoint does: the items of one trainer, read by another."""
    origin = origin_of(source, state)
    items = saved_state.items_of(source, state)
    wanted = saved_state.abstract_items(target, origin)
    for name, tree in wanted.items():
        shapes = jax.tree.map(lambda x: x.shape, tree)
        assert shapes == jax.tree.map(lambda x: x.shape, items[name])
    read = {
        name: jax.tree.map(
            lambda x, like: jax.device_put(np.asarray(x), like.sharding), items[name], tree
        )
        for name, tree in wanted.items()
    }
    return saved_state.state_of(target, read, origin, t=state.t)


def test_the_same_trainer_gets_the_same_state_back():
    algorithm, state = trained(2, 4, num_fragments=2, overlap_steps=1)
    back = moved(algorithm, state, algorithm)
    assert back.t == 4
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(back), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("old", "new"), [(2, 4), (4, 2), (2, 3)])
def test_with_another_M_replica_r_is_the_old_r_mod_M(old, new):
    """theta and the outer optimizer state stay as they are."""
    algorithm, state = trained(old, 4)
    larger, _ = trained(new, 0)
    back = moved(algorithm, state, larger)
    for r in range(new):
        np.testing.assert_array_equal(back.params["w"][r], state.params["w"][r % old])
        np.testing.assert_array_equal(back.opt_state[r], state.opt_state[r % old])
    np.testing.assert_array_equal(back.outer["w"], state.outer["w"])
    assert back.bad.shape == (new, 1) and back.sizes.norm_R.shape == (new,)
    larger.step(back, np.zeros(new, np.float32))


def test_eager_history_restarts_with_another_M():
    """theta is per replica: replica r takes that of old r mod M; what was in flight is zeros."""
    algorithm, state = trained(2, 5, outer_overlap="eager")
    larger, _ = trained(4, 0, outer_overlap="eager")
    back = moved(algorithm, state, larger)
    np.testing.assert_array_equal(back.outer["w"][3], state.outer["w"][1])
    assert any(np.asarray(x).any() for x in jax.tree.leaves(state.incoming))
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(back.incoming))


def mesh_of(devices, *sizes):
    names = ("diloco", "data", "fsdp")
    return Mesh(np.array(devices[: math.prod(sizes)]).reshape(sizes), names)


def sharded(mesh):
    return {"w": NamedSharding(mesh, P("fsdp")), "b": NamedSharding(mesh, P())}


@functools.cache
def streaming(M, mesh, wire):
    """Four layers and a vector of 5, in fragments of two layers and the vector; tau=3.

    The trainer, whose programs all tests share, and its state before the first step."""
    algorithm = DiLoCo(
        inner_step, num_replicas=M, mesh=mesh, layer_axis={"w": 1, "b": None}, sync_period=6,
        num_fragments=3, overlap_steps=3, exchange_dtype=wire, alpha=0.25,
    )  # fmt: skip
    numbers = np.random.default_rng(3)
    params = {
        "w": numbers.normal(size=(4, 4)).astype(np.float32),
        "b": numbers.normal(size=5).astype(np.float32),
    }
    lies = sharded(mesh)
    placed = {name: jax.device_put(x, lies[name]) for name, x in params.items()}
    return algorithm, algorithm.init(placed, jnp.zeros(()))


def copy_of(state):
    """A step donates its state."""

    def copy(x):
        return x if isinstance(x, int) else jax.device_put(np.array(x), x.sharding)

    return jax.tree.map(copy, state)


def stepped(algorithm, state, steps):
    for _ in range(steps):
        M = algorithm.num_replicas
        state, _ = algorithm.step(state, np.arange(1, M + 1, dtype=np.float32) / 10)
    return state
