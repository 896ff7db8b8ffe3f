"""int2 and topk against their stated layout and error bounds, value by value in float64."""

import numpy as np
from hypothesis import given, settings
from test_quantize import (
    BLOCK,
    TINY,
    at_the_limits,
    e3m0_by_the_docstring,
    jit_encode,
    normal,
    raw,
    round_trip,
    values,
)

SENT = 8


def by_block(x):
    return [x[i : i + BLOCK].astype(np.float64) for i in range(0, x.size, BLOCK)]


def without_denormals(x):
    return np.where(np.abs(x) < 2.0**-126, 0, x)


def steps_of_int2(x):
    """What the array says of s, for each block."""
    scales = np.asarray(jit_encode("int2", x))[-(-x.size // 4) :].reshape(2, -1).astype(np.uint32)
    return ((scales[0] | scales[1] << 8) << 16).view(np.float32).astype(np.float64)


def test_int2_array_by_hand():
    """Magnitudes 1, 1, 4, 2, 0: mean 8/5, s = 5/4 of it = 2 = 0x4000 as bfloat16.

    codes of 1, -1, 4, -2, 0: 0, 2, 1, 3 (2 is as large as s), 0. Quarters of two codes, the last
    ones fillers: bytes 0 + 1*4 + 0*16, 2 + 3*4; then the low bytes of s, then the high ones."""
    x = np.float32([1, -1, 4, -2, 0])
    assert jit_encode("int2", x).tolist() == [4, 14, 0x00, 0x40]
    assert round_trip("int2", x).tolist() == [1, -1, 3, -3, 1]


def test_int2_sends_a_block_as_zeros_where_half_a_step_would_be_denormal():
    """s = 5/4 * 2^-126 is below 2^-125. Control: of twice as much s/2 arrives."""
    assert round_trip("int2", np.float32([2.0**-126])).tolist() == [0]
    assert round_trip("int2", np.float32([2.0**-125])).tolist() == [1.25 * 2.0**-126]


def test_topk_array_by_hand():
    """Of 12 values the eight largest: 2 at place 11, 1 or -1 at 0..6; 1 at 7..10 is not sent.

    s = 2, so 1 has code 6 and -1 code 8 + 6. Low half bytes are of the first four places."""
    x = np.float32([1] * 5 + [-1, 1] + [1] * 4 + [2])
    code = jit_encode("topk", x).tolist()
    assert code == [0, 1, 2, 3, 4, 5, 6, 11] + [6 + 16 * 6, 6 + 16 * 14, 102, 6 + 16 * 7] + [128]
    assert round_trip("topk", x).tolist() == [1] * 5 + [-1, 1] + [0] * 4 + [2]


def test_topk_of_a_leaf_smaller_than_what_a_block_sends_is_float4_e3m0():
    """Fillers have place 0 and code 0, and stand before the value at place 0. 3 is a tie: s = 4."""
    x = np.float32([3, 0, -1])
    assert jit_encode("topk", x).tolist() == [0] * 7 + [2] + [0, 0, 16 * 7, 16 * 13] + [129]
    assert raw(round_trip("topk", x)) == raw(round_trip("float4_e3m0", x))


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
    expected = []
    for own in by_block(without_denormals(x)):
        kept = np.zeros_like(own)
        largest = np.argsort(-np.abs(own), kind="stable")[:SENT]
        kept[largest] = own[largest]
        expected.append(e3m0_by_the_docstring(kept.astype(np.float32)))
    assert raw(round_trip("topk", x)) == raw(np.concatenate(expected).astype(np.float32))
    assert np.abs(np.concatenate(expected)).max() > 0 or np.abs(x).max() < 2 * TINY


def test_losses_on_normal_values_are_what_the_docstring_says():
    """int2: norm of the error 34.5 %. topk: 90 %."""
    x = normal(0, 1 << 16, -7).astype(np.float64)
    error = {}
    for name in ("int2", "topk"):
        arrived = round_trip(name, x.astype(np.float32)).astype(np.float64)
        error[name] = np.linalg.norm(x - arrived) / np.linalg.norm(x)
    assert abs(error["int2"] - 0.345) < 0.003
    assert 0.88 < error["topk"] < 0.92
