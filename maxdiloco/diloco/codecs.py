"""Encoders and decoders of the wire formats; quantize.py describes their layouts and error bounds.

Every step is integer arithmetic, a selection, or a float32 operation with one correctly rounded
result. The bits therefore do not depend on how a program is compiled.
"""

# N values  K wire elements  B blocks  Q = 256 values of a block  T values of a block that are sent

from typing import Any

import ml_dtypes
import numpy as np

BLOCK = 256  # values that share a scale; one scale byte for 256 codes of 4 bits adds 0.8%
EXPONENT = 0x7F800000
MANTISSA = 0x007FFFFF
MAGNITUDE = 0x7FFFFFFF
_LOWEST = 8  # biased exponent of 2^-119: below it, 2^-7 of it would not be a normal float32
_BFLOAT16_LARGEST = 0x7F7F
_BYTES = (0, 8, 16, 24)  # a byte each, lowest first [bits]
# Values of a block that topk sends: 3.1%. SparseLoCo (arXiv 2508.15706) sends 1% to 3% of larger
# blocks. An index into a block of 256 is one byte.
SENT = 8
# The best uniform quantiser with four levels for normal values has a step of 0.9957 standard
# deviations (Max 1960, table II). The deviation is 1.2533 mean magnitudes; the product is 5/4.
_STEP = 1.25
# jax.Array or numpy.ndarray; each function computes with the library of its arguments.
Array = Any


def bits_of(x: Array) -> Array:
    """Reinterpret float32 values as int32."""
    return x.view(np.int32)


def float_of(bits: Array) -> Array:
    """Reinterpret int32 values as float32."""
    return bits.view(np.float32)


def normal_bits(x_N: Array) -> Array:
    """Return the bits of x; zeros, denormals, infinities and NaN become the bits of +0."""
    xp = x_N.__array_namespace__()
    bits_N = bits_of(x_N)
    exponent_N = bits_N & EXPONENT
    return xp.where((exponent_N == 0) | (exponent_N == EXPONENT), 0, bits_N)


def blocks(x_N: Array) -> Array:
    """Reshape x to blocks [B, Q]; the last block is padded with zeros."""
    xp = x_N.__array_namespace__()
    return xp.pad(x_N, (0, -x_N.shape[0] % BLOCK)).reshape(-1, BLOCK)


def _largest(magnitude_BQ: Array) -> Array:
    """Return the indices of the SENT largest values of each block; the first one wins a tie."""
    if magnitude_BQ.__array_namespace__() is np:
        return np.argsort(-magnitude_BQ, axis=1, kind="stable")[:, :SENT]
    from jax import lax  # not at the top: the log of an islands run is read without JAX

    return lax.top_k(float_of(magnitude_BQ), SENT)[1]


def _once(x_B: Array) -> Array:
    """Return x >= 0 as the maximum of x and 0, a reduction that XLA:CPU computes once per block.

    Without the reduction XLA:CPU would compute x again for each value of the block.
    """
    xp = x_B.__array_namespace__()
    return xp.max(xp.where(np.arange(2)[:, None] == 0, x_B, 0), axis=0)


def _packed(code_N: Array, values: int) -> Array:
    """Pack `values` codes into each byte; the first 1 / `values` of the codes get the lowest bits.

    The bytes are computed as a sum, because XLA:CPU would copy slices of the codes value by value.
    """
    xp = code_N.__array_namespace__()
    shifts = 8 // values * np.arange(values)[:, None]
    parts = xp.pad(code_N, (0, -code_N.shape[0] % values)).reshape(values, -1)
    return xp.sum(parts << shifts, axis=0)


def times_power_of_two(integer: Array, power: Array) -> Array:
    """Return integer * 2^power as float32; exact for 0 < integer < 2^24 and normal results."""
    return float_of(bits_of(integer.astype(np.float32)) + (power << 23))


def bfloat16_bits(bits_N: Array) -> Array:
    """Return the 16 bits of the nearest bfloat16, ties to even, as int32; never infinity."""
    xp = bits_N.__array_namespace__()
    odd_N = (bits_N >> 16) & 1
    magnitude_N = ((bits_N & MAGNITUDE) + 0x7FFF + odd_N) >> 16
    sign_N = (bits_N >> 16) & 0x8000
    return xp.minimum(magnitude_N, _BFLOAT16_LARGEST) | sign_N


def e3m0_codes(bits_BQ: Array) -> tuple[Array, Array]:
    """Return 4-bit codes [B, Q] and the exponents of s [B], int32; see quantize, float4_e3m0."""
    xp = bits_BQ.__array_namespace__()
    magnitude_BQ = bits_BQ & MAGNITUDE
    half = (MANTISSA + 1) // 2  # a significand of 1.5 or more carries into the exponent
    power_BQ = (magnitude_BQ + half) >> 23
    is_sent_BQ = magnitude_BQ >> 23 >= _LOWEST
    top_B = xp.max(xp.where(is_sent_BQ, xp.minimum(power_BQ, 254), 0), axis=1)  # of the largest
    code_BQ = xp.clip(power_BQ - top_B[:, None] + 7, 1, 7)
    code_BQ = code_BQ | ((bits_BQ >> 28) & 8)
    # top - 7 is the exponent of half the smallest power of two
    sent_BQ = (top_B[:, None] > 0) & (magnitude_BQ >> 23 >= top_B[:, None] - 7)
    return xp.where(sent_BQ, code_BQ, 0), top_B


