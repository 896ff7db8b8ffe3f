"""Wire formats: how the float32 values of an outer gradient are encoded for an exchange.

Streaming DiLoCo (arXiv 2501.18512) sec. 2.4 sends each replica's unreduced outer gradient in 4 bits
and sums in float32. The 4 bits are E3M0: 1 sign, 3 exponent and 0 mantissa bits (notation of arXiv
2405.13938). It does not publish scales, exponent bias, rounding or the treatment of zero. They are
chosen here.

| format       | array    | bytes for 256 values | error at most; a: largest |x| of its block |
|--------------|----------|----------------------|--------------------------------------------|
| float32      | float32  | 1024                 | 0: the bits as they are                    |
| bfloat16     | bfloat16 | 512                  | |x| / 256                                  |
| int8         | int8     | 256 + 4 of scale     | a / 253                                    |
| float4_e3m0  | uint8    | 128 + 1 of scale     | |x| / 3 or a / 96, whichever is more       |
| int2         | uint8    | 64 + 2 of scale      | s / 2 or |x| - 3/2 s, whichever is more    |
| topk         | uint8    | 12 + 1 of scale      | 8 values: as float4_e3m0; the others: |x|  |

All formats except the first two scale blocks of 256 consecutive values; the last block may be
shorter. The codes come first, then the scales. Rounding is deterministic. Zeros of either sign,
denormals, infinities and NaN are encoded like 0; the payload has separate flags for infinities and
NaN. Blocks with a < 2^-119 (1.5e-36) are also sent as zeros (int8: if the scale would be below
2^-126, a < 127 * 2^-126; int2: if s would be below 2^-125). The table leaves out these errors. An
array of zero bits decodes to zeros. Encoding decoded values again gives the same array, except
with int2.

bfloat16: nearest, ties to even; values that would round above the largest (3.39e38) become it.
int8: codes -127..127, x = code * scale. The code is x times the inverse of the scale, rounded to
    nearest, ties to even. The scale is a / 127 truncated to at most 18 bits. code * scale therefore
    has at most 24 bits and is exact in float32. The inverse is computed in integers. The codes are
    followed by the lowest bytes of all blocks' float32 scales, then the next bytes, and so on.
float4_e3m0: two values in a byte, the first half of the array in the low bits, the second in the
    high ones, so decoding only slices. Code 0 is zero, 1..7 are the powers of two s/64,
    s/32 ... s; bit 3 is the sign. s is the power of two nearest to a. The scale byte is the
    exponent of s, biased as in float32; byte 0 is a block of zeros. A value is rounded to the
    nearest code; ties (1.5 * 2^k, and s/128 between s/64 and zero) are rounded away from zero. For
    a >= 2.55e38, s is 2^127 and the error is up to |x| / 2.
    Why: for 2^20 standard normal values the norm of the error is 19.4% of the values' norm. The
    decoded values are 3.9% short along the values, and the mean relative error is 0.19. With eight
    powers of two and no zero the mean relative error is 0.35, and unchanged parameters would move.
    With thresholds at sqrt(2) * 2^k, or with s = 2^floor(log2 a), the norm of the error is 20.2%.
int2: codes of a sign (bit 1) and a level (bit 0) for -3/2 s, -s/2, s/2 and 3/2 s. A byte has four
    codes; the first quarter of the array is in the lowest bits. s is 5/4 of the block's mean
    magnitude, rounded to the nearest bfloat16. Magnitudes too small to count lower s by at most 1%.
    The lower bytes of all s come first. With this s the four levels are nearly optimal for normal
    values (Max 1960): the norm of the error is 34.5% of the values' norm. Zero has no code: in a
    block with other values, it is decoded as s/2. The norm of a block's error is always smaller
    than the norm of the block. 2^127 is the largest s.
topk: each block's 8 values of largest magnitude, the first ones in case of a tie; the others are
    decoded as zero. The array starts with the indices in the block, a byte each, in ascending
    order. The codes of float4_e3m0 follow, which have their own scale, and then the scales. A value
    of code 0 has index 0. A short block also has 13 bytes. Error feedback adds the values that were
    not sent to the next send; without it topk loses most of the signal (arXiv 2508.15706).

The `feedback` field of a format marks formats meant for error feedback; see outer.add_residual.

The bits are the same on every device. Each step of encoding and decoding is integer arithmetic, a
selection, or a float32 operation with one correctly rounded result. The arrays do not depend on
jit, vmap or fusion. Products in decoding are exact: a compiler that contracts code * scale + sum
into one multiply-add changes no bit of the sum. bfloat16 is rounded in integers because a compiler
may drop a conversion to bfloat16 and back, as XLA does on GPU.
"""

# N values  K wire elements  B blocks  Q = 256 values of a block

from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np

