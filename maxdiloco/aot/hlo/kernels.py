"""Least time of the attention kernels in a compiled TPU program, from their shapes.

The compiler gives Pallas kernels no estimate. Splash attention (jax.experimental.pallas.ops.tpu)
names its kernels; what each multiplies follows from the operands. Its time is that of the products
at the chip's peak, with heads filled up to the lanes of the matrix unit: kernels are slower.
"""

import re

from maxdiloco.aot.hlo import shapes
from maxdiloco.aot.hlo.reader import Computation, Instruction

PALLAS = "tpu_custom_call"
LANES = 128
# Products of [L, H] and [H, L] or of that size: the kernels of the backward pass compute the
# scores again.
PRODUCTS = {"fwd": 2, "dkv": 4, "dq": 3}
_NAME = re.compile(r"splash_m[hq]a_(fwd|dkv|dq)_")


def is_kernel(item: Instruction) -> bool:
    """Whether an instruction calls a Pallas kernel."""
    return item.opcode == "custom-call" and item.attribute("custom_call_target") == PALLAS


def attention_flops(where: Computation, item: Instruction) -> float | None:
    """FLOPs of a causal attention kernel on one device, lanes included; None for another kernel.

    The first operand, [.., n, m], says which of the n * n blocks of scores are computed: those
    on and below the diagonal, m a row or a column at most.
    """
    named = _NAME.search(item.name)
    if named is None:
        return None
    operands = [shapes.read(where[name].shape).dims for name in item.operands]
    *_, blocks, width = operands[0]
    blocks, width = max(blocks, width), min(blocks, width)
    computed = sum(min(row + 1, width) for row in range(blocks)) / blocks**2
    B, N, *_ = next(dims for dims in operands if len(dims) == 4)  # queries come first
    results = [shapes.read(shape).dims for shape in shapes.elements(item.shape)]
    *_, L, H = next(dims for dims in results if len(dims) == 4)
    lanes = -(-H // LANES) * LANES
    return PRODUCTS[named[1]] * 2.0 * B * N * L * L * lanes * computed
