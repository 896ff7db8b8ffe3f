"""Texts and metrics of a DiLoCo run: tables at its start, log lines of a resume, metrics.

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
from maxdiloco.engine.calls import bytes_on_device
from maxdiloco.engine.layout import Layout, State
from maxdiloco.engine.restore import Restorer
from maxdiloco.engine.settings import HOST
from maxdiloco.engine.trainer import Description, SavedLayout
from maxdiloco.output import aligned


def description(layout: Layout, *, sizes: Sequence[int] | None = None) -> Description:
    """See Trainer.description.

    Args:
      layout: the run's layout.
      sizes: bytes of each fragment that one replica sends to another one; None: the bytes of the
        transport.
    """
    settings = layout.settings
    overlap = settings.round_overlap
    if overlap == "none":
        overlap = f"tau {settings.overlap_steps}"
    padded = settings.transport != HOST
    if sizes is None:
        sizes = [plan.padded_bytes if padded else plan.unpadded_bytes for plan in layout.plans]
    fragments = fragment_table(layout, sizes)
    payload = layout.plans[0].payload
    title = f"DiLoCo of {settings.num_fragments} fragments, {overlap}, {payload.wire}"
    if payload.parts:
        title += f", reduce-scatter with {payload.parts.mean_dtype} means"
    start = (*_replica_table(layout), *fragments, *memory_lines(layout))
    return Description(title, tuple(fragments), start, resident(layout), bool(payload.parts))


def _replica_table(layout: Layout) -> list[str]:
    """Return the mesh position and the devices of each replica."""
    positions = layout.mesh.shape["diloco"]
    rows = [("replica", "mesh position", "devices")]
    for m in range(layout.num_replicas):
        position = m * positions // layout.num_replicas
        ids = [device.id for device in np.ravel(layout.mesh.devices[position])]
        rows.append((m, position, f"{ids[0]}..{ids[-1]}" if len(ids) > 1 else str(ids[0])))
    return aligned(rows)


def fragment_table(layout: Layout, sizes: Sequence[int]) -> list[str]:
    """Return the table of fragments, and warnings for large ones.

    Args:
      layout: the run's layout.
      sizes: bytes of each fragment that one replica sends to another one.
    """
    total = sum(plan.fragment.size for plan in layout.plans)
    rows = [("fragment", "layers", "parameters", "padding", "bytes sent", "share")]
    for p, plan in enumerate(layout.plans):
        layers = _ranges(plan.fragment.layers) if len(layout.plans) > 1 else "all"
        padding, size = max(sizes[p] - plan.unpadded_bytes, 0), plan.fragment.size
        rows.append(
            (p, layers, f"{size:,}", f"{padding:,}", f"{sizes[p]:,}", f"{size / total:.1%}")
        )
    lines = aligned(rows)
    for p in oversized(sizes):
        remedy = "Cut it by rows with a larger num_nonlayer_fragments, or use fewer layer fragments"
        if layout.plans[p].fragment.layers:
            remedy = "Use more fragments"
        lines.append(
            f"warning: fragment {p} sends {sizes[p]:,} bytes, more than twice the median, and sets "
            f"the peak bandwidth. {remedy}."
        )
    return lines


def _ranges(layers: Sequence[int]) -> str:
    """Shorten runs of layers: 0,1,2,5 -> '0-2,5'. Without layers: 'none'."""
    shown = []
    for _, run in itertools.groupby(enumerate(layers), lambda pair: pair[1] - pair[0]):
        first, *others = (layer for _, layer in run)
        shown.append(f"{first}-{others[-1]}" if others else str(first))
    return ",".join(shown) or "none"


def memory_lines(layout: Layout) -> list[str]:
    """Return the bytes on one device of the outer state and of error-feedback residuals."""
    state, copies = layout.state, "one copy on every slice"
    if layout.settings.is_eager:
        copies = f"one copy for each of {layout.num_replicas} replicas"
    lines = [
        f"outer state: {_mib((state.outer, state.outer_opt)):.1f} MiB a device "
        f"({_mib(state.outer):.1f} MiB of it parameters), {copies}, kept in "
        f"{_memory_of(state.outer)} memory"
    ]
    if jax.tree.leaves(state.residual):
        lines.append(
            f"error feedback: {_mib(state.residual):.1f} MiB a device, a residual for each replica"
        )
    return lines


def resident(layout: Layout) -> str:
    """Return the memory of the state other than replicas and their optimizers [MiB a device]."""
    state = layout.state
    memory = "" if _memory_of(state.outer) == "device" else f" (in {_memory_of(state.outer)})"
    shown = [
        f"outer state{memory} {_mib((state.outer, state.outer_opt)):.1f}",
        f"in flight {_mib(state.in_flight):.1f}",
    ]
    if jax.tree.leaves(state.residual):
        shown.append(f"residuals {_mib(state.residual):.1f}")
    return ", ".join(shown)


def _memory_of(tree: Any) -> str:
    return jax.tree.leaves(tree)[0].sharding.memory_kind or "device"


def _mib(tree: Any) -> float:
    return sum(map(bytes_on_device, jax.tree.leaves(tree))) / 2**20


def restore_lines(restorer: Restorer, t: int) -> list[str]:
    """Return log lines on the differences between a checkpoint of step t and the restored state."""
    now, before, saved = restorer.layout.settings, restorer.before, restorer.saved
    M, old = now.num_replicas, saved.num_replicas
    lines = []
    if M != old:
        lines.append(f"replicas {old} -> {M}: replica r resumes from replica r mod {old}.")
    if M < old:
        oldest = max(_ages(before.schedule, t, saved), key=lambda age: age[0])[1]
        lines.append(
            f"replicas from {M} on are dropped with their inner optimizers; the outer parameters "
            f"have their work up to {oldest} steps ago."
        )
    if before.is_eager and not now.is_eager:
        lines.append("the outer parameters are the mean over the replicas' copies.")
    if now.is_eager and not before.is_eager:
        lines.append("each replica starts from a copy of the outer parameters.")
    if not restorer.same_fragments:
        lines.append("the fragments have changed: the outer optimizer starts from scratch.")
    until = t if restorer.keeps_flight else saved.dropped_until
    if sends := before.schedule.pending(t, dropped_until=until):
        lines.append(_dropped(sends, before.round_overlap, old))
    if now.feeds_back and not restorer.keeps_residual:
        lines.append("error feedback: the residuals of the replicas start at zero.")
    if before.feeds_back and not now.feeds_back:
        lines.append("error feedback: the residuals of the replicas are dropped.")
    if now.round_overlap != "none" and not restorer.keeps_flight:
        lines.append(f"{now.round_overlap}: the first exchanges are as in round 1.")
    return lines


def _dropped(sends: Sequence[Event], round_overlap: str, M: int) -> str:
    """Return the log line on dropped exchanges of a run with this round overlap and M replicas."""
    named = ", ".join(f"{send.fragment} (sent after step {send.send_step})" for send in sends)
    line = f"dropped: exchanges in flight, of fragments {named}."
    if round_overlap == "none":
        return f"{line} The replicas keep their values, so later outer gradients have them."
    kept = "nothing" if round_overlap == "delayed" else f"a replica's own share, 1/{M},"
    return (
        f"{line} The replicas were merged when these were sent: the outer parameters keep {kept} "
        "of the progress of these rounds, the replicas the fraction alpha."
    )


def closing_line(schedule: Schedule, state: State) -> str:
    """Return the step, and the age of the outer parameters."""
    ages = ", ".join(age for _, age in _ages(schedule, state.t, state))
    return f"done: step {state.t}; age of each fragment of the outer parameters [steps]: {ages}"


def _ages(schedule: Schedule, t: int, state: State | SavedLayout) -> list[tuple[int, str]]:
    """Return the age of each fragment of the outer parameters [steps], as a number and in words.

    The age is a lower bound if the last exchange belongs to an earlier schedule.
    """
    most = t - state.schedule_since if state.schedule_since else math.inf
    ages = schedule.ages(t, dropped_until=state.dropped_until)
    return [(age, str(age) if age < most else f"{most} or more") for age in ages]


def state_metrics(state: State) -> dict[str, float]:
    """Return metrics of the fragment that was merged last; empty before the first merge.

    The cosine is a mean over pairs of replicas, weighted by the product of their norms. It follows
    from the norms of the replicas and of the mean:
    |sum g|^2 = sum |g_m|^2 + sum over pairs of 2 g_m g_n. In eager mode the update ratio belongs to
    one replica of this process. The norm of the residuals refers to the fragment sent last, and is
    a mean over the replicas of this process.
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
