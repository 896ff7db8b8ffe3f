"""The wire formats once more, in float64 NumPy, from the table in `diloco/quantize.py`.

A codec gives what a receiver holds after a sender encoded values [N] of one leaf of a fragment.
"""

import numpy as np

BLOCK = 256
TINY = 2.0**-119  # a block below it is sent as zeros by float4_e3m0
TINY_INT8 = 127 * 2.0**-126  # the same for int8


def bfloat16_codec(x_N):
    """Eight significant bits, ties to even: np.round does that to x over its last bit's worth."""
    _, exponent_N = np.frexp(x_N)  # |x| = f * 2^exponent, 1/2 <= f < 1
    last_bit_N = np.exp2(exponent_N - 8.0)
    return np.round(x_N / last_bit_N) * last_bit_N


def by_block(quantise):
    """A codec that scales blocks of 256 neighbours, the last one shorter, each by its largest."""

    def codec(x_N):
        x_N = np.where(np.abs(x_N) < 2.0**-126, 0, np.asarray(x_N, np.float64))  # no denormals
        blocks = [x_N[i : i + BLOCK] for i in range(0, len(x_N), BLOCK)]
        out = [quantise(x, np.abs(x).max()) if x.any() else 0 * x for x in blocks]
        return np.concatenate(out)

    return codec


@by_block
def int8_codec(x_N, largest):
    """code * scale, scale = a / 127 cut to whole 2^-24ths of the power of two above a."""
    _, exponent = np.frexp(np.float32(largest))
    unit = np.exp2(exponent - 24.0)
    scale = np.floor(largest / unit / 127) * unit
    return np.round(x_N / scale) * scale


def e3m0(x_N, largest):
    """The nearest of ±s, ±s/2 ... ±s/64 and 0, s the power of two nearest to a; ties go up."""
    if largest < TINY:
        return 0 * np.abs(x_N)
    _, exponent = np.frexp(largest)  # a = f * 2^exponent; the nearest power is above f = 3/4
    s = min(np.exp2(exponent - (largest / np.exp2(exponent) < 0.75) * 1.0), 2.0**127)
    levels = np.array([s / 2**i for i in range(7)] + [0.0])
    distances = np.abs(np.abs(x_N)[:, None] - levels)
    nearest_N = levels[distances.argmin(1)]
    return np.where(nearest_N > 0, np.copysign(nearest_N, x_N), 0)


@by_block
def int2_codec(x_N, largest):
    """±s/2 or ±3/2 s, s 5/4 of the mean magnitude, of bits worth a / 2^22 and more."""
    _, exponent = np.frexp(largest)
    unit = np.exp2(exponent - 22.0)
    total = np.floor(np.floor(np.abs(x_N) / unit).sum() / 64)
    s = bfloat16_codec(np.float32(total) * np.float32(1.25 / len(x_N))) * unit * 64
    return np.where(np.abs(x_N) >= s, 1.5 * s, 0.5 * s) * np.where(x_N < 0, -1, 1)


@by_block
def topk_codec(x_N, largest):
    """Of the eight of largest magnitude, the first of equal ones, what e3m0 makes of them."""
    kept_N = np.zeros_like(x_N)
    places = np.argsort(-np.abs(x_N), kind="stable")[:8]
    kept_N[places] = x_N[places]
    return e3m0(kept_N, largest)


e3m0_codec = by_block(e3m0)
CODECS = {
    "float32": np.float32,
    "bfloat16": bfloat16_codec,
    "int8": int8_codec,
    "float4_e3m0": e3m0_codec,
    "int2": int2_codec,
    "topk": topk_codec,
}
