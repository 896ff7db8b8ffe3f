"""The codecs of the wire formats; diloco/quantize.py has their layouts in words and error bounds.

Every step is integer arithmetic, a selection, or a float32 operation with one correctly rounded
result, so that no bit depends on how a program is compiled.
"""

# N values  K wire elements  B blocks  Q = 256 values of a block  T values of a block that are sent

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BLOCK = 256  # our choice: one scale byte in 256 half bytes is 0.8 % of the payload
EXPONENT = 0x7F800000
MANTISSA = 0x007FFFFF
MAGNITUDE = 0x7FFFFFFF
_LOWEST = 8  # biased exponent of 2^-119: below it, 2^-7 of it would not be a normal float32
_BFLOAT16_LARGEST = 0x7F7F
_BYTES = (0, 8, 16, 24)  # a byte each, lowest first [bits]
# Values of a block that topk sends: 3.1 %. SparseLoCo (arXiv 2508.15706) sends 1 to 3 % of larger
# blocks; with 256 an index is one byte.
SENT = 8
# The step of the best uniform quantiser of four levels for normal values is 0.9957 of their
# deviation (Max 1960, table II), which is 1.2533 of their mean magnitude: together 5/4.
_STEP = 1.25


def bits_of(x: jax.Array) -> jax.Array:
    """float32 as int32."""
    return lax.bitcast_convert_type(x, jnp.int32)


def float_of(bits: jax.Array) -> jax.Array:
    """int32 as float32."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def normal_bits(x_N: jax.Array) -> jax.Array:
    """Bits of x; of +0 for zeros, denormals, infinities and NaN."""
    bits_N = bits_of(x_N)
    exponent_N = bits_N & EXPONENT
    return jnp.where((exponent_N == 0) | (exponent_N == EXPONENT), 0, bits_N)


def blocks(x_N: jax.Array) -> jax.Array:
    """[B, Q], the last block filled up with zeros."""
    return jnp.pad(x_N, (0, -x_N.shape[0] % BLOCK)).reshape(-1, BLOCK)


def _once(x_B: jax.Array) -> jax.Array:
    """x >= 0 itself, as the maximum with 0: XLA:CPU computes what it reduces once for each block.

    Else it would compute it again for each value of the block that uses it.
    """
    return jnp.max(jnp.where(np.arange(2)[:, None] == 0, x_B, 0), axis=0)


def _packed(code_N: jax.Array, values: int) -> jax.Array:
    """So many codes in a byte: the first part of them in the lowest bits.

    A sum, since XLA:CPU would take slices of the codes value by value.
    """
    shifts = 8 // values * np.arange(values)[:, None]
    parts = jnp.pad(code_N, (0, -code_N.shape[0] % values)).reshape(values, -1)
    return jnp.sum(parts << shifts, axis=0)


def times_power_of_two(integer: jax.Array, power: jax.Array) -> jax.Array:
    """integer * 2^power in float32, exact for positive integers below 2^24 and normal results."""
    return float_of(bits_of(integer.astype(jnp.float32)) + (power << 23))


def bfloat16_bits(bits_N: jax.Array) -> jax.Array:
    """The 16 bits of the nearest bfloat16, ties to even, as int32; never infinity."""
    odd_N = (bits_N >> 16) & 1
    magnitude_N = ((bits_N & MAGNITUDE) + 0x7FFF + odd_N) >> 16
    sign_N = (bits_N >> 16) & 0x8000
    return jnp.minimum(magnitude_N, _BFLOAT16_LARGEST) | sign_N


def e3m0_codes(bits_BQ: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Four bits a value [B, Q] and the exponent of s [B], int32; see quantize, float4_e3m0."""
    magnitude_BQ = bits_BQ & MAGNITUDE
    half = (MANTISSA + 1) // 2  # carries into the exponent from a mantissa of 1.5 on
    power_BQ = (magnitude_BQ + half) >> 23
    is_sent_BQ = magnitude_BQ >> 23 >= _LOWEST
    top_B = jnp.max(jnp.where(is_sent_BQ, jnp.minimum(power_BQ, 254), 0), axis=1)  # of the largest
    code_BQ = jnp.clip(power_BQ - top_B[:, None] + 7, 1, 7)
    code_BQ = code_BQ | ((bits_BQ >> 28) & 8)
    # top - 7 is the exponent of half the smallest power of two
    sent_BQ = (top_B[:, None] > 0) & (magnitude_BQ >> 23 >= top_B[:, None] - 7)
    return jnp.where(sent_BQ, code_BQ, 0), top_B