from maxdiloco.diloco import codecs
from maxdiloco.diloco.codecs import BLOCK, SENT, Array


class WireFormat(NamedTuple):
    """A wire format.

    Attributes:
      name: its name in the settings.
      dtype: dtype of the encoded array.
      encode: [n] float32 -> [encoded_size]. decode: (encoded array, n) -> [n] float32.
      block: values that share a scale; 1 without scales.
      values: values in one element of the encoded array; 0 if only `scale` elements hold values.
      scale: additional elements for each block.
      error: norm of the error relative to the norm of standard normal values; 0 is exact.
      feedback: whether the format is meant for error feedback.
      counts: whether `encode` needs the number of values in blocks that are padded with zeros.
    """

    name: str
    dtype: np.dtype
    encode: Callable[..., Array]
    decode: Callable[[Array, int], Array]
    block: int
    values: int
    scale: int
    error: float
    feedback: bool = False
    counts: bool = False


def _as_it_is(x_N: Array, n: int = 0) -> Array:
    return x_N


_F32, _BF16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
_I8, _U8 = np.dtype(np.int8), np.dtype(np.uint8)
_TOPK = SENT * 3 // 2 + 1  # bytes of a block: indices, codes in pairs, a scale
# name, dtype, encode, decode, block, values, scale, error, feedback, counts; the most exact first.
FORMATS = (
    WireFormat("float32", _F32, _as_it_is, _as_it_is, 1, 1, 0, 0.0),
    WireFormat("bfloat16", _BF16, codecs.encode_bfloat16, codecs.decode_bfloat16, 1, 1, 0, 0.0017),
    WireFormat("int8", _I8, codecs.encode_int8, codecs.decode_int8, BLOCK, 1, 4, 0.007),
    WireFormat("float4_e3m0", _U8, codecs.encode_e3m0, codecs.decode_e3m0, BLOCK, 2, 1, 0.194),
    WireFormat("int2", _U8, codecs.encode_int2, codecs.decode_int2, BLOCK, 4, 2, 0.344, True, True),
    WireFormat("topk", _U8, codecs.encode_topk, codecs.decode_topk, BLOCK, 0, _TOPK, 0.9, True),
)
NAMES = tuple(known.name for known in FORMATS)


def wire_format(name: str) -> WireFormat:
    """Return the wire format of this name. Raises ValueError for an unknown name."""
    for known in FORMATS:
        if known.name == name:
            return known
    raise ValueError(
        f"exchange_dtype={name!r} is unknown: it names how outer gradients cross the link. "
        f"Use one of {', '.join(NAMES)}."
    )


def ceil_div(n: int, divisor: int) -> int:
    """Return n / divisor, rounded up."""
    return -(-n // divisor)


def encoded_size(name: str, n: int) -> int:
    """Return the number of elements of n encoded values: codes and scales of the blocks."""
    wire = wire_format(name)
    codes = ceil_div(n, wire.values) if wire.values else 0
    return codes + ceil_div(n, wire.block) * wire.scale


def finer(name: str, other: str) -> str:
    """Return the more exact of two formats."""
    return min(name, other, key=NAMES.index)


def words(name: str) -> np.dtype:
    """Return the unsigned integer dtype of the same size as a format's elements."""
    return np.dtype(f"uint{8 * wire_format(name).dtype.itemsize}")


def encode(name: str, x_N: Array, count_B: Array | None = None) -> Array:
    """Encode values as an array [encoded_size] of the format's dtype.

    `x_N` is float32 of rank 1, a leaf or a shard of a leaf; blocks start at its first value. Use
    vmap for more dims. `count_B` is the number of values in each block if some are padded with
    zeros. Raises ValueError for another rank or dtype and for an unknown name.
    """
    if x_N.ndim != 1 or x_N.dtype != np.float32:
        raise ValueError(
            f"x={x_N.dtype}{list(x_N.shape)} cannot be encoded: blocks run along one dim of "
            "float32 values. Use x.astype(float32).reshape(-1), and vmap over replicas."
        )
    wire = wire_format(name)
    return wire.encode(x_N, count_B) if wire.counts else wire.encode(x_N)


def decode(name: str, code_K: Array, n: int) -> Array:
    """Decode an array to n float32 values.

    `code_K` is [encoded_size(name, n)] of the format's dtype. Raises ValueError for another shape
    or dtype and for an unknown name.
    """
    wire, size = wire_format(name), encoded_size(name, n)
    if code_K.shape != (size,) or code_K.dtype != wire.dtype:
        raise ValueError(
            f"code={code_K.dtype}{list(code_K.shape)} does not hold {n} {name} values: these are "
            f"{wire.dtype}[{size}]. Use the array that encode returned, and its number of values."
        )
    return wire.decode(code_K, n)
