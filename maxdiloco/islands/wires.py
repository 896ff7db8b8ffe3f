"""The wire formats on the host: numpy alone, the bits of diloco/codecs.py on every machine.

diloco/quantize.py has the layouts and error bounds. All arithmetic is on integers, or float32 with
one correctly rounded result.
"""

# N values  B blocks  Q = 256 values of a block

from collections.abc import Callable
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

BLOCK, SENT, _STEP = 256, 8, 1.25  # as in codecs.py
_EXPONENT, _MANTISSA, _MAGNITUDE = 0x7F800000, 0x007FFFFF, 0x7FFFFFFF
_LOWEST = 8  # see codecs._LOWEST


def _normal_bits(x_N: np.ndarray) -> np.ndarray:
    bits_N = x_N.view(np.int32)
    exponent_N = bits_N & _EXPONENT
    return np.where((exponent_N == 0) | (exponent_N == _EXPONENT), 0, bits_N)


def _blocks(x_N: np.ndarray) -> np.ndarray:
    return np.pad(x_N, (0, -x_N.size % BLOCK)).reshape(-1, BLOCK)


def _times_power_of_two(integer: np.ndarray, power: np.ndarray) -> np.ndarray:
    bits = integer.astype(np.float32).view(np.int32)
    return (bits + (power << 23).astype(np.int32)).view(np.float32)


def _encode_bfloat16(x_N: np.ndarray) -> np.ndarray:
    bits_N = _normal_bits(x_N)
    magnitude_N = ((bits_N & _MAGNITUDE) + 0x7FFF + ((bits_N >> 16) & 1)) >> 16
    return (np.minimum(magnitude_N, 0x7F7F) | ((bits_N >> 16) & 0x8000)).astype("<u2")


def _decode_bfloat16(code_N: np.ndarray, n: int) -> np.ndarray:
    return (code_N.astype(np.uint32) << 16).view(np.float32)


def _encode_int8(x_N: np.ndarray) -> np.ndarray:
    bits_BQ = _blocks(_normal_bits(x_N))
    largest_B = np.max(bits_BQ & _MAGNITUDE, axis=1)
    exponent_B = largest_B >> 23
    step_B = ((largest_B & _MANTISSA) | (_MANTISSA + 1)) // 127
    high_B = (1 << 30) // step_B
    inverse_B = (high_B << 9) + (((1 << 30) - high_B * step_B) << 9) // step_B
    scale_B = _times_power_of_two(step_B, exponent_B - 150)
    inverse_B = _times_power_of_two(inverse_B, 150 - 39 - exponent_B)
    sent_B = scale_B.view(np.int32) > _MANTISSA
    scale_B, inverse_B = (np.where(sent_B, x_B, np.float32(0)) for x_B in (scale_B, inverse_B))
    code_BQ = np.rint(bits_BQ.view(np.float32) * inverse_B[:, None]).astype(np.int8)
    scale_4B = scale_B.astype("<f4").view(np.int8).reshape(-1, 4).T
    return np.concatenate([code_BQ.reshape(-1)[: x_N.size], scale_4B.reshape(-1)])


def _decode_int8(code_K: np.ndarray, n: int) -> np.ndarray:
    scale_B = np.ascontiguousarray(code_K[n:].reshape(4, -1).T).view("<f4").astype(np.float32)
    return (_blocks(code_K[:n]).astype(np.float32) * scale_B).reshape(-1)[:n]