def e3m0_values(code_BQ: jax.Array, top_B: jax.Array) -> jax.Array:
    """The float32 values of what e3m0_codes gave."""
    power_BQ = code_BQ & 7
    bits_BQ = ((code_BQ & 8) << 28) | ((top_B[:, None] - 7 + power_BQ) << 23)
    return float_of(jnp.where(power_BQ > 0, bits_BQ, 0))


def encode_bfloat16(x_N: jax.Array) -> jax.Array:
    """The nearest values of bfloat16, none infinite."""
    code_N = bfloat16_bits(normal_bits(x_N))
    return lax.bitcast_convert_type(code_N.astype(jnp.uint16), jnp.bfloat16)


def decode_bfloat16(code_N: jax.Array, n: int) -> jax.Array:
    """The float32 values of encode_bfloat16."""
    return float_of(lax.bitcast_convert_type(code_N, jnp.uint16).astype(jnp.int32) << 16)


def encode_int8(x_N: jax.Array) -> jax.Array:
    """Codes of a byte, then the four bytes of the blocks' scales."""
    bits_BQ = blocks(normal_bits(x_N))
    largest_B = jnp.max(bits_BQ & MAGNITUDE, axis=1)
    exponent_B = largest_B >> 23
    # largest = significand * 2^(exponent - 150); scale = step * 2^(exponent - 150)
    step_B = ((largest_B & MANTISSA) | (MANTISSA + 1)).astype(jnp.uint32) // 127
    # 2^39 / step by long division in 32 bits: at most 23 bits, so exact in float32
    high_B = (1 << 30) // step_B
    rest_B = (1 << 30) - high_B * step_B
    inverse_B = (high_B << 9) + (rest_B << 9) // step_B
    scale_B = times_power_of_two(step_B, exponent_B - 150)
    inverse_B = times_power_of_two(inverse_B, 150 - 39 - exponent_B)
    sent_B = bits_of(scale_B) > MANTISSA  # a normal, positive float32
    scale_B, inverse_B = jnp.where(sent_B, scale_B, 0), _once(jnp.where(sent_B, inverse_B, 0))
    scaled_BQ = float_of(bits_BQ) * inverse_B[:, None]
    code_BQ = lax.round(scaled_BQ, lax.RoundingMethod.TO_NEAREST_EVEN).astype(jnp.int8)
    byte_4B = (bits_of(scale_B) >> jnp.array(_BYTES)[:, None]) & 255
    scale_K = lax.bitcast_convert_type(byte_4B.astype(jnp.uint8), jnp.int8).reshape(-1)
    return jnp.concatenate([code_BQ.reshape(-1)[: x_N.shape[0]], scale_K])


def decode_int8(code_K: jax.Array, n: int) -> jax.Array:
    """The n float32 values of encode_int8."""
    code_BQ = blocks(code_K[:n])
    byte_4B = code_K[n:].reshape(4, -1).astype(jnp.int32) & 255
    bits_4B = byte_4B << jnp.array(_BYTES)[:, None]
    scale_B = float_of(bits_4B[0] | bits_4B[1] | bits_4B[2] | bits_4B[3])
    return (code_BQ.astype(jnp.float32) * scale_B[:, None]).reshape(-1)[:n]


def encode_e3m0(x_N: jax.Array) -> jax.Array:
    """Two codes in a byte, then the blocks' exponents."""
    n = x_N.shape[0]
    code_BQ, top_B = e3m0_codes(blocks(normal_bits(x_N)))
    packed = _packed(code_BQ.reshape(-1)[:n], 2)
    return jnp.concatenate([packed, top_B]).astype(jnp.uint8)


