"""The two ways in which the actions of a step are carried out: their tables of programs.

Both run the same schedule with the same payloads, decoding and ordered mean, to the same bits.
`ProgramExchange`: the chunks travel inside compiled programs, one beside each inner step.
`HostExchange`: a fragment travels through host memory, all of it from its send on, and is there
when the schedule takes it. XLA overlaps a collective with computation on TPU only.
"""

import itertools
import statistics
import time
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import NamedSharding

from maxdiloco.diloco import quantize
from maxdiloco.diloco.schedule import (
    INNER,
    INNER_EXCHANGE,
    MERGE,
    OUTER_STEP,
    PACK,
    SYNCHRONISE,
    Action,
    Event,
    Schedule,
)
from maxdiloco.engine.calls import Call, after, arguments, count_calls, with_residual
from maxdiloco.engine.programs import Programs
from maxdiloco.engine.state import FragmentPlan, Layout, State, with_item, with_items
from maxdiloco.exchange.collective import incoming_spec
from maxdiloco.exchange.host import HostCarrier, Links
from maxdiloco.exchange.payload import payload_bytes
from maxdiloco.parallel.program import Program

CARRIERS = ("program", "host")
SAMPLES = 9  # steps whose times give the pace of the next exchange; our choice
PACED_PART = 0.6  # of the time that a fragment has; the rest is for a peer that is behind. Ours.
# Steps whose chunks are on the device, where they are kept in host memory: the one that runs and
# the next, so that the device does not wait for the host. Our choice.
STEPS_ON_DEVICE = 2


def chunks_on_device(
    layout: Layout, carrier: str, steps: int = STEPS_ON_DEVICE
) -> list[jax.ShapeDtypeStruct]:
    """The most that is on the device at once of chunks that are kept in host memory.

    Of each step the chunk that it sends and what arrives. None of carrier host: no step carries
    a chunk.
    """
    if carrier == "host" or not layout.chunk_memory:
        return []
    chunk = slice(len(layout.pieces))
    of_step = [*layout.state.outgoing[chunk], *layout.state.incoming[0][chunk]]
    return steps * of_step


class ProgramExchange:
    """Every action is one compiled program."""

    def __init__(self, programs: Programs, schedule: Schedule):
        self._programs, self._schedule = programs, schedule
        self._arrived: deque[tuple[jax.Array, ...]] = deque(maxlen=STEPS_ON_DEVICE)

    def begin(self, state: State) -> None:
        """Nothing to begin: what is under way is in the state."""

    def run(self, action: Action, state: State, batch: Any) -> tuple[State, Any]:
        """The state after an action, and the metrics where it is the inner step, else None."""
        layout = self._programs.layout
        copies = action.program == INNER_EXCHANGE and layout.chunk_memory
        if copies and len(self._arrived) == STEPS_ON_DEVICE:
            # A host that runs ahead would copy a chunk to the device for every step it dispatches.
            jax.block_until_ready(self._arrived[0])
        program, args = arguments(self._programs, action, state, batch)
        state, metrics = after(self._programs, action, state, program(*args))
        if copies:
            places = layout.places(layout.plans[action.fragment], [action.chunk])
            self._arrived.append(tuple(state.incoming[action.slot][i] for i in places))
        return state, metrics

    def settled(self, state: State) -> State:
        """The state as a checkpoint holds it."""
        return state

    def calls(self, batch: Any) -> list[Call]:
        """Every program that the steps call. batch: ShapeDtypeStructs, leaves [R, ...]."""
        layout = self._programs.layout
        calls = count_calls(
            self._schedule, lambda action: [arguments(self._programs, action, layout.state, batch)]
        )

        def beside(call: Call) -> tuple[jax.ShapeDtypeStruct, ...]:
            own = call.program.name.startswith(INNER_EXCHANGE)  # among its arguments and results
            return tuple(chunks_on_device(layout, "program", STEPS_ON_DEVICE - own))

        return [call._replace(beside=beside(call)) for call in calls]

    def extra_metrics(self) -> dict[str, float]:
        """None."""
        return {}

    def fragment_bytes(self, plan: FragmentPlan) -> int:
        """Bytes of one exchange of a fragment from one replica to one other, padding included."""
        return plan.num_chunks * self._programs.layout.chunk_bytes(plan)

    def action_bytes(self, action: Action) -> int:
        """Bytes that an action makes one replica send to one other."""
        if action.program not in (INNER_EXCHANGE, SYNCHRONISE):
            return 0
        layout = self._programs.layout
        return layout.chunk_bytes(layout.plans[action.fragment])

    def close(self) -> None:
        """Nothing to close."""


