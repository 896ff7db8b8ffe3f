"""DiLoCo, Streaming DiLoCo and eager updates for any training step.

DiLoCo: arXiv 2311.08105, Algorithm 1. Streaming DiLoCo: arXiv 2501.18512, Algorithm 2. Eager
updates: arXiv 2502.12996, Algorithm 3. The package `engine` does not depend on the model.

    # R replicas  F leaves
"""

import copy
import functools
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from maxdiloco.diloco import fragments, schedule
from maxdiloco.diloco.combinations import RADIAL
from maxdiloco.diloco.schedule import Action
from maxdiloco.engine import describe, finite, library_checks
from maxdiloco.engine.calls import Call
from maxdiloco.engine.collective import Chunks, Sent
from maxdiloco.engine.fragment_values import arrays_of, with_arrays
from maxdiloco.engine.host_transfer import Messenger
from maxdiloco.engine.layout import (
    ChunkBuffer,
    FragmentPlan,
    Layout,
    State,
    lay_out,
    with_fragment,
)
from maxdiloco.engine.payload import Cut
from maxdiloco.engine.programs import Programs
from maxdiloco.engine.restore import Restorer, outer_item, saved_items
from maxdiloco.engine.settings import ExchangeSettings
from maxdiloco.engine.trainer import Description, RestorePlan, SavedLayout
from maxdiloco.engine.transports import TRANSPORTS, DryTransport, Leg, Transport
from maxdiloco.parallel.program import Program, throttle_cpu

InnerStep = Callable[[Any, Any, Any], tuple[Any, Any, Any]]
OnCompile = Callable[[str, float, jax.stages.Compiled], None]