def decode_e3m0(code_K: jax.Array, n: int) -> jax.Array:
    """The n float32 values of encode_e3m0."""
    code_K = code_K.astype(jnp.int32)
    packed_K = code_K[: (n + 1) // 2]
    code_BQ = blocks(jnp.concatenate([packed_K & 15, packed_K >> 4])[:n])
    return e3m0_values(code_BQ, code_K[(n + 1) // 2 :]).reshape(-1)[:n]


def encode_int2(x_N: jax.Array, count_B: jax.Array | None = None) -> jax.Array:
    """[encoded_size] uint8: four codes in a byte, then both bytes of the blocks' steps.

    count_B: values of each block, of one that zeros fill up.
    """
    n = x_N.shape[0]
    bits_BQ = blocks(normal_bits(x_N))
    factors = np.float32(_STEP / np.maximum(np.arange(BLOCK + 1), 1))
    if count_B is None:
        factor_B = factors[np.minimum(n - np.arange(bits_BQ.shape[0]) * BLOCK, BLOCK)]
    else:
        factor_B = jnp.asarray(factors)[count_B]
    step_B = _steps(bits_BQ & MAGNITUDE, factor_B)
    upper_BQ = (bits_BQ & MAGNITUDE) >= (step_B << 16)[:, None]
    code_BQ = ((bits_BQ >> 30) & 2) | upper_BQ.astype(jnp.int32)
    code_N = jnp.where(step_B[:, None] > 0, code_BQ, 0).reshape(-1)[:n]
    return jnp.concatenate([_packed(code_N, 4), step_B & 255, step_B >> 8]).astype(jnp.uint8)


def _steps(magnitude_BQ: jax.Array, factor_B: jax.Array | np.ndarray) -> jax.Array:
    """5/4 of the mean magnitude of each block, as bits of bfloat16; 0 for a block of zeros.

    factor_B: 5/4 over the number of values.

    The magnitudes are added as integers, so that their order means nothing.
    """
    exponent_BQ = magnitude_BQ >> 23
    top_B = jnp.max(exponent_BQ, axis=1)
    significand_BQ = jnp.where(exponent_BQ > 0, (magnitude_BQ & MANTISSA) | (MANTISSA + 1), 0)
    # In units of 2^(top - 148): below 2^22 each, so below 2^30 together.
    shift_BQ = jnp.minimum(top_B[:, None] - exponent_BQ + 2, 31)
    total_B = jnp.sum(significand_BQ >> shift_BQ, axis=1)
    # 24 bits are exact in float32; the least of them is 2^-15 of the sum or less.
    step_B = bfloat16_bits(bits_of((total_B >> 6).astype(jnp.float32) * factor_B))
    step_B = jnp.minimum(step_B + ((top_B - 142) << 7), 254 << 7)  # 3/2 of 2^127 is finite
    return _once(jnp.where((top_B > 0) & (step_B >> 7 >= 2), step_B, 0))  # half a step is normal


def decode_int2(code_K: jax.Array, n: int) -> jax.Array:
    """The n float32 values of encode_int2."""
    code_K = code_K.astype(jnp.int32)
    packed, scales = code_K[: (n + 3) // 4], code_K[(n + 3) // 4 :].reshape(2, -1)
    code_BQ = blocks(jnp.concatenate([(packed >> (2 * i)) & 3 for i in range(4)])[:n])
    step_B = scales[0] | (scales[1] << 8)
    # In integers: of two float32 products in a program a compiler may contract either.
    halves_BQ = ((step_B & 127) | 128)[:, None] * jnp.where(code_BQ & 1, 3, 1)
    power_B = (step_B >> 7) - 135
    bits_BQ = bits_of(times_power_of_two(halves_BQ, power_B[:, None])) | ((code_BQ & 2) << 30)
    return float_of(jnp.where(step_B[:, None] > 0, bits_BQ, 0)).reshape(-1)[:n]


def encode_topk(x_N: jax.Array) -> jax.Array:
    """[encoded_size] uint8: places in the block, then codes, two in a byte, then scales."""
    bits_BQ = blocks(normal_bits(x_N))
    _, place_BT = lax.top_k(float_of(bits_BQ & MAGNITUDE), SENT)  # of equal ones the first
    code_BT, top_B = e3m0_codes(jnp.take_along_axis(bits_BQ, place_BT, axis=1))
    # By place, what is sent as zero in front: the same values have the same bytes.
    key_BT = jnp.sort(jnp.where(code_BT > 0, (place_BT << 4) | code_BT, 0), axis=1)
    place_BT, (low, high) = key_BT >> 4, jnp.split(key_BT & 15, 2, axis=1)
    parts = (place_BT, low | (high << 4), top_B)
    return jnp.concatenate([part.reshape(-1) for part in parts]).astype(jnp.uint8)


def decode_topk(code_K: jax.Array, n: int) -> jax.Array:
    """The n float32 values of encode_topk."""
    code_K = code_K.astype(jnp.int32)
    num_blocks = -(-n // BLOCK)
    places, codes, top_B = jnp.split(code_K, [SENT * num_blocks, SENT * num_blocks * 3 // 2])
    place_BT, packed = places.reshape(-1, SENT), codes.reshape(-1, SENT // 2)
    code_BT = jnp.concatenate([packed & 15, packed >> 4], axis=1)
    value_BT = e3m0_values(code_BT, top_B)
    lane_BQ = lax.broadcasted_iota(jnp.int32, (num_blocks, BLOCK), 1)
    value_BQ = jnp.zeros((num_blocks, BLOCK), jnp.float32)
    for i in range(SENT):
        here_BQ = (lane_BQ == place_BT[:, i, None]) & (code_BT[:, i, None] > 0)
        value_BQ = jnp.where(here_BQ, value_BT[:, i, None], value_BQ)
    return value_BQ.reshape(-1)[:n]
