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
from maxdiloco.errors import CheckpointError
from maxdiloco.exchange import collective
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
    wanted = saved_state.abstract_items(target, origin, state.t)
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
    assert back.bad.shape == (new, 1) and back.gram.shape == (new, new)
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


@pytest.mark.parametrize("wire", ["float32", "float4_e3m0"])
@pytest.mark.parametrize("steps", [8, 9, 10, 11])
@pytest.mark.parametrize("grid", [(1, 1, 1), (4, 1, 2), (2, 2, 2), (1, 1, 4)])
def test_what_is_in_flight_is_applied_before_the_first_step(devices, grid, steps, wire):
    """Sends at 2, 4, 6, ... with tau=3, some chunks not gone: theta takes in the pending means.

    Expected: the same exchanges applied at once by the trainer that sent them, whose outgoing
    and incoming chunks are those of the checkpoint.
    """
    source, start = streaming(2, mesh_of(devices, 2, 1, 2), wire)
    expected = state = stepped(source, copy_of(start), steps)
    target, _ = streaming(4, mesh_of(devices, *grid), wire)
    pending = [s.fragment for s in source.schedule.pending(steps)]
    assert pending
    for send in source.schedule.pending(steps):
        plan = source.layout.plans[send.fragment]
        arrived = [
            state.incoming[send.slot][c]
            if send.send_step + 1 + c <= steps
            else jax.jit(lambda x: collective.carry(x, source.mesh))(state.outgoing[c])
            for c in range(plan.num_chunks)
        ]
        received = jax.jit(
            lambda a, plan=plan: collective.receive(plan.payload, a, num_replicas=2)
        )(arrived)
        expected = source.apply_mean(
            expected, send.fragment, [np.asarray(x) for x in received.mean]
        )
    wanted = jax.tree.map(np.asarray, (expected.outer, expected.params))
    state = stepped(source, copy_of(start), steps)  # apply_mean has donated the first one
    back = moved(source, state, target)
    assert back.settled == steps
    for name in ("w", "b"):
        np.testing.assert_allclose(back.outer[name], wanted[0][name], rtol=1e-6, atol=1e-7)
        for r in range(4):
            np.testing.assert_allclose(
                back.params[name][r], wanted[1][name][r % 2], rtol=1e-6, atol=1e-7
            )
    before = jax.tree.map(np.asarray, back.outer)
    after = stepped(target, back, 1)  # nothing is applied a second time, with zeros
    again = {e.fragment for e in target.schedule.applies(steps + 1)} - set(pending)
    assert not again
    for name in ("w", "b"):
        np.testing.assert_array_equal(after.outer[name], before[name])


def test_other_rules_with_fragments_in_flight_are_refused(devices):
    """Positive control: after a step with nothing in flight they are not."""
    algorithm, state = trained(2, 0, overlap_steps=1)
    origin = origin_of(algorithm, state)._replace(same_rules=False)
    with pytest.raises(CheckpointError, match=r"logical_axis_rules differ.*Set them back"):
        saved_state.refuse_in_flight(algorithm, origin, 3)
    saved_state.refuse_in_flight(algorithm, origin, 4)
