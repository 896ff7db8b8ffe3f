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
| int2         | uint8    | 64 + 2 of scale      | s / 2 or |x| - 3/2 s, whichever is more    |
| topk         | uint8    | 12 + 1 of scale      | of the 8 sent that of float4_e3m0, else |x| |

All but the first two scale blocks of 256 consecutive values, the last one shorter; the codes come
first, then the scales. Rounding is deterministic. Zeros of either sign, denormals, infinities and
NaN are encoded as 0 is (a payload flags the last two beside the codes). Blocks of a < 2^-119
(1.5e-36) are sent as zeros, too (int8: if the scale would be below 2^-126, a < 127 * 2^-126; int2:
if s would be below 2^-125); the table leaves out these errors. An array of zero bits decodes to
zeros. Encoding decoded values gives the same array again, but not with int2.

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
int2: codes of a sign (bit 1) and a level (bit 0) for -3/2 s, -s/2, s/2 and 3/2 s, four in a byte,
    the first quarter of the array in the lowest bits. s is 5/4 of the mean magnitude of the block,
    less 1 % at most for magnitudes too small to count, to the nearest bfloat16; the lower bytes of
    all s come first. With it four levels are nearly the best there are for normal values (Max
    1960): the norm of the error is 34.5 % of theirs. There is no zero: in a block of others it
    arrives as s/2. The error of a block is always smaller than the block. 2^127 is the largest s.
topk: of each block the 8 values of largest magnitude (of equal ones the first), the rest is zero.
    Their places in the block, a byte each, in ascending order; then their codes, which are those
    of float4_e3m0 with a scale of their own; then the scales. A value of code 0 has place 0. A
    short block has 13 bytes, too. Top-k alone loses most of what it is given: it is meant for
    error feedback, where what is not sent now is added to what is sent next (arXiv 2508.15706).

`feedback` of a format says whether that is so; see outer.add_residual.

The same bits everywhere: each step of encoding and decoding is integer arithmetic, a selection, or
a float32 operation with one correctly rounded result. So the arrays do not depend on jit, vmap or
fusion; and as products in decoding are exact, a compiler that contracts code * scale + sum into
one multiply-add changes no bit of the sum. bfloat16 is rounded in integers because a compiler may
drop a conversion to bfloat16 and back; XLA does on GPU.
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

    dtype: of the array on the wire. encode: [n] float32 -> [encoded_size]; decode: back, of n.
    block: values that share a scale; 1 where there is none. values: values in one wire element; 0
    where only those of `scale` carry any. scale: wire elements of one block besides. error: norm
    of the error of standard normal values relative to theirs; 0 is exact. feedback: whether it is
    meant for error feedback. counts: whether `encode` has to know how many values a block has that
    zeros fill up.
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
_TOPK = SENT * 3 // 2 + 1  # bytes of a block: places, codes in pairs, a scale
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
    """The wire format of this name. Raises ValueError for another."""
    for known in FORMATS:
        if known.name == name:
            return known
    raise ValueError(
        f"exchange_dtype={name!r} is unknown: it names how outer gradients cross the link. "
        f"Use one of {', '.join(NAMES)}."
    )


def ceil_div(n: int, divisor: int) -> int:
    """n / divisor, rounded up."""
    return -(-n // divisor)


def encoded_size(name: str, n: int) -> int:
    """Wire elements of n values: the codes, then the scales of the blocks."""
    wire = wire_format(name)
    codes = ceil_div(n, wire.values) if wire.values else 0
    return codes + ceil_div(n, wire.block) * wire.scale


def finer(name: str, other: str) -> str:
    """The more exact one of two formats."""
    return min(name, other, key=NAMES.index)


def words(name: str) -> np.dtype:
    """The unsigned integers of the size of a format's elements."""
    return np.dtype(f"uint{8 * wire_format(name).dtype.itemsize}")


def encode(name: str, x_N: Array, count_B: Array | None = None) -> Array:
    """Values as they cross the link: [encoded_size] of the format's dtype.

    x_N: float32, rank 1 (one leaf, or a shard of it: blocks start at its first value); use vmap
    for more dims. count_B: values of each block, where zeros fill some up. Raises ValueError for
    another rank or dtype and for an unknown name.
    """
    if x_N.ndim != 1 or x_N.dtype != np.float32:
        raise ValueError(
            f"x={x_N.dtype}{list(x_N.shape)} cannot be encoded: blocks run along one dim of "
            "float32 values. Use x.astype(float32).reshape(-1), and vmap over replicas."
        )
    wire = wire_format(name)
    return wire.encode(x_N, count_B) if wire.counts else wire.encode(x_N)


def decode(name: str, code_K: Array, n: int) -> Array:
    """The n float32 values of an encoded array.

    code_K: [encoded_size(name, n)] of the format's dtype. Raises ValueError for another shape or
    dtype and for an unknown name.
    """
    wire, size = wire_format(name), encoded_size(name, n)
    if code_K.shape != (size,) or code_K.dtype != wire.dtype:
        raise ValueError(
            f"code={code_K.dtype}{list(code_K.shape)} does not hold {n} {name} values: these are "
            f"{wire.dtype}[{size}]. Use the array that encode returned, and its number of values."
        )
    return wire.decode(code_K, n)
