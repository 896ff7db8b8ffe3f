"""Fragments in flight in a checkpoint of another M or mesh: read from their bytes and applied.

    # R replicas  D mesh slots  S devices of a slice  C wire elements of a replica on one device

A chunk of codes says nothing of the mesh it was laid out for; the checkpoint's note does. From it
the old layout is worked out again, the codes are put back into leaves, and their mean is applied
before the first step of the resumed run.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiloco.algorithm import DiLoCo
from maxdiloco.algorithm_layout import FragmentPlan, State, plan_fragments
from maxdiloco.diloco import outer, quantize
from maxdiloco.diloco.fragments import Fragment
from maxdiloco.diloco.schedule import Event
from maxdiloco.errors import NumericsError
from maxdiloco.exchange.payload import Share
from maxdiloco.parallel.mesh import in_slice_axes
from maxdiloco.parallel.sharding import axes_of


class OldLayout:
    """How the chunks of a checkpoint lie, from the M and the mesh axes it was saved with."""

    def __init__(self, trainer: DiLoCo, num_replicas: int, mesh: dict[str, int]):
        self.mesh = AbstractMesh(tuple(mesh.values()), tuple(mesh))
        self.num_replicas = num_replicas
        here = trainer.layout
        parts: tuple[Fragment, ...] = tuple(plan.fragment for plan in here.plans)
        one_replica = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), here.state.params
        )
        self.plans, self.chunk = plan_fragments(
            one_replica,
            parts,
            here.specs,
            wire=trainer.wire,
            mesh=self.mesh,
            window=trainer.schedule.window,
        )
        self.in_slice = math.prod(mesh[axis] for axis in in_slice_axes(self.mesh))

    def abstract(self, trainer: DiLoCo) -> dict[str, Any]:
        """The item `flight` of the checkpoint, to be read whole on every device."""
        total = self.num_replicas * self.in_slice * self.chunk
        chunk = jax.ShapeDtypeStruct(
            (total,),
            quantize.wire(trainer.wire).dtype,
            sharding=NamedSharding(trainer.mesh, P()),
        )
        window, slots = trainer.schedule.window, trainer.schedule.slots
        return {"outgoing": (chunk,) * window, "incoming": ((chunk,) * window,) * slots}

    def codes(self, flight: dict[str, Any], send: Event, t: int) -> np.ndarray:
        """[S, R, C] of an exchange: what has arrived by step t, and what was still to go."""
        plan = self.plans[send.fragment]
        M, S, D = self.num_replicas, self.in_slice, self.mesh.shape["diloco"]
        chunks = []
        for c in range(plan.num_chunks):
            if send.send_step + 1 + c <= t:
                arrived = np.asarray(flight["incoming"][send.slot][c])
                chunks.append(arrived.reshape(S, M, self.chunk))
            else:
                waiting = np.asarray(flight["outgoing"][c])
                waiting = waiting.reshape(D, S, M // D, self.chunk).swapaxes(0, 1)
                chunks.append(waiting.reshape(S, M, self.chunk))
        return np.concatenate(chunks, axis=2)[:, :, : plan.payload.size]


def gradients(layout: OldLayout, plan: FragmentPlan, codes_SRC: np.ndarray) -> list[np.ndarray]:
    """The decoded outer gradients of a fragment, [R, ...] float32 for each of its leaves.

    Raises NumericsError when a replica had sent a NaN or infinity.
    """
    flags = codes_SRC[:, :, : len(plan.payload.shares)].astype(np.float32)
    if flags.any():
        _, m, _ = np.argwhere(flags)[0]
        raise NumericsError(
            f"the outer gradient in flight of replica {m} has a NaN or infinity. Go on from an "
            f"earlier checkpoint with a lower learning_rate, or with nan_policy=skip."
        )
    return [_leaf(layout, share, codes_SRC, plan.payload.wire) for share in plan.payload.shares]


def _leaf(layout: OldLayout, share: Share, codes_SRC: np.ndarray, wire: str) -> np.ndarray:
    axes = in_slice_axes(layout.mesh)
    sizes = [layout.mesh.shape[axis] for axis in axes]
    entries = [axes_of(e) for e in share.spec]
    entries += [()] * (len(share.local) - len(entries))
    shards = [math.prod(layout.mesh.shape[a] for a in names) for names in entries]
    M = codes_SRC.shape[1]
    whole = np.zeros((M, *(n * k for n, k in zip(share.local, shards, strict=True))), np.float32)
    flat: dict[tuple[int, ...], np.ndarray] = {}
    for device, place in enumerate(itertools.product(*map(range, sizes))):
        at = dict(zip(axes, place, strict=True))
        shard = tuple(_index(names, at, layout.mesh) for names in entries)
        copy = _index(share.spare, at, layout.mesh)
        code_RC = codes_SRC[device, :, share.start : share.start + share.length]
        values = [np.asarray(quantize.decode(wire, code, share.count)) for code in code_RC]
        buffer = flat.setdefault(shard, np.zeros((M, share.copies * share.count), np.float32))
        buffer[:, copy * share.count : (copy + 1) * share.count] = values
    for shard, buffer in flat.items():
        box = tuple(slice(i * n, (i + 1) * n) for i, n in zip(shard, share.local, strict=True))
        local = buffer[:, : math.prod(share.local)].reshape(M, *share.local)
        whole[(slice(None), *box)] = local
    return whole


def _index(names: Sequence[str], at: dict[str, int], mesh: AbstractMesh) -> int:
    """Position along several mesh axes, the first the slowest."""
    index = 0
    for name in names:
        index = index * mesh.shape[name] + at[name]
    return index


def apply_pending(
    trainer: DiLoCo, state: State, layout: OldLayout, flight: dict[str, Any]
) -> State:
    """Apply every exchange that was in flight, oldest first: the mean over the old replicas."""
    for send in trainer.schedule.pending(state.t):
        if send.send_step <= state.settled:
            continue
        old = layout.plans[send.fragment]
        g_R = gradients(layout, old, layout.codes(flight, send, state.t))
        mean = [np.asarray(leaf) for leaf in outer.ordered_mean(g_R)]
        state = trainer.apply_mean(state, send.fragment, mean)
    return replace(state, settled=state.t)
