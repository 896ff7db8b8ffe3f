"""What DiLoCo tells the user: tables at the start, metrics of an exchange, the last line.

    # R replicas
"""

import math
from collections.abc import Sequence

import jax
import numpy as np

from maxdiloco.diloco.fragments import oversized
from maxdiloco.diloco.schedule import Event, Schedule
from maxdiloco.engine import exchanges
from maxdiloco.engine.saved import Reader
from maxdiloco.engine.state import Layout, State
from maxdiloco.engine.trainer import Description
from maxdiloco.exchange.collective import Sizes
from maxdiloco.exchange.payload import payload_bytes
from maxdiloco.processes.output import aligned

MOST_NAMED = 6  # fragments in a line; our choice


def description(
    layout: Layout, schedule: Schedule, wire_bytes: Sequence[int], carrier: str
) -> Description:
    """See Trainer.description. wire_bytes: of each fragment. carrier: of exchanges.CARRIERS."""
    overlap = f"tau {schedule.tau}" if schedule.overlap == "none" else schedule.overlap
    fragments = tuple(fragment_table(layout, wire_bytes))
    return Description(
        title=f"DiLoCo of {schedule.P} fragments, {overlap}, {layout.plans[0].payload.wire}",
        fragments=fragments,
        start=(
            *replica_table(layout),
            *fragments,
            outer_memory_line(layout),
            *residual_lines(layout),
            *flight_lines(layout, carrier),
        ),
        resident=resident(layout),
    )


def replica_table(layout: Layout) -> list[str]:
    """The slot of the mesh and the devices of each replica."""
    mesh = layout.mesh
    slots = mesh.shape["diloco"]
    rows = [("replica", "slot", "devices")]
    for m in range(layout.num_replicas):
        slot = m * slots // layout.num_replicas
        ids = [device.id for device in np.ravel(mesh.devices[slot])]
        shown = f"{ids[0]}..{ids[-1]}" if len(ids) > 1 else str(ids[0])
        rows.append((m, slot, shown))
    return aligned(rows)


def fragment_table(layout: Layout, wire: Sequence[int]) -> list[str]:
    """Layers, parameters, bytes and share of each fragment; warnings for large ones.

    padding: of the bytes on the wire, those that fill chunks of one length and whole tiles.
    """
    sizes = [plan.fragment.size for plan in layout.plans]
    rows = [("fragment", "layers", "parameters", "padding", "bytes on the wire", "share")]
    for p, plan in enumerate(layout.plans):
        layers = _ranges(plan.fragment.layers) or "none"
        if len(layout.plans) == 1:
            layers = "all"
        padding, share = wire[p] - payload_bytes(plan.payload), sizes[p] / sum(sizes)
        rows.append((p, layers, f"{sizes[p]:,}", f"{padding:,}", f"{wire[p]:,}", f"{share:.1%}"))
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


def outer_memory_line(layout: Layout) -> str:
    """Bytes of theta and the outer optimizer state on one device, and whose they are."""
    outer = jax.tree.leaves(layout.state.outer)
    total = _mib([*outer, *jax.tree.leaves(layout.state.outer_opt)])
    copies = f"one copy for each of {layout.num_replicas} replicas"
    return (
        f"outer state: {total:.1f} MiB a device ({_mib(outer):.1f} MiB of it parameters), "
        f"{copies if layout.per_replica_outer else 'one copy on every slice'}, kept in "
        f"{_memory_of(outer)}"
    )


def residual_lines(layout: Layout) -> list[str]:
    """Bytes of the residuals of error feedback on one device; none without."""
    residual = jax.tree.leaves(layout.state.residual)
    if not residual:
        return []
    return [
        f"error feedback: {_mib(residual):.1f} MiB a device, a residual for each replica, kept in "
        f"{_memory_of(residual)}"
    ]


def flight_lines(layout: Layout, carrier: str) -> list[str]:
    """Bytes in flight of one device in host memory, and what is on the device of it; none without.

    carrier: of exchanges.CARRIERS.
    """
    if layout.chunk_memory is None:
        return []
    flight = jax.tree.leaves((layout.state.outgoing, layout.state.incoming))
    line = f"in flight: {_mib(flight):.1f} MiB a device, kept in {layout.chunk_memory}"
    chunks = exchanges.chunks_on_device(layout, exchanges.CARRIERS[carrier].steps_on_device)
    if chunks:
        line += f"; the chunks of two steps, {_mib(chunks):.1f} MiB at most, are on the device"
    return [line]


def resident(layout: Layout) -> str:
    """State that DiLoCo keeps for a device besides the replicas and their optimizer [MiB]."""
    state = layout.state
    outer = jax.tree.leaves((state.outer, state.outer_opt))
    where = _memory_of(outer)
    flight = jax.tree.leaves((state.outgoing, state.incoming))
    place = "" if where == "device" else f" (in {where})"
    line = f"outer state{place} {_mib(outer):.1f}, in flight{place} {_mib(flight):.1f}"
    residual = jax.tree.leaves(state.residual)
    return f"{line}, residuals{place} {_mib(residual):.1f}" if residual else line


