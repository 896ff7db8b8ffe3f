"""The programs of a run and what each is called with, known before anything runs."""

from typing import Any, NamedTuple

from maxdiloco.algorithm_layout import FragmentPlan, State, pick
from maxdiloco.algorithm_programs import Programs
from maxdiloco.diloco.schedule import Schedule
from maxdiloco.parallel.program import Program

# When a program runs: as part of the steps; beside them, with the run's state on the devices; or
# at the start, when there is no state yet.
STEP, BESIDE, START = "step", "beside", "start"


class Call(NamedTuple):
    """A program with the ShapeDtypeStructs that a run passes to it.

    runs: how often it runs in the H steps of a period, once the first exchanges are under way.
    when: STEP, BESIDE or START.
    """

    program: Program
    args: tuple
    runs: float
    when: str = STEP


def merge_args(state: State, plan: FragmentPlan, incoming: tuple | None) -> tuple:
    """Arguments of merge, synchronise (incoming None) and outer_step for one fragment."""
    args = (
        pick(state.params, plan),
        pick(state.outer, plan),
        state.outer_opt[plan.index],
        state.bad,
        plan.places,
    )
    return args if incoming is None else (*args, incoming)


def pack_args(state: State, plan: FragmentPlan) -> tuple:
    """Arguments of pack for one fragment."""
    return pick(state.params, plan), pick(state.outer, plan), plan.places


def calls(programs: Programs, schedule: Schedule, batch: Any) -> list[Call]:
    """Every program that the steps of a run call, once each, `inner` first.

    batch: ShapeDtypeStructs with shardings, leaves [R, ...]. Fragments with equal cuts share a
    program, and are counted together.
    """
    layout = programs.layout
    state, plans, window = layout.state, layout.plans, schedule.window
    carried = sum(plan.num_chunks for plan in plans) if window else 0
    inner = (state.params, state.opt_state, batch)
    out = [Call(programs.inner, inner, schedule.H - carried)]
    if window:
        out.append(Call(programs.inner_exchange, (*inner, state.outgoing[0]), carried))
    for kind in _kinds(schedule):
        of_kind: dict[int, Call] = {}
        for plan in plans:
            program = programs.of(kind, plan)
            before = of_kind.get(id(program))
            if before is None:
                of_kind[id(program)] = Call(program, _args(kind, state, plan), 1)
            else:
                of_kind[id(program)] = before._replace(runs=before.runs + 1)
        out.extend(of_kind.values())
    return out


def _kinds(schedule: Schedule) -> tuple[str, ...]:
    if schedule.overlap != "none":
        return ("outer_step",)
    return ("pack", "merge") if schedule.window else ("synchronise",)


def _args(kind: str, state: State, plan: FragmentPlan) -> tuple:
    if kind == "pack":
        return pack_args(state, plan)
    incoming = None if kind == "synchronise" else state.incoming[0][: plan.num_chunks]
    return merge_args(state, plan, incoming)
