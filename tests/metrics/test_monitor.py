"""The mean loss of a row, also when the run was interrupted since the row before."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from maxdiloco.metrics import monitor as monitor_lib
from maxdiloco.metrics.monitor import Monitor


def placed(losses_R, slots=2):
    mesh = jax.make_mesh((slots,), ("diloco",), devices=jax.devices()[:slots])
    x = jnp.asarray(losses_R, jnp.float32)
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec("diloco")))


def monitor(R=4, slots=2):
    like = placed(np.zeros(R), slots)
    like = jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=like.sharding)
    trainer = types.SimpleNamespace(
        check_finite=lambda state: None,
        abstract_metrics=lambda batch: {"loss": like, "grad_norm": like},
    )
    return Monitor(trainer, None, stop_on_nan=False, on_compile=lambda *_: None)


def losses(t, R=4):
    """Another one for each step and replica, with bits that a sum in float32 would lose."""
    return (np.arange(R) + 1) / np.float32(3 + t)


def add(watcher, steps, R=4, slots=2):
    for t in steps:
        loss = placed(losses(t, R), slots)
        watcher.add(t, {"loss": loss, "grad_norm": loss})


def mean(steps, R=4):
    return np.mean([losses(t, R).astype(np.float64) for t in steps], axis=0).astype(np.float32)


@pytest.mark.parametrize("most", [256, 2])
def test_the_loss_of_a_row_is_the_mean_of_the_steps_since_the_last_row(monkeypatch, most):
    """However many of them are still on the devices. One step alone keeps its bits."""
    monkeypatch.setattr(monitor_lib, "_MOST_LOSSES", most)
    watcher = monitor()
    add(watcher, range(1, 6))
    np.testing.assert_allclose(watcher.take_mean_loss(5), mean(range(1, 6)), rtol=1e-7)
    add(watcher, [6])
    np.testing.assert_array_equal(watcher.take_mean_loss(1), losses(6).astype(np.float32))


def test_a_run_that_was_interrupted_between_two_rows_writes_the_same_row():
    whole, before, after = monitor(), monitor(), monitor()
    add(whole, range(1, 8))
    add(before, range(1, 4))
    after.resume_losses(before.loss_sums())
    add(after, range(4, 8))
    np.testing.assert_array_equal(after.take_mean_loss(7), whole.take_mean_loss(7))


def test_a_row_of_a_step_that_was_not_finite_has_no_mean():
    watcher = monitor()
    add(watcher, [1])
    bad = placed([1.0, np.nan, 1.0, 1.0])
    watcher.add(2, {"loss": bad, "grad_norm": bad})
    add(watcher, [3])
    assert np.isnan(watcher.take_mean_loss(3)).tolist() == [False, True, False, False]


def test_with_more_replicas_each_goes_on_from_the_one_it_is_a_copy_of():
    """Replica r takes the parameters of r mod M, and its losses."""
    before, after = monitor(2), monitor(6)
    add(before, [1, 2], R=2)
    after.resume_losses(before.loss_sums())
    add(after, [3], R=6)
    wanted = (np.tile(mean([1, 2], 2).astype(np.float64), 3) * 2 + losses(3, 6)) / 3
    np.testing.assert_allclose(after.take_mean_loss(3), wanted, rtol=1e-6)
