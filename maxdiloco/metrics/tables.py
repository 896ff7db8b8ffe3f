"""The tables a run prints at its start: replicas, fragments, outer state."""

import math
from collections.abc import Sequence
from typing import Any

import jax

from maxdiloco.diloco import quantize
from maxdiloco.diloco.fragments import oversized
from maxdiloco.engine.state import Layout


def aligned(rows: Sequence[Sequence[object]]) -> list[str]:
    """Rows as lines with columns in line: the first column to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def replica_table(layout: Layout) -> list[str]:
    """Which replica lies on which devices."""
    mesh = layout.mesh
    slots = mesh.shape["diloco"]
    rows = [("replica", "slot", "devices")]
    for m in range(layout.num_replicas):
        slot = m * slots // layout.num_replicas
        ids = [device.id for device in mesh.devices[slot].flat]
        shown = f"{ids[0]}..{ids[-1]}" if len(ids) > 1 else str(ids[0])
        rows.append((m, slot, shown))
    return aligned(rows)


def bytes_on_wire(layout: Layout, fragment: int) -> int:
    """Bytes of one replica's payload of a fragment, scales, flags and padding included."""
    plan = layout.plans[fragment]
    in_slice = layout.mesh.size // layout.mesh.shape["diloco"]
    itemsize = quantize.wire_format(plan.payload.wire).dtype.itemsize
    return plan.num_chunks * layout.chunk_of(plan) * in_slice * itemsize


def fragment_table(layout: Layout) -> list[str]:
    """Fragment, layers, parameters, bytes on the wire, share; a warning for an oversized one."""
    sizes = [plan.fragment.size for plan in layout.plans]
    wire = [bytes_on_wire(layout, p) for p in range(len(layout.plans))]
    rows = [("fragment", "layers", "parameters", "bytes on the wire", "share")]
    for p, plan in enumerate(layout.plans):
        layers = _ranges(plan.fragment.layers) or "none"
        if len(layout.plans) == 1:
            layers = "all"
        rows.append((p, layers, f"{sizes[p]:,}", f"{wire[p]:,}", f"{sizes[p] / sum(sizes):.1%}"))
    lines = aligned(rows)
    for p in oversized(wire):
        lines.append(
            f"warning: fragment {p} sends {wire[p]:,} bytes, more than twice the median, and sets "
            f"the peak bandwidth. {_remedy(layout, p)}"
        )
    return lines


def _remedy(layout: Layout, p: int) -> str:
    if layout.plans[p].fragment.layers:
        return "Use more fragments: num_diloco_fragments."
    return "Cut it by rows with a larger num_nonlayer_fragments, or use fewer layer fragments."


def _ranges(layers: Sequence[int]) -> str:
    """0,1,2,5 -> '0-2,5'."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def outer_memory_line(layout: Layout, kept_in: str) -> str:
    """Bytes of theta and the outer optimizer state on one device, and whose they are."""
    outer = jax.tree.leaves(layout.state.outer)
    total = _mib([*outer, *jax.tree.leaves(layout.state.outer_opt)])
    copies = f"one copy for each of {layout.num_replicas} replicas"
    return (
        f"outer state: {total:.1f} MiB a device ({_mib(outer):.1f} MiB of it parameters), "
        f"{copies if layout.per_replica_outer else 'one copy on every slice'}, kept in {kept_in}"
    )


def resident(layout: Layout) -> str:
    """What DiLoCo keeps on a device between programs, beside replicas and optimizer [MiB]."""
    state = layout.state
    outer = jax.tree.leaves((state.outer, state.outer_opt))
    where = outer[0].sharding.memory_kind or "device"
    flight = jax.tree.leaves((state.outgoing, state.incoming))
    kept = "outer state" if where == "device" else f"outer state (in {where})"
    return f"{kept} {_mib(outer):.1f}, in flight {_mib(flight):.1f}"


def _mib(arrays: Sequence[jax.ShapeDtypeStruct]) -> float:
    return sum(bytes_on_device(x) for x in arrays) / 2**20


def bytes_on_device(x: jax.ShapeDtypeStruct) -> int:
    """Bytes of an array's shard, tiles not counted."""
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


def memory_line(memory: Any) -> str:
    """What one compiled program needs on a device."""
    sizes = {
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "of these shared": memory.alias_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "on the host": memory.host_argument_size_in_bytes,
    }
    shown = ", ".join(f"{name} {size / 2**20:.1f}" for name, size in sizes.items())
    return f"memory a device [MiB]: {shown}"
