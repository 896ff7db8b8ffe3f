"""Where every array of a DiLoCo run lies, and which fragment holds what: all that is static.

    leaf        one array of a replica's parameters
     | diloco/slices.py: the entries of it that a fragment takes
    LeafSlice   --.
     |             `--  Fragment: one slice of each leaf it touches (diloco/fragments.py)
     | exchange/payload.py: the part of the slice that one device sends
    WireShard   --.
                   `--  Payload: one shard of each slice of a fragment, and flags
    FragmentPlan        a Fragment, its Payload, and the chunks in which that travels
    Layout              all FragmentPlans, and the State as shapes with shardings

    # R replicas  F leaves
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiloco.diloco import fragments
from maxdiloco.diloco.slices import LeafSlice
from maxdiloco.engine.chunks import cut, pieces_of_a_chunk
from maxdiloco.engine.trainer import ExchangeSettings
from maxdiloco.exchange import collective, payload
from maxdiloco.parallel import offload
from maxdiloco.parallel.mesh import devices_of_slice
from maxdiloco.parallel.sharding import axes_of, optimizer_shardings, spec_on


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """All that a run needs to go on: a pytree of arrays, and t as a Python int.

    params, opt_state: [R, ...] of the replicas. outer: theta, float32, [...] ([R, ...] when eager).
    outer_opt: state of the outer optimizer, one entry per fragment. outgoing: pieces of the chunks
    of the fragment on the wire; incoming: of those that have arrived, per receive slot.
    bad: [R, F] whether a replica's leaf had a NaN or infinity at a send; bad_before: the same
    before the last synchronisation. sizes, update_ratio ([R] when eager): of the fragment applied
    last. residual: of error feedback, float32, [R, ...] like params, kept where theta is, and its
    norm of the fragment sent last; both () without. dropped_until: exchanges that were in flight
    after this step are never applied. schedule_since: the schedule is the present one after it.
    """

    t: int = field(metadata=dict(static=True))
    params: Any
    opt_state: Any
    outer: Any
    outer_opt: tuple[Any, ...]
    outgoing: tuple[jax.Array, ...]
    incoming: tuple[tuple[jax.Array, ...], ...]
    bad: jax.Array
    bad_before: jax.Array
    sizes: collective.Sizes
    update_ratio: jax.Array
    residual: Any = ()
    residual_norm_R: Any = ()
    dropped_until: int = field(default=0, metadata=dict(static=True))
    schedule_since: int = field(default=0, metadata=dict(static=True))


@dataclass(frozen=True)
class FragmentPlan:
    """One fragment, ready to be packed and merged; those of equal `form` share their programs."""

    index: int
    fragment: fragments.Fragment
    payload: payload.Payload
    num_chunks: int = 1
    num_pieces: int = 1  # arrays of each chunk: the first ones of Layout.pieces

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


@dataclass(frozen=True)
class Layout:
    """Shapes and shardings of a run's state, and the plans of its fragments.

    paths, specs: of one replica's parameter leaves, in tree order. pieces: of a chunk, see
    engine.chunks; none when every fragment travels whole. per_replica_outer: whether theta has a
    leading R (eager). chunk_memory: where the chunks in the state are kept: offload.HOST or, None,
    the device. state: of ShapeDtypeStructs with shardings.
    """

    mesh: Mesh
    num_replicas: int
    paths: tuple[str, ...]
    specs: tuple[P, ...]
    plans: tuple[FragmentPlan, ...]
    pieces: tuple[int, ...]
    per_replica_outer: bool
    chunk_memory: str | None
    state: State

    def lengths(self, plan: FragmentPlan) -> tuple[int, ...]:
        """Wire elements per replica and device of the arrays that make a chunk of this fragment."""
        whole = (payload.pad_to_tile(plan.payload.size),)
        return self.pieces[: plan.num_pieces] or whole

    def places(self, plan: FragmentPlan, chunks: Iterable[int] | None = None) -> list[int]:
        """Where the pieces of a fragment's chunks, by default of all, are in a receive slot."""
        chunks = range(plan.num_chunks) if chunks is None else chunks
        return [c * len(self.pieces) + piece for c in chunks for piece in range(plan.num_pieces)]

    def chunk_bytes(self, plan: FragmentPlan) -> int:
        """Bytes of one replica's chunk of this fragment, scales, flags and padding included."""
        itemsize = plan.payload.dtype.itemsize
        return sum(self.lengths(plan)) * devices_of_slice(self.mesh) * itemsize


def _slice_spec(leaf_slice: LeafSlice, spec: P, mesh: Mesh) -> P:
    """In-slice spec of what a slice takes of a leaf: the leaf's, if the entries still divide."""
    axis = leaf_slice.axis
    if leaf_slice.pattern == "whole" or axis >= len(spec):
        return spec
    devices = np.prod([mesh.shape[name] for name in axes_of(spec[axis])], dtype=int)
    if leaf_slice.pattern == "stride" and leaf_slice.count % devices == 0:
        return spec
    return P(*spec[:axis], None, *spec[axis + 1 :])