def e3m0_values(code_BQ: Array, top_B: Array) -> Array:
    """Return the float32 values [B, Q] of the results of e3m0_codes."""
    xp = code_BQ.__array_namespace__()
    power_BQ = code_BQ & 7
    bits_BQ = ((code_BQ & 8) << 28) | ((top_B[:, None] - 7 + power_BQ) << 23)
    return float_of(xp.where(power_BQ > 0, bits_BQ, 0))


def encode_bfloat16(x_N: Array) -> Array:
    """Round to the nearest finite bfloat16."""
    return bfloat16_bits(normal_bits(x_N)).astype(np.uint16).view(ml_dtypes.bfloat16)


def decode_bfloat16(code_N: Array, n: int) -> Array:
    """Return the float32 values of the result of encode_bfloat16."""
    return float_of(code_N.view(np.uint16).astype(np.int32) << 16)


def encode_int8(x_N: Array) -> Array:
    """Encode as one-byte codes, followed by the four bytes of each block's scale."""
    xp = x_N.__array_namespace__()
    bits_BQ = blocks(normal_bits(x_N))
    largest_B = xp.max(bits_BQ & MAGNITUDE, axis=1)
    exponent_B = largest_B >> 23
    # largest = significand * 2^(exponent - 150); scale = step * 2^(exponent - 150)
    step_B = ((largest_B & MANTISSA) | (MANTISSA + 1)).astype(np.uint32) // 127
    # 2^39 / step by long division in 32 bits: at most 23 bits, so exact in float32
    high_B = (1 << 30) // step_B
    rest_B = (1 << 30) - high_B * step_B
    inverse_B = (high_B << 9) + (rest_B << 9) // step_B
    scale_B = times_power_of_two(step_B, exponent_B - 150)
    inverse_B = times_power_of_two(inverse_B, 150 - 39 - exponent_B)
    sent_B = bits_of(scale_B) > MANTISSA  # a normal, positive float32
    scale_B, inverse_B = xp.where(sent_B, scale_B, 0), _once(xp.where(sent_B, inverse_B, 0))
    scaled_BQ = float_of(bits_BQ) * inverse_B[:, None]
    code_BQ = xp.rint(scaled_BQ).astype(np.int8)
    byte_4B = (bits_of(scale_B) >> np.array(_BYTES, np.int32)[:, None]) & 255
    scale_K = byte_4B.astype(np.uint8).view(np.int8).reshape(-1)
    return xp.concatenate([code_BQ.reshape(-1)[: x_N.shape[0]], scale_K])


def decode_int8(code_K: Array, n: int) -> Array:
    """Return the n float32 values of the result of encode_int8."""
    code_BQ = blocks(code_K[:n])
    byte_4B = code_K[n:].reshape(4, -1).astype(np.int32) & 255
    bits_4B = byte_4B << np.array(_BYTES, np.int32)[:, None]
    scale_B = float_of(bits_4B[0] | bits_4B[1] | bits_4B[2] | bits_4B[3])
    return (code_BQ.astype(np.float32) * scale_B[:, None]).reshape(-1)[:n]


def encode_e3m0(x_N: Array) -> Array:
    """Encode as two codes in a byte, followed by the blocks' exponents."""
    xp = x_N.__array_namespace__()
    n = x_N.shape[0]
    code_BQ, top_B = e3m0_codes(blocks(normal_bits(x_N)))
    packed = _packed(code_BQ.reshape(-1)[:n], 2)
    return xp.concatenate([packed, top_B]).astype(np.uint8)


