"""The static part of a DiLoCo run: shapes and shardings of its state, and the fragments' plans.

leaf          one array of a replica's parameters
LeafSlice     the entries of a leaf that belong to a fragment (diloco/slices.py)
Fragment      the slices of a fragment (diloco/fragments.py)
WireShard     the part of a slice that one device encodes (payload.py)
Payload       flags and the shards of all slices of a fragment (payload.py)
FragmentPlan  a Fragment, its Payload, and the chunks in which the payload is sent
Layout        all FragmentPlans, and the State as shapes with shardings

    # R replicas  F leaves
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiloco.diloco import quantize, schedule
from maxdiloco.diloco.fragments import Fragment
from maxdiloco.diloco.schedule import Action, Schedule
from maxdiloco.diloco.slices import LeafSlice
from maxdiloco.engine import collective, payload, reduce_scatter
from maxdiloco.engine.payload import Cut, Payload
from maxdiloco.engine.settings import ExchangeSettings
from maxdiloco.parallel import offload
from maxdiloco.parallel.mesh import devices_of_slice
from maxdiloco.parallel.sharding import axes_of, optimizer_shardings, spec_on

# -- state -----------------------------------------------------------------------------------------

# The fields of State that hold chunks in flight.
BUFFERS = ("outgoing", "incoming", "scatter_outgoing", "scatter_incoming")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ChunkBuffer:
    """Chunks in flight in one direction, for one or more exchanges.

    Attributes:
      chunks: one array for each chunk: the chunks of slot 0, then of slot 1, and so on.
      per_slot: number of chunks of a slot.
    """

    chunks: tuple[jax.Array, ...] = ()
    per_slot: int = field(default=0, metadata={"static": True})

    def indices(self, slot: int, numbers: Iterable[int]) -> list[int]:
        """Return the positions in `chunks` of a slot's chunks with these numbers."""
        return [slot * self.per_slot + number for number in numbers]

    def read(self, slot: int, numbers: Iterable[int]) -> tuple[jax.Array, ...]:
        """Return a slot's chunks with these numbers."""
        return tuple(self.chunks[i] for i in self.indices(slot, numbers))

    def write(
        self, slot: int, numbers: Iterable[int], chunks: Sequence[jax.Array]
    ) -> "ChunkBuffer":
        """Return the buffer with a slot's chunks with these numbers replaced.

        Without overlap a buffer has no chunks, and stays empty.
        """
        return replace(self, chunks=with_items(self.chunks, self.indices(slot, numbers), chunks))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """The state of a run after inner step t: a pytree of arrays, and t as a Python int.

    Attributes:
      t: number of inner steps done.
      params: parameters of the replicas, leaves [R, ...].
      opt_state: states of their inner optimizers, leaves [R, ...].
      outer: the outer parameters, float32, leaves [...]; eager: [R, ...].
      outer_opt: state of the outer optimizer, one entry for each fragment.
      outgoing: chunks of the fragment that is being sent; one slot.
      incoming: chunks that have arrived at all slices, one slot for each exchange in flight.
      scatter_outgoing: reduce-scatter: chunks with the parts for the slices that average them.
      scatter_incoming: reduce-scatter: the chunks of `scatter_outgoing` after arrival; one slot.
      bad: [R, F], whether a replica's leaf was not finite in any exchange so far.
      bad_before: `bad` before the last merge.
      sizes: sizes of the outer gradients of the last merge, for the metrics.
      update_ratio: relative size of the last outer update; eager: [R].
      residual: error-feedback residuals, float32, leaves [R, ...]; () without error feedback.
      residual_norm_R: L2 norm of the residual of the fragment sent last; () without error feedback.
      dropped_until: step after which the exchanges in flight were dropped at a resume; 0 for none.
      schedule_since: step after which the current schedule began.
    """

    t: int = field(metadata={"static": True})
    params: Any
    opt_state: Any
    outer: Any
    outer_opt: tuple[Any, ...]
    outgoing: ChunkBuffer
    incoming: ChunkBuffer
    scatter_outgoing: ChunkBuffer
    scatter_incoming: ChunkBuffer
    bad: jax.Array
    bad_before: jax.Array
    sizes: collective.Sizes
    update_ratio: jax.Array
    residual: Any = ()
    residual_norm_R: Any = ()
    dropped_until: int = field(default=0, metadata={"static": True})
    schedule_since: int = field(default=0, metadata={"static": True})

    @property
    def in_flight(self) -> tuple[ChunkBuffer, ...]:
        """All chunks in flight."""
        return tuple(vars(self)[name] for name in BUFFERS)


