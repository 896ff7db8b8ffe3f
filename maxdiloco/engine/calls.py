"""The program of each action of the schedule, its arguments, and where its results go."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiloco.diloco.schedule import (
    INNER,
    INNER_EXCHANGE,
    MERGE,
    OUTER_STEP,
    PACK,
    PROGRAMS,
    Action,
    Schedule,
)
from maxdiloco.engine.fragment_arrays import FragmentArrays
from maxdiloco.engine.programs import Programs
from maxdiloco.engine.state import (
    FragmentPlan,
    State,
    fragment_leaves,
    with_fragment,
    with_item,
    with_items,
)
from maxdiloco.parallel import offload
from maxdiloco.parallel.program import Program

# When a program runs: in the steps; beside them, with the run's state on the devices; or at the
# start, before there is a state.
STEP, BESIDE, START = "step", "beside", "start"
# What a program beside the steps is run for, unless for every step. Only the first has programs: a
# save writes what the state has, a log step reads it.
EVALUATION, SAVE, LOG = "evaluation", "save", "log step"


class Call(NamedTuple):
    """A program with its arguments as ShapeDtypeStructs.

    runs: how often it runs in the H steps of a period, after the first exchanges.
    when: STEP, BESIDE or START. event: EVALUATION, SAVE, LOG, or "". beside: what is on the device
    while it runs, besides its arguments, its results and the state.
    """

    program: Program
    args: tuple
    runs: float
    when: str = STEP
    event: str = ""
    beside: tuple[jax.ShapeDtypeStruct, ...] = ()


def arguments(
    programs: Programs, action: Action, state: State, batch: Any, incoming: tuple | None = None
) -> tuple[Program, tuple]:
    """The program of an action and what it takes, of arrays or of ShapeDtypeStructs.

    incoming: the chunks to merge; None: those in the state.
    """
    step = (state.params, state.opt_state, batch)
    if action.program == INNER:
        return programs.inner, step
    layout = programs.layout
    plan = layout.plans[action.fragment]
    if action.program == INNER_EXCHANGE:
        places = layout.places(plan, [action.chunk])
        chunk = tuple(offload.moved(state.outgoing[i], None) for i in places)
        slot = state.incoming[action.slot]
        replaced = () if layout.chunk_memory else tuple(slot[i] for i in places)
        return programs.inner_exchange(plan), (*step, chunk, replaced)
    program = programs.of(action.program, plan)
    outer_opt = () if action.program == PACK else state.outer_opt[plan.index]
    leaves = FragmentArrays(
        fragment_leaves(state.params, plan), fragment_leaves(state.outer, plan), outer_opt
    )
    residual = fragment_leaves(state.residual, plan)
    if action.program == PACK:
        return program, (leaves, plan.starts, *([residual] if residual else ()))
    if action.program != MERGE:
        leaves = leaves._replace(residual=residual)
    args = (leaves, state.bad, plan.starts)
    if action.program in (MERGE, OUTER_STEP):
        if incoming is None:
            slot = state.incoming[action.slot]
            incoming = tuple(slot[i] for i in layout.places(plan))
        args += (incoming,)
    return program, args


def after(programs: Programs, action: Action, state: State, results: Any) -> tuple[State, Any]:
    """The state after an action, and the metrics of the step if the action is the inner step."""
    layout = programs.layout
    if action.program in (INNER, INNER_EXCHANGE):
        params, opt_state, metrics, *chunk = results
        state = replace(state, params=params, opt_state=opt_state)
        if action.program == INNER_EXCHANGE:
            places = layout.places(layout.plans[action.fragment], [action.chunk])
            chunk = [offload.moved(x, layout.chunk_memory) for x in chunk]
            slot = with_items(state.incoming[action.slot], places, chunk)
            state = replace(state, incoming=with_item(state.incoming, action.slot, slot))
        return state, metrics
    plan = layout.plans[action.fragment]
    if action.program == PACK:
        return replace(
            with_residual(state, plan, results.residual, results.norm_R),
            outgoing=with_items(state.outgoing, layout.places(plan), results.chunks),
        ), None
    leaves, bad, sizes, update_ratio, sent = results
    bad.copy_to_host_async()
    state = replace(
        with_residual(state, plan, leaves.residual, sent.norm_R),
        params=with_fragment(state.params, plan, leaves.params),
        outer=with_fragment(state.outer, plan, leaves.theta),
        outer_opt=with_item(state.outer_opt, plan.index, leaves.outer_opt),
        outgoing=with_items(
            state.outgoing, layout.places(plan) if sent.chunks else (), sent.chunks
        ),
        bad=bad,
        bad_before=state.bad,
        sizes=sizes,
        update_ratio=update_ratio,
    )
    return state, None


def abstract_metrics(programs: Programs, batch: Any) -> Any:
    """ShapeDtypeStructs of the metrics of a step, leaves [R, ...]. batch: ShapeDtypeStructs."""
    like, lead = programs.layout.state, NamedSharding(programs.layout.mesh, P("diloco"))
    shapes = programs.inner.out_shapes(like.params, like.opt_state, batch)[2]
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=lead), shapes)


def with_residual(state: State, plan: FragmentPlan, residual: Any, norm_R: Any) -> State:
    """The state after a send of a fragment. residual: its leaves; () where nothing was sent."""
    if not residual:
        return state
    whole = with_fragment(state.residual, plan, residual)
    return replace(state, residual=whole, residual_norm_R=norm_R)


def count_calls(
    schedule: Schedule, programs_of: Callable[[Action], Iterable[tuple[Program, tuple]]]
) -> list[Call]:
    """Every program that the steps of a run call, once each, `inner` first.

    programs_of: the programs of an action, with ShapeDtypeStructs for their arguments. Fragments of
    equal form share a program, and are counted together. The period counted is the third: all is
    under way in it.
    """
    H = schedule.H
    actions = [action for t in range(2 * H + 1, 3 * H + 1) for action in schedule.actions(t)]
    actions.sort(key=lambda action: (PROGRAMS.index(action.program), action.fragment))
    by_program: dict[int, Call] = {}
    for runs, action in [(0, Action(INNER)), *((1, action) for action in actions)]:
        for program, args in programs_of(action):
            call = by_program.setdefault(id(program), Call(program, args, 0))
            by_program[id(program)] = call._replace(runs=call.runs + runs)
    return list(by_program.values())