def plan_fragments(
    params: Any, settings: ExchangeSettings, layer_axis: Any, specs: Sequence[P], mesh: Mesh
) -> tuple[tuple[FragmentPlan, ...], tuple[int, ...]]:
    """Every fragment's payload and chunks, and Layout.pieces. Raises as fragments.partition."""
    leaves, plans = jax.tree.leaves(params), []
    partition = fragments.partition(params, layer_axis, **settings.partition)
    for index, fragment in enumerate(partition):
        shapes = [s.shape(leaves[s.leaf].shape) for s in fragment.slices]
        slice_specs = [_slice_spec(s, specs[s.leaf], mesh) for s in fragment.slices]
        sent = payload.for_leaves(shapes, slice_specs, wire=settings.exchange_dtype, mesh=mesh)
        plans.append(FragmentPlan(index, fragment, sent))
    max_chunks = settings.schedule.max_chunks
    if max_chunks == 0:
        return tuple(plans), ()
    sizes = [plan.payload.size for plan in plans]
    unit = plans[0].payload.dtype.itemsize * devices_of_slice(mesh)
    pieces = pieces_of_a_chunk(sizes, max_chunks=max_chunks, unit=unit)
    cuts = [cut(size, pieces, max_chunks) for size in sizes]
    return tuple(
        replace(plan, num_chunks=num_chunks, num_pieces=num_pieces)
        for plan, (_, num_chunks, num_pieces) in zip(plans, cuts, strict=True)
    ), pieces


def lay_out(
    params: Any,
    opt_state: Any,
    settings: ExchangeSettings,
    *,
    layer_axis: Any,
    num_replicas: int,
    mesh: Mesh,
    optimizer: optax.GradientTransformation,
    outer_memory: str | None,
) -> Layout:
    """The layout for one replica's params and opt_state. outer_memory: offload.HOST or None."""
    paths, leaves = zip(*jax.tree_util.tree_leaves_with_path(params), strict=True)
    specs = tuple(spec_on(x, mesh) for x in leaves)
    schedule, per_replica = settings.schedule, settings.outer_overlap == "eager"
    plans, pieces = plan_fragments(params, settings, layer_axis, specs, mesh)
    struct = functools.partial(_struct, mesh)

    def replicas(x, **other):
        kept = dict(dtype=x.dtype, memory=offload.kind_of(x)) | other
        return struct((num_replicas, *x.shape), P("diloco", *spec_on(x, mesh)), **kept)

    def outer(shape, spec, dtype=jnp.float32, memory=outer_memory):
        if per_replica:
            shape, spec = (num_replicas, *shape), P("diloco", *spec)
        return struct(shape, spec, dtype, memory)

    def chunks(spec):
        length, dtype = num_replicas * devices_of_slice(mesh), plans[0].payload.dtype
        sizes = pieces * schedule.max_chunks
        return tuple(struct((length * size,), spec, dtype, outer_memory) for size in sizes)

    residual, residual_norm_R = (), ()
    if settings.error_feedback:
        kept = dict(dtype=jnp.float32, memory=outer_memory)
        residual = jax.tree.map(lambda x: replicas(x, **kept), params)
        residual_norm_R = struct((num_replicas,), P("diloco"))
    norms_R = struct((num_replicas,), P())
    flags = struct((num_replicas, len(leaves)), P(), jnp.bool_)
    theta = [outer(x.shape, spec) for x, spec in zip(leaves, specs, strict=True)]
    state = State(
        t=0,
        params=jax.tree.map(replicas, params),
        opt_state=jax.tree.map(replicas, opt_state),
        outer=jax.tree.unflatten(jax.tree.structure(params), theta),
        outer_opt=tuple(_outer_opt(plan, leaves, optimizer, mesh, outer) for plan in plans),
        outgoing=chunks(collective.outgoing_spec(mesh)),
        incoming=(chunks(collective.incoming_spec(mesh)),) * schedule.slots if pieces else (),
        bad=flags,
        bad_before=flags,
        sizes=collective.Sizes(norms_R, norms_R, struct((), P())),
        update_ratio=outer((), P(), memory=None),
        residual=residual,
        residual_norm_R=residual_norm_R,
    )
    names = tuple(jax.tree_util.keystr(path) for path in paths)
    memory = outer_memory if pieces else None
    return Layout(mesh, num_replicas, names, specs, plans, pieces, per_replica, memory, state)


def _struct(mesh, shape, spec, dtype=jnp.float32, memory=None) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(mesh, spec, memory_kind=memory)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _outer_opt(plan, leaves, optimizer, mesh, outer):
    """ShapeDtypeStructs of one fragment's state of the outer optimizer."""
    fragment = fragment_structs(plan, leaves)
    shardings = [NamedSharding(mesh, shard.spec) for shard in plan.payload.shards]
    specs = optimizer_shardings(optimizer, fragment, shardings, mesh)
    state = jax.eval_shape(optimizer.init, fragment)
    return jax.tree.map(lambda x, s: outer(x.shape, s.spec, x.dtype), state, specs)


def fragment_structs(plan: FragmentPlan, leaves: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """A fragment's values of theta, of leaves of one replica."""
    shapes = [s.shape(leaves[s.leaf].shape) for s in plan.slices]
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


def fragment_leaves(tree: Any, plan: FragmentPlan) -> Sequence[jax.Array]:
    """The leaves a fragment touches, in tree order; () of an empty tree."""
    leaves = jax.tree.leaves(tree)
    return [leaves[s.leaf] for s in plan.slices] if leaves else ()


def with_fragment(tree: Any, plan: FragmentPlan, values: Sequence[jax.Array]) -> Any:
    """The tree with the leaves a fragment touches replaced by values; an empty one as it is."""
    leaves, structure = jax.tree.flatten(tree)
    if not leaves:
        return tree
    for s, value in zip(plan.slices, values, strict=True):
        leaves[s.leaf] = value
    return jax.tree.unflatten(structure, leaves)


def with_items(items: tuple, places: Sequence[int], values: Sequence[Any]) -> tuple:
    """items with those at `places` replaced by values."""
    new = dict(zip(places, values, strict=True))
    return tuple(new.get(i, item) for i, item in enumerate(items))