def _memory_of(arrays: Sequence[jax.ShapeDtypeStruct]) -> str:
    return arrays[0].sharding.memory_kind or "device"


def _mib(arrays: Sequence[jax.ShapeDtypeStruct]) -> float:
    return sum(bytes_on_device(x) for x in arrays) / 2**20


def bytes_on_device(x: jax.ShapeDtypeStruct) -> int:
    """Bytes of an array's shard, without tile padding."""
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


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
    sends = reader.dropped(t)
    if sends:
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
    saved = reader.saved
    age = max(reader.before.schedule.ages(t, dropped_until=saved.dropped_until))
    since = t - saved.schedule_since  # the exchanges before it had another schedule
    age = f"{since} or more" if 0 < saved.schedule_since and age >= since else str(age)
    who = f"replica {M}" if old - M == 1 else f"replicas {M} to {old - 1}"
    gone = "the state of their optimizers is gone"
    if age == "0":
        return f" theta has all the work of {who}; {gone}."
    steps = "step" if age == "1" else "steps"
    return f" theta keeps the work of {who} up to {age} {steps} ago; the rest is lost, and {gone}."


def _dropped(sends: Sequence[Event], overlap: str, M: int, *, all_stay: bool) -> str:
    """The line on exchanges in flight that are dropped. overlap, M: of the run that sent them.

    all_stay: whether every replica of that run goes on.
    """
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
    ages = schedule.ages(state.t, dropped_until=state.dropped_until)
    shown = [str(age) for age in ages]
    if state.schedule_since:  # the exchanges before it had another schedule
        most = state.t - state.schedule_since
        shown = [f"{most} or more" if age >= most else str(age) for age in ages]
    return f"done: step {state.t}; age of each fragment of theta [steps]: {', '.join(shown)}"


def not_finite(layout: Layout, bad_RF: np.ndarray, t: int) -> str:
    """What to say of the first flag of State.bad that is set."""
    m, leaf = np.argwhere(bad_RF)[0]
    return (
        f"step {t}: the outer gradient of replica {m} has a NaN or infinity in "
        f"params{layout.paths[leaf]}. No replica took it in. Go on from the last "
        f"checkpoint with a lower learning_rate, or with nan_policy=skip."
    )


def bad_parameter(name: str, t: int, *, replica: int | None = None) -> str:
    """What to say of a value of the state that is not finite. replica: whose; None: of all."""
    whose = "" if replica is None else f" of replica {replica}"
    return (
        f"step {t}: {name}{whose} has a NaN or infinity: this state is of no use. Go on from the "
        f"last checkpoint with a lower learning rate."
    )


def residual_metrics(norm_R: jax.Array | tuple[()]) -> dict[str, float]:
    """Mean norm of the residuals of the fragment sent last, of the replicas held here."""
    if isinstance(norm_R, tuple):
        return {}
    held = {str(shard.index): np.asarray(shard.data) for shard in norm_R.addressable_shards}
    return {"diloco/residual_norm": float(np.mean(np.concatenate([*held.values()])))}


def state_metrics(state: State) -> dict[str, float]:
    """Metrics of the last exchange, as the state has them."""
    sizes = jax.tree.map(np.asarray, state.sizes)
    row = outer_metrics(sizes, state.update_ratio)
    return row | residual_metrics(state.residual_norm_R)


def outer_metrics(sizes: Sizes, update_ratio: jax.Array) -> dict[str, float]:
    """Norm of the mean outer gradient, mean pairwise cosine, drift and outer update of an exchange.

    Of the fragment that was synchronised last; empty before the first synchronisation. When eager
    each replica has its own update, and the metric is that of a replica of this process. The
    cosines are weighted by the product of the two norms, so that their sum follows from the norms
    of the replicas and of the mean: |sum g|^2 = sum |g_m|^2 + sum over pairs of 2 g_m g_n.
    """
    norm_R = np.asarray(sizes.norm_R, np.float64)
    M = norm_R.size
    if not norm_R.any():
        return {}
    row = {
        "diloco/outer_grad_norm": float(sizes.mean_norm),
        "diloco/drift": float(np.mean(sizes.drift_R)),
        "diloco/outer_update_ratio": float(np.ravel(update_ratio.addressable_data(0))[0]),
    }
    products = norm_R.sum() ** 2 - (norm_R**2).sum() if np.isfinite(norm_R).all() else 0.0
    if products > 0:
        inner = (M * float(sizes.mean_norm)) ** 2 - (norm_R**2).sum()
        row["diloco/outer_grad_cosine"] = float(np.clip(inner / products, -1, 1))
    return row
