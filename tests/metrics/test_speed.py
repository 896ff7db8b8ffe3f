"""Step time between log points, and the share of the peak."""

import contextlib

import pytest

from maxdiloco.metrics.speed import StepClock, performance, training_flops_per_token
from maxdiloco.parallel.chips import CHIPS


@pytest.fixture
def hands():
    """A clock that is set by hand: hands[0]."""
    return [100.0]


def started(hands, step):
    return StepClock(step, clock=lambda: hands[0])


def test_step_time_is_the_interval_between_log_points_over_its_steps(hands):
    clock = started(hands, 20)
    hands[0] += 6.0
    assert clock.lap(30) == pytest.approx(0.6)
    hands[0] += 1.0
    assert clock.lap(35) == pytest.approx(0.2)


def test_what_is_excluded_does_not_count_and_only_in_its_interval(hands):
    """Also when what the time was spent on fails."""
    clock = started(hands, 0)
    hands[0] += 6.0
    with contextlib.suppress(KeyError), clock.excluded():  # an evaluation
        hands[0] += 50.0
        raise KeyError
    clock.exclude(2.0)  # of the 6 s, a compile
    assert clock.lap(4) == pytest.approx(1.0)
    hands[0] += 3.0
    assert clock.lap(5) == pytest.approx(3.0)


def test_flops_per_token_are_palms():
    """arXiv 2204.02311 App. B: 6 N + 12 L H Q T; N=1000, L=2, H=4 heads of Q=8, T=16."""
    assert training_flops_per_token(1000, 2, 4 * 8, 16) == 6000 + 12 * 2 * 32 * 16


@pytest.mark.parametrize(
    ("kind", "peak"), [("TPU v5 lite", {"perf/mfu": pytest.approx(3e12 / 197e12)}), ("cpu", {})]
)
def test_performance_by_hand_without_mfu_where_the_peak_is_unknown(kind, peak):
    """0.5 s a step, 2000 tokens, 3e9 FLOP a token on 4 devices: 4000 tokens/s, 3e12 a device."""
    work = dict(step_time=0.5, tokens_per_step=2000, flops_per_token=3e9, num_devices=4)
    assert performance(**work, device_kind=kind) == peak | {
        "perf/step_time": 0.5,
        "perf/tokens_per_second": 4000.0,
        "perf/tflops_per_device": 3.0,
    }


def test_peaks_agree_with_those_that_pallas_knows():
    """jax's own table, per TensorCore; 2.5 % apart at most (it rounds v6e to 920 TFLOP/s).

    v3 is left out: 123 TFLOP/s on the product page, 140 in that table.
    """
    from jax._src.pallas.mosaic import tpu_info

    peaks = {kind: chip.peak_flops for chip in CHIPS.values() for kind in chip.kinds}
    seen = 0
    for kind, peak in peaks.items():
        version = tpu_info.chip_version_from_device_kind(kind)
        if version is None or kind == "TPU v3":
            continue
        cores = 2 if version.supports_megacore else 1  # TensorCores that make up one device
        known = tpu_info._get_tpu_info_impl(version, cores).bf16_ops_per_second * cores
        assert peak == pytest.approx(known, rel=0.025), kind
        seen += 1
    assert seen >= 8
