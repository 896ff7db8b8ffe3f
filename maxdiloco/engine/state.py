"""Where every array of a DiLoCo run lies, and which fragment holds what: all that is static.

leaf        one array of a replica's parameters
 | diloco/slices.py: the entries of it that a fragment takes
LeafSlice   --.
 |             `--  Fragment: one slice of each leaf it touches (diloco/fragments.py)
 | exchange/payload.py: the part of the slice that one device sends
WireShard   --.
               `--  Payload: one shard of each slice of a fragment, and flags
FragmentPlan        a Fragment, its Payload, and the chunks in which that travels (engine/plans.py)
Layout              all FragmentPlans, and the State as shapes with shardings

    # R replicas  F leaves
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiloco.diloco.schedule import Schedule
from maxdiloco.engine.plans import FragmentPlan, Plans, plan_fragments
from maxdiloco.engine.trainer import ExchangeSettings
from maxdiloco.exchange import collective
from maxdiloco.parallel import offload
from maxdiloco.parallel.mesh import devices_of_slice
from maxdiloco.parallel.sharding import optimizer_shardings, spec_on


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """All that a run needs to go on: a pytree of arrays, and t as a Python int.

    params, opt_state: [R, ...] of the replicas. outer: theta, float32, [...] ([R, ...] when eager).
    outer_opt: state of the outer optimizer, one entry per fragment. outgoing: pieces of the chunks
    of the fragment on the wire; incoming: of those that have arrived, per receive slot. parts: of
    those on their way to owners, when eager those last sent of every receive slot, one slot after
    the other; arrived: of those that are there; both () without owners.
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
    parts: tuple[jax.Array, ...] = ()
    arrived: tuple[jax.Array, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Layout(Plans):
    """Shapes and shardings of a run's state, and the plans of its fragments.

    paths, specs: of one replica's parameter leaves, in tree order. per_replica_outer: whether theta
    has a leading R (eager). chunk_memory: where the chunks in the state are kept: offload.HOST or,
    None, the device. state: of ShapeDtypeStructs with shardings.
    """

    mesh: Mesh
    num_replicas: int
    paths: tuple[str, ...]
    specs: tuple[P, ...]
    per_replica_outer: bool
    chunk_memory: str | None
    state: State

    def sent_places(
        self, plan: FragmentPlan, slot: int, chunks: Iterable[int] | None = None
    ) -> list[int]:
        """Where the pieces of a fragment's chunks to owners, by default of all, are in parts."""
        return self.part_places(plan, chunks, slot if self.per_replica_outer else 0)


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
    travel = plan_fragments(params, settings, layer_axis, specs, mesh, num_replicas)
    plans = travel.plans
    struct = functools.partial(_struct, mesh)

    def replicas(x, **other):
        kept = dict(dtype=x.dtype, memory=offload.kind_of(x)) | other
        return struct((num_replicas, *x.shape), P("diloco", *spec_on(x, mesh)), **kept)

    def outer(shape, spec, dtype=jnp.float32, memory=outer_memory):
        if per_replica:
            shape, spec = (num_replicas, *shape), P("diloco", *spec)
        return struct(shape, spec, dtype, memory)

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
        bad=flags,
        bad_before=flags,
        sizes=collective.Sizes(norms_R, norms_R, struct((), P())),
        update_ratio=outer((), P(), memory=None),
        residual=residual,
        residual_norm_R=residual_norm_R,
        **_in_flight(travel, schedule, mesh, num_replicas, outer_memory),
    )
    names = tuple(jax.tree_util.keystr(path) for path in paths)
    known = dict(mesh=mesh, num_replicas=num_replicas, paths=names, specs=specs, state=state)
    memory = outer_memory if travel.pieces else None
    return Layout(**vars(travel), **known, per_replica_outer=per_replica, chunk_memory=memory)


def _in_flight(
    travel: Plans, schedule: Schedule, mesh: Mesh, num_replicas: int, memory: str | None
) -> dict[str, Any]:
    """The chunks of a state, by field."""
    sent, slots = travel.plans[0].payload, mesh.shape["diloco"]
    share_steps = max(1, schedule.max_chunks - travel.scatter_steps)
    outgoing, incoming = collective.outgoing_spec(mesh), collective.incoming_spec(mesh)

    def chunks(spec, rows, lengths, dtype):
        length = rows * devices_of_slice(mesh)
        return tuple(_struct(mesh, (length * n,), spec, dtype, memory) for n in lengths)

    shared = slots if sent.owned else num_replicas, travel.pieces * share_steps, sent.dtype
    parts = num_replicas * slots, travel.part_pieces * travel.scatter_steps, sent.first_dtype
    return dict(
        outgoing=chunks(outgoing, *shared),
        incoming=(chunks(incoming, *shared),) * schedule.slots if travel.pieces else (),
        parts=chunks(outgoing, *parts) * (schedule.slots if schedule.overlap == "eager" else 1),
        arrived=chunks(outgoing, *parts),
    )


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
