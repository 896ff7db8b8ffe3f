"""How every fragment travels: its payload, and the chunks in which it is on the link."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from maxdiloco.diloco import fragments, quantize
from maxdiloco.diloco.schedule import OWNERS
from maxdiloco.diloco.slices import LeafSlice
from maxdiloco.engine.chunks import cut, pieces_of_a_chunk, steps_to_owners
from maxdiloco.engine.trainer import ExchangeSettings
from maxdiloco.exchange import owners, payload
from maxdiloco.parallel.mesh import devices_of_slice
from maxdiloco.parallel.sharding import axes_of


@dataclass(frozen=True)
class FragmentPlan:
    """One fragment, ready to be packed and merged; those of equal `form` share their programs."""

    index: int
    fragment: fragments.Fragment
    payload: payload.Payload
    num_chunks: int = 1
    num_pieces: int = 1  # arrays of each chunk: the first ones of Layout.pieces
    scattered: tuple[int, int] = (1, 1)  # the same of the chunks to owners: Layout.part_pieces

    @property
    def slices(self) -> tuple[LeafSlice, ...]:
        """Of the leaves it touches, in tree order."""
        return self.fragment.slices

    @functools.cached_property
    def form(self) -> tuple[LeafSlice, ...]:
        """What its programs are compiled for."""
        return tuple(s.form for s in self.slices)

    @functools.cached_property
    def starts(self) -> tuple[np.ndarray, ...]:
        """What its programs are given: where each slice starts, or its indices."""
        return tuple(np.array(s.start_or_indices, np.int32) for s in self.slices)


def _slice_spec(leaf_slice: LeafSlice, spec: P, mesh: Mesh) -> P:
    """In-slice spec of what a slice takes of a leaf: the leaf's, if the entries still divide."""
    axis = leaf_slice.axis
    if leaf_slice.pattern == "whole" or axis >= len(spec):
        return spec
    devices = np.prod([mesh.shape[name] for name in axes_of(spec[axis])], dtype=int)
    if leaf_slice.pattern == "stride" and leaf_slice.count % devices == 0:
        return spec
    return P(*spec[:axis], None, *spec[axis + 1 :])


@dataclass(frozen=True, kw_only=True)
class Plans:
    """How all fragments travel.

    pieces: of a chunk, see engine.chunks; none when every fragment travels whole. scatter_steps,
    part_pieces: of the schedule, and of a chunk to owners.
    """

    plans: tuple[FragmentPlan, ...]
    pieces: tuple[int, ...] = ()
    scatter_steps: int = 0
    part_pieces: tuple[int, ...] = ()

    @property
    def all_pieces(self) -> tuple[int, ...]:
        """What tells whether chunks that were saved are cut as these are."""
        return self.part_pieces + self.pieces

    def lengths(self, plan: FragmentPlan) -> tuple[int, ...]:
        """Wire elements per replica and device of the arrays that make a chunk of this fragment.

        From owners per device alone.
        """
        whole = (payload.pad_to_tile(plan.payload.size),)
        return self.pieces[: plan.num_pieces] or whole

    def first_lengths(self, plan: FragmentPlan) -> tuple[int, ...]:
        """The same of the arrays that `pack` makes, all chunks; to owners per slot, too."""
        if not plan.payload.owned:
            return self.lengths(plan) * plan.num_chunks
        num_chunks, num_pieces = plan.scattered
        whole = (payload.pad_to_tile(plan.payload.first_size),)
        return self.part_pieces[:num_pieces] * num_chunks or whole

    def places(self, plan: FragmentPlan, chunks: Iterable[int] | None = None) -> list[int]:
        """Where the pieces of a fragment's chunks, by default of all, are in a receive slot."""
        chunks = range(plan.num_chunks) if chunks is None else chunks
        return [c * len(self.pieces) + piece for c in chunks for piece in range(plan.num_pieces)]

    def part_places(
        self, plan: FragmentPlan, chunks: Iterable[int] | None = None, slot: int = 0
    ) -> list[int]:
        """The same of State.arrived, and of State.parts, which may have several slots of them."""
        num_chunks, num_pieces = plan.scattered
        chunks = range(num_chunks) if chunks is None else chunks
        first = slot * self.scatter_steps
        pieces = len(self.part_pieces)
        return [(first + c) * pieces + piece for c in chunks for piece in range(num_pieces)]

    def chunk_bytes(self, plan: FragmentPlan) -> int:
        """Bytes of one replica's chunk of this fragment, scales, flags and padding included.

        From owners a replica's share of the bytes of its slot.
        """
        sent = sum(self.lengths(plan)) * plan.payload.dtype.itemsize
        if plan.payload.owned:
            sent = quantize.ceil_div(sent, plan.payload.owned.replicas)
        return sent * devices_of_slice(plan.payload.mesh)

    def part_bytes(self, plan: FragmentPlan) -> int:
        """Bytes of one replica's chunk for one owner; 0 without owners."""
        if not plan.payload.owned:
            return 0
        sent = sum(self.first_lengths(plan)) // plan.scattered[0]
        return sent * plan.payload.first_dtype.itemsize * devices_of_slice(plan.payload.mesh)

    def exchange_bytes(self, plan: FragmentPlan) -> int:
        """Bytes that one replica sends to one other in an exchange of this fragment."""
        shared = plan.num_chunks * self.chunk_bytes(plan)
        return shared + plan.scattered[0] * self.part_bytes(plan)


