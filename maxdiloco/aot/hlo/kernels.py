"""Least time of the kernels in a compiled TPU program whose products are known, from their shapes.

The compiler gives Pallas kernels no estimate. Splash attention and the products of experts, of
jax.experimental.pallas.ops.tpu and of XLA itself, have names; what each multiplies follows from the
operands. Their time is that of the products at the chip's peak, of attention with heads filled up
to the lanes of the matrix unit: kernels are slower.
"""

import math
import re

from maxdiloco.aot.hlo import shapes
from maxdiloco.aot.hlo.reader import Computation, Instruction

PALLAS = "tpu_custom_call"
LANES = 128
# Products of [L, H] and [H, L] or of that size: the kernels of the backward pass compute the
# scores again.
PRODUCTS = {"fwd": 2, "dkv": 4, "dq": 3}
FLOATS = ("bf16", "f16", "f32")
_NAME = re.compile(r"splash_m[hq]a_(fwd|dkv|dq)_")
# Rows times the matrix of their expert, or it transposed, the sums of their products for each, and
# what finds rows.
_EXPERTS = re.compile(r"(ragged-dot-none|gmm|tgmm|ragged-dot-metadata)\b")


def is_kernel(item: Instruction) -> bool:
    """Whether an instruction calls a Pallas kernel."""
    return item.opcode == "custom-call" and item.attribute("custom_call_target") == PALLAS


def flops(where: Computation, item: Instruction) -> float | None:
    """FLOPs of a kernel on one device; None for one that is not known here."""
    of_experts = _expert_flops(where, item)
    return attention_flops(where, item) if of_experts is None else of_experts


def _expert_flops(where: Computation, item: Instruction) -> float | None:
    """FLOPs of a product of rows and their experts' matrices, or of its gradient.

    Every row counts. Rows of other devices' experts are left out by the kernel, but not here.
    """
    named = _EXPERTS.match(item.name)
    if named is None:
        return None
    if named[1] == "ragged-dot-metadata":
        return 0.0
    operands = [shapes.read(where[name].shape) for name in item.operands]
    rows, factor = [x.dims for x in operands if x.dtype in FLOATS]
    width = factor[-1] if named[1] == "tgmm" else shapes.read(item.shape).dims[-1]
    return 2.0 * math.prod(rows) * width


def attention_flops(where: Computation, item: Instruction) -> float | None:
    """FLOPs of a causal attention kernel on one device, lanes included; None for another kernel.

    The first operand says which blocks of scores are computed, those on and below the diagonal:
    [.., rows of blocks, at most so many a row], of dkv [.., at most so many a column, columns].
    Queries are the first array of floats and keys the second, [B, N, ...] or of one sequence
    [N, ...]. There are fewer queries than keys where devices share a sequence, evenly.
    """
    named = _NAME.search(item.name)
    if named is None:
        return None
    operands = [shapes.read(where[name].shape) for name in item.operands]
    queries, keys, *_ = [x.dims for x in operands if x.dtype in FLOATS and len(x.dims) > 2]
    results = [shapes.read(shape).dims for shape in shapes.elements(item.shape)]
    # Tokens may be in the lanes of what goes in; in what comes out they are not.
    either = [sorted(dims[-2:]) for dims in (queries, keys)]
    H = next(dims[-1] for dims in results if sorted(dims[-2:]) in either)
    L, S = (dims[-1] * dims[-2] // H for dims in (queries, keys))
    *_, rows, columns = operands[0].dims
    shards, block = S // L, S // columns if named[1] == "dkv" else L // rows
    width = rows * shards if named[1] == "dkv" else columns
    computed = sum(min(row + 1, width) for row in range(S // block)) / shards
    lanes = -(-H // LANES) * LANES
    return PRODUCTS[named[1]] * 2.0 * math.prod(queries[:-2]) * block**2 * lanes * computed
