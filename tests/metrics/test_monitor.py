"""Figures of a row: the mean loss, also of an interrupted run, step time and share of the peak."""

import contextlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from maxdiloco.metrics import monitor as monitor_lib
from maxdiloco.metrics.monitor import Monitor
from maxdiloco.metrics.rows import learning_metrics
from maxdiloco.metrics.speed import StepClock, flops_per_token, performance
from maxdiloco.parallel.chips import CHIPS


def placed(losses_R):
    mesh = jax.make_mesh((2,), ("diloco",), devices=jax.devices()[:2])
    x = jnp.asarray(losses_R, jnp.float32)
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec("diloco")))


NAMES = ("loss", "grad_norm")


def monitor(R=4, names=NAMES):
    like = placed(np.zeros(R))
    like = jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=like.sharding)
    program = types.SimpleNamespace(out_shapes=lambda: (None, None, dict.fromkeys(names, like)))
    plain = types.SimpleNamespace(program=program, args=())
    trainer = types.SimpleNamespace(
        check_finite=lambda state, **_: None,
        calls=lambda batch: [plain],
    )
    return Monitor(trainer, None, stop_on_nan=False, on_compile=lambda *_: None)


def losses(t, R=4):
    """Another one for each step and replica, with bits that a sum in float32 would lose."""
    return (np.arange(R) + 1) / np.float32(3 + t)


def add(watcher, steps, R=4):
    for t in steps:
        loss = placed(losses(t, R))
        watcher.add(t, {"loss": loss, "grad_norm": loss})


def mean(steps, R=4):
    return np.mean([losses(t, R).astype(np.float64) for t in steps], axis=0).astype(np.float32)


@pytest.mark.parametrize("most", [256, 2])
def test_the_loss_of_a_row_is_the_mean_since_the_last_row(monkeypatch, most):
    """However many of them are still on the devices. One step alone keeps its bits."""
    monkeypatch.setattr(monitor_lib, "_MAX_STEPS", most)
    watcher = monitor()
    add(watcher, range(1, 6))
    np.testing.assert_allclose(watcher.read_row(5)["loss"], mean(range(1, 6)), rtol=1e-7)
    add(watcher, [6])
    np.testing.assert_array_equal(watcher.read_row(1)["loss"], losses(6).astype(np.float32))


def test_a_run_interrupted_between_rows_writes_the_same_row():
    """With more replicas each continues from the one that it is a copy of: replica r takes the
    parameters of r mod M, and its losses."""
    whole, before, after = monitor(), monitor(), monitor()
    add(whole, range(1, 8))
    add(before, range(1, 4))
    after.resume(before.sums())
    add(after, range(4, 8))
    np.testing.assert_array_equal(after.read_row(7)["loss"], whole.read_row(7)["loss"])
    before, after = monitor(2), monitor(6)
    add(before, [1, 2], R=2)
    after.resume(before.sums())
    add(after, [3], R=6)
    wanted = (np.tile(mean([1, 2], 2).astype(np.float64), 3) * 2 + losses(3, 6)) / 3
    np.testing.assert_allclose(after.read_row(3)["loss"], wanted, rtol=1e-6)


def test_a_row_of_a_step_that_was_not_finite_has_no_mean():
    watcher = monitor()
    add(watcher, [1])
    bad = placed([1.0, np.nan, 1.0, 1.0])
    watcher.add(2, {"loss": bad, "grad_norm": bad})
    add(watcher, [3])
    assert np.isnan(watcher.read_row(3)["loss"]).tolist() == [False, True, False, False]


