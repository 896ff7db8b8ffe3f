"""Floating-point operations of the matrix products in a compiled program."""

import math
import re

from maxdiloco.aot.hlo import shapes
from maxdiloco.aot.hlo.executed import executed
from maxdiloco.aot.hlo.reader import Computation, Instruction, Module


def matmul_flops(module: Module) -> float:
    """FLOPs of one run on one device; a multiplication with its addition counts as two.

    The body of a loop counts as often as it runs; XLA's own count takes it once. Products inside
    Pallas kernels are not in the text and do not count.
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
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", item.attributes)
    if labels is None:
        text = item.attribute("dim_labels") or ""
        raise ValueError(f"%{item.name} has dim_labels {text!r}, which this reader cannot read")
    lhs = dict(zip(labels[1], _dims(computation, item.operands[0]), strict=True))
    kernel = dict(zip(labels[2], _dims(computation, item.operands[1]), strict=True))
    out = dict(zip(labels[3], shapes.read(item.shape).dims, strict=True))
    products = 2.0 * out["b"] * out["f"] * kernel["i"]
    window = _window(item)
    for n, dim in enumerate(sorted(key for key in out if key.isdigit())):
        of_dim = {name: values[n] for name, values in window.items() if n < len(values)}
        products *= _pairs(out[dim], kernel[dim], lhs[dim], of_dim)
    return products / int(item.attribute("batch_group_count") or 1)


def _window(item: Instruction) -> dict[str, list]:
    """`window={size=3x1 pad=0_0x1_1 ..}` as lists with an entry for each spatial dim."""
    text = re.search(r"window=\{([^}]*)\}", item.attributes)
    pairs = [entry.split("=") for entry in text[1].split()] if text else []
    return {
        name: [tuple(map(int, v.split("_"))) if "_" in v else int(v) for v in value.split("x")]
        for name, value in pairs
    }


def _pairs(out: int, kernel: int, size: int, window: dict) -> int:
    """Number of (output, kernel) positions of one spatial dim that read an input, not padding."""
    stride, low = window.get("stride", 1), window.get("pad", (0, 0))[0]
    base, dilation = window.get("lhs_dilate", 1), window.get("rhs_dilate", 1)
    last = (size - 1) * base
    count = 0
    for k in range(kernel):
        # The position o * stride + k * dilation - low is a multiple of base in 0..last.
        offset = k * dilation - low
        count += sum(
            1
            for o in range(out)
            if 0 <= o * stride + offset <= last and (o * stride + offset) % base == 0
        )
    return count
