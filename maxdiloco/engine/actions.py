"""One record for each kind of action: its executable, its arguments, what it changes and sends.

A carrier says in a table which kinds carry out an action of the schedule (engine/exchanges.py).
Nothing else in the engine asks of which kind an action is.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from maxdiloco.diloco import schedule
from maxdiloco.diloco.schedule import Action
from maxdiloco.engine.fragment_arrays import arrays_of
from maxdiloco.engine.plans import FragmentPlan
from maxdiloco.engine.programs import Programs
from maxdiloco.engine.state import Layout, State, with_fragment, with_items
from maxdiloco.parallel import offload
from maxdiloco.parallel.program import Program

# Of a fragment, from one kind to the next: packed, or arrived. None: the state has them.
Chunks = tuple[Any, ...] | None


class Given(NamedTuple):
    """What an action is carried out on, and what is there after it: arrays, or ShapeDtypeStructs.

    batch: of the inner step; metrics: of it, None before.
    """

    layout: Layout
    action: Action
    state: State
    batch: Any = None
    chunks: Chunks = None
    metrics: Any = None

    @property
    def plan(self) -> FragmentPlan:
        """Of the action's fragment."""
        return self.layout.plans[self.action.fragment]


class Kind(NamedTuple):
    """What carries out an action, or a part of one: a compiled program, or a carrier on the host.

    changed: (Given, results of the program, None without one) -> Given after it.
    call: (programs, Given) -> the program and its arguments; None without one.
    abstract: Given -> ShapeDtypeStructs of the chunks that the host hands on.
    bytes_sent: (layout, plan) -> bytes that one replica sends to one other. carries: whether a
    chunk travels in it, and arrives in a receive slot.
    """

    changed: Callable[[Given, Any], Given]
    call: Callable[[Programs, Given], tuple[Program, tuple]] | None = None
    abstract: Callable[[Given], Chunks] | None = None
    bytes_sent: Callable[[Layout, FragmentPlan], int] | None = None
    carries: bool = False

    def run(self, programs: Programs, given: Given) -> Given:
        """Carry it out."""
        if self.call is None:
            return self.changed(given, None)
        program, args = self.call(programs, given)
        return self.changed(given, program(*args))


def on_host(do: Callable[[Given], Chunks], **parts: Any) -> Kind:
    """A kind that a carrier does itself, and that changes no state. do: Given -> chunks or None."""
    return Kind(lambda given, _: given._replace(chunks=do(given)), **parts)


def _step(programs, given):
    return programs.inner, (given.state.params, given.state.opt_state, given.batch)


def _stepped(given, results):
    params, opt_state, metrics = results
    state = replace(given.state, params=params, opt_state=opt_state)
    return given._replace(state=state, metrics=metrics)


def _step_with_chunk(programs, given):
    layout, state = given.layout, given.state
    places = layout.places(given.plan, [given.action.chunk])
    slot = state.incoming[given.action.slot]
    outgoing = [state.outgoing[i] for i in places]
    return programs.inner_exchange(given.plan), _beside(given, outgoing, [slot[i] for i in places])


def _beside(given, outgoing, arrived):
    """Arguments of an inner step beside a chunk, and what that replaces."""
    layout, state = given.layout, given.state
    chunk = tuple(offload.moved(x, None) for x in outgoing)
    replaced = () if layout.chunk_memory else tuple(arrived)
    return state.params, state.opt_state, given.batch, chunk, replaced


def _stepped_with_chunk(given, results):
    after = _stepped(given, results[:3])
    layout, action, incoming = given.layout, given.action, after.state.incoming
    places = layout.places(given.plan, [action.chunk])
    chunk = [offload.moved(x, layout.chunk_memory) for x in results[3:]]
    slot = with_items(incoming[action.slot], places, chunk)
    incoming = with_items(incoming, [action.slot], [slot])
    return after._replace(state=replace(after.state, incoming=incoming))


def _step_with_part(programs, given):
    layout, state, (_, _, slot, chunk) = given.layout, given.state, given.action
    places = layout.part_places(given.plan, [chunk])
    parts = [state.parts[i] for i in layout.sent_places(given.plan, slot, [chunk])]
    arrived = [state.arrived[i] for i in places]
    return programs.inner_scatter(given.plan), _beside(given, parts, arrived)


def _stepped_with_part(given, results):
    after, layout = _stepped(given, results[:3]), given.layout
    places = layout.part_places(given.plan, [given.action.chunk])
    chunk = [offload.moved(x, layout.chunk_memory) for x in results[3:]]
    arrived = with_items(after.state.arrived, places, chunk)
    return after._replace(state=replace(after.state, arrived=arrived))


def _reduce(programs, given):
    return programs.of("reduce", given.plan), (_parts(given),)


def _reduce_and_share(programs, given):
    return programs.of("reduce and share", given.plan), (_parts(given),)


def _parts(given):
    if given.chunks is not None:
        return given.chunks
    return tuple(given.state.arrived[i] for i in given.layout.part_places(given.plan))


