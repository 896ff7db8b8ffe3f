"""What DiLoCo tells the user: tables at the start, metrics of an exchange, the last line.

    # R replicas
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from maxdiloco.diloco.fragments import oversized
from maxdiloco.diloco.schedule import Event, Schedule
from maxdiloco.engine import exchanges
from maxdiloco.engine.calls import bytes_on_device
from maxdiloco.engine.saved import Reader
from maxdiloco.engine.state import Layout, State
from maxdiloco.engine.trainer import Description, SavedLayout
from maxdiloco.exchange.payload import payload_bytes
from maxdiloco.processes.output import aligned

MOST_NAMED = 6  # fragments in a line; our choice


def description(layout: Layout, schedule: Schedule, carrier: exchanges.Carrier) -> Description:
    """See Trainer.description."""
    overlap = f"tau {schedule.tau}" if schedule.overlap == "none" else schedule.overlap
    fragments = fragment_table(layout, [carrier.fragment_bytes(plan) for plan in layout.plans])
    memory = memory_lines(layout, carrier.steps_on_device)
    sent = layout.plans[0].payload
    title = f"DiLoCo of {schedule.P} fragments, {overlap}, {sent.wire}"
    if sent.owned:
        title += f", owners who share {sent.owned.reduced}"
    start = (*_replica_table(layout), *fragments, *memory)
    return Description(title, tuple(fragments), start, resident(layout), bool(sent.owned))


def _replica_table(layout: Layout) -> list[str]:
    """The slot of the mesh and the devices of each replica."""
    slots = layout.mesh.shape["diloco"]
    rows = [("replica", "slot", "devices")]
    for m in range(layout.num_replicas):
        slot = m * slots // layout.num_replicas
        ids = [device.id for device in np.ravel(layout.mesh.devices[slot])]
        rows.append((m, slot, f"{ids[0]}..{ids[-1]}" if len(ids) > 1 else str(ids[0])))
    return aligned(rows)


def fragment_table(layout: Layout, wire: Sequence[int]) -> list[str]:
    """Layers, parameters, padding, bytes and share of each fragment; warnings for large ones."""
    total = sum(plan.fragment.size for plan in layout.plans)
    rows = [("fragment", "layers", "parameters", "padding", "bytes on the wire", "share")]
    for p, plan in enumerate(layout.plans):
        layers = _ranges(plan.fragment.layers) if len(layout.plans) > 1 else "all"
        padding, size = max(wire[p] - payload_bytes(plan.payload), 0), plan.fragment.size
        rows.append((p, layers, f"{size:,}", f"{padding:,}", f"{wire[p]:,}", f"{size / total:.1%}"))
    lines = aligned(rows)
    for p in oversized(wire):
        remedy = "Cut it by rows with a larger num_nonlayer_fragments, or use fewer layer fragments"
        if layout.plans[p].fragment.layers:
            remedy = "Use more fragments: num_diloco_fragments"
        lines.append(
            f"warning: fragment {p} sends {wire[p]:,} bytes, more than twice the median, and sets "
            f"the peak bandwidth. {remedy}."
        )
    return lines


def _ranges(layers: Sequence[int]) -> str:
    """0,1,2,5 -> '0-2,5'; none -> 'none'."""
    shown = []
    for _, run in itertools.groupby(enumerate(layers), lambda pair: pair[1] - pair[0]):
        first, *others = (layer for _, layer in run)
        shown.append(f"{first}-{others[-1]}" if others else str(first))
    return ",".join(shown) or "none"


def memory_lines(layout: Layout, steps_on_device: int) -> list[str]:
    """Bytes on one device of theta and the outer optimizer state, and whose they are.

    Of the residuals of error feedback, too, and of what is in flight in host memory, with the part
    of it that is on the device. steps_on_device: of the carrier.
    """
    state, copies = layout.state, "one copy on every slice"
    if layout.per_replica_outer:
        copies = f"one copy for each of {layout.num_replicas} replicas"
    lines = [
        f"outer state: {_mib((state.outer, state.outer_opt)):.1f} MiB a device "
        f"({_mib(state.outer):.1f} MiB of it parameters), {copies}, kept in "
        f"{_memory_of(state.outer)}"
    ]
    if jax.tree.leaves(state.residual):
        lines.append(
            f"error feedback: {_mib(state.residual):.1f} MiB a device, a residual for each "
            f"replica, kept in {_memory_of(state.residual)}"
        )
    if layout.chunk_memory is not None:
        flight, beside = _mib(in_flight(state)), ""
        if chunks := exchanges.chunks_on_device(layout, steps_on_device):
            size = _mib(chunks)
            beside = f"; the chunks of two steps, {size:.1f} MiB at most, are on the device"
        lines.append(f"in flight: {flight:.1f} MiB a device, kept in {layout.chunk_memory}{beside}")
    return lines


def resident(layout: Layout) -> str:
    """State that DiLoCo keeps for a device besides the replicas and their optimizer [MiB]."""
    state = layout.state
    parts = {
        "outer state": (state.outer, state.outer_opt),
        "in flight": in_flight(state),
        "residuals": state.residual,
    }
    place = "" if _memory_of(state.outer) == "device" else f" (in {_memory_of(state.outer)})"
    shown = [f"{name}{place} {_mib(tree):.1f}" for name, tree in parts.items()]
    return ", ".join(shown if jax.tree.leaves(state.residual) else shown[:-1])


def in_flight(state: State) -> tuple:
    """The chunks in a state."""
    return state.outgoing, state.incoming, state.parts, state.arrived


def _memory_of(tree: Any) -> str:
    return jax.tree.leaves(tree)[0].sharding.memory_kind or "device"


def _mib(tree: Any) -> float:
    return sum(map(bytes_on_device, jax.tree.leaves(tree))) / 2**20


def restore_lines(reader: Reader, t: int) -> list[str]:
    """What reading a state of step t changes: one sentence or more a line."""
    M, old = reader.layout.num_replicas, reader.saved.num_replicas
    lines = []
    if M != old:
        lines.append(
            f"replicas {old} -> {M}: replica r goes on from what was replica r mod {old}."
            f"{_ended(reader, t) if M < old else ''}"
        )
    if reader.was_eager and not reader.layout.per_replica_outer:
        lines.append("theta and its momentum are the means of those of the replicas.")
    if reader.layout.per_replica_outer and not reader.was_eager:
        lines.append("each replica starts from a copy of theta and its momentum.")
    until = t if reader.keeps_flight else reader.saved.dropped_until
    if sends := reader.before.schedule.pending(t, dropped_until=until):
        lines.append(_dropped(sends, reader.before.outer_overlap, old, all_stay=M >= old))
    if reader.settings.error_feedback and not reader.keeps_residual:
        lines.append("error feedback: the residuals of the replicas begin at zero.")
    if reader.before.error_feedback and not reader.settings.error_feedback:
        lines.append("error feedback: the residuals of the replicas are dropped.")
    if reader.settings.outer_overlap != "none" and not reader.keeps_flight:
        lines.append(f"{reader.settings.outer_overlap}: the first exchanges are as in round 1.")
    return lines


def _ended(reader: Reader, t: int) -> str:
    """What becomes of the work of the replicas that do not go on after step t."""
    M, old = reader.layout.num_replicas, reader.saved.num_replicas
    age = max(_ages(reader.before.schedule, t, reader.saved), key=lambda age: age[0])[1]
    who = f"replica {M}" if old - M == 1 else f"replicas {M} to {old - 1}"
    gone = "the state of their optimizers is gone"
    if age == "0":
        return f" theta has all the work of {who}; {gone}."
    steps = "step" if age == "1" else "steps"
    return f" theta keeps the work of {who} up to {age} {steps} ago; the rest is lost, and {gone}."


def _dropped(sends: Sequence[Event], overlap: str, M: int, *, all_stay: bool) -> str:
    """The line on exchanges in flight that are dropped. overlap, M: of the run that sent them."""
    named = ", ".join(f"{send.fragment} (sent after step {send.send_step})" for send in sends)
    if len(sends) > MOST_NAMED:
        steps = f"{sends[0].send_step} to {sends[-1].send_step}"
        named = f"{len(sends)} of them, sent after steps {steps}"
    line = f"dropped: fragments in flight, {named}."
    if overlap == "none":
        return (
            f"{line} theta and the replicas{'' if all_stay else ' that go on'} keep their values, "
            f"so the next outer gradients carry {'the same' if all_stay else 'their'} progress."
        )
    kept = "nothing" if overlap == "delayed" else f"a replica's own part, 1/{M} of it,"
    return (
        f"{line} {overlap} merges when it sends: of what these rounds have moved {kept} is in "
        f"theta, and alpha of it in the replicas; the rest is lost."
    )


def closing_line(schedule: Schedule, state: State) -> str:
    """The step, and how old theta's values are."""
    shown = [age for _, age in _ages(schedule, state.t, state)]
    return f"done: step {state.t}; age of each fragment of theta [steps]: {', '.join(shown)}"


