"""Floating-point operations of the matrix products in a compiled program."""

import math
import re

from maxdiloco.aot.hlo import shapes
from maxdiloco.aot.hlo.executed import executed
from maxdiloco.aot.hlo.reader import Computation, Instruction, Module


def matmul_flops(module: Module) -> float:
    """FLOPs of one run on one device: two for a multiplication and its addition.

    XLA's own count takes the body of a loop once; this one takes it as often as it runs. Products
    inside Pallas kernels are not in the text, so they do not count.
    """
    total = 0.0
    for run in executed(module):
        if run.instruction.opcode == "dot":
            total += run.times * _dot(run.computation, run.instruction)
        elif run.instruction.opcode == "convolution":
            total += run.times * _convolution(run.computation, run.instruction)
    return total


def _dims(computation: Computation, name: str) -> tuple[int, ...]:
    return shapes.read(computation[name].shape).dims


def _dot(computation: Computation, item: Instruction) -> float:
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", item.attributes)
    lhs = _dims(computation, item.operands[0])
    inner = [lhs[int(dim)] for dim in contracted[1].split(",") if dim] if contracted else []
    return 2.0 * math.prod(shapes.read(item.shape).dims) * math.prod(inner)


def _convolution(computation: Computation, item: Instruction) -> float:
    """XLA:TPU writes every product as a convolution; batch dims are strided spatial ones."""
    labels = item.attribute("dim_labels") or ""
    found = re.fullmatch(r"(\w+)_(\w+)->(\w+)", _labels(item))
    if found is None:
        raise ValueError(f"%{item.name} has dim_labels {labels!r}, which this reader cannot read")
    lhs = dict(zip(found[1], _dims(computation, item.operands[0]), strict=True))
    kernel = dict(zip(found[2], _dims(computation, item.operands[1]), strict=True))
    out = dict(zip(found[3], shapes.read(item.shape).dims, strict=True))
    products = 2.0 * out["b"] * out["f"] * kernel["i"]
    window = _window(item)
    for n, dim in enumerate(sorted(key for key in out if key.isdigit())):
        one = {name: values[n] for name, values in window.items() if n < len(values)}
        products *= _pairs(out[dim], kernel[dim], lhs[dim], one)
    return products / int(item.attribute("batch_group_count") or 1)


def _labels(item: Instruction) -> str:
    found = re.search(r"dim_labels=([\w]+->[\w]+)", item.attributes)
    return found[1] if found else ""


def _window(item: Instruction) -> dict[str, list]:
    """`window={size=3x1 pad=0_0x1_1 ..}` as lists, one entry for each spatial dim."""
    found = re.search(r"window=\{([^}]*)\}", item.attributes)
    pairs = [part.split("=") for part in found[1].split()] if found else []
    return {
        name: [tuple(map(int, v.split("_"))) if "_" in v else int(v) for v in value.split("x")]
        for name, value in pairs
    }


def _pairs(out: int, kernel: int, size: int, window: dict) -> int:
    """(output, kernel) positions of one spatial dim that meet an input value and no padding."""
    stride, low = window.get("stride", 1), window.get("pad", (0, 0))[0]
    base, spread = window.get("lhs_dilate", 1), window.get("rhs_dilate", 1)
    last = (size - 1) * base
    count = 0
    for k in range(kernel):
        # o * stride + k * spread - low = position, a multiple of base in 0..last
        offset = k * spread - low
        count += sum(
            1
            for o in range(out)
            if 0 <= o * stride + offset <= last and (o * stride + offset) % base == 0
        )
    return count
