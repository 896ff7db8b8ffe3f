"""int2 and topk against their stated layout and error bounds, value by value in float64."""

import numpy as np
import pytest
from hypothesis import given, settings
from test_quantize import at_the_limits, jit_encode, normal, raw, round_trip, values
from wire_codecs import BLOCK, TINY, topk_codec


def by_block(x):
    return [x[i : i + BLOCK].astype(np.float64) for i in range(0, x.size, BLOCK)]


def without_denormals(x):
    return np.where(np.abs(x) < 2.0**-126, 0, x)


def steps_of_int2(x):
    """What the array says of s, for each block."""
    scales = np.asarray(jit_encode("int2", x))[-(-x.size // 4) :].reshape(2, -1).astype(np.uint32)
    return ((scales[0] | scales[1] << 8) << 16).view(np.float32).astype(np.float64)


@settings(max_examples=100, deadline=None)
@given(values())
@at_the_limits
def test_errors_of_int2_stay_within_the_stated_bounds(x):
    """s is 5/4 of the mean magnitude, to 1.5 %; the error s/2, or |x| - 3/2 s; in all, less than
    the block."""
    for own, arrived, s in zip(
        by_block(without_denormals(x)), by_block(round_trip("int2", x)), steps_of_int2(x),
        strict=True,
    ):  # fmt: skip
        wanted = min(1.25 * np.abs(own).mean(), 2.0**127)
        if s == 0:
            assert wanted < 2.0**-125 * 1.01 and not arrived.any()
            continue
        assert abs(s - wanted) <= 0.015 * wanted
        assert set(np.abs(arrived)) <= {s / 2, 1.5 * s}
        bound = np.maximum(s / 2, np.abs(own) - 1.5 * s)
        assert (np.abs(own - arrived) <= bound).all()
        scaled = own / np.abs(own).max(), (own - arrived) / np.abs(own).max()
        assert np.square(scaled[1]).sum() < np.square(scaled[0]).sum()


@settings(max_examples=100, deadline=None)
@given(values())
@at_the_limits
def test_topk_arrives_as_the_nearest_codes_of_the_largest_eight(x):
    """Bit for bit: float4_e3m0 of the block with all but its eight largest set to zero."""
    expected = topk_codec(x)
    assert raw(round_trip("topk", x)) == raw(expected.astype(np.float32))
    assert np.abs(expected).max() > 0 or np.abs(x).max() < 2 * TINY


@pytest.mark.parametrize(
    ("name", "loss", "tolerance"),
    [("float4_e3m0", 0.194, 0.003), ("int2", 0.345, 0.003), ("topk", 0.9, 0.02)],
)
def test_losses_on_normal_values_are_what_the_docstring_says(name, loss, tolerance):
    """Norm of the error. Of float4_e3m0 also 3.9 % short along x, mean relative error 0.19."""
    x = normal(0, 1 << 16, -7).astype(np.float64)
    arrived = round_trip(name, x.astype(np.float32)).astype(np.float64)
    assert np.linalg.norm(x - arrived) / np.linalg.norm(x) == pytest.approx(loss, abs=tolerance)
    if name == "float4_e3m0":
        assert 1 - np.dot(x, arrived) / np.dot(x, x) == pytest.approx(0.039, abs=0.003)
        assert np.mean(np.abs(x - arrived) / np.abs(x)) == pytest.approx(0.19, abs=0.005)
