"""Wire formats: how the float32 values of an outer gradient cross the link.

Streaming DiLoCo (arXiv 2501.18512) sec. 2.4 sends each replica's unreduced outer gradient in 4
bits, E3M0 (1 sign, 3 exponent, 0 mantissa bits; arXiv 2405.13938 for the notation), and sums in
float32. It does not publish scales, exponent bias, rounding or the treatment of zero: what follows
is our choice.

| wire         | array    | bytes for 256 values | error at most; a: largest |x| of its block |
|--------------|----------|----------------------|--------------------------------------------|
| float32      | float32  | 1024                 | 0: the bits as they are                    |
| bfloat16     | bfloat16 | 512                  | |x| / 256                                  |
| int8         | int8     | 256 + 4 of scale     | a / 253                                    |
| float4_e3m0  | uint8    | 128 + 1 of scale     | |x| / 3 or a / 96, whichever is more       |

int8 and float4_e3m0 scale blocks of 256 consecutive values, the last one shorter; the codes come
first, then the scales. Rounding is deterministic. Zeros of either sign,
denormals, infinities and NaN are sent as 0 (a payload flags the last two beside the codes).
Blocks of a < 2^-119 (1.5e-36) are sent as zeros, too (int8: if the scale would be below 2^-126,
a < 127 * 2^-126); the table leaves out these errors. An array of zero bits decodes to zeros.
Encoding decoded values gives the same array again.

bfloat16: nearest, ties to even; what rounds above the largest (3.39e38) becomes that.
int8: codes -127..127, x = code * scale. The code is x times the inverse of the scale, rounded to
    nearest, ties to even. The scale is a / 127 cut to 18 bits at most, so that code * scale fits
    24 and is exact in float32. Its inverse is computed in integers. After the codes come the
    lowest bytes of the float32 scales of all blocks, then the next bytes, and so on.
float4_e3m0: two values in a byte, the first half of the array in the low bits, the second in the
    high ones, so decoding only slices. Code 0 is zero, 1..7 are the powers of two s/64,
    s/32 ... s; bit 3 is the sign. s is the power of two nearest to a; its exponent, biased as in
    float32, is the scale byte, and byte 0 is a block of zeros. A value becomes the nearest of the
    codes; ties (1.5 * 2^k, and s/128 between s/64 and zero) go away from zero. For a >= 2.55e38,
    s is 2^127 and the error up to |x| / 2.
    Why: for 2^20 standard normal values the norm of the error is 19.4 % of theirs, what arrives
    is 3.9 % short along them, and the mean relative error is 0.19. With eight powers of two and
    no zero the last is 0.35, and parameters that did not move would be moved. With thresholds
    at sqrt(2) * 2^k the norm of the error is 20.2 %, with s = 2^floor(log2 a) 20.2 % as well.

The same bits everywhere: each step of encoding and decoding is integer arithmetic, a selection, or
a float32 operation with one correctly rounded result. So the arrays do not depend on jit, vmap or
fusion; and as products in decoding are exact, a compiler that contracts code * scale + sum into
one multiply-add changes no bit of the sum. bfloat16 is rounded in integers because a compiler may
drop a conversion to bfloat16 and back; XLA does on GPU.
"""

# N values  K wire elements  B blocks  Q = 256 values of a block

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BLOCK = 256  # our choice: one scale byte in 256 half bytes is 0.8 % of the payload
_LOWEST = 8  # biased exponent of 2^-119: below it, 2^-7 of it would not be a normal float32
_EXPONENT = 0x7F800000
_MANTISSA = 0x007FFFFF
_MAGNITUDE = 0x7FFFFFFF
_BFLOAT16_LARGEST = 0x7F7F
_BYTES = (0, 8, 16, 24)  # a byte each, lowest first [bits]


class WireFormat(NamedTuple):
    """A wire format.

    dtype: of the array on the wire. block: values that share a scale; 1 where there is none.
    values: values in one wire element. scale: wire elements of one block's scale.
    """

    name: str
    dtype: np.dtype
    block: int
    values: int
    scale: int