# -- fragments -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FragmentPlan:
    """How one fragment is exchanged. Fragments of equal `form` share their compiled programs.

    Attributes:
      index: the fragment's index.
      fragment: its slices of the leaves.
      payload: the payload that one device encodes.
      gather: cut of the payload that all slices receive.
      scatter: reduce-scatter: cut of the parts that slices average; None with all-gather.
    """

    index: int
    fragment: Fragment
    payload: Payload
    gather: Cut
    scatter: Cut | None = None

    @property
    def slices(self) -> tuple[LeafSlice, ...]:
        """Slices of the leaves, in tree order."""
        return self.fragment.slices

    @property
    def packed(self) -> Cut:
        """Cut of the payload that `pack` makes."""
        return self.gather if self.scatter is None else self.scatter

    @functools.cached_property
    def form(self) -> tuple[LeafSlice, ...]:
        """The static part of its slices, for which its programs are compiled."""
        return tuple(s.form for s in self.slices)

    @functools.cached_property
    def starts(self) -> tuple[np.ndarray, ...]:
        """The start, or the indices, of each slice: an argument of its programs."""
        return tuple(np.array(s.start_or_indices, np.int32) for s in self.slices)

    # Bytes that one replica sends to one other slice, headers and scales included.

    @property
    def gather_bytes(self) -> int:
        """Bytes of the chunks of `gather`, without padding."""
        return self.payload.gather_bytes(self.payload.size)

    @property
    def scatter_bytes(self) -> int:
        """Bytes of the chunks of `scatter`, without padding; 0 with all-gather."""
        return self.payload.scatter_bytes(self.payload.sent_size) if self.scatter else 0

    @property
    def gather_chunk_bytes(self) -> int:
        """Bytes of one chunk of `gather`."""
        return self.payload.gather_bytes(self.gather.length)

    @property
    def scatter_chunk_bytes(self) -> int:
        """Bytes of one chunk of `scatter`; 0 with all-gather."""
        return self.payload.scatter_bytes(self.scatter.length) if self.scatter else 0

    @property
    def unpadded_bytes(self) -> int:
        """Bytes of the whole exchange, without padding."""
        return self.gather_bytes + self.scatter_bytes

    @property
    def padded_bytes(self) -> int:
        """Bytes of the whole exchange in chunks."""
        scattered = self.scatter.count * self.scatter_chunk_bytes if self.scatter else 0
        return self.gather.count * self.gather_chunk_bytes + scattered

    def bytes_sent(self, action: Action, *, in_programs: bool) -> int:
        """Return the bytes that an action makes one replica send to one other slice.

        Args:
          action: an action of the schedule for this fragment.
          in_programs: whether compiled programs carry padded chunks (transport xla). If not, an
            exchange is sent at once by the action that encodes it.
        """
        match action.name:
            case schedule.INNER_EXCHANGE:
                return self.gather_chunk_bytes
            case schedule.INNER_SCATTER:
                return self.scatter_chunk_bytes
            case schedule.REDUCE_AND_SHARE:
                return self.gather.count * self.gather_chunk_bytes
            case schedule.SYNCHRONISE:
                return self.padded_bytes
            case schedule.REDUCE if not in_programs:
                return self.gather_bytes
            case schedule.PACK | schedule.DELAYED_STEP | schedule.EAGER_STEP if not in_programs:
                return self.scatter_bytes if self.scatter else self.gather_bytes
        return 0

    # Shapes of chunks in a state. A chunk has a row for each replica, and a chunk of means one for
    # each slice.

    @property
    def outgoing_chunks(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The chunks of `gather` before they are sent."""
        spec = collective.outgoing_spec(self.payload.mesh)
        return self._chunks(self.gather, self._gathered_rows, spec, self.payload.dtype)

    @property
    def incoming_chunks(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The chunks of `gather` that have reached a slice."""
        spec = collective.incoming_spec(self.payload.mesh)
        return self._chunks(self.gather, self._gathered_rows, spec, self.payload.dtype)

    @property
    def scattered_chunks(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The chunks of `scatter`, before they are sent and after."""
        rows = self.payload.num_replicas * self.payload.num_slices
        spec = collective.outgoing_spec(self.payload.mesh)
        return self._chunks(self.scatter, rows, spec, self.payload.sent_dtype)

    @property
    def packed_chunks(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The chunks that `pack` makes."""
        return self.scattered_chunks if self.scatter else self.outgoing_chunks

    @property
    def _gathered_rows(self) -> int:
        payload = self.payload
        return payload.num_slices if payload.parts else payload.num_replicas

    def _chunks(self, cut: Cut, rows: int, spec: P, dtype: np.dtype):
        size = rows * devices_of_slice(self.payload.mesh) * cut.length
        return (_struct(self.payload.mesh, (size,), spec, dtype),) * cut.count


def _slice_spec(leaf_slice: LeafSlice, spec: P, mesh: Mesh) -> P:
    """Return the in-slice sharding of a leaf slice: the leaf's, if its entries still divide."""
    axis = leaf_slice.axis
    if leaf_slice.pattern == "whole" or axis >= len(spec):
        return spec
    devices = np.prod([mesh.shape[name] for name in axes_of(spec[axis])], dtype=int)
    if leaf_slice.pattern == "stride" and leaf_slice.count % devices == 0:
        return spec
    return P(*spec[:axis], None, *spec[axis + 1 :])


def scatter_steps(steps: int, payloads: Sequence[Payload]) -> int:
    """Return the steps of the first leg of reduce-scatter; 0 without it, or without steps.

    Args:
      steps: inner steps in which a fragment travels.
      payloads: the fragments' payloads; the largest one decides.
    """
    if not payloads[0].parts or steps == 0:
        return 0
    largest = max(payloads, key=lambda sent: sent.sent_size)
    scattered = largest.replicas_per_slice * largest.sent_size * largest.sent_dtype.itemsize
    return divide_steps(steps, scattered=scattered, gathered=largest.size * largest.dtype.itemsize)


def divide_steps(steps: int, *, scattered: float, gathered: float) -> int:
    """Divide steps between the legs of reduce-scatter, so that both use the link equally.

    Each leg gets at least one step if there are two.

    Args:
      steps: inner steps in which a fragment travels.
      scattered: bytes of the first leg.
      gathered: bytes of the second leg.

    Returns:
      Steps of the first leg.
    """
    even = round(steps * scattered / (scattered + gathered))
    return max(1, min(even, steps - 1))


def plan_fragments(
    params: Any,
    settings: ExchangeSettings,
    *,
    layer_axis: Any,
    specs: Sequence[P],
    mesh: Mesh,
) -> tuple[FragmentPlan, ...]:
    """Return the plan of every fragment.

    All chunks of a leg have one length: the largest fragment divided by the steps of the leg, in
    whole tiles. Smaller fragments have fewer chunks. A fragment that has no steps to travel in
    (tau = 0) is one chunk.

    Args:
      params: one replica's parameters, arrays or ShapeDtypeStructs.
      settings: the settings, resolved.
      layer_axis: see maxdiloco.DiLoCo.
      specs: sharding of each leaf inside a slice.
      mesh: the mesh.

    Raises:
      ValueError: as fragments.partition.
    """
    leaves, payloads = jax.tree.leaves(params), []
    fragments = settings.partition(params, layer_axis)
    for fragment in fragments:
        shapes = [s.shape(leaves[s.leaf].shape) for s in fragment.slices]
        slice_specs = [_slice_spec(s, specs[s.leaf], mesh) for s in fragment.slices]
        sent = payload.for_leaves(
            shapes,
            slice_specs,
            wire=settings.exchange_dtype,
            mesh=mesh,
            num_replicas=settings.num_replicas,
        )
        if settings.collective == schedule.REDUCE_SCATTER:
            sent = reduce_scatter.cut_payload(sent)
        payloads.append(sent)
    steps = settings.schedule.max_chunks
    first_leg = scatter_steps(steps, payloads)
    gathers = _cuts([sent.size for sent in payloads], max(1, steps - first_leg) if steps else 0)
    scatters = [None] * len(payloads)
    if settings.collective == schedule.REDUCE_SCATTER:
        scatters = _cuts([sent.sent_size for sent in payloads], first_leg)
    parts = zip(fragments, payloads, gathers, scatters, strict=True)
    return tuple(FragmentPlan(p, *part) for p, part in enumerate(parts))


def _cuts(sizes: Sequence[int], steps: int) -> list[Cut]:
    """Cut payloads of these sizes [wire elements] into equal chunks, at most one for each step.

    Without steps each payload is one chunk.
    """
    if steps == 0:
        return [Cut(1, payload.pad_to_tile(size)) for size in sizes]
    length = payload.pad_to_tile(quantize.ceil_div(max(sizes), steps))
    return [Cut(quantize.ceil_div(size, length), length) for size in sizes]


# -- layout ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Shapes and shardings of a run's state, and the plans of its fragments.

    Attributes:
      mesh: the mesh.
      settings: the settings, resolved.
      plans: one for each fragment.
      scatter_steps: see the function `scatter_steps`.
      paths: paths of the parameter leaves, in tree order.
      specs: sharding of each leaf inside a slice.
      state: the state as ShapeDtypeStructs with shardings.
    """

    mesh: Mesh
    settings: ExchangeSettings
    plans: tuple[FragmentPlan, ...]
    scatter_steps: int
    paths: tuple[str, ...]
    specs: tuple[P, ...]
    state: State

    @property
    def num_replicas(self) -> int:
        """M."""
        return self.settings.num_replicas

    @property
    def schedule(self) -> Schedule:
        """The schedule, with the number of chunks of every fragment."""
        scatters = [plan.scatter.count if plan.scatter else 1 for plan in self.plans]
        return replace(
            self.settings.schedule,
            num_chunks=tuple(plan.gather.count for plan in self.plans),
            scatter_steps=self.scatter_steps,
            num_scatter_chunks=tuple(scatters),
        )

    @property
    def chunk_lengths(self) -> tuple[int, ...]:
        """Lengths of the chunks of each leg; () if nothing is in flight between steps."""
        if self.settings.schedule.max_chunks == 0:
            return ()
        plan = self.plans[0]
        return tuple(cut.length for cut in (plan.scatter, plan.gather) if cut)


def lay_out(
    params: Any,
    opt_state: Any,
    settings: ExchangeSettings,
    *,
    layer_axis: Any,
    mesh: Mesh,
) -> Layout:
    """Return the layout for one replica's params and opt_state (arrays or ShapeDtypeStructs).

    Args:
      params: one replica's parameters.
      opt_state: state of its inner optimizer.
      settings: the settings, resolved.
      layer_axis: see maxdiloco.DiLoCo.
      mesh: the mesh.
    """
    paths, leaves = zip(*jax.tree_util.tree_leaves_with_path(params), strict=True)
    specs, M = tuple(spec_on(x, mesh) for x in leaves), settings.num_replicas
    plans = plan_fragments(params, settings, layer_axis=layer_axis, specs=specs, mesh=mesh)
    struct = functools.partial(_struct, mesh)
    outer_memory = None if settings.outer_memory == "device" else settings.outer_memory

    def replicas(x):
        spec = P("diloco", *spec_on(x, mesh))
        return struct((M, *x.shape), spec, x.dtype, offload.memory_kind(x))

    def residual(x):
        return struct((M, *x.shape), P("diloco", *spec_on(x, mesh)))

    def outer(shape, spec, dtype=jnp.float32, memory=outer_memory):
        if settings.is_eager:
            shape, spec = (M, *shape), P("diloco", *spec)
        return struct(shape, spec, dtype, memory)

    norms_R, flags = struct((M,), P()), struct((M, len(leaves)), P(), jnp.bool_)
    outer_params = [outer(x.shape, spec) for x, spec in zip(leaves, specs, strict=True)]
    optimizer, feeds_back = settings.make_outer_optimizer(), settings.feeds_back
    state = State(
        t=0,
        params=jax.tree.map(replicas, params),
        opt_state=jax.tree.map(replicas, opt_state),
        outer=jax.tree.unflatten(jax.tree.structure(params), outer_params),
        outer_opt=tuple(_outer_opt(plan, leaves, optimizer, mesh, outer) for plan in plans),
        bad=flags,
        bad_before=flags,
        sizes=collective.Sizes(norms_R, norms_R, struct((), P())),
        update_ratio=outer((), P(), memory=None),
        residual=jax.tree.map(residual, params) if feeds_back else (),
        residual_norm_R=struct((M,), P("diloco")) if feeds_back else (),
        **_buffers(settings.schedule, plans),
    )
    return Layout(
        mesh=mesh,
        settings=settings,
        plans=plans,
        scatter_steps=scatter_steps(settings.schedule.max_chunks, [plan.payload for plan in plans]),
        paths=tuple(jax.tree_util.keystr(path) for path in paths),
        specs=specs,
        state=state,
    )


def _buffers(schedule_: Schedule, plans: Sequence[FragmentPlan]) -> dict[str, ChunkBuffer]:
    """Return the chunk buffers of a state, by field, with the chunks of the largest fragment."""
    buffers = dict.fromkeys(BUFFERS, ChunkBuffer())
    if schedule_.max_chunks == 0:
        return buffers
    largest = max(plans, key=lambda plan: plan.gather.count)
    count, incoming = largest.gather.count, largest.incoming_chunks * schedule_.slots
    buffers["outgoing"] = ChunkBuffer(largest.outgoing_chunks, count)
    buffers["incoming"] = ChunkBuffer(incoming, count)
    if largest.scatter:
        largest = max(plans, key=lambda plan: plan.scatter.count)
        scattered = ChunkBuffer(largest.scattered_chunks, largest.scatter.count)
        buffers["scatter_outgoing"] = buffers["scatter_incoming"] = scattered
    return buffers


def _struct(mesh, shape, spec, dtype=jnp.float32, memory=None) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(mesh, spec, memory_kind=memory)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _outer_opt(plan, leaves, optimizer, mesh, outer):
    """Return ShapeDtypeStructs of one fragment's state of the outer optimizer."""
    shapes = [s.shape(leaves[s.leaf].shape) for s in plan.slices]
    fragment = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    shardings = [NamedSharding(mesh, shard.spec) for shard in plan.payload.shards]
    specs = optimizer_shardings(optimizer, fragment, shardings, mesh)
    state = jax.eval_shape(optimizer.init, fragment)
    return jax.tree.map(lambda x, s: outer(x.shape, s.spec, x.dtype), state, specs)


# -- parts of a state ------------------------------------------------------------------------------


def fragment_leaves(tree: Any, plan: FragmentPlan) -> Sequence[jax.Array]:
    """Return the leaves with values of a fragment, in tree order; () for an empty tree."""
    leaves = jax.tree.leaves(tree)
    return [leaves[s.leaf] for s in plan.slices] if leaves else ()


def with_fragment(tree: Any, plan: FragmentPlan, values: Sequence[jax.Array]) -> Any:
    """Return the tree with the leaves of `fragment_leaves` replaced; an empty tree stays empty."""
    leaves, structure = jax.tree.flatten(tree)
    if not leaves:
        return tree
    for s, value in zip(plan.slices, values, strict=True):
        leaves[s.leaf] = value
    return jax.tree.unflatten(structure, leaves)


def with_items(items: tuple, indices: Sequence[int], values: Sequence[Any]) -> tuple:
    """Return `items` with the ones at `indices` replaced by `values`."""
    new = dict(zip(indices, values, strict=True))
    return tuple(new.get(i, item) for i, item in enumerate(items))