def _ages(schedule: Schedule, t: int, of: State | SavedLayout) -> list[tuple[int, str]]:
    """How old theta's values are [steps], and in words: earlier exchanges had another schedule."""
    most = t - of.schedule_since if of.schedule_since else math.inf
    ages = schedule.ages(t, dropped_until=of.dropped_until)
    return [(age, str(age) if age < most else f"{most} or more") for age in ages]


def state_metrics(state: State) -> dict[str, float]:
    """Of the fragment that was synchronised last; empty before the first synchronisation.

    When eager each replica has its own update, and the metric is that of a replica held here. The
    mean pairwise cosine is weighted by the product of the two norms, so it follows from the norms
    of the replicas and of the mean: |sum g|^2 = sum |g_m|^2 + sum over pairs of 2 g_m g_n. The norm
    of the residuals is of the fragment sent last, a mean over the replicas held here.
    """
    sizes, row = jax.tree.map(np.asarray, state.sizes), {}
    norm_R = np.asarray(sizes.norm_R, np.float64)
    if norm_R.any():
        row["diloco/outer_grad_norm"] = float(sizes.mean_norm)
        row["diloco/drift"] = float(np.mean(sizes.drift_R))
        ratio = state.update_ratio.addressable_data(0)
        row["diloco/outer_update_ratio"] = float(np.ravel(ratio)[0])
    products = norm_R.sum() ** 2 - (norm_R**2).sum() if np.isfinite(norm_R).all() else 0.0
    if products > 0:
        inner = (norm_R.size * float(sizes.mean_norm)) ** 2 - (norm_R**2).sum()
        row["diloco/outer_grad_cosine"] = float(np.clip(inner / products, -1, 1))
    if not isinstance(state.residual_norm_R, tuple):
        shards = state.residual_norm_R.addressable_shards
        held = {str(shard.index): np.asarray(shard.data) for shard in shards}
        row["diloco/residual_norm"] = float(np.mean(np.concatenate([*held.values()])))
    return row