_FORMATS = (
    WireFormat("float32", np.dtype(jnp.float32), block=1, values=1, scale=0),
    WireFormat("bfloat16", np.dtype(jnp.bfloat16), block=1, values=1, scale=0),
    WireFormat("int8", np.dtype(jnp.int8), block=BLOCK, values=1, scale=4),
    WireFormat("float4_e3m0", np.dtype(jnp.uint8), block=BLOCK, values=2, scale=1),
)
NAMES = tuple(known.name for known in _FORMATS)


def wire_format(name: str) -> WireFormat:
    """The wire format of this name. Raises ValueError for another."""
    for known in _FORMATS:
        if known.name == name:
            return known
    raise ValueError(
        f"diloco_exchange_dtype={name!r} is unknown: it names how outer gradients cross the link. "
        f"Use one of {', '.join(NAMES)}."
    )


def ceil_div(n: int, divisor: int) -> int:
    """n / divisor, rounded up."""
    return -(-n // divisor)


def encoded_size(name: str, n: int) -> int:
    """Wire elements of n values: the codes, then the scales of the blocks."""
    w = wire_format(name)
    return ceil_div(n, w.values) + ceil_div(n, w.block) * w.scale


def encode(name: str, x_N: jax.Array) -> jax.Array:
    """Values as they cross the link: [encoded_size] of the format's dtype.

    x_N: float32, rank 1 (one leaf, or a shard of it: blocks start at its first value); use vmap
    for more dims. Raises ValueError for another rank or dtype and for an unknown name.
    """
    if x_N.ndim != 1 or x_N.dtype != jnp.float32:
        raise ValueError(
            f"x={x_N.dtype}{list(x_N.shape)} cannot be encoded: blocks run along one dim of "
            "float32 values. Use x.astype(float32).reshape(-1), and vmap over replicas."
        )
    encoders = {
        "float32": lambda x: x,
        "bfloat16": _encode_bfloat16,
        "int8": _encode_int8,
        "float4_e3m0": _encode_e3m0,
    }
    return encoders[wire_format(name).name](x_N)


def decode(name: str, code_K: jax.Array, n: int) -> jax.Array:
    """The n float32 values of an encoded array.

    code_K: [encoded_size(name, n)] of the format's dtype. Raises ValueError for another shape or
    dtype and for an unknown name.
    """
    w, size = wire_format(name), encoded_size(name, n)
    if code_K.shape != (size,) or code_K.dtype != w.dtype:
        raise ValueError(
            f"code={code_K.dtype}{list(code_K.shape)} does not hold {n} {name} values: these are "
            f"{w.dtype}[{size}]. Use the array that encode returned, and its number of values."
        )
    decoders = {
        "float32": lambda code, _: code,
        "bfloat16": lambda code, _: _decode_bfloat16(code),
        "int8": _decode_int8,
        "float4_e3m0": _decode_e3m0,
    }
    return decoders[name](code_K, n)


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _float(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _normal_bits(x_N: jax.Array) -> jax.Array:
    """Bits of x; of +0 for zeros, denormals, infinities and NaN."""
    bits_N = _bits(x_N)
    exponent_N = bits_N & _EXPONENT
    return jnp.where((exponent_N == 0) | (exponent_N == _EXPONENT), 0, bits_N)


def _blocks(x_N: jax.Array) -> jax.Array:
    """[B, Q], the last block filled up with zeros."""
    return jnp.pad(x_N, (0, -x_N.shape[0] % BLOCK)).reshape(-1, BLOCK)


def _encode_bfloat16(x_N: jax.Array) -> jax.Array:
    bits_N = _normal_bits(x_N)
    odd_N = (bits_N >> 16) & 1
    magnitude_N = ((bits_N & _MAGNITUDE) + 0x7FFF + odd_N) >> 16  # nearest, ties to even
    sign_N = (bits_N >> 16) & 0x8000
    code_N = jnp.minimum(magnitude_N, _BFLOAT16_LARGEST) | sign_N
    return lax.bitcast_convert_type(code_N.astype(jnp.uint16), jnp.bfloat16)


def _decode_bfloat16(code_N: jax.Array) -> jax.Array:
    return _float(lax.bitcast_convert_type(code_N, jnp.uint16).astype(jnp.int32) << 16)


def _times_power_of_two(integer: jax.Array, power: jax.Array) -> jax.Array:
    """integer * 2^power in float32, exact for positive integers below 2^24 and normal results."""
    return _float(_bits(integer.astype(jnp.float32)) + (power << 23))


def _encode_int8(x_N: jax.Array) -> jax.Array:
    bits_BQ = _blocks(_normal_bits(x_N))
    largest_B = jnp.max(bits_BQ & _MAGNITUDE, axis=1)
    exponent_B = largest_B >> 23
    # largest = significand * 2^(exponent - 150); scale = step * 2^(exponent - 150)
    step_B = ((largest_B & _MANTISSA) | (_MANTISSA + 1)).astype(jnp.uint32) // 127
    # 2^39 / step by long division in 32 bits: at most 23 bits, so exact in float32
    high_B = (1 << 30) // step_B
    rest_B = (1 << 30) - high_B * step_B
    inverse_B = (high_B << 9) + (rest_B << 9) // step_B
    scale_B = _times_power_of_two(step_B, exponent_B - 150)
    inverse_B = _times_power_of_two(inverse_B, 150 - 39 - exponent_B)
    sent_B = _bits(scale_B) > _MANTISSA  # a normal, positive float32
    scale_B, inverse_B = jnp.where(sent_B, scale_B, 0), jnp.where(sent_B, inverse_B, 0)
    scaled_BQ = _float(bits_BQ) * inverse_B[:, None]
    code_BQ = lax.round(scaled_BQ, lax.RoundingMethod.TO_NEAREST_EVEN).astype(jnp.int8)
    byte_4B = (_bits(scale_B) >> jnp.array(_BYTES)[:, None]) & 255
    scale_K = lax.bitcast_convert_type(byte_4B.astype(jnp.uint8), jnp.int8).reshape(-1)
    return jnp.concatenate([code_BQ.reshape(-1)[: x_N.shape[0]], scale_K])


def _decode_int8(code_K: jax.Array, n: int) -> jax.Array:
    code_BQ = _blocks(code_K[:n])
    byte_4B = code_K[n:].reshape(4, -1).astype(jnp.int32) & 255
    bits_4B = byte_4B << jnp.array(_BYTES)[:, None]
    scale_B = _float(bits_4B[0] | bits_4B[1] | bits_4B[2] | bits_4B[3])
    return (code_BQ.astype(jnp.float32) * scale_B[:, None]).reshape(-1)[:n]


def _encode_e3m0(x_N: jax.Array) -> jax.Array:
    n = x_N.shape[0]
    bits_BQ = _blocks(_normal_bits(x_N))
    magnitude_BQ = bits_BQ & _MAGNITUDE
    half = (_MANTISSA + 1) // 2  # carries into the exponent from a mantissa of 1.5 on
    largest_B = jnp.max(magnitude_BQ, axis=1)
    top_B = jnp.minimum((largest_B + half) >> 23, 254)
    top_B = jnp.where(largest_B >> 23 >= _LOWEST, top_B, 0)
    code_BQ = jnp.clip(((magnitude_BQ + half) >> 23) - top_B[:, None] + 7, 1, 7)
    code_BQ = code_BQ | ((bits_BQ >> 28) & 8)
    # top - 7 is the exponent of half the smallest power of two
    sent_BQ = (top_B[:, None] > 0) & (magnitude_BQ >> 23 >= top_B[:, None] - 7)
    code_N = jnp.where(sent_BQ, code_BQ, 0).reshape(-1)[:n]
    low, high = jnp.split(jnp.pad(code_N, (0, n % 2)), 2)
    return jnp.concatenate([low | (high << 4), top_B]).astype(jnp.uint8)


def _decode_e3m0(code_K: jax.Array, n: int) -> jax.Array:
    code_K = code_K.astype(jnp.int32)
    packed_K = code_K[: (n + 1) // 2]
    code_BQ = _blocks(jnp.concatenate([packed_K & 15, packed_K >> 4])[:n])
    top_B = code_K[(n + 1) // 2 :]
    power_BQ = code_BQ & 7
    bits_BQ = ((code_BQ & 8) << 28) | ((top_B[:, None] - 7 + power_BQ) << 23)
    return _float(jnp.where(power_BQ > 0, bits_BQ, 0)).reshape(-1)[:n]
