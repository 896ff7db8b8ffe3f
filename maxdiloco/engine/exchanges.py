"""How the actions of a step are carried out: a table of kinds for each carrier.

The carriers run the same schedule with the same payloads, decoding and ordered mean, to the same
bits. `program`: the chunks travel inside compiled programs, one beside each inner step. `host`: a
fragment travels through host memory, all of it from its send on, and is there when the schedule
takes it. XLA overlaps a collective with computation on TPU only.
"""

import itertools
import statistics
import time
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import NamedSharding

from maxdiloco.diloco import schedule as names
from maxdiloco.diloco.schedule import Action, Schedule
from maxdiloco.engine import actions
from maxdiloco.engine.actions import Chunks, Given, Kind, on_host
from maxdiloco.engine.calls import Call
from maxdiloco.engine.programs import Programs
from maxdiloco.engine.state import FragmentPlan, Layout, State, with_items
from maxdiloco.exchange.collective import incoming_spec
from maxdiloco.exchange.host import HostCarrier, Mailbox
from maxdiloco.exchange.payload import payload_bytes
from maxdiloco.parallel.mesh import devices_of_slice

SAMPLES = 9  # steps whose times give the pace of the next exchange; our choice
PACED_PART = 0.6  # of the time that a fragment has; the rest is for a peer that is behind. Ours.
# Steps whose chunks are on the device, where they are kept in host memory: the one that runs and
# the next, so that the device does not wait for the host. Our choice.
STEPS_ON_DEVICE = 2

# {kind of an action of the schedule: what carries it out, in this order}
Table = Mapping[str, tuple[Kind, ...]]


class Carrier:
    """Carries out the actions of the schedule by its table.

    table: of every kind in schedule.PROGRAMS. steps_on_device: whose chunks are on the device at
    once, where the state keeps them in host memory; 0 where no step carries a chunk.
    through_mailbox: whether it sends to other processes by the mailbox.
    """

    table: Table
    steps_on_device = 0
    through_mailbox = False

    def __init__(self, programs: Programs, schedule: Schedule, mailbox: Mailbox | None):
        del mailbox  # for a carrier that has any
        self._programs, self._schedule, self._layout = programs, schedule, programs.layout

    def run(self, action: Action, state: State, batch: Any) -> tuple[State, Any]:
        """The state after an action, and the metrics where it is the inner step, else None."""
        given = Given(self._layout, action, state, batch)
        for kind in self.table[action.program]:
            given = kind.run(self._programs, given)
        return given.state, given.metrics

    def calls(self, batch: Any) -> list[Call]:
        """Every program that the steps call, once each, `inner` first.

        batch: ShapeDtypeStructs, leaves [R, ...]. The period counted is the third: all is under way
        in it.
        """
        H, schedule = self._schedule.H, self._schedule
        actions = [action for t in range(2 * H + 1, 3 * H + 1) for action in schedule.actions(t)]
        actions.sort(key=lambda action: (names.PROGRAMS.index(action.program), action.fragment))
        by_program: dict[int, Call] = {}
        for runs, action in [(0, Action(names.INNER)), *((1, action) for action in actions)]:
            for call in self._calls_of(action, batch):
                call = by_program.setdefault(id(call.program), call)
                by_program[id(call.program)] = call._replace(runs=call.runs + runs)
        return list(by_program.values())

    def _calls_of(self, action: Action, batch: Any) -> Iterable[Call]:
        layout, steps = self._layout, self.steps_on_device
        given = Given(layout, action, layout.state, batch)
        for kind in self.table[action.program]:
            if kind.call is not None:
                # What the program itself carries is among its arguments and results.
                beside = tuple(chunks_on_device(layout, steps - kind.carries if steps else 0))
                yield Call(*kind.call(self._programs, given), 0, beside=beside)
            if kind.abstract is not None:
                given = given._replace(chunks=kind.abstract(given))

    def action_bytes(self, action: Action) -> int:
        """Bytes that an action makes one replica send to one other."""
        sizes = [kind.bytes_sent for kind in self.table[action.program] if kind.bytes_sent]
        return sum(size(self._layout, self._layout.plans[action.fragment]) for size in sizes)

    def fragment_bytes(self, plan: FragmentPlan) -> int:
        """Bytes of one exchange of a fragment from one replica to one other, padding included."""
        return plan.num_chunks * self._layout.chunk_bytes(plan)

    def _abstract_incoming(self, given: Given) -> Chunks:
        """What a fragment's exchange brings, for `calls`; of the kind that takes it."""
        mesh, plan, memory = self._layout.mesh, given.plan, self._layout.chunk_memory
        devices = self._layout.num_replicas * devices_of_slice(mesh)
        sharding = NamedSharding(mesh, incoming_spec(mesh), memory_kind=memory)
        return tuple(
            jax.ShapeDtypeStruct((devices * length,), plan.payload.dtype, sharding=sharding)
            for length in self._layout.lengths(plan) * plan.num_chunks
        )

    def begin(self, state: State) -> None:
        """Start again what was under way in a restored state; all processes restore the same."""

    def settled(self, state: State) -> State:
        """The state as a checkpoint holds it. Waits for the exchanges under way."""
        return state

    def extra_metrics(self) -> dict[str, float]:
        """What it has to tell since the last call."""
        return {}

    def close(self) -> None:
        """End its threads."""


def chunks_on_device(layout: Layout, steps: int) -> list[jax.ShapeDtypeStruct]:
    """The chunks of some steps, sent and arrived, that are on the device beside the host's."""
    if not steps or not layout.chunk_memory:
        return []
    chunk = slice(len(layout.pieces))
    of_step = [*layout.state.outgoing[chunk], *layout.state.incoming[0][chunk]]
    return steps * of_step