def test_skipped_steps_are_counted_and_not_in_the_mean():
    """Replica 1 skips steps 2 and 3, replica 3 all of them."""
    skipped_tR = [[0, 0, 0, 1], [0, 1, 0, 1], [0, 1, 0, 1]]
    before, after = monitor(names=(*NAMES, "skipped")), monitor(names=(*NAMES, "skipped"))
    for watcher, steps in (before, [1, 2]), (after, [3]):
        for t in steps:
            kept = placed(skipped_tR[t - 1])
            bad = placed(np.where(skipped_tR[t - 1], np.nan, losses(t)))
            watcher.add(t, {"loss": bad, "grad_norm": bad, "skipped": kept})
        if watcher is before:
            before_sums = before.sums()
            after.resume(before_sums)
    found = after.read_row(3)
    np.testing.assert_array_equal(found["skipped"], [0, 2, 0, 3])
    wanted = [*mean([1, 2, 3])[:1], losses(1)[1], mean([1, 2, 3])[2], np.nan]
    np.testing.assert_allclose(found["loss"], wanted, rtol=1e-6)
    of_those_with_a_loss = learning_metrics(found, 0.1)["learning/loss"]
    np.testing.assert_allclose(of_those_with_a_loss, np.mean(wanted[:3]), rtol=1e-6)
    stops = monitor()  # another nan_policy from step 3 on
    stops.resume(before_sums)
    add(stops, [3])
    found = stops.read_row(3)
    np.testing.assert_array_equal(found["skipped"], [0, 1, 0, 2])
    wanted = [mean([1, 2, 3])[0], mean([1, 3])[1], mean([1, 2, 3])[2], losses(3)[3]]
    np.testing.assert_allclose(found["loss"], wanted, rtol=1e-6)


def test_step_time_is_the_log_interval_over_its_steps():
    """That counts in its interval alone, also when what the time was spent on fails."""
    hands = [100.0]  # a clock that is set by hand
    clock = StepClock(20, clock=lambda: hands[0])
    hands[0] += 6.0
    assert clock.lap(30) == pytest.approx(0.6)
    hands[0] += 6.0
    with contextlib.suppress(KeyError), clock.excluded():  # an evaluation
        hands[0] += 50.0
        raise KeyError
    assert clock.lap(34) == pytest.approx(1.5)
    hands[0] += 3.0
    assert clock.lap(35) == pytest.approx(3.0)


def test_flops_per_token_and_performance_by_hand():
    """arXiv 2204.02311 App. B: 6 N + 12 L H Q T; N=1000, L=2, H=4 heads of Q=8, T=16. 0.5 s a step,
    2000 tokens, 3e9 FLOP a token on 4 devices: 4000 tokens/s, 3e12 a device. No mfu where the peak
    is unknown."""
    sizes = dict(num_layers=2, num_query_heads=4, head_dim=8, tied_head=True)
    for latent, dims in ((None, 8 + 8), (types.SimpleNamespace(v_head_dim=6), 8 + 6)):
        spec = types.SimpleNamespace(**sizes, latent=latent)
        found = flops_per_token(spec, {"w": np.zeros((10, 100))}, 16)
        assert found == 6000 + 6 * 2 * 4 * dims * 16
    work = dict(step_time=0.5, tokens_per_step=2000, flops_per_token=3e9, num_devices=4)
    found = {"perf/step_time": 0.5, "perf/tokens_per_second": 4000.0, "perf/tflops_per_device": 3.0}
    assert performance(**work, device_kind="cpu") == found
    found["perf/mfu"] = pytest.approx(3e12 / 197e12)
    assert performance(**work, device_kind="TPU v5 lite") == found


def test_peaks_agree_with_those_that_pallas_knows():
    """jax's own table, per TensorCore; 2.5 % apart at most (it rounds v6e to 920 TFLOP/s).

    v3 is left out: 123 TFLOP/s on the product page, 140 in that table.
    """
    from jax._src.pallas.mosaic import tpu_info

    peaks = {kind: chip.peak_flops for chip in CHIPS.values() for kind in chip.device_kinds}
    seen = 0
    for kind, peak in peaks.items():
        version = tpu_info.chip_version_from_device_kind(kind)
        if version is None or kind == "TPU v3":
            continue
        cores = 2 if version.supports_megacore else 1  # TensorCores that make up one device
        known = tpu_info.get_tpu_info_for_chip(version, cores).bf16_ops_per_second * cores
        assert peak == pytest.approx(known, rel=0.025), kind
        seen += 1
    assert seen >= 8