def plan_fragments(
    params: Any,
    settings: ExchangeSettings,
    layer_axis: Any,
    specs: Sequence[P],
    mesh: Mesh,
    num_replicas: int,
) -> Plans:
    """Every fragment's payload and chunks. Raises as fragments.partition."""
    leaves, plans, wire = jax.tree.leaves(params), [], settings.exchange_dtype
    here = num_replicas // mesh.shape["diloco"]
    partition = fragments.partition(params, layer_axis, **settings.partition)
    for index, fragment in enumerate(partition):
        shapes = [s.shape(leaves[s.leaf].shape) for s in fragment.slices]
        slice_specs = [_slice_spec(s, specs[s.leaf], mesh) for s in fragment.slices]
        sent = payload.for_leaves(shapes, slice_specs, wire=wire, mesh=mesh)
        if settings.exchange == OWNERS:
            sent = owners.cut(sent, reduced=quantize.finer(wire, owners.REDUCED), replicas=here)
        plans.append(FragmentPlan(index, fragment, sent))
    steps, scatter_steps = settings.schedule.max_chunks, 0
    if steps == 0:
        return Plans(plans=tuple(plans))

    def chunked(sizes, max_chunks, dtype):
        unit = dtype.itemsize * devices_of_slice(mesh)
        pieces = pieces_of_a_chunk(sizes, max_chunks=max_chunks, unit=unit)
        return pieces, [cut(size, pieces, max_chunks)[1:] for size in sizes]

    part_pieces, scattered = (), [plan.scattered for plan in plans]
    if settings.exchange == OWNERS:
        largest = max((plan.payload for plan in plans), key=lambda sent: sent.first_size)
        to_owners = here * largest.first_size * largest.first_dtype.itemsize
        shared = largest.size * largest.dtype.itemsize
        scatter_steps = steps_to_owners(steps, to_owners=to_owners, shared=shared)
        sizes = [plan.payload.first_size for plan in plans]
        part_pieces, scattered = chunked(sizes, scatter_steps, largest.first_dtype)
    sizes = [plan.payload.size for plan in plans]
    pieces, cuts = chunked(sizes, max(1, steps - scatter_steps), plans[0].payload.dtype)
    plans = [
        replace(plan, num_chunks=num_chunks, num_pieces=num_pieces, scattered=parts)
        for plan, (num_chunks, num_pieces), parts in zip(plans, cuts, scattered, strict=True)
    ]
    return Plans(
        plans=tuple(plans),
        pieces=pieces,
        scatter_steps=scatter_steps,
        part_pieces=part_pieces,
    )
