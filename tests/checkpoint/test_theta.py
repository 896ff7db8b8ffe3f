"""theta of a checkpoint: one, or, with eager updates, one for each replica."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from maxdiloco import DiLoCo
from maxdiloco.checkpoint import read, saved_state, theta
from maxdiloco.checkpoint.checkpointer import Checkpointer
from maxdiloco.engine.trainer import OUTER_OF_EACH, SavedLayout

PARAMS = {"w": np.arange(6, dtype=np.float32)}


def trained(steps, **options):
    algorithm = DiLoCo(
        lambda p, o, b: (jax.tree.map(lambda x: x - b * x, p), o, {}),
        num_replicas=2,
        sync_period=2,
        **options,
    )
    state = algorithm.init(jax.tree.map(jnp.asarray, PARAMS), ())
    for _ in range(steps):
        state, _ = algorithm.step(state, np.array([0.1, 0.3], np.float32))
    return algorithm, state


def saved(folder, algorithm, state, *, items=None, without=()):
    note = algorithm.note(state)
    note = {name: value for name, value in note.items() if name not in without}
    with Checkpointer(folder / "checkpoints", max_to_keep=1, use_async=False) as checkpointer:
        checkpointer.save(state.t, items or algorithm.saved_items(state), note)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_who_reads_a_run_with_eager_updates_takes_the_mean(tmp_path, dtype):
    """In float32, then rounded. Control: the two thetas differ."""
    algorithm, state = trained(5, outer_overlap="eager")
    saved(tmp_path, algorithm, state)
    here = SingleDeviceSharding(jax.devices()[0])
    like = {"w": jax.ShapeDtypeStruct((6,), dtype, sharding=here)}
    found, restored = read.restore_theta(tmp_path, like, key="RUN")
    assert restored.items.keys() == {"outer"}
    w_R = np.asarray(state.outer["w"])
    assert np.any(w_R[0] != w_R[1])
    mean = (w_R[0] + w_R[1]) / np.float32(2)
    np.testing.assert_array_equal(found["w"], mean.astype(dtype))
    np.testing.assert_array_equal(found["w"], algorithm.outer_params(state)["w"].astype(dtype))


@pytest.mark.parametrize("older", [False, True])
def test_a_run_without_eager_updates_goes_on_from_the_mean(tmp_path, older):
    """Older checkpoints have the mean as an item of its own, and do not say where theta is."""
    algorithm, state = trained(5, outer_overlap="eager")
    mean = np.asarray(algorithm.outer_params(state)["w"])
    items, without = algorithm.saved_items(state), ()
    if older:
        items, without = items | {"outer_params": {"w": jnp.asarray(mean)}}, ["theta_item"]
    saved(tmp_path, algorithm, state, items=items, without=without)
    target, _ = trained(0)
    names = SavedLayout._fields

    def layout(meta):
        return SavedLayout(**{n: meta[n] for n in names if n in meta}, same_rules=True)

    restored = read.restore_from(
        tmp_path, lambda meta: saved_state.abstract_items(target, layout(meta)), key="RUN"
    )
    assert ("outer_params" in restored.items) == older
    back = target.restored(restored.items, layout(restored.meta), t=5)
    np.testing.assert_array_equal(back.outer["w"], mean)


@pytest.mark.parametrize(("R", "first"), [(4, "diloco"), (3, None)])
def test_the_thetas_of_replicas_are_divided_among_the_slices_where_they_divide(devices, R, first):
    """Read in float32, whatever the mean is wanted in."""
    mesh = Mesh(np.array(devices[:2]), ("diloco",))
    like = jax.ShapeDtypeStruct((6,), jnp.bfloat16, sharding=NamedSharding(mesh, P()))
    wanted = theta.wanted({"w": like}, {"theta_item": OUTER_OF_EACH, "num_replicas": R})
    read = wanted.abstract["w"]
    assert (wanted.item, read.shape, read.dtype) == (OUTER_OF_EACH, (R, 6), jnp.float32)
    assert read.sharding.spec == P(first)


def test_theta_of_any_other_run_is_one_item():
    like = {"w": jax.ShapeDtypeStruct((6,), jnp.float32)}
    for meta in ({}, {"theta_item": "outer_params"}):
        wanted = theta.wanted(like, meta)
        assert (wanted.item, wanted.abstract) == ("outer_params", like)