def _reduced(given, chunks):
    """What this slot shares is on its way; without overlap the state keeps no chunks."""
    state = given.state
    if state.outgoing:
        places = given.layout.places(given.plan)
        state = replace(state, outgoing=with_items(state.outgoing, places, chunks))
    return given._replace(state=state, chunks=chunks)


def _reduced_and_shared(given, chunks):
    incoming, slot = given.state.incoming, given.action.slot
    whole = with_items(incoming[slot], given.layout.places(given.plan), chunks)
    return given._replace(
        state=replace(given.state, incoming=with_items(incoming, [slot], [whole]))
    )


def _pack(programs, given):
    leaves = arrays_of(given.state, given.plan)._replace(outer_opt=())
    residual = (leaves.residual,) if leaves.residual else ()
    args = (leaves._replace(residual=()), given.plan.starts, *residual)
    return programs.of("pack", given.plan), args


def _packed(given, sent):
    return _after_send(given, given.state, sent.residual, sent)


def _synchronise(programs, given):
    args = arrays_of(given.state, given.plan), given.state.bad, given.plan.starts
    return programs.of("synchronise", given.plan), args


def _outer_step(programs, given):
    args = arrays_of(given.state, given.plan), given.state.bad, given.plan.starts
    layout, parts = given.layout, given.state.parts
    before = layout.sent_places(given.plan, given.action.slot) if layout.per_replica_outer else ()
    of_owners = (tuple(parts[i] for i in before),) if parts and before else ()
    return programs.of("outer_step", given.plan), (*args, _arrived(given), *of_owners)


def _merge(programs, given):
    leaves = arrays_of(given.state, given.plan)._replace(residual=())
    args = leaves, given.state.bad, given.plan.starts, _arrived(given)
    return programs.of("merge", given.plan), args


def _arrived(given):
    if given.chunks is not None:
        return given.chunks
    slot = given.state.incoming[given.action.slot]
    return tuple(slot[i] for i in given.layout.places(given.plan))


def _replaced(given, results):
    leaves, bad, sizes, update_ratio, sent = results
    bad.copy_to_host_async()
    plan, before = given.plan, given.state
    state = replace(
        before,
        params=with_fragment(before.params, plan, leaves.params),
        outer=with_fragment(before.outer, plan, leaves.theta),
        outer_opt=with_items(before.outer_opt, [plan.index], [leaves.outer_opt]),
        bad=bad,
        bad_before=before.bad,
        sizes=sizes,
        update_ratio=update_ratio,
    )
    return _after_send(given, state, leaves.residual, sent)


def _after_send(given, state, residual, sent):
    """The residual and the chunks of a send in the state; without overlap it keeps no chunks."""
    if residual:
        whole = with_fragment(given.state.residual, given.plan, residual)
        state = replace(state, residual=whole, residual_norm_R=sent.norm_R)
    layout, plan = given.layout, given.plan
    if sent.chunks and state.parts:
        places = layout.sent_places(plan, given.action.slot)
        parts = with_items(state.parts, places, sent.chunks)
        state = replace(state, parts=parts)
    elif sent.chunks and state.outgoing:
        outgoing = with_items(state.outgoing, layout.places(plan), sent.chunks)
        state = replace(state, outgoing=outgoing)
    return given._replace(state=state, chunks=sent.chunks)


# Streaming DiLoCo (arXiv 2501.18512) Algorithm 2, by its lines; see diloco/schedule.py.
INNER = Kind(_stepped, _step)  # 3-5
INNER_EXCHANGE = Kind(  # the same beside a chunk: 8 and 10
    _stepped_with_chunk, _step_with_chunk, bytes_sent=Layout.chunk_bytes, carries=True
)
SCATTER = Kind(  # the same, each part to its owner
    _stepped_with_part, _step_with_part, bytes_sent=Layout.part_bytes, carries=True
)
REDUCE = Kind(_reduced, _reduce)
# Where no step is left for what it makes.
REDUCE_AND_SHARE = Kind(
    _reduced_and_shared, _reduce_and_share, bytes_sent=Layout.chunk_bytes
)
PACK = Kind(_packed, _pack)  # 7-8
MERGE = Kind(_replaced, _merge)  # 10-12
SYNCHRONISE = Kind(_replaced, _synchronise, bytes_sent=Layout.exchange_bytes)  # 7-12, tau = 0
OUTER_STEP = Kind(_replaced, _outer_step)  # delayed, eager: the same, the mean of the round before

# By the names of the schedule.
KINDS: Mapping[str, Kind] = MappingProxyType({
    schedule.INNER: INNER,
    schedule.INNER_EXCHANGE: INNER_EXCHANGE,
    schedule.SCATTER: SCATTER,
    schedule.SHARE: INNER_EXCHANGE,
    schedule.PACK: PACK,
    schedule.REDUCE: REDUCE,
    schedule.MERGE: MERGE,
    schedule.SYNCHRONISE: SYNCHRONISE,
    schedule.OUTER_STEP: OUTER_STEP,
})  # fmt: skip
