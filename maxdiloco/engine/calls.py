"""Every program that a run calls, with its arguments and how often."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from maxdiloco.diloco.schedule import INNER, PROGRAMS, Action, Schedule
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


def abstract_metrics(step: Call, sharding: NamedSharding) -> Any:
    """ShapeDtypeStructs of the metrics of a plain step."""
    shapes = step.program.out_shapes(*step.args)[2]
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)


def count_calls(schedule: Schedule, calls_of: Callable[[Action], Iterable[Call]]) -> list[Call]:
    """Every program that the steps of a run call, once each, `inner` first.

    calls_of: the programs of an action, with ShapeDtypeStructs for their arguments. Fragments of
    equal form share a program, and are counted together. The period counted is the third: all is
    under way in it.
    """
    H = schedule.H
    actions = [action for t in range(2 * H + 1, 3 * H + 1) for action in schedule.actions(t)]
    actions.sort(key=lambda action: (PROGRAMS.index(action.program), action.fragment))
    by_program: dict[int, Call] = {}
    for runs, action in [(0, Action(INNER)), *((1, action) for action in actions)]:
        for call in calls_of(action):
            call = by_program.setdefault(id(call.program), call)
            by_program[id(call.program)] = call._replace(runs=call.runs + runs)
    return list(by_program.values())
