"""How the actions of a step are carried out: a table of kinds for each carrier.

The carriers run the same schedule with the same payloads, decoding and ordered mean, to the same
bits. `program`: the chunks travel inside compiled programs, one beside each inner step. `host`: a
fragment travels through host memory, all of it from its send on, and is there when the schedule
takes it. XLA overlaps a collective with computation on TPU only.
"""

import functools
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
from maxdiloco.engine.calls import Call, bytes_on_device
from maxdiloco.engine.plans import FragmentPlan
from maxdiloco.engine.programs import Programs
from maxdiloco.engine.state import Layout, State, with_items
from maxdiloco.exchange.collective import incoming_spec, outgoing_spec
from maxdiloco.exchange.host import HostCarrier, Mailbox, Passage
from maxdiloco.exchange.payload import payload_bytes, sent_bytes
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
        return self._layout.exchange_bytes(plan)

    def _abstract_incoming(self, given: Given, *, to_owners: bool = False) -> Chunks:
        """What a fragment's exchange brings, for `calls`; of the kind that takes it."""
        mesh, plan, memory = self._layout.mesh, given.plan, self._layout.chunk_memory
        rows, spec = self._layout.num_replicas, incoming_spec(mesh)
        lengths, dtype = self._layout.lengths(plan) * plan.num_chunks, plan.payload.dtype
        if to_owners:
            rows, spec = rows * mesh.shape["diloco"], outgoing_spec(mesh)
            lengths, dtype = self._layout.first_lengths(plan), plan.payload.first_dtype
        elif plan.payload.owned:
            rows = mesh.shape["diloco"]
        sharding = NamedSharding(mesh, spec, memory_kind=memory)
        devices = rows * devices_of_slice(mesh)
        return tuple(
            jax.ShapeDtypeStruct((devices * n,), dtype, sharding=sharding) for n in lengths
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
    chunk, state = slice(len(layout.pieces)), layout.state
    of_step = [*state.outgoing[chunk], *state.incoming[0][chunk]]
    parts = slice(len(layout.part_pieces))
    to_owners = [*state.parts[parts], *state.arrived[parts]]
    larger = max(of_step, to_owners, key=lambda arrays: sum(map(bytes_on_device, arrays)))
    return steps * larger


class InPrograms(Carrier):
    """The carrier `program`: every action is one compiled program, and the state has all of it."""

    steps_on_device = STEPS_ON_DEVICE

    def __init__(self, programs: Programs, schedule: Schedule, mailbox: Mailbox | None):
        super().__init__(programs, schedule, mailbox)
        self._arrived: deque[Chunks] = deque(maxlen=STEPS_ON_DEVICE)
        kinds = dict(actions.KINDS)
        if self._layout.scatter_steps == schedule.max_chunks:
            kinds[names.REDUCE] = actions.REDUCE_AND_SHARE
        table = {name: (kind,) for name, kind in kinds.items()}
        if self._layout.chunk_memory:
            wait, note, of_part = map(on_host, (self._wait, self._note, self._note_part))
            table[names.INNER_EXCHANGE] = table[names.SHARE] = wait, actions.INNER_EXCHANGE, note
            table[names.SCATTER] = wait, actions.SCATTER, of_part
        self.table: Table = MappingProxyType(table)

    def _wait(self, given: Given) -> None:
        """A host that runs ahead would copy a chunk to the device for every step it dispatches."""
        if len(self._arrived) == STEPS_ON_DEVICE:
            jax.block_until_ready(self._arrived[0])

    def _note(self, given: Given) -> None:
        places = self._layout.places(given.plan, [given.action.chunk])
        self._arrived.append(tuple(given.state.incoming[given.action.slot][i] for i in places))

    def _note_part(self, given: Given) -> None:
        places = self._layout.part_places(given.plan, [given.action.chunk])
        self._arrived.append(tuple(given.state.arrived[i] for i in places))


class ThroughHost(Carrier):
    """The carrier `host`: what is packed leaves at once, and what is merged is waited for."""

    through_mailbox = True

    def __init__(self, programs: Programs, schedule: Schedule, mailbox: Mailbox | None):
        super().__init__(programs, schedule, mailbox)
        kept = self._layout.chunk_memory
        self._carrier = HostCarrier(self._layout.mesh, mailbox=mailbox, memory=kept)
        self._step_ends: deque[float] = deque(maxlen=SAMPLES)
        self._begun = 0  # a part of every key, so that what another state has sent is never taken
        # By fragment, step of the send, and whether it brings parts to their owners.
        self._arriving: dict[tuple[int, int, bool], Future] = {}
        self._waited_s = 0.0
        tick = on_host(lambda given: self._step_ends.append(time.monotonic()))
        inner = (tick, actions.INNER)
        to_owners = bool(self._layout.plans[0].payload.owned)
        start, take = self._starting(to_owners), self._taking(False)
        reduce = (self._taking(True), actions.REDUCE, self._starting(False)) if to_owners else ()
        self.table: Table = MappingProxyType({
            **dict.fromkeys((names.INNER, names.INNER_EXCHANGE, names.SCATTER, names.SHARE), inner),
            names.PACK: (actions.PACK, start),
            names.REDUCE: reduce,
            names.MERGE: (take, actions.MERGE),
            names.SYNCHRONISE: (actions.PACK, start, *reduce, take, actions.MERGE),
            names.OUTER_STEP: (take, actions.OUTER_STEP, start),
        })  # fmt: skip

    def _starting(self, to_owners: bool) -> Kind:
        def start(given):
            after_s = 0 if to_owners else self._layout.scatter_steps
            self._start(given.plan, given.state.t - after_s, given.chunks, to_owners=to_owners)

        return on_host(start, bytes_sent=lambda _, plan: sent_bytes(plan.payload, to_owners))

    def _taking(self, to_owners: bool) -> Kind:
        lag = self._layout.scatter_steps if to_owners else self._schedule.lag
        abstract = functools.partial(self._abstract_incoming, to_owners=to_owners)
        return on_host(lambda given: self._take(given, lag, to_owners), abstract=abstract)

    def begin(self, state: State) -> None:
        """See Carrier."""
        self._begun += 1
        self._carrier.patience.begin()
        self._arriving.clear()
        for send in self._schedule.pending(state.t, dropped_until=state.dropped_until):
            plan, layout = self._layout.plans[send.fragment], self._layout
            steps = state.t - send.send_step
            parts, shared = self._arrived_by(plan, steps)
            if parts < plan.scattered[0]:  # else all of it had arrived
                chunks = tuple(state.parts[i] for i in layout.sent_places(plan, send.slot))
                self._start(plan, send.send_step, chunks, to_owners=True)
            elif steps >= layout.scatter_steps and shared < plan.num_chunks:
                chunks = tuple(state.outgoing[i] for i in layout.places(plan))
                self._start(plan, send.send_step, chunks)

    def settled(self, state: State) -> State:
        """The state with the chunks that programs would have carried."""
        for send in self._schedule.pending(state.t, dropped_until=state.dropped_until):
            plan, layout = self._layout.plans[send.fragment], self._layout
            parts, shared = map(range, self._arrived_by(plan, state.t - send.send_step))
            if arriving := self._arriving.get((send.fragment, send.send_step, True)):
                places = layout.part_places(plan, parts)
                chunks = arriving.result()[: len(places)]
                state = replace(state, arrived=with_items(state.arrived, places, chunks))
            if arriving := self._arriving.get((send.fragment, send.send_step, False)):
                places = layout.places(plan, shared)
                slot = state.incoming[send.slot]
                slot = with_items(slot, places, arriving.result()[: len(places)])
                incoming = with_items(state.incoming, [send.slot], [slot])
                state = replace(state, incoming=incoming)
        return state

    def _arrived_by(self, plan: FragmentPlan, steps: int) -> tuple[int, int]:
        """Chunks to owners and to all that programs have carried so many steps after a send."""
        to_owners = self._layout.scatter_steps
        after = steps - to_owners if self._schedule.share_steps else plan.num_chunks
        parts = min(plan.scattered[0], steps) if to_owners else plan.scattered[0]
        return parts, min(plan.num_chunks, after) if steps >= to_owners else 0

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

    def _start(
        self,
        plan: FragmentPlan,
        send_step: int,
        chunks: tuple[jax.Array, ...],
        *,
        to_owners: bool = False,
    ) -> None:
        sent, name = plan.payload, f"fragment {plan.index} of step {send_step}"
        owned = sent.owned and not to_owners
        passage = Passage(
            (self._begun, plan.index, send_step, to_owners),
            size=sent.first_size if to_owners else sent.size,
            rows=1 if owned else self._layout.num_replicas // self._layout.mesh.shape["diloco"],
            to_owners=to_owners,
            within_s=self._within_s(to_owners),
            what=f"parts of {name}" if to_owners else name,
        )
        self._arriving[passage.key[1:]] = self._carrier.start(passage, chunks)

    def _within_s(self, to_owners: bool) -> float | None:
        """Part of the time until what is sent is taken or the next is sent [s], if known."""
        ends, schedule = list(self._step_ends), self._schedule
        steps = schedule.scatter_steps if to_owners else schedule.share_steps
        if len(ends) < SAMPLES or not steps:
            return None
        step_s = statistics.median(b - a for a, b in itertools.pairwise(ends))
        return PACED_PART * steps * step_s

    def _take(self, given: Given, lag: int, to_owners: bool) -> Chunks:
        """None: the state has it, or the zeros of round 0."""
        exchange = given.plan.index, given.state.t - lag, to_owners
        started, arriving = time.perf_counter(), self._arriving.pop(exchange, None)
        arrived = arriving and arriving.result()
        self._waited_s += time.perf_counter() - started
        return arrived


CARRIERS: Mapping[str, type[Carrier]] = MappingProxyType(
    {"program": InPrograms, "host": ThroughHost}
)