class HostExchange:
    """The fragment that an action sends leaves at once; one that it takes is waited for."""

    def __init__(self, programs: Programs, schedule: Schedule, links: Links | None):
        self._programs, self._schedule = programs, schedule
        self._layout = programs.layout
        self._carrier = HostCarrier(
            self._layout.mesh,
            num_replicas=self._layout.num_replicas,
            links=links,
            memory=self._layout.chunk_memory,
        )
        self._step_ends: deque[float] = deque(maxlen=SAMPLES)
        self._begun = 0  # a part of every key, so that what another state has sent is never taken

    def begin(self, state: State) -> None:
        """Start again what was under way in a restored state; all processes restore the same."""
        self._begun += 1
        self._carrier.forget()
        for send in self._pending(state):
            plan = self._layout.plans[send.fragment]
            if state.t - send.send_step < plan.num_chunks:  # else all of it had arrived
                self._start(plan, send.send_step, self._outgoing(plan, state))

    def run(self, action: Action, state: State, batch: Any) -> tuple[State, Any]:
        """The state after an action, and the metrics where it is the inner step, else None."""
        if action.program in (INNER, INNER_EXCHANGE):
            self._step_ends.append(time.monotonic())
            return self._run(Action(INNER), state, batch)
        plan = self._layout.plans[action.fragment]
        if action.program == SYNCHRONISE:
            program, args = self._program(PACK, action, state)
            sent = program(*args)
            state = with_residual(state, plan, sent.residual, sent.norm_R)
            self._start(plan, state.t, sent.chunks)
            program, args = self._program(MERGE, action, state, self._take(plan, state.t))
            return after(self._programs, action, state, program(*args))
        taken = None
        if action.program in (MERGE, OUTER_STEP):
            taken = self._take(plan, state.t - self._schedule.lag)
        state, _ = self._run(action, state, batch, taken)
        if action.program in (PACK, OUTER_STEP):
            self._start(plan, state.t, self._outgoing(plan, state))
        return state, None

    def settled(self, state: State) -> State:
        """The state as a checkpoint holds it: with the chunks that programs would have carried.

        Waits for the exchanges under way.
        """
        incoming = state.incoming
        for send in self._pending(state):
            key = self._key(send.fragment, send.send_step)
            if self._carrier.under_way(key):
                plan, arrived = self._layout.plans[send.fragment], self._carrier.peek(key)
                chunks = range(min(plan.num_chunks, state.t - send.send_step))
                places = self._layout.places(plan, chunks)
                slot = with_items(incoming[send.slot], places, arrived[: len(places)])
                incoming = with_item(incoming, send.slot, slot)
        return replace(state, incoming=incoming)

    def calls(self, batch: Any) -> list[Call]:
        """Every program that the steps call. batch: ShapeDtypeStructs, leaves [R, ...]."""
        like = self._layout.state

        def programs_of(action: Action) -> Iterable[tuple[Program, tuple]]:
            if action.program in (INNER, INNER_EXCHANGE):
                return [arguments(self._programs, Action(INNER), like, batch)]
            if action.program == SYNCHRONISE:
                arrived = self._abstract_incoming(self._layout.plans[action.fragment])
                merge = self._program(MERGE, action, like, arrived)
                return [self._program(PACK, action, like), merge]
            return [arguments(self._programs, action, like, batch)]

        return count_calls(self._schedule, programs_of)

    def extra_metrics(self) -> dict[str, float]:
        """What this process has waited for exchanges since the last call [s]."""
        waited, self._carrier.waited_s = self._carrier.waited_s, 0.0
        return {"dcn/waited_s": waited}

    def fragment_bytes(self, plan: FragmentPlan) -> int:
        """Bytes of one exchange of a fragment from one replica to one other: no padding."""
        return payload_bytes(plan.payload)

    def action_bytes(self, action: Action) -> int:
        """Bytes that an action makes one replica send to one other."""
        if action.program not in (PACK, SYNCHRONISE, OUTER_STEP):
            return 0
        return self.fragment_bytes(self._layout.plans[action.fragment])

    def close(self) -> None:
        """End the threads."""
        self._carrier.close()

    def _pending(self, state: State) -> list[Event]:
        pending = self._schedule.pending(state.t)
        return [send for send in pending if send.send_step > state.dropped_until]

    def _key(self, fragment: int, send_step: int) -> Hashable:
        return (self._begun, fragment, send_step)

    def _outgoing(self, plan: FragmentPlan, state: State) -> tuple[jax.Array, ...]:
        return tuple(state.outgoing[i] for i in self._layout.places(plan))

    def _start(self, plan: FragmentPlan, send_step: int, chunks: tuple[jax.Array, ...]) -> None:
        key = self._key(plan.index, send_step)
        what = f"fragment {plan.index} of step {send_step}"
        options = dict(size=plan.payload.size, within_s=self._within_s(), what=what)
        self._carrier.start(key, chunks, **options)

    def _within_s(self) -> float | None:
        """Most of the time until the fragment is taken or the next one sent, by recent steps [s].

        None before there are enough of them, and for tau = 0. Where the host runs ahead of the
        device its steps look short, and the pace is fast.
        """
        ends = list(self._step_ends)
        if len(ends) < SAMPLES or not self._schedule.max_chunks:
            return None
        step_s = statistics.median(b - a for a, b in itertools.pairwise(ends))
        return PACED_PART * self._schedule.max_chunks * step_s

    def _take(self, plan: FragmentPlan, send_step: int) -> tuple[jax.Array, ...] | None:
        """None: the state has it, or the zeros of round 0."""
        key = self._key(plan.index, send_step)
        return self._carrier.take(key) if self._carrier.under_way(key) else None

    def _program(self, kind, action, state, incoming=None) -> tuple[Program, tuple]:
        action = action._replace(program=kind)
        return arguments(self._programs, action, state, None, incoming)

    def _run(self, action, state, batch, incoming=None) -> tuple[State, Any]:
        program, args = arguments(self._programs, action, state, batch, incoming)
        return after(self._programs, action, state, program(*args))

    def _abstract_incoming(self, plan: FragmentPlan) -> tuple[jax.ShapeDtypeStruct, ...]:
        mesh = self._layout.mesh
        in_slice = mesh.size // mesh.shape["diloco"]
        devices = self._layout.num_replicas * in_slice
        dtype = quantize.wire_format(plan.payload.wire).dtype
        sharding = NamedSharding(mesh, incoming_spec(mesh))
        return tuple(
            jax.ShapeDtypeStruct((devices * length,), dtype, sharding=sharding)
            for length in self._layout.lengths(plan) * plan.num_chunks
        )