def _e3m0_codes(bits_BQ: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    magnitude_BQ, half = bits_BQ & _MAGNITUDE, (_MANTISSA + 1) // 2
    largest_B = np.max(magnitude_BQ, axis=1)
    # As integers of 64 bits: the largest magnitudes and a half are above 2^31.
    top_B = np.minimum((largest_B.astype(np.int64) + half) >> 23, 254)
    top_B = np.where(largest_B >> 23 >= _LOWEST, top_B, 0)
    code_BQ = ((magnitude_BQ.astype(np.int64) + half) >> 23) - top_B[:, None] + 7
    code_BQ = np.clip(code_BQ, 1, 7) | ((bits_BQ >> 28) & 8)
    sent_BQ = (top_B[:, None] > 0) & (magnitude_BQ >> 23 >= top_B[:, None] - 7)
    return np.where(sent_BQ, code_BQ, 0), top_B


def _e3m0_values(code_BQ: np.ndarray, top_B: np.ndarray) -> np.ndarray:
    power_BQ = code_BQ & 7
    bits_BQ = ((code_BQ & 8) << 28) | ((top_B[:, None] - 7 + power_BQ) << 23)
    return np.where(power_BQ > 0, bits_BQ, 0).astype(np.int32).view(np.float32)


def _encode_e3m0(x_N: np.ndarray) -> np.ndarray:
    n = x_N.size
    code_BQ, top_B = _e3m0_codes(_blocks(_normal_bits(x_N)))
    low, high = np.split(np.pad(code_BQ.reshape(-1)[:n], (0, n % 2)), 2)
    return np.concatenate([low | (high << 4), top_B]).astype(np.uint8)


def _decode_e3m0(code_K: np.ndarray, n: int) -> np.ndarray:
    packed, top_B = np.split(code_K.astype(np.int32), [(n + 1) // 2])
    code_BQ = _blocks(np.concatenate([packed & 15, packed >> 4])[:n])
    return _e3m0_values(code_BQ, top_B).reshape(-1)[:n]


def _encode_int2(x_N: np.ndarray) -> np.ndarray:
    n, bits_BQ = x_N.size, _blocks(_normal_bits(x_N))
    count_B = np.minimum(n - np.arange(bits_BQ.shape[0]) * BLOCK, BLOCK)
    magnitude_BQ = bits_BQ & _MAGNITUDE
    step_B = _steps(magnitude_BQ, np.float32(_STEP / count_B))
    upper_BQ = magnitude_BQ >= (step_B << 16)[:, None]
    code_N = np.where(step_B[:, None] > 0, ((bits_BQ >> 30) & 2) | upper_BQ, 0).reshape(-1)[:n]
    quarters = np.split(np.pad(code_N, (0, -n % 4)), 4)
    packed = sum(quarter << (2 * i) for i, quarter in enumerate(quarters))
    return np.concatenate([packed, step_B & 255, step_B >> 8]).astype(np.uint8)


def _steps(magnitude_BQ: np.ndarray, factor_B: np.ndarray) -> np.ndarray:
    exponent_BQ = magnitude_BQ >> 23
    top_B = np.max(exponent_BQ, axis=1)
    significand_BQ = np.where(exponent_BQ > 0, (magnitude_BQ & _MANTISSA) | (_MANTISSA + 1), 0)
    shift_BQ = np.minimum(top_B[:, None] - exponent_BQ + 2, 31)
    total_B = np.sum(significand_BQ >> shift_BQ, axis=1)
    step_B = _encode_bfloat16((total_B >> 6).astype(np.float32) * factor_B).astype(np.int64)
    step_B = np.minimum(step_B + ((top_B - 142) << 7), 254 << 7)
    return np.where((top_B > 0) & (step_B >> 7 >= 2), step_B, 0)


def _decode_int2(code_K: np.ndarray, n: int) -> np.ndarray:
    packed, scales = np.split(code_K.astype(np.int32), [(n + 3) // 4])
    code_BQ = _blocks(np.concatenate([(packed >> (2 * i)) & 3 for i in range(4)])[:n])
    low_B, high_B = scales.reshape(2, -1)
    step_B = low_B | (high_B << 8)
    halves_BQ = ((step_B & 127) | 128)[:, None] * np.where(code_BQ & 1, 3, 1)
    power_B = np.where(step_B > 0, (step_B >> 7) - 135, 0)
    x_BQ = _times_power_of_two(halves_BQ, power_B[:, None])
    x_BQ = np.where(code_BQ & 2, -x_BQ, x_BQ)
    return np.where(step_B[:, None] > 0, x_BQ, np.float32(0)).reshape(-1)[:n]


def _encode_topk(x_N: np.ndarray) -> np.ndarray:
    bits_BQ = _blocks(_normal_bits(x_N))
    place_BT = np.argsort(-(bits_BQ & _MAGNITUDE), axis=1, kind="stable")[:, :SENT]
    code_BT, top_B = _e3m0_codes(np.take_along_axis(bits_BQ, place_BT, axis=1))
    key_BT = np.sort(np.where(code_BT > 0, (place_BT << 4) | code_BT, 0), axis=1)
    low, high = np.split(key_BT & 15, 2, axis=1)
    parts = (key_BT >> 4, low | (high << 4), top_B)
    return np.concatenate([part.reshape(-1) for part in parts]).astype(np.uint8)


def _decode_topk(code_K: np.ndarray, n: int) -> np.ndarray:
    num_blocks = -(-n // BLOCK)
    ends = [SENT * num_blocks, SENT * num_blocks * 3 // 2]
    places, codes, top_B = np.split(code_K.astype(np.int32), ends)
    place_BT, packed = places.reshape(-1, SENT), codes.reshape(-1, SENT // 2)
    code_BT = np.concatenate([packed & 15, packed >> 4], axis=1)
    value_BT, x_BQ = _e3m0_values(code_BT, top_B), np.zeros((num_blocks, BLOCK), np.float32)
    row_BT = np.broadcast_to(np.arange(num_blocks)[:, None], place_BT.shape)
    sent_BT = code_BT > 0
    x_BQ[row_BT[sent_BT], place_BT[sent_BT]] = value_BT[sent_BT]
    return x_BQ.reshape(-1)[:n]


class Wire(NamedTuple):
    """A format. encode: [N] float32 -> codes of dtype; decode: back, of n values.

    size: bytes of n values.
    """

    dtype: str
    encode: Callable[[np.ndarray], np.ndarray]
    decode: Callable[[np.ndarray, int], np.ndarray]
    size: Callable[[int], int]


WIRES = MappingProxyType({
    "float32": Wire("<f4", lambda x_N: x_N, lambda code_N, n: code_N, lambda n: 4 * n),
    "bfloat16": Wire("<u2", _encode_bfloat16, _decode_bfloat16, lambda n: 2 * n),
    "int8": Wire("i1", _encode_int8, _decode_int8, lambda n: n + 4 * -(-n // BLOCK)),
    "float4_e3m0": Wire("u1", _encode_e3m0, _decode_e3m0, lambda n: (n + 1) // 2 + -(-n // BLOCK)),
    "int2": Wire("u1", _encode_int2, _decode_int2, lambda n: (n + 3) // 4 + 2 * -(-n // BLOCK)),
    "topk": Wire("u1", _encode_topk, _decode_topk, lambda n: 13 * -(-n // BLOCK)),
})  # fmt: skip

# A mean is not sparse, and two bits are too few for one that nobody corrects.
DOWN = ("float32", "bfloat16", "int8", "float4_e3m0")


def encode(name: str, sizes: tuple[int, ...], x_N: np.ndarray) -> bytes:
    """The payload of a fragment: its leaves of these sizes, one after the other, each encoded."""
    leaves = np.split(np.asarray(x_N, np.float32), np.cumsum(sizes)[:-1])
    dtype = WIRES[name].dtype
    return b"".join(WIRES[name].encode(leaf).astype(dtype).tobytes() for leaf in leaves)


def decode(name: str, sizes: tuple[int, ...], payload: bytes) -> np.ndarray:
    """The float32 values of `encode`. Raises ValueError for a payload of another size."""
    wire, start, leaves = WIRES[name], 0, []
    if len(payload) != payload_size(name, sizes):
        raise ValueError(
            f"{len(payload)} bytes are no {name} payload of leaves of {sizes} values: it has "
            f"{payload_size(name, sizes)}"
        )
    for n in sizes:
        codes = np.frombuffer(payload[start : start + wire.size(n)], wire.dtype)
        leaves.append(wire.decode(codes, n).astype(np.float32))
        start += wire.size(n)
    return np.concatenate(leaves)


def payload_size(name: str, sizes: tuple[int, ...]) -> int:
    """Bytes of a payload."""
    return sum(map(WIRES[name].size, sizes))
