"""DiLoCo, Streaming DiLoCo and eager updates around anybody's training step.

DiLoCo: arXiv 2311.08105 Algorithm 1. Streaming DiLoCo: arXiv 2501.18512 Algorithm 2. Eager
updates: arXiv 2502.12996 Algorithm 3. No language model is known here.

    # R replicas  F leaves
"""

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from maxdiloco.diloco import fragments, outer_rate, quantize, schedule
from maxdiloco.engine import arguments, describe, exchanges, finite, saved
from maxdiloco.engine.calls import Call
from maxdiloco.engine.exchanges import Carrier
from maxdiloco.engine.programs import Programs, Rule
from maxdiloco.engine.state import Layout, State, lay_out
from maxdiloco.engine.trainer import Description, ExchangeSettings, Reading, SavedLayout, Trainer
from maxdiloco.exchange.host import Mailbox
from maxdiloco.parallel.program import Program, throttle_cpu


class DiLoCo(Trainer):
    """M replicas that train apart and synchronise fragment by fragment.

    inner_step: (params, opt_state, batch) -> (params, opt_state, metrics), one replica's view, any
      JAX code that keeps the structure, shapes and dtypes of the first two.
    num_replicas M; sync_period H [inner steps]; num_fragments P; overlap_steps tau [inner steps];
      alpha: weight of the replica's own values in the merge.
    outer_lr, outer_momentum: of SGD with Nesterov momentum; None: those of diloco.outer_rate.
    outer_optimizer: any optax transformation in its place (a fragment is a list of float32 arrays).
    outer_overlap: none | delayed | eager. exchange_dtype: of quantize.NAMES. error_feedback: send
      what earlier sends have left over, too; None: with int2 and topk.
    merge: mean | rda, how the outer gradients become one: see outer.radial_directional_mean.
    exchange: gather | owners: each slot of the mesh takes all that is sent, or a part whose mean it
      sends to all, in 8 bits at least: see exchange.owners. owners has no rda or topk.
    offsets: inner step (mod H) at which each fragment is sent; default floor(p*H/P).
    layer_axis: which leaves stack layers: None, or a pytree like params of None, int,
      `fragments.Stacked` or `fragments.Vocabulary`.
    mesh: M is a multiple of the size of its axis `diloco`; None: one device holds all replicas.
    outer_memory: device | pinned_host, where theta, the outer optimizer state, residuals and what
      is in flight are kept.
    exchange_carrier: program | host, see engine.exchanges; mailbox: for host in several processes,
      their messages (processes.mailbox).
    on_compile(name, seconds, compiled): called after each compilation.
    layout, programs: exist from `init` or `bind` on. See Trainer for what a training run calls.
    Raises ValueError for values outside the contract, before anything is compiled.
    """

    layout: Layout
    programs: Programs

    def __init__(
        self,
        inner_step: Callable[[Any, Any, Any], tuple[Any, Any, Any]],
        *,
        num_replicas: int,
        sync_period: int,
        num_fragments: int = 1,
        overlap_steps: int = 0,
        alpha: float = 0.0,
        outer_lr: float | None = None,
        outer_momentum: float | None = None,
        outer_optimizer: optax.GradientTransformation | None = None,
        outer_overlap: str = "none",
        exchange_dtype: str = "float32",
        error_feedback: bool | None = None,
        merge: str = "mean",
        exchange: str = schedule.GATHER,
        sequential_layers: bool = False,
        num_nonlayer_fragments: int = 1,
        offsets: Sequence[int] | None = None,
        layer_axis: Any = None,
        mesh: Mesh | None = None,
        outer_memory: str = "device",
        exchange_carrier: str = "program",
        mailbox: Mailbox | None = None,
        on_compile: Callable[[str, float, jax.stages.Compiled], None] = lambda *_: None,
    ):
        mesh = mesh or Mesh(np.array(jax.devices()[:1]), ("diloco",))
        choices = dict(merge=merge, exchange=exchange, exchange_dtype=exchange_dtype)
        choices |= dict(outer_memory=outer_memory, exchange_carrier=exchange_carrier)
        arguments.check(num_replicas, mesh, alpha, num_nonlayer_fragments, outer_overlap, choices)
        counts = dict(H=sync_period, P=num_fragments, tau=overlap_steps, overlap=outer_overlap)
        schedule.check_counts(**counts)
        if offsets is None:
            offsets = schedule.offsets(num_fragments, sync_period)
        schedule.check(offsets=offsets, **counts)
        wire = quantize.wire_format(exchange_dtype)
        self.settings = ExchangeSettings(
            sync_period=sync_period,
            overlap_steps=overlap_steps,
            offsets=tuple(offsets),
            outer_overlap=outer_overlap,
            exchange_dtype=exchange_dtype,
            num_nonlayer_fragments=num_nonlayer_fragments,
            sequential_layers=sequential_layers,
            error_feedback=arguments.feedback(error_feedback, wire),
            exchange=exchange,
        )
        self.schedule, self.period = self.settings.schedule, sync_period
        self.mesh, self.num_replicas = mesh, num_replicas
        rate = outer_rate.rate(num_replicas, overlap=outer_overlap, merge=merge)
        given = outer_optimizer, outer_lr, outer_momentum
        self.optimizer, numbers = arguments.outer_optimizer(*given, rate)
        self._noted_rule = numbers | {"alpha": float(alpha), "merge": merge}
        self._alpha, self._merge = alpha, merge
        self._inner_step, self._layer_axis = arguments.checked_step(inner_step), layer_axis
        self._outer_memory = None if outer_memory == "device" else outer_memory
        self._carrier_name, self._mailbox, self._on_compile = exchange_carrier, mailbox, on_compile
        self._carrier: Carrier | None = None
        self._last_state: Callable[[], State | None] = lambda: None  # for `close`

    def bind(self, params: Any, opt_state: Any) -> Layout:
        """Set layout and programs for one replica's pytrees (arrays or ShapeDtypeStructs).

        For a run that may restore a state, in place of `init`. Raises ValueError for fragments or
        leaves that do not fit.
        """
        arguments.check_trees(params, opt_state)
        self.layout = lay_out(
            params,
            opt_state,
            self.settings,
            layer_axis=self._layer_axis,
            num_replicas=self.num_replicas,
            mesh=self.mesh,
            optimizer=self.optimizer,
            outer_memory=self._outer_memory,
        )
        self.schedule = replace(
            self.schedule,
            num_chunks=tuple(plan.num_chunks for plan in self.layout.plans),
            scatter_steps=self.layout.scatter_steps,
            num_scattered=tuple(plan.scattered[0] for plan in self.layout.plans),
        )
        kinds = fragments.kinds_of(params, self._layer_axis) if self._merge == "rda" else None
        rule = Rule(self.optimizer, self._alpha, self.settings.outer_overlap, kinds)
        self.programs = Programs(self.layout, self._inner_step, rule, self._on_compile)
        self.abstract_state = self.layout.state
        # An evaluation never sends theta to another slice.
        self.exported, self.evaluated = self.programs.exported, self.programs.evaluated
        self._carrier = self._make_carrier()
        self._last_step = None
        return self.layout

    def _make_carrier(self) -> Carrier:
        """What carries out the actions; layout and programs are there."""
        make = exchanges.CARRIERS[self._carrier_name]
        return make(self.programs, self.schedule, self._mailbox)

    def init(self, params: Any, opt_state: Any) -> State:
        """One replica's pytrees, copied to all; shardings are kept, with `diloco` prepended.

        Into typed PRNG keys of opt_state (jax.random.key) each replica's number is folded.
        """
        self.bind(params, opt_state)
        return self.init_program(lambda *given: given)(params, opt_state)

    def init_program(self, make: Callable[..., tuple[Any, Any]], **options) -> Program:
        """The program that copies one replica's (params, opt_state) to all."""
        return self.programs.init(make, **options)

    def calls(self, batch: Any) -> list[Call]:
        """See Trainer; after `bind`."""
        return self._carrier.calls(batch)

    def step(self, state: State, batch: Any) -> tuple[State, Any]:
        """One inner step of every replica, and the sends and applies of this step.

        Streaming DiLoCo Algorithm 2, line 2 for one t: lines 3-12 in the order of schedule.actions.
        state: donated. batch: leaves [R, ...], as of the metrics. Not itself jittable. Raises
        ValueError for a batch without R; NumericsError when a replica's outer gradient was not
        finite, after the next synchronisation.
        """
        arguments.check_batch(batch, self.num_replicas)
        if state.t != self._last_step:  # the first step, or another state
            self._carrier.begin(state)
        actions = self.schedule.actions(state.t + 1, dropped_until=state.dropped_until)
        if len(actions) > 1:
            # The host would wait for the flags of the last synchronisation.
            finite.check_flags(self.layout, state.bad_before, state.t)
        state, metrics = replace(state, t=state.t + 1), None
        for action in actions:
            busy = (state.params, state.incoming, state.outer, state.residual_norm_R)
            throttle_cpu(self.mesh, busy)
            state, new = self._carrier.run(action, state, batch)
            metrics = metrics if new is None else new
        self._last_step, self._last_state = state.t, weakref.ref(state)
        return state, metrics

    def close(self) -> None:
        """End the threads, and check_finite of the last state unless an error is under way."""
        if self._carrier is not None:
            self._carrier.close()
        if (state := self._last_state()) is not None and sys.exception() is None:
            finite.check(self.layout, state)

    def check_exchanges(self, state: State) -> None:
        """See Trainer. The flags travel with the exchange, so all processes raise alike."""
        finite.check_flags(self.layout, state.bad, state.t)

    def check_finite(self, state: State) -> None:
        """As check_exchanges, and if parameters or theta that are held here are not finite now."""
        finite.check(self.layout, state)

    def replica_params(self, state: State) -> Any:
        """The replicas' parameters, leaves [R, ...]."""
        return state.params

    def outer_params(self, state: State) -> Any:
        """theta, float32, leaves [...], on the devices; eager: the mean. Raises NumericsError."""
        self.check_finite(state)
        return self.exported.of(state)

    def bytes_sent(self, t: int) -> int:
        """Bytes that inner step t makes one replica send to other slices."""
        sent = sum(map(self._carrier.action_bytes, self.schedule.actions(t)))
        return sent * (self.mesh.shape["diloco"] - 1)

    def extra_metrics(self, state: State) -> dict[str, float]:
        """Of the last exchange, and of the carrier."""
        return describe.state_metrics(state) | self._carrier.extra_metrics()

    @property
    def description(self) -> Description:
        """Replicas, fragments and the memory of the outer state."""
        return describe.description(self.layout, self.schedule, self._carrier)

    def closing_line(self, state: State) -> str:
        """The step, and how old theta's values are."""
        return describe.closing_line(self.schedule, state)

    def saved_items(self, state: State) -> dict[str, Any]:
        """Everything in the state as it lies; theta is an item of its own."""
        return saved.items_of(self._carrier.settled(state), self.layout)

    def note(self, state: State) -> dict[str, Any]:
        """What SavedLayout asks for."""
        return {
            "num_replicas": self.num_replicas,
            "mesh": dict(self.mesh.shape),
            "exchange": self.settings._asdict() | {"offsets": list(self.settings.offsets)},
            "rule": self._noted_rule,
            "dropped_until": state.dropped_until,
            "schedule_since": state.schedule_since,
            "chunk_pieces": list(self.layout.all_pieces),
            "theta_item": saved.theta_item(self.layout),
        }

    def reading(self, saved_layout: SavedLayout) -> Reading:
        """See Trainer; with another M, mesh or exchange, nothing in flight."""
        of_run = (self.layout, self.settings, self.optimizer, self._layer_axis)
        reader = saved.Reader(*of_run, self.exported.like, saved_layout)
        lines = functools.partial(describe.restore_lines, reader)
        return Reading(reader.items(), reader.state_of, reader.replica_items, lines)
