"""Payloads of fragments in the wire formats of diloco/quantize.py, by numpy."""

import numpy as np

from maxdiloco.diloco import quantize

WIRES = quantize.NAMES
# A mean is not sparse, and two bits are too few for one that nobody corrects.
DOWN = ("float32", "bfloat16", "int8", "float4_e3m0")


def encode(name: str, sizes: tuple[int, ...], x_N: np.ndarray) -> bytes:
    """The payload of a fragment: its leaves of these sizes, one after the other, each encoded."""
    leaves = np.split(np.asarray(x_N, np.float32), np.cumsum(sizes)[:-1])
    return b"".join(quantize.encode(name, leaf).tobytes() for leaf in leaves)


def decode(name: str, sizes: tuple[int, ...], payload: bytes) -> np.ndarray:
    """The float32 values of `encode`. Raises ValueError for a payload of another size."""
    wire, start, leaves = quantize.wire_format(name), 0, []
    if len(payload) != payload_size(name, sizes):
        raise ValueError(
            f"{len(payload)} bytes are no {name} payload of leaves of {sizes} values: it has "
            f"{payload_size(name, sizes)}"
        )
    for n in sizes:
        end = start + _size(name, n)
        codes = np.frombuffer(payload[start:end], wire.dtype)
        leaves.append(quantize.decode(name, codes, n))
        start = end
    return np.concatenate(leaves)


def payload_size(name: str, sizes: tuple[int, ...]) -> int:
    """Bytes of a payload."""
    return sum(_size(name, n) for n in sizes)


def _size(name: str, n: int) -> int:
    return quantize.encoded_size(name, n) * quantize.wire_format(name).dtype.itemsize
