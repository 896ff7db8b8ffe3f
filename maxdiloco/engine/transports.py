"""How the chunks of a fragment travel between slices: inside compiled programs, or over the host.

`xla`: the inner steps after a send carry one chunk each, in the same compiled program. XLA hides
the exchange behind the computation on TPU only.
`host`: a fragment travels through host memory and TCP while inner steps run.

Payloads, decoding and the order of the mean are the same, so both transports give the same bits.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from maxdiloco.diloco import schedule
from maxdiloco.diloco.schedule import Action, Event
from maxdiloco.engine.collective import Chunks
from maxdiloco.engine.host_transfer import HostTransfers, Messenger, Transfer
from maxdiloco.engine.layout import FragmentPlan, State
from maxdiloco.engine.programs import Programs
from maxdiloco.engine.settings import HOST, XLA
from maxdiloco.parallel.program import Program

Run = Callable[..., Any]  # (program, *args) -> the program's results


class Leg(NamedTuple):
    """One leg of one exchange. An all-gather has one leg, reduce-scatter has two.

    Attributes:
      fragment: index of the fragment.
      send_step: inner step after which the outer gradients were formed.
      scatters: whether it is the first leg of reduce-scatter, which brings each slice its part.
    """

    fragment: int
    send_step: int
    scatters: bool = False


class Transport(Protocol):
    """Carries chunks between slices.

    Attributes:
      in_programs: whether the inner steps carry chunks, so that chunks which have arrived are in
        the state. If not, `receive` returns them.
      waited_s: time that `receive` has waited so far [s]; None if it never waits.
    """

    in_programs: bool
    waited_s: float | None = None

    def begin(self, state: State) -> None:
        """Send the chunks again that were in flight in a restored state."""

    def start_send(self, leg: Leg, chunks: Chunks) -> None:
        """Begin to send the chunks of a leg, and return at once."""

    def inner_step(self, run: Run, state: State, action: Action, batch: Any) -> tuple[State, Any]:
        """Run the inner step, with a chunk if the action has one: (state, metrics)."""

    def receive(self, leg: Leg) -> Chunks | None:
        """Return the chunks of a leg from all slices; None if they are in the state."""

    def state_for_checkpoint(self, state: State) -> State:
        """Return the state with all chunks that were sent so far."""

    def close(self) -> None:
        """End the threads."""


def plain_inner_step(run: Run, program: Program, state: State, batch: Any) -> tuple[State, Any]:
    """Run the inner step of every replica: Algorithm 2, lines 3-5."""
    params, opt_state, metrics = run(program, state.params, state.opt_state, batch)
    return replace(state, params=params, opt_state=opt_state), metrics


class XlaTransport:
    """The transport `xla`: chunks travel inside the programs of the inner steps."""

    in_programs = True
    waited_s = None

    def __init__(self, programs: Programs, messenger: Messenger | None = None):
        """Keep the programs. messenger: unused."""
        del messenger
        self._programs = programs

    def begin(self, state: State) -> None:
        """Do nothing: all chunks in flight are in the state."""

    def start_send(self, leg: Leg, chunks: Chunks) -> None:
        """Do nothing: the inner steps carry the chunks, which are in the state."""

    def inner_step(self, run: Run, state: State, action: Action, batch: Any) -> tuple[State, Any]:
        """See Transport."""
        programs, chunk = self._programs, [action.chunk]
        match action.name:
            case schedule.INNER:
                return plain_inner_step(run, programs.inner, state, batch)
            case schedule.INNER_SCATTER:
                outgoing = state.scatter_outgoing.read(0, chunk)
                replaced = state.scatter_incoming.read(0, chunk)
                args = (state.params, state.opt_state, batch, *outgoing, *replaced)
                params, opt_state, metrics, arrived = run(programs.inner_scatter, *args)
                incoming = state.scatter_incoming.write(0, chunk, [arrived])
                new = {"scatter_incoming": incoming}
            case schedule.INNER_EXCHANGE:
                outgoing = state.outgoing.read(0, chunk)
                replaced = state.incoming.read(action.slot, chunk)
                args = (state.params, state.opt_state, batch, *outgoing, *replaced)
                params, opt_state, metrics, arrived = run(programs.inner_exchange, *args)
                new = {"incoming": state.incoming.write(action.slot, chunk, [arrived])}
        return replace(state, params=params, opt_state=opt_state, **new), metrics

    def receive(self, leg: Leg) -> Chunks | None:
        """Return None: the chunks are in the state."""
        return None

    def state_for_checkpoint(self, state: State) -> State:
        """Return the state, which has all chunks."""
        return state

    def close(self) -> None:
        """Do nothing: this transport has no threads."""


class HostTransport:
    """The transport `host`: threads send a fragment when it is packed; `receive` waits for it."""

    in_programs = False

    def __init__(self, programs: Programs, messenger: Messenger | None):
        """Start the threads. messenger: None in a run of one process."""
        self._programs, self._layout = programs, programs.layout
        self._schedule = programs.layout.schedule
        self._transfers = HostTransfers(self._layout.mesh, messenger=messenger)
        # A part of every key, so that chunks which were sent for another state are never received.
        self._restarts = 0
        self._in_flight: dict[Leg, Future] = {}
        self.waited_s = 0.0

    def begin(self, state: State) -> None:
        """See Transport."""
        self._restarts += 1
        self._transfers.deadlines.begin()
        self._in_flight.clear()
        # One exchange is on the link at a time, so all except the last one have arrived.
        for event, plan in self._pending(state)[-1:]:
            if state.t < event.send_step + self._layout.scatter_steps:
                chunks = state.scatter_outgoing.read(0, range(plan.scatter.count))
                self.start_send(Leg(plan.index, event.send_step, scatters=True), chunks)
            elif self._schedule.share_steps:  # if not, the means arrived in the step of `reduce`
                chunks = state.outgoing.read(0, range(plan.gather.count))
                self.start_send(Leg(plan.index, event.send_step), chunks)

    def start_send(self, leg: Leg, chunks: Chunks) -> None:
        """See Transport."""
        payload = self._layout.plans[leg.fragment].payload
        means = payload.parts is not None and not leg.scatters
        name = f"fragment {leg.fragment} of step {leg.send_step}"
        transfer = Transfer(
            (self._restarts, *leg),
            size=payload.sent_size if leg.scatters else payload.size,
            rows=1 if means else payload.replicas_per_slice,
            scatters=leg.scatters,
            what=f"parts of {name}" if leg.scatters else name,
        )
        self._in_flight[leg] = self._transfers.start(transfer, chunks)

    def inner_step(self, run: Run, state: State, action: Action, batch: Any) -> tuple[State, Any]:
        """See Transport. The schedule of this transport has no actions with chunks."""
        return plain_inner_step(run, self._programs.inner, state, batch)

    def receive(self, leg: Leg) -> Chunks | None:
        """See Transport. Waits for the peers; raises LostPeerError."""
        started, future = time.perf_counter(), self._in_flight.pop(leg, None)
        chunks = future and future.result()
        self.waited_s += time.perf_counter() - started
        return chunks

    def state_for_checkpoint(self, state: State) -> State:
        """See Transport. Waits for the exchanges in flight."""
        for event, plan in self._pending(state):
            if future := self._in_flight.get(Leg(plan.index, event.send_step, scatters=True)):
                numbers = range(plan.scatter.count)
                incoming = state.scatter_incoming.write(0, numbers, future.result())
                state = replace(state, scatter_incoming=incoming)
            if future := self._in_flight.get(Leg(plan.index, event.send_step)):
                numbers = range(plan.gather.count)
                incoming = state.incoming.write(event.slot, numbers, future.result())
                state = replace(state, incoming=incoming)
        return state

    def close(self) -> None:
        """End the threads."""
        self._transfers.close()

    def _pending(self, state: State) -> list[tuple[Event, FragmentPlan]]:
        events = self._schedule.pending(state.t, dropped_until=state.dropped_until)
        return [(event, self._layout.plans[event.fragment]) for event in events]


class DryTransport:
    """Stands for a transport while a step runs on shapes: nothing is sent."""

    def __init__(self, transport: Transport, plans: Sequence[FragmentPlan]):
        """Keep the transport, whose inner steps are recorded, and the fragments' plans."""
        self._transport, self._plans = transport, plans
        self.inner_step = transport.inner_step

    def start_send(self, leg: Leg, chunks: Chunks) -> None:
        """Do nothing."""

    def receive(self, leg: Leg) -> Chunks | None:
        """Return the shapes of the chunks, unless the state has them."""
        if self._transport.in_programs:
            return None
        plan = self._plans[leg.fragment]
        return plan.scattered_chunks if leg.scatters else plan.incoming_chunks


MakeTransport = Callable[[Programs, Messenger | None], Transport]
TRANSPORTS: Mapping[str, MakeTransport] = MappingProxyType({XLA: XlaTransport, HOST: HostTransport})