def decode_e3m0(code_K: Array, n: int) -> Array:
    """Return the n float32 values of the result of encode_e3m0."""
    xp = code_K.__array_namespace__()
    code_K = code_K.astype(np.int32)
    packed_K = code_K[: (n + 1) // 2]
    code_BQ = blocks(xp.concatenate([packed_K & 15, packed_K >> 4])[:n])
    return e3m0_values(code_BQ, code_K[(n + 1) // 2 :]).reshape(-1)[:n]


def encode_int2(x_N: Array, count_B: Array | None = None) -> Array:
    """Encode as [encoded_size] uint8: four codes in a byte, then both bytes of the blocks' steps.

    count_B: number of values in each block without its zero padding; None: only the last block of
    x_N is padded.
    """
    xp = x_N.__array_namespace__()
    n = x_N.shape[0]
    bits_BQ = blocks(normal_bits(x_N))
    factors = np.float32(_STEP / np.maximum(np.arange(BLOCK + 1), 1))
    if count_B is None:
        factor_B = factors[np.minimum(n - np.arange(bits_BQ.shape[0]) * BLOCK, BLOCK)]
    else:
        factor_B = xp.asarray(factors)[count_B]
    step_B = _steps(bits_BQ & MAGNITUDE, factor_B)
    upper_BQ = (bits_BQ & MAGNITUDE) >= (step_B << 16)[:, None]
    code_BQ = ((bits_BQ >> 30) & 2) | upper_BQ.astype(np.int32)
    code_N = xp.where(step_B[:, None] > 0, code_BQ, 0).reshape(-1)[:n]
    return xp.concatenate([_packed(code_N, 4), step_B & 255, step_B >> 8]).astype(np.uint8)


def _steps(magnitude_BQ: Array, factor_B: Array) -> Array:
    """Return 5/4 of each block's mean magnitude, as bits of bfloat16; 0 for a block of zeros.

    factor_B: 5/4 divided by the number of values in the block.

    The magnitudes are added as integers, so the sum does not depend on their order.
    """
    xp = magnitude_BQ.__array_namespace__()
    exponent_BQ = magnitude_BQ >> 23
    top_B = xp.max(exponent_BQ, axis=1)
    significand_BQ = xp.where(exponent_BQ > 0, (magnitude_BQ & MANTISSA) | (MANTISSA + 1), 0)
    # In units of 2^(top - 148): each value is below 2^22, and their sum is below 2^30.
    shift_BQ = xp.minimum(top_B[:, None] - exponent_BQ + 2, 31)
    total_B = xp.sum(significand_BQ >> shift_BQ, axis=1)
    # 24 bits are exact in float32; the lowest bit is at most 2^-15 of the sum.
    step_B = bfloat16_bits(bits_of((total_B >> 6).astype(np.float32) * factor_B))
    step_B = xp.minimum(step_B + ((top_B - 142) << 7), 254 << 7)  # 3/2 of 2^127 is finite
    return _once(xp.where((top_B > 0) & (step_B >> 7 >= 2), step_B, 0))  # half a step is normal


def decode_int2(code_K: Array, n: int) -> Array:
    """Return the n float32 values of the result of encode_int2."""
    xp = code_K.__array_namespace__()
    code_K = code_K.astype(np.int32)
    packed, scales = code_K[: (n + 3) // 4], code_K[(n + 3) // 4 :].reshape(2, -1)
    code_BQ = blocks(xp.concatenate([(packed >> (2 * i)) & 3 for i in range(4)])[:n])
    step_B = scales[0] | (scales[1] << 8)
    # Integer arithmetic, because a compiler may contract either of two float32 products.
    halves_BQ = ((step_B & 127) | 128)[:, None] * xp.where(code_BQ & 1, 3, 1)
    power_B = (step_B >> 7) - 135
    bits_BQ = bits_of(times_power_of_two(halves_BQ, power_B[:, None])) | ((code_BQ & 2) << 30)
    return float_of(xp.where(step_B[:, None] > 0, bits_BQ, 0)).reshape(-1)[:n]


def encode_topk(x_N: Array) -> Array:
    """Encode as [encoded_size] uint8: indices in the block, codes (two in a byte), scales."""
    xp = x_N.__array_namespace__()
    bits_BQ = blocks(normal_bits(x_N))
    place_BT = _largest(bits_BQ & MAGNITUDE)
    code_BT, top_B = e3m0_codes(xp.take_along_axis(bits_BQ, place_BT, axis=1))
    # Sorted by index, with values that are sent as zero first: equal values give equal bytes.
    key_BT = xp.sort(xp.where(code_BT > 0, (place_BT << 4) | code_BT, 0), axis=1)
    place_BT, (low, high) = key_BT >> 4, xp.split(key_BT & 15, 2, axis=1)
    parts = (place_BT, low | (high << 4), top_B)
    return xp.concatenate([part.reshape(-1) for part in parts]).astype(np.uint8)


def decode_topk(code_K: Array, n: int) -> Array:
    """Return the n float32 values of the result of encode_topk."""
    xp = code_K.__array_namespace__()
    code_K = code_K.astype(np.int32)
    num_blocks = -(-n // BLOCK)
    places, codes, top_B = xp.split(code_K, [SENT * num_blocks, SENT * num_blocks * 3 // 2])
    place_BT, packed = places.reshape(-1, SENT), codes.reshape(-1, SENT // 2)
    code_BT = xp.concatenate([packed & 15, packed >> 4], axis=1)
    value_BT = e3m0_values(code_BT, top_B)
    value_BQ = xp.zeros((num_blocks, BLOCK), np.float32)
    if xp is np:
        row_S, sent_S = np.nonzero(code_BT)
        value_BQ[row_S, place_BT[row_S, sent_S]] = value_BT[row_S, sent_S]
        return value_BQ.reshape(-1)[:n]
    lane_BQ = np.arange(BLOCK, dtype=np.int32)
    for i in range(SENT):  # a scatter would write one value after the other
        here_BQ = (lane_BQ == place_BT[:, i, None]) & (code_BT[:, i, None] > 0)
        value_BQ = xp.where(here_BQ, value_BT[:, i, None], value_BQ)
    return value_BQ.reshape(-1)[:n]
