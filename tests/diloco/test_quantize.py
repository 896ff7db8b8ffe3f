"""The wire formats against their stated layout and error bounds, value by value in float64."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tiers import corner
from wire_codecs import BLOCK, TINY, TINY_INT8, e3m0_codec, topk_codec

from maxdiloco.diloco import quantize
from maxdiloco.diloco.quantize import decode, encode, encoded_size, wire_format

SIZES = (1, 7, 256, 515)  # few, since each compiles: one value, an odd rest, whole, a short block
LOSSY = ("bfloat16", "int8", "float4_e3m0", "int2", "topk")

jit_encode = jax.jit(encode, static_argnums=0)
jit_decode = jax.jit(decode, static_argnums=(0, 2))


def round_trip(name, x):
    return np.asarray(jit_decode(name, jit_encode(name, x), x.size))


def raw(x):
    """The bytes of an array, to compare -0, NaN and bfloat16 too."""
    return np.asarray(x).view(np.uint8).tolist()


def without_denormals(x):
    return np.where(np.abs(x) < 2.0**-126, 0, x)


def normal(seed, size, exponent):
    return (np.random.default_rng(seed).standard_normal(size) * 2.0**exponent).astype(np.float32)


@st.composite
def values(draw):
    """Any finite float32 (zeros, denormals, 1e-38 to 3e38 in one block), normal or all equal."""
    size = draw(st.sampled_from(SIZES))
    finite = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True)
    kind = draw(st.sampled_from(["any", "normal", "equal", "powers"]))
    if kind == "any":
        return draw(hnp.arrays(np.float32, size, elements=finite))
    if kind == "equal":
        return np.full(size, draw(finite), np.float32)
    if kind == "powers":
        powers = np.random.default_rng(draw(st.integers(0, 999))).integers(-149, 128, size)
        return np.ldexp(np.float32(1), powers).astype(np.float32)
    return normal(draw(st.integers(0, 999)), size, draw(st.integers(-140, 120)))


def of_any_values(test):
    """Beside drawn values: both sides of TINY, the largest, a zero of either sign, a denormal."""
    below = [np.nextafter(np.float32(tiny), np.float32(0)) for tiny in (TINY, TINY_INT8)]
    test = given(values())(test)
    for limit in (TINY, TINY_INT8, *below, 3.4028235e38, 0.0, -0.0, 1e-45):
        test = example(np.full(7, limit, np.float32))(test)
    return test


# Largest 127: scale 127 / 127 = 1 = 0x3F800000, lowest byte first; ties go to even.
INT8 = [127, -64, 0.5, 1.5, 2.5, -0.5, 0]
# Largest 1: s = 1, scale byte 127. Ties 0.75, 0.375 and 1/128 go away from zero.
# codes: 1 -> 7, -1 -> 8+7, 0.75 -> 1 -> 7, 0.74 -> 0.5 -> 6 | 1/64 -> 1, 1/128 -> 1/64 -> 1,
# 0.0078 -> 0, -0.375 -> -0.5 -> 8+6. Byte i = first half [i] + 16 * second half [i].
E3M0 = [1, -1, 0.75, 0.74, 1 / 64, 1 / 128, 0.0078, -0.375]
U = 2.0**-7  # of bfloat16, whose largest is the last one
BFLOAT16 = [1, 1 + 2 * U, -1 - U, 2.0**127 * (2 - U)]


@pytest.mark.parametrize(
    ("name", "x", "code", "arrived"),
    [
        # Ties go to even: 1 + u/2 to 1, 1 + 3u/2 to 1 + 2u; 3.4e38 would round to infinity.
        ("bfloat16", [1 + U / 2, 1 + 3 * U / 2, -1 - 0.51 * U, 3.4e38], BFLOAT16, BFLOAT16),
        ("int8", INT8, [127, -64, 0, 2, 2, 0, 0] + [0, 0, -128, 0x3F], [127, -64, 0, 2, 2, 0, 0]),
        ("float4_e3m0", E3M0, [7 + 16, 15 + 16, 7, 6 + 16 * 14, 127],
         [1, -1, 1, 0.5, 1 / 64, 1 / 64, 0, -0.5]),
        # Of an odd number the last half byte is 0: 1, -1 | 0.5, filler.
        ("float4_e3m0", [1, -1, 0.5], [7 + 16 * 6, 15, 127], [1, -1, 0.5]),
        # The power of two nearest to the largest: 1.5 is a tie. None is above 2^127.
        ("float4_e3m0", [1.49], [7, 127], [1]),
        ("float4_e3m0", [1.5], [7, 128], [2]),
        ("float4_e3m0", [3e38], [7, 254], [2.0**127]),
        # Magnitudes 1, 1, 4, 2, 0: mean 8/5, s = 5/4 of it = 2 = 0x4000 as bfloat16. Codes of 1,
        # -1, 4, -2, 0: 0, 2, 1, 3 (2 is as large as s), 0. Quarters of two codes, the last ones
        # fillers: bytes 0 + 1*4 + 0*16, 2 + 3*4; then the low bytes of s, then the high ones.
        ("int2", [1, -1, 4, -2, 0], [4, 14, 0x00, 0x40], [1, -1, 3, -3, 1]),
        # Half a step would be denormal: s = 5/4 * 2^-126 is below 2^-125. Control: twice as much.
        ("int2", [2.0**-126], [0, 0, 0], [0]),
        ("int2", [2.0**-125], [0, 0x20, 0x01], [1.25 * 2.0**-126]),
        # Of 12 values the eight largest: 2 at place 11, 1 or -1 at 0..6; 1 at 7..10 is not sent.
        # s = 2, so 1 has code 6 and -1 code 8 + 6. Low half bytes are of the first four places.
        ("topk", [1] * 5 + [-1, 1] + [1] * 4 + [2],
         [0, 1, 2, 3, 4, 5, 6, 11] + [6 + 16 * 6, 6 + 16 * 14, 102, 6 + 16 * 7] + [128],
         [1] * 5 + [-1, 1] + [0] * 4 + [2]),
        # Of fewer values than it sends fillers have place 0 and code 0, and stand before the value
        # at place 0. 3 is a tie: s = 4.
        ("topk", [3, 0, -1], [0] * 7 + [2] + [0, 0, 16 * 7, 16 * 13] + [129], [4, 0, -1]),
    ],
)  # fmt: skip
def test_arrays_by_hand(name, x, code, arrived):
    x = np.float32(x)
    assert jit_encode(name, x).tolist() == code
    assert round_trip(name, x).tolist() == arrived


@of_any_values
def test_e3m0_arrives_as_the_nearest_code_and_topk_as_those_of_the_largest_eight(x):
    """Bit for bit what the docstring says, worked out in float64."""
    for name, codec in (("float4_e3m0", e3m0_codec), ("topk", topk_codec)):
        expected = codec(x)
        assert raw(round_trip(name, x)) == raw(expected.astype(np.float32)), name
        assert np.abs(expected).max() > 0 or np.abs(x).max() < 2 * TINY


@of_any_values
def test_int8_arrives_as_the_nearest_multiple_of_its_scale(x):
    """code * scale exactly, scale = a / 127 cut, |code| <= 127, nearest but for 1e-4 of a step."""
    code = np.asarray(jit_encode("int8", x))
    blocks = -(-x.size // BLOCK)
    scale = np.ascontiguousarray(code[x.size :].reshape(4, blocks).T).view(np.float32)
    scale = np.repeat(scale.astype(np.float64), BLOCK)[: x.size]
    x64 = without_denormals(x.astype(np.float64))
    magnitude = np.abs(x64)
    largest = [magnitude[i : i + BLOCK].max() for i in range(0, x.size, BLOCK)]
    a = np.repeat(largest, BLOCK)[: x.size]
    assert ((scale > 0) == (a >= TINY_INT8)).all()
    sent = scale > 0
    assert (scale[sent] <= a[sent] / 127).all()
    assert (scale[sent] > a[sent] / 127 * (1 - 2.0**-16)).all()
    codes = code[: x.size].astype(np.float64)
    assert (np.abs(codes) <= 127).all()
    assert (np.abs(x64[sent] / scale[sent] - codes[sent]) <= 0.5001).all()
    assert raw(round_trip("int8", x)) == raw((codes * scale).astype(np.float32) + np.float32(0))


@of_any_values
def test_errors_of_int2_stay_within_the_stated_bounds(x):
    """s is 5/4 of the mean magnitude, to 1.5 %; the error s/2, or |x| - 3/2 s; in all, less than
    the block."""
    sent, blocks = np.asarray(jit_encode("int2", x))[-(-x.size // 4) :], range(0, x.size, BLOCK)
    low, high = sent.reshape(2, -1).astype(np.uint32)
    steps = ((low | high << 8) << 16).view(np.float32)  # what the array says of s, for each block
    whole = without_denormals(x), round_trip("int2", x)
    for start, s in zip(blocks, steps.astype(np.float64), strict=True):
        own, arrived = (v[start : start + BLOCK].astype(np.float64) for v in whole)
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


@pytest.mark.parametrize("name", quantize.NAMES)
def test_errors_of_normal_values_are_what_the_table_says(name):
    """The most exact wire is first. float4_e3m0: 3.9 % short along x, mean relative error 0.19."""
    x = normal(0, 1 << 16, -7).astype(np.float64)
    arrived = round_trip(name, x.astype(np.float32)).astype(np.float64)
    error = np.linalg.norm(x - arrived) / np.linalg.norm(x)
    assert error == pytest.approx(wire_format(name).error, rel=0.03)
    assert [w.error for w in quantize.FORMATS] == sorted(w.error for w in quantize.FORMATS)
    if name == "float4_e3m0":
        assert 1 - np.dot(x, arrived) / np.dot(x, x) == pytest.approx(0.039, abs=0.003)
        assert np.mean(np.abs(x - arrived) / np.abs(x)) == pytest.approx(0.19, abs=0.005)


@of_any_values
def test_encoding_what_was_decoded_gives_the_same_array(x):
    """A second trip loses nothing, so a value may be encoded again anywhere."""
    for name in set(quantize.NAMES) - {"int2"}:
        code = jit_encode(name, x)
        assert raw(jit_encode(name, jit_decode(name, code, x.size))) == raw(code), name


@pytest.mark.parametrize("n", [0, 1, 515])
@pytest.mark.parametrize("name", quantize.NAMES)
def test_an_array_of_zero_bits_decodes_to_zeros(name, n):
    """A fresh in-flight slot; and zeros of either sign are sent as such an array."""
    empty = jnp.zeros((encoded_size(name, n),), wire_format(name).dtype)
    assert raw(jit_decode(name, empty, n)) == raw(np.zeros(n, np.float32))
    if name in LOSSY:
        assert raw(jit_encode(name, jnp.full((n,), -0.0, jnp.float32))) == raw(empty)


@pytest.mark.parametrize("name", LOSSY)
def test_what_is_not_finite_or_denormal_is_sent_as_zero(name):
    """And it spoils no other value of its block. int2 has no code for zero."""
    odd = np.float32([np.nan, 1.0, np.inf, -2.0, -np.inf, 1e-40, -np.nan])
    plain = np.float32([0.0, 1.0, 0.0, -2.0, 0.0, 0.0, 0.0])
    if name != "int2":
        assert round_trip(name, odd)[[0, 2, 4, 5, 6]].tolist() == [0.0] * 5
    assert raw(jit_encode(name, odd)) == raw(jit_encode(name, plain))


def test_float32_is_sent_as_it_is():
    """Bit for bit, what is not finite included."""
    x = jnp.array([jnp.nan, -0.0, jnp.inf, 1e-40, 1.1], jnp.float32)
    assert raw(jit_encode("float32", x)) == raw(jit_decode("float32", x, 5)) == raw(x)


@pytest.mark.parametrize("name", corner(quantize.NAMES, ["float4_e3m0", "int2", "topk"]))
def test_bits_do_not_depend_on_how_it_is_compiled(name):
    """Op by op, compiled, under vmap and in one program with its decoding: the same bits. Of a sum
    too: a compiler may contract code * scale + sum to one rounding; products are exact, so it may.
    """
    x_RN = np.stack([normal(seed, 515, seed - 3) for seed in range(3)])
    codes = [jit_encode(name, x) for x in x_RN]
    decoded = [jit_decode(name, code, 515) for code in codes]
    assert raw(codes[0]) == raw(encode(name, jnp.asarray(x_RN[0])))
    assert raw(decoded[0]) == raw(decode(name, codes[0], 515))
    over_R = jax.jit(jax.vmap(functools.partial(encode, name)))
    assert raw(over_R(x_RN)) == [raw(code) for code in codes]
    whole = jax.jit(jax.vmap(lambda x: decode(name, encode(name, x), 515)))
    assert raw(whole(x_RN)) == [raw(values) for values in decoded]
    fused = jax.jit(lambda p, q: decode(name, p, 515) + decode(name, q, 515))
    assert raw(fused(*codes[:2])) == raw(np.asarray(decoded[0]) + np.asarray(decoded[1]))


def test_sizes_on_the_wire():
    """By hand for 257 values: 257; 257; 257 + 2 scales of 4; 129 + 2 scales of 1; 65 + 2 scales of
    2; 2 * 13."""
    assert [encoded_size(name, 257) for name in quantize.NAMES] == [257, 257, 265, 131, 69, 26]
    assert [encoded_size(name, 0) for name in quantize.NAMES] == [0, 0, 0, 0, 0, 0]
    bytes_of_two_blocks = (2048, 1024, 2 * 260, 2 * 129, 2 * 66, 2 * 13)
    for name, size in zip(quantize.NAMES, bytes_of_two_blocks, strict=True):
        for n in (257, 512):
            x = jax.ShapeDtypeStruct((n,), jnp.float32)
            code = jax.eval_shape(functools.partial(encode, name), x)
            assert (code.shape, code.dtype) == ((encoded_size(name, n),), wire_format(name).dtype)
        assert code.size * code.dtype.itemsize == size, name


def test_an_unknown_wire_format_is_named():
    """By every function that accepts the name."""
    one = jnp.ones((1,), jnp.float32)
    for function, *args in ((wire_format,), (encode, one), (decode, one, 1), (encoded_size, 1)):
        with pytest.raises(ValueError, match="exchange_dtype='fp4'"):
            function("fp4", *args)


def test_arrays_of_another_shape_or_dtype_are_refused():
    """Blocks run along one dim, the replica dim is for vmap; 3 values are 3 codes and one scale of
    4 bytes."""
    for x in (np.ones((2, 3), np.float32), np.float32(1), np.ones(3, np.float16)):
        shown = re.escape(f"x={x.dtype}{list(x.shape)}")
        with pytest.raises(ValueError, match=shown):
            encode("int8", jnp.asarray(x))
    code = jnp.zeros((7,), jnp.int8)
    for wrong, shown in ((code[:-1], r"int8\[6\]"), (code.astype(jnp.uint8), r"uint8\[7\]")):
        with pytest.raises(ValueError, match=f"code={shown}"):
            decode("int8", wrong, 3)