class InPrograms(Carrier):
    """The carrier `program`: every action is one compiled program, and the state has all of it."""

    steps_on_device = STEPS_ON_DEVICE

    def __init__(self, programs: Programs, schedule: Schedule, mailbox: Mailbox | None):
        super().__init__(programs, schedule, mailbox)
        self._arrived: deque[Chunks] = deque(maxlen=STEPS_ON_DEVICE)
        table = {name: (kind,) for name, kind in actions.KINDS.items()}
        if self._layout.chunk_memory:
            in_turn = (on_host(self._wait), actions.INNER_EXCHANGE, on_host(self._note))
            table[names.INNER_EXCHANGE] = in_turn
        self.table: Table = MappingProxyType(table)

    def _wait(self, given: Given) -> None:
        """A host that runs ahead would copy a chunk to the device for every step it dispatches."""
        if len(self._arrived) == STEPS_ON_DEVICE:
            jax.block_until_ready(self._arrived[0])

    def _note(self, given: Given) -> None:
        places = self._layout.places(given.plan, [given.action.chunk])
        self._arrived.append(tuple(given.state.incoming[given.action.slot][i] for i in places))


class ThroughHost(Carrier):
    """The carrier `host`: what is packed leaves at once, and what is merged is waited for."""

    through_mailbox = True

    def __init__(self, programs: Programs, schedule: Schedule, mailbox: Mailbox | None):
        super().__init__(programs, schedule, mailbox)
        self._carrier = HostCarrier(
            self._layout.mesh,
            num_replicas=self._layout.num_replicas,
            mailbox=mailbox,
            memory=self._layout.chunk_memory,
        )
        self._step_ends: deque[float] = deque(maxlen=SAMPLES)
        self._begun = 0  # a part of every key, so that what another state has sent is never taken
        self._arriving: dict[tuple[int, int], Future] = {}  # by fragment and step of the send
        self._waited_s = 0.0
        tick = on_host(lambda given: self._step_ends.append(time.monotonic()))
        inner = (tick, actions.INNER)
        start = on_host(
            lambda given: self._start(given.plan, given.state.t, given.chunks),
            bytes_sent=lambda _, plan: self.fragment_bytes(plan),
        )
        take = on_host(self._take, abstract=self._abstract_incoming)
        self.table: Table = MappingProxyType({
            names.INNER: inner,
            names.INNER_EXCHANGE: inner,
            names.PACK: (actions.PACK, start),
            names.MERGE: (take, actions.MERGE),
            names.SYNCHRONISE: (actions.PACK, start, take, actions.MERGE),
            names.OUTER_STEP: (take, actions.OUTER_STEP, start),
        })  # fmt: skip

    def begin(self, state: State) -> None:
        """See Carrier."""
        self._begun += 1
        self._carrier.patience.begin()
        self._arriving.clear()
        for send in self._schedule.pending(state.t, dropped_until=state.dropped_until):
            plan = self._layout.plans[send.fragment]
            if state.t - send.send_step < plan.num_chunks:  # else all of it had arrived
                chunks = tuple(state.outgoing[i] for i in self._layout.places(plan))
                self._start(plan, send.send_step, chunks)

    def settled(self, state: State) -> State:
        """The state with the chunks that programs would have carried."""
        incoming = state.incoming
        for send in self._schedule.pending(state.t, dropped_until=state.dropped_until):
            if arriving := self._arriving.get((send.fragment, send.send_step)):
                plan, arrived = self._layout.plans[send.fragment], arriving.result()
                chunks = range(min(plan.num_chunks, state.t - send.send_step))
                places = self._layout.places(plan, chunks)
                slot = with_items(incoming[send.slot], places, arrived[: len(places)])
                incoming = with_items(incoming, [send.slot], [slot])
        return replace(state, incoming=incoming)

    def extra_metrics(self) -> dict[str, float]:
        """What this process has waited for exchanges since the last call [s]."""
        waited, self._waited_s = self._waited_s, 0.0
        return {"dcn/waited_s": waited}

    def fragment_bytes(self, plan: FragmentPlan) -> int:
        """No padding."""
        return payload_bytes(plan.payload)

    def close(self) -> None:
        """End the threads."""
        self._carrier.close()

    def _start(self, plan: FragmentPlan, send_step: int, chunks: tuple[jax.Array, ...]) -> None:
        what = f"fragment {plan.index} of step {send_step}"
        options = dict(size=plan.payload.size, within_s=self._within_s(), what=what)
        key = self._begun, plan.index, send_step
        self._arriving[key[1:]] = self._carrier.start(key, chunks, **options)

    def _within_s(self) -> float | None:
        """Part of the time until the fragment is taken or the next one sent [s], if known."""
        ends = list(self._step_ends)
        if len(ends) < SAMPLES or not self._schedule.max_chunks:
            return None
        step_s = statistics.median(b - a for a, b in itertools.pairwise(ends))
        return PACED_PART * self._schedule.max_chunks * step_s

    def _take(self, given: Given) -> Chunks:
        """None: the state has it, or the zeros of round 0."""
        exchange = given.plan.index, given.state.t - self._schedule.lag
        started, arriving = time.perf_counter(), self._arriving.pop(exchange, None)
        arrived = arriving and arriving.result()
        self._waited_s += time.perf_counter() - started
        return arrived


CARRIERS: Mapping[str, type[Carrier]] = MappingProxyType(
    {"program": InPrograms, "host": ThroughHost}
)
