"""Floating-point operations of the matrix products in a compiled program, and of its kernels.

The compiler's own count, compiled.cost_analysis(), is not used: it takes the body of a loop once,
leaves Pallas kernels out, and is None for absent GPUs (docs/reference/compile-report.md has
figures).

The compiler estimates no time for Pallas kernels. The grouped products of experts bring an
estimate. Splash attention of jax.experimental.pallas.ops.tpu is known by its name; its products
follow from the operands, with heads padded to the lanes of the matrix unit.
"""

import math
import re

from maxdiloco.planning.hlo.notation import Shape, arrays, shape
from maxdiloco.planning.hlo.reader import Computation, Instruction, Module, executed_instructions

PALLAS = "tpu_custom_call"
LANES = 128
# Products for each score of two tokens: over the features of keys, and over the features of values.
# The kernels of the backward pass compute the scores again.
PRODUCTS = {"fwd": (1, 1), "dkv": (2, 2), "dq": (2, 1)}
FLOATS = ("bf16", "f16", "f32")
_ATTENTION = re.compile(r"splash_m[hq]a_(fwd|dkv|dq)_")
_OWN_ESTIMATE = re.compile(r'"cost_estimate":\{"flops":"(\d+)"')
_INDICES = "ragged-dot-metadata"  # finds the rows of each expert, multiplies nothing
# Targets of custom calls that neither take noticeable time nor send anything to another slice.
LOCAL_CALLS = """
    AllocateBuffer AssumeGatherIndicesInBound AsyncCollectiveDone AsyncCollectiveStart ConcatBitcast
    GatherScatterIndicesBitpacked HostExecute MoveToDevice MoveToHost PrepareAsyncCallDone
    PrepareAsyncCallStart Sharding SliceId SPMDFullToShardShape SPMDShardToFullShape ZeroCrop
""".split()
_NUMBER = re.compile(r"(\.\d+)+$")  # by which XLA tells instructions of one name apart


def matmul_flops(module: Module) -> float:
    """Count the FLOPs of one run on one device; a multiplication with its addition counts as two.

    The body of a loop counts as often as it runs. Products inside Pallas kernels are not in the
    text and do not count.
    """
    counts = {"dot": _dot, "convolution": _convolution}
    products = (
        run.times * counts[run.instruction.opcode](run.computation, run.instruction)
        for run in executed_instructions(module)
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
    """Count a product that XLA:TPU writes as a convolution, as it does with every product.

    A spatial dim has size n or 1 in each of the three arrays: it is a batch dim, a dim that is
    summed over, or a dim of one factor. The product multiplies n of its n * n pairs of positions.

    Raises:
      ValueError: the window is another one.
    """
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
    for dim in (key for key in out if key.isdigit()):
        sizes = {out[dim], kernel[dim], lhs[dim]}
        if len(sizes - {1}) > 1:
            raise ValueError(f"%{item.name} is not a matrix product: its window has sizes {sizes}")
        products *= max(sizes)
    return products / int(item.attribute("batch_group_count") or 1)


def is_kernel(item: Instruction) -> bool:
    """Tell whether an instruction calls a Pallas kernel."""
    return item.opcode == "custom-call" and item.attribute("custom_call_target") == PALLAS


def kernel_flops(where: Computation, item: Instruction) -> float | None:
    """Return the FLOPs of a kernel on one device; None for an unknown kernel."""
    if own := _OWN_ESTIMATE.search(item.attributes):
        return float(own[1])
    if item.name.startswith(_INDICES):
        return 0.0
    named = _ATTENTION.search(item.name)
    return _attention_flops(named[1], where, item) if named else None


def unknown_calls(module: Module) -> dict[str, int]:
    """Count the custom calls that a report cannot judge.

    They add no time to an estimate, and traffic of theirs between slices is not seen.

    Returns:
      How often each runs in one run of the program, by the name of a Pallas kernel or the target of
      any other call.
    """
    found: dict[str, int] = {}
    for run in executed_instructions(module):
        item = run.instruction
        if item.opcode not in ("custom-call", "custom-call-start"):
            continue
        target = item.attribute("custom_call_target")
        if target in LOCAL_CALLS or kernel_flops(run.computation, item) is not None:
            continue
        name = target if target and target != PALLAS else _NUMBER.sub("", item.name)
        found[name] = found.get(name, 0) + run.times
    return found


def _attention_flops(name: str, where: Computation, item: Instruction) -> float | None:
    """Count a causal attention kernel on one device, padded lanes included; None if it is unknown.

    The first operand lists the blocks of scores to compute, on and below the diagonal: [.., rows of
    blocks, most blocks of a row], or for dkv [.., most blocks of a column, columns]. The first
    three arrays of floats are queries, keys and values. Their shape is [B, N, tokens, features], or
    [N, tokens, features] for one sequence; tokens may be the last dim. If devices share a sequence,
    evenly, there are fewer queries than keys. Values may have fewer features than keys.
    """
    try:
        operands = _shapes(where, item)
        results = [shape(text) for text in arrays(item.shape)]
    except ValueError:  # such as an operand that is a tuple
        return None
    floats = [x.dims for x in operands if x.dtype in FLOATS and len(x.dims) > 2]
    if len(floats) < 3 or operands[0].dtype in FLOATS or len(operands[0].dims) < 2:
        return None
    q, k, v = floats[:3]
    # Results have their features last. Scratch is a result too, with fewer dims.
    made = [x.dims[-2:] for x in results if x.dtype in FLOATS and len(x.dims) == len(q)]
    sizes = _attention_sizes(name, made, *(math.prod(dims[-2:]) for dims in (q, k, v)))
    if sizes is None:
        return None
    L, S, *widths = sizes
    *_, rows, columns = operands[0].dims
    shards, block = S // L, S // columns if name == "dkv" else L // rows
    if not block:
        return None
    width = rows * shards if name == "dkv" else columns
    computed = sum(min(row + 1, width) for row in range(S // block)) / shards
    lanes = (-(-features // LANES) * LANES for features in widths)
    features = sum(n * size for n, size in zip(PRODUCTS[name], lanes, strict=True))
    return 2.0 * math.prod(q[:-2]) * block**2 * features * computed


def _attention_sizes(
    name: str, made: list[tuple[int, ...]], q: int, k: int, v: int
) -> tuple[int, int, int, int] | None:
    """Return the numbers of queries and keys, and the features of keys and of values.

    Args:
      name: of the kernel: `fwd`, `dkv` or `dq`.
      made: (tokens, features) of each result.
      q: tokens times features of the queries.
      k: the same of the keys.
      v: the same of the values.

    Returns:
      The sizes; None if they do not fit each other.
    """
    match name, made:
        case "fwd", [(L, V), *_]:  # the context, and the normalisers
            H, S = q // L, v // V
        case "dq", [(L, H)]:
            S = k // H
            V = v // max(S, 1)
        case "dkv", [(S, H), (_, V)]:
            L = q // H
        case _:
            return None
    return (L, S, H, V) if (L * H, S * H, S * V) == (q, k, v) and S % L == 0 else None