class DiLoCo:
    """M replicas that train independently and synchronise fragment by fragment.

    Attributes:
      settings: the settings, resolved.
      layout: shapes, shardings and fragments; after `init` or `bind`.
      programs: the compiled programs; after `init` or `bind`.
      For the other attributes see engine.trainer.Trainer.
    """

    layout: Layout
    programs: Programs

    def __init__(
        self,
        inner_step: InnerStep,
        *,
        layer_axis: Any = None,
        mesh: Mesh | None = None,
        messenger: Messenger | None = None,
        on_compile: OnCompile = lambda *_: None,
        **settings: Any,
    ):
        """Check the settings; nothing is allocated or compiled.

        Args:
          inner_step: (params, opt_state, batch) -> (params, opt_state, metrics) of one replica: any
            JAX code that keeps the structure, shapes and dtypes of params and opt_state.
          layer_axis: which leaves stack layers: None, or a pytree like params of None, int,
            `fragments.Stacked` or `fragments.Vocabulary`.
          mesh: a mesh with the axis `diloco`, whose size divides M. None: one device holds all
            replicas.
          messenger: messages between processes, for transport='host' in several processes.
          on_compile: called as on_compile(name, seconds, compiled) after each compilation.
          **settings: fields of `ExchangeSettings`: num_replicas, sync_period, num_fragments,
            overlap_steps, alpha, outer_lr, exchange_dtype ...

        Raises:
          ValueError: a value that is not allowed.
        """
        mesh = mesh or Mesh(np.array(jax.devices()[:1]), ("diloco",))
        library_checks.check_mesh(mesh)
        self.settings = ExchangeSettings(**settings).resolve_on(mesh)
        self.mesh, self.num_replicas = mesh, self.settings.num_replicas
        self.schedule, self.period = self.settings.schedule, self.settings.sync_period
        self._inner_step = library_checks.with_structure_check(inner_step)
        self._layer_axis = layer_axis
        self._messenger, self._on_compile = messenger, on_compile
        self._transport: Transport | None = None
        # `calls` replaces it, to record programs instead of running them.
        self._run: Callable[..., Any] = lambda program, *args: program(*args)
        self._last_state: Callable[[], State | None] = lambda: None  # for `close`

    @classmethod
    def from_settings(
        cls, inner_step: InnerStep, settings: ExchangeSettings, **options: Any
    ) -> "DiLoCo":
        """Return DiLoCo with these settings. options: the other arguments of the constructor."""
        return cls(inner_step, **options, **vars(settings))

    def bind(self, params: Any, opt_state: Any) -> Layout:
        """Set layout and programs for one replica's pytrees (arrays or ShapeDtypeStructs).

        A run that may restore a state calls `bind` instead of `init`.

        Raises:
          ValueError: a leaf cannot be trained, or the parameters cannot be cut into P fragments.
        """
        library_checks.check_trees(params, opt_state, self.mesh)
        self.layout = lay_out(
            params, opt_state, self.settings, layer_axis=self._layer_axis, mesh=self.mesh
        )
        self.schedule = self.layout.schedule
        radial = self.settings.aggregation == RADIAL
        leaf_axes = fragments.leaf_axes_of(params, self._layer_axis) if radial else None
        self.programs = Programs(self.layout, self._inner_step, leaf_axes, self._on_compile)
        self.abstract_state = self.layout.state
        self.exported, self.evaluated = self.programs.exported, self.programs.evaluated
        make_transport = TRANSPORTS[self.settings.transport]
        self._transport = make_transport(self.programs, self._messenger)
        self._last_step = None
        return self.layout

    def init(self, params: Any, opt_state: Any) -> State:
        """Copy one replica's pytrees to all replicas: R becomes the first dim of each leaf.

        Typed PRNG keys in opt_state (jax.random.key) get each replica's number folded in.
        """
        self.bind(params, opt_state)
        return self.init_program(lambda *trees: trees)(params, opt_state)

    def init_program(self, make: Callable[..., tuple[Any, Any]], **options) -> Program:
        """Return the program that copies one replica's (params, opt_state) to all replicas."""
        return self.programs.init(make, **options)

    # -- one step --------------------------------------------------------------------------------

    def step(self, state: State, batch: Any) -> tuple[State, Any]:
        """Take one inner step of every replica, with the sends and merges of this step.

        Streaming DiLoCo, Algorithm 2, line 2 for one t: lines 3-12, in the order of
        schedule.actions.

        Args:
          state: the state of the step before; donated.
          batch: leaves [R, ...].

        Returns:
          (state, metrics with leaves [R, ...]). The call cannot be inside jit.

        Raises:
          ValueError: the batch lacks R.
          NumericsError: after the next merge, if a replica's outer gradient was not finite.
        """
        library_checks.check_batch(batch, self.num_replicas)
        if state.t != self._last_step:  # the first step, or another state
            self._transport.begin(state)
        actions = self.schedule.actions(state.t + 1, dropped_until=state.dropped_until)
        if len(actions) > 1:
            # `bad` itself would make the host wait for the last merge.
            finite.check_flags(self.layout, state.bad_before, state.t)
        bad, metrics = state.bad, None
        state = replace(state, t=state.t + 1)
        for action in actions:
            busy = (state.params, state.incoming, state.outer, state.residual_norm_R)
            throttle_cpu(self.mesh, busy)
            state, new_metrics = self._act(action, state, batch)
            metrics = metrics if new_metrics is None else new_metrics
        if state.bad is not bad:
            state.bad.copy_to_host_async()
        self._last_step, self._last_state = state.t, weakref.ref(state)
        return state, metrics

    def _act(self, action: Action, state: State, batch: Any) -> tuple[State, Any]:
        """Execute an action and return (state, metrics of an inner step or None)."""
        match action.name:
            case schedule.INNER | schedule.INNER_EXCHANGE | schedule.INNER_SCATTER:
                return self._transport.inner_step(self._run, state, action, batch)
            case schedule.PACK:
                return self._pack(action, state), None
            case schedule.REDUCE:
                return self._reduce(action, state), None
            case schedule.REDUCE_AND_SHARE:
                return self._reduce_and_share(action, state), None
            case schedule.MERGE:
                return self._merge(action, state), None
            case schedule.SYNCHRONISE:
                return self._synchronise(action, state), None
            case schedule.DELAYED_STEP:
                return self._delayed_step(action, state), None
            case schedule.EAGER_STEP:
                return self._eager_step(action, state), None
        raise AssertionError(action)

    def _pack(self, action: Action, state: State) -> State:
        """Encode the outer gradients of a fragment and start to send them: lines 7-8."""
        plan = self.layout.plans[action.fragment]
        leaves = arrays_of(state, plan)
        program = self.programs.pack(plan)
        replaced = self._replaced_by_pack(state, plan)
        args = leaves._replace(outer_opt=(), residual=()), plan.starts, leaves.residual, replaced
        return self._sent(action, state, self._run(program, *args))

    def _reduce(self, action: Action, state: State) -> State:
        """Reduce-scatter: average the part of each slice and start to send the mean: line 8."""
        plan = self.layout.plans[action.fragment]
        send_step = state.t - self.layout.scatter_steps
        parts = self._received(Leg(plan.index, send_step, scatters=True), state, action)
        replaced = self._replaced(state.outgoing, plan.gather)
        chunks = self._run(self.programs.reduce(plan), parts, replaced)
        outgoing = state.outgoing.write(0, range(plan.gather.count), chunks)
        state = replace(state, outgoing=outgoing)
        self._transport.start_send(Leg(plan.index, send_step), chunks)
        return state

    def _reduce_and_share(self, action: Action, state: State) -> State:
        """Reduce, and share the mean at once, if no inner step is left to carry it: line 8."""
        plan = self.layout.plans[action.fragment]
        parts = state.scatter_incoming.read(0, range(plan.scatter.count))
        chunks = self._run(self.programs.reduce_and_share(plan), parts)
        incoming = state.incoming.write(action.slot, range(plan.gather.count), chunks)
        return replace(state, incoming=incoming)

    def _merge(self, action: Action, state: State) -> State:
        """Apply an exchange that was sent tau steps ago: lines 10-12."""
        plan = self.layout.plans[action.fragment]
        leg = Leg(plan.index, state.t - self.schedule.lag)
        leaves = arrays_of(state, plan)._replace(residual=())
        args = leaves, state.bad, plan.starts, (), self._received(leg, state, action)
        return self._merged(action, state, self._run(self.programs.merge(plan), *args))

    def _synchronise(self, action: Action, state: State) -> State:
        """Send, exchange and merge in one program: lines 7-12 with tau = 0."""
        plan = self.layout.plans[action.fragment]
        args = arrays_of(state, plan), state.bad, plan.starts, ()
        return self._merged(action, state, self._run(self.programs.synchronise(plan), *args))

    def _delayed_step(self, action: Action, state: State) -> State:
        """Merge the exchange of the previous round, and send the exchange of this round."""
        plan = self.layout.plans[action.fragment]
        return self._step_of_round(action, state, self.programs.delayed_step(plan))

    def _eager_step(self, action: Action, state: State) -> State:
        """Merge the previous round with each replica's outer gradient of this round, and send."""
        plan = self.layout.plans[action.fragment]
        return self._step_of_round(action, state, self.programs.eager_step(plan))

    def _step_of_round(self, action: Action, state: State, program: Program) -> State:
        """Run a program that merges one exchange and sends the next one."""
        plan = self.layout.plans[action.fragment]
        incoming = self._received(Leg(plan.index, state.t - self.schedule.lag), state, action)
        replaced = self._replaced_by_pack(state, plan)
        args = arrays_of(state, plan), state.bad, plan.starts, replaced, incoming
        return self._merged(action, state, self._run(program, *args))

    def _received(self, leg: Leg, state: State, action: Action) -> Chunks:
        """Return the chunks of a leg; zeros if nothing was sent, as for a merge in round 1."""
        chunks, plan = self._transport.receive(leg), self.layout.plans[leg.fragment]
        if chunks is not None:
            return chunks
        if leg.scatters:
            return state.scatter_incoming.read(0, range(plan.scatter.count))
        return state.incoming.read(action.slot, range(plan.gather.count))

    def _replaced_by_pack(self, state: State, plan: FragmentPlan) -> Chunks:
        """Return the chunks that `pack` replaces, see `_replaced`."""
        outgoing = state.scatter_outgoing if plan.scatter else state.outgoing
        return self._replaced(outgoing, plan.packed)

    def _replaced(self, outgoing: ChunkBuffer, cut: Cut) -> Chunks:
        """Return the chunks that a send replaces, to be donated; () if threads may read them."""
        return outgoing.read(0, range(cut.count)) if self.schedule.in_programs else ()

    def _merged(self, action: Action, state: State, results: Any) -> State:
        """Return the state with the results of a program that replaces a fragment's values."""
        leaves, bad, sizes, update_ratio, sent = results
        plan = self.layout.plans[action.fragment]
        new_state = replace(
            with_arrays(state, plan, leaves),
            bad=bad,
            bad_before=state.bad,
            sizes=sizes,
            update_ratio=update_ratio,
        )
        return self._sent(action, new_state, sent)

    def _sent(self, action: Action, state: State, sent: Sent) -> State:
        """Return the state after a send, whose chunks begin to travel."""
        plan = self.layout.plans[action.fragment]
        if sent.residual:
            residual = with_fragment(state.residual, plan, sent.residual)
            state = replace(state, residual=residual, residual_norm_R=sent.norm_R)
        if not sent.chunks:
            return state
        scatters, numbers = plan.scatter is not None, range(len(sent.chunks))
        if scatters:
            outgoing = state.scatter_outgoing.write(0, numbers, sent.chunks)
            state = replace(state, scatter_outgoing=outgoing)
        else:
            state = replace(state, outgoing=state.outgoing.write(0, numbers, sent.chunks))
        self._transport.start_send(Leg(plan.index, state.t, scatters), sent.chunks)
        return state

    # -- compiled programs and bytes -------------------------------------------------------------

    def calls(self, batch: Any) -> list[Call]:
        """Return every program that the steps call, `inner` first; after `bind`.

        The method executes the actions of the third period, when exchanges are in flight, with
        shapes instead of arrays.

        Args:
          batch: ShapeDtypeStructs, leaves [R, ...].
        """
        H, found = self.period, {}
        shapes: dict[int, Any] = {}

        def record(program: Program, *args: Any) -> Any:
            call = found.setdefault(id(program), Call(program, args, 0))
            found[id(program)] = call._replace(runs=call.runs + 1)
            if id(program) not in shapes:
                shapes[id(program)] = program.out_shapes(*args)
            return shapes[id(program)]

        dry = copy.copy(self)
        dry._run, dry._transport = record, DryTransport(self._transport, self.layout.plans)
        state = replace(self.abstract_state, t=2 * H)
        dry._act(Action(schedule.INNER), state, batch)
        found[id(self.programs.inner)] = found[id(self.programs.inner)]._replace(runs=0)
        actions = [each for t in range(2 * H + 1, 3 * H + 1) for each in self.schedule.actions(t)]
        actions.sort(key=lambda action: (schedule.ACTIONS.index(action.name), action.fragment or 0))
        for action in actions:
            dry._act(action, state, batch)
        return list(found.values())

    def bytes_sent(self, t: int) -> int:
        """Return the bytes that inner step t makes one replica send to other slices."""
        plans, in_programs = self.layout.plans, self._transport.in_programs
        sent = sum(
            plans[action.fragment].bytes_sent(action, in_programs=in_programs)
            for action in self.schedule.actions(t)
            if action.fragment is not None
        )
        return sent * (self.mesh.shape["diloco"] - 1)

    # -- values of a state -----------------------------------------------------------------------

    def check_finite(self, state: State, *, exchanges_only: bool = False) -> None:
        """See Trainer. The flags travel with the exchange, so all processes raise together."""
        if exchanges_only:
            finite.check_flags(self.layout, state.bad, state.t)
        else:
            finite.check(self.layout, state)

    def replica_params(self, state: State) -> Any:
        """Return the replicas' parameters, leaves [R, ...]."""
        return state.params

    def outer_params(self, state: State) -> Any:
        """Return the outer parameters, float32, leaves [...]; eager: their mean.

        Raises:
          NumericsError: a value is not finite.
        """
        self.check_finite(state)
        return self.exported.read(state)

    def extra_metrics(self, state: State) -> dict[str, float]:
        """Return metrics of the last exchange, and the time waited for exchanges [s]."""
        found = describe.state_metrics(state)
        if self._transport.waited_s is not None:
            found["dcn/waited_s"] = self._transport.waited_s
            self._transport.waited_s = 0.0
        return found

    @property
    def description(self) -> Description:
        """Texts on the replicas, the fragments and the memory of the outer state."""
        return describe.description(self.layout)

    def closing_line(self, state: State) -> str:
        """Return the step and the age of the outer parameters as text."""
        return describe.closing_line(self.schedule, state)

    # -- checkpoints -----------------------------------------------------------------------------

    def checkpoint(self, state: State) -> tuple[dict[str, Any], dict[str, Any]]:
        """See Trainer."""
        metadata = {
            "num_replicas": self.num_replicas,
            "mesh": dict(self.mesh.shape),
            "exchange": self.settings.to_json(),
            "dropped_until": state.dropped_until,
            "schedule_since": state.schedule_since,
            "chunk_lengths": list(self.layout.chunk_lengths),
            "outer_item": outer_item(self.layout),
        }
        state = self._transport.state_for_checkpoint(state)
        return saved_items(state, self.layout), metadata

    def restore_plan(self, saved: SavedLayout) -> RestorePlan:
        """See Trainer, and restore.Restorer for a checkpoint of another M, mesh or settings."""
        restorer = Restorer(self.layout, saved)
        lines = functools.partial(describe.restore_lines, restorer)
        return RestorePlan(restorer.items(), restorer.state_of, restorer.replica_items, lines)

    def close(self) -> None:
        """Stop the threads, and check the last state unless an exception is being raised."""
        if self._transport is not None:
            self._transport.close()
        if (state := self._last_state()) is not None and sys.exception() is None:
            finite.check(self.layout, state)
