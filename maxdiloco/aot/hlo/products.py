"""Floating-point operations of the matrix products in a compiled program, and of its kernels.

The compiler gives Pallas kernels no estimate. Splash attention and the products of experts, of
jax.experimental.pallas.ops.tpu and of XLA itself, have names; what each multiplies follows from the
operands. Attention counts with heads filled up to the lanes of the matrix unit.
"""

import math
import re

from maxdiloco.aot.hlo.notation import Shape, elements, shape
from maxdiloco.aot.hlo.reader import Computation, Instruction, Module, executed

PALLAS = "tpu_custom_call"
LANES = 128
# Products of [L, H] and [H, L] or of that size: the kernels of the backward pass compute the
# scores again.
PRODUCTS = {"fwd": 2, "dkv": 4, "dq": 3}
FLOATS = ("bf16", "f16", "f32")
_ATTENTION = re.compile(r"splash_m[hq]a_(fwd|dkv|dq)_")
# Rows times the matrix of their expert, or it transposed, the sums of their products for each, and
# what finds rows.
_EXPERTS = re.compile(r"(ragged-dot-none|gmm|tgmm|ragged-dot-metadata)\b")


def matmul_flops(module: Module) -> float:
    """FLOPs of one run on one device; a multiplication with its addition counts as two.

    The body of a loop counts as often as it runs; XLA's own count takes it once. Products inside
    Pallas kernels are not in the text and do not count.
    """
    counts = {"dot": _dot, "convolution": _convolution}
    products = (
        run.times * counts[run.instruction.opcode](run.computation, run.instruction)
        for run in executed(module)
        if run.instruction.opcode in counts
    )
    return sum(products, 0.0)


def _shapes(where: Computation, item: Instruction) -> list[Shape]:
    return [shape(where[name].shape) for name in item.operands]


def _dot(computation: Computation, item: Instruction) -> float:
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", item.attributes)
    lhs = _shapes(computation, item)[0].dims
    inner = [lhs[int(dim)] for dim in contracted[1].split(",") if dim] if contracted else []
    return 2.0 * math.prod(shape(item.shape).dims) * math.prod(inner)


def _convolution(computation: Computation, item: Instruction) -> float:
    """XLA:TPU writes every product as a convolution; batch dims are strided spatial ones."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", item.attributes)
    if labels is None:
        text = item.attribute("dim_labels") or ""
        raise ValueError(f"%{item.name} has dim_labels {text!r}, which this reader cannot read")
    lhs, kernel = (
        dict(zip(names, operand.dims, strict=True))
        for names, operand in zip(labels.groups(), _shapes(computation, item), strict=False)
    )
    out = dict(zip(labels[3], shape(item.shape).dims, strict=True))
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
    positions = (o * stride + k * dilation - low for k in range(kernel) for o in range(out))
    return sum(0 <= x <= (size - 1) * base and x % base == 0 for x in positions)


def is_kernel(item: Instruction) -> bool:
    """Whether an instruction calls a Pallas kernel."""
    return item.opcode == "custom-call" and item.attribute("custom_call_target") == PALLAS


def kernel_flops(where: Computation, item: Instruction) -> float | None:
    """FLOPs of a kernel on one device; None for one that is not known here."""
    if named := _EXPERTS.match(item.name):
        return _expert_flops(named[1], where, item)
    named = _ATTENTION.search(item.name)
    return _attention_flops(named[1], where, item) if named else None


def _expert_flops(name: str, where: Computation, item: Instruction) -> float:
    """Of rows and their experts' matrices, or the gradient; rows of other devices count too."""
    if name == "ragged-dot-metadata":
        return 0.0
    rows, factor = [x.dims for x in _shapes(where, item) if x.dtype in FLOATS]
    width = factor[-1] if name == "tgmm" else shape(item.shape).dims[-1]
    return 2.0 * math.prod(rows) * width


def _attention_flops(name: str, where: Computation, item: Instruction) -> float:
    """FLOPs of a causal attention kernel on one device, lanes included.

    The first operand says which blocks of scores are computed, those on and below the diagonal:
    [.., rows of blocks, at most so many a row], of dkv [.., at most so many a column, columns].
    Queries are the first array of floats and keys the second, [B, N, ...] or of one sequence
    [N, ...]. There are fewer queries than keys where devices share a sequence, evenly.
    """
    operands = _shapes(where, item)
    queries, keys, *_ = [x.dims for x in operands if x.dtype in FLOATS and len(x.dims) > 2]
    results = [shape(text).dims for text in elements(item.shape)]
    # Tokens may be in the lanes of what goes in; in what comes out they are not.
    either = [sorted(dims[-2:]) for dims in (queries, keys)]
    H = next(dims[-1] for dims in results if sorted(dims[-2:]) in either)
    L, S = (dims[-1] * dims[-2] // H for dims in (queries, keys))
    *_, rows, columns = operands[0].dims
    shards, block = S // L, S // columns if name == "dkv" else L // rows
    width = rows * shards if name == "dkv" else columns
    computed = sum(min(row + 1, width) for row in range(S // block)) / shards
    lanes = -(-H // LANES) * LANES
    return PRODUCTS[name] * 2.0 * math.prod(queries[:-2]) * block**2 * lanes * computed
