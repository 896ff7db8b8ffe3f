"""The trainer of an island: one replica, which exchanges through a log in an object store.

Outer parameters and outer optimizer are in the host memory of the island's driver. The state has a
copy of them, for evaluations, checkpoints and exports.
"""

import dataclasses
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from maxdiloco.engine import describe
from maxdiloco.engine.calls import Call
from maxdiloco.engine.diloco import DiLoCo, InnerStep
from maxdiloco.engine.host_transfer import Mailbox
from maxdiloco.engine.layout import Layout, State
from maxdiloco.engine.settings import ExchangeSettings
from maxdiloco.engine.trainer import Description, RestorePlan, SavedLayout
from maxdiloco.engine.transports import plain_inner_step
from maxdiloco.errors import CheckpointError, ConfigError, NumericsError
from maxdiloco.islands import beside, core, fitness, keys, objects, records, wires
from maxdiloco.islands.beside import Beside
from maxdiloco.islands.counted import Counted, Counts
from maxdiloco.islands.driver import Driver
from maxdiloco.islands.island import REPLACED, Damage, Stop
from maxdiloco.islands.keys import Keys
from maxdiloco.islands.records import Run
from maxdiloco.parallel.program import Program, throttle_cpu
from maxdiloco.run.island import processes as island_processes
from maxdiloco.run.island import settings as island_settings
from maxdiloco.run.island.host_values import HostValues
from maxdiloco.run.island.leased_text import LeasedText
from maxdiloco.run.island.processes import GO, Processes, Ranges, Standing
from maxdiloco.run.island.settings import Settings
from maxdiloco.run.island.values import Values, leaves_of

_LOOK_S = 0.05  # time between two looks of a reader for the island that replaces one [s]


def _run(program: Program, *args: Any) -> Any:
    return program(*args)


class IslandTrainer:
    """The trainer (engine.trainer.Trainer) and the run control of an island.

    It has a DiLoCo of one replica for layout, programs and checkpoints. Process 0 decides what the
    processes of the island do.
    """

    num_replicas = 1

    def __init__(
        self,
        inner_step: InnerStep,
        exchange: ExchangeSettings,
        *,
        settings: Settings,
        fresh: Callable[[Any], Any],
        layer_axis: Any,
        mailbox: Mailbox | None,
        **options: Any,
    ):
        """Make the parts; nothing is compiled.

        Args:
          inner_step: of the replica.
          exchange: settings of the run; the log has those of its exchanges.
          settings: of the island.
          fresh: parameters of one replica -> the first state of its inner optimizer.
          layer_axis, mailbox, **options: of DiLoCo.
        """
        exchange = dataclasses.replace(exchange, overlap_steps=0, error_feedback=False)
        self._diloco = DiLoCo.from_settings(inner_step, exchange, layer_axis=layer_axis, **options)
        self.mesh, self.period = self._diloco.mesh, self._diloco.period
        self._layer_axis, self._mailbox = layer_axis, mailbox
        self._settings, self._run, self._fresh = settings, settings.run, fresh
        self._processes = Processes(mailbox)
        self._standing: Standing | None = None
        self._keys: Keys | None = None  # of process 0
        self._beside: Beside | None = None
        self._incarnation = 0
        self._begun = 0  # inner steps before this start of the island
        self._warm_from: int | None = None  # where inner moments began at zero in a run under way
        self._moments_of: int | None = None
        self._left, self._waited_s = False, 0.0
        self._told = Counts(), 0
        self._running: Any = ()
        self._last_state: Callable[[], State | None] = lambda: None  # for `close`

    def bind(self, params: Any, opt_state: Any) -> Layout:
        """Set the layout for one replica's pytrees, and open the store if the island is to train.

        Raises:
          ConfigError: the store cannot be used, or has another run.
        """
        layout, settings = self._diloco.bind(params, opt_state), self._settings
        self.abstract_state = self._diloco.abstract_state
        self.exported, self.evaluated = self._diloco.exported, self._diloco.evaluated
        self._run = settings.run._replace(fragments=leaves_of(layout, self._layer_axis))
        if settings.facts is not None:
            self._processes.first(self._open)
        return layout

    def _open(self) -> None:
        """Open the store; raises as bind."""
        url, key = self._settings.url, self._settings.key
        self._keys = keys.read(key) if key else None
        self._bucket = Counted(objects.open_bucket(url, "islands_store"))
        fitness.require_rights(self._bucket, url, self._settings.name)
        self._agreed()

    def _agreed(self) -> tuple[Run, Any]:
        """Return the run of this island, and the run that the store has; raises as bind."""
        settings = self._settings
        stored, run = objects.get(self._bucket, None, records.RUN), self._run
        if isinstance(stored, Damage):
            raise ConfigError(f"islands_store={settings.url}: {stored.reason}. Use another.")
        found = stored if isinstance(stored, Run) else None
        if found is not None:
            run = island_settings.adopted(run, found, settings.url, settings.facts.step_tokens)
        known = keys.of_run(self._keys, found, settings.name, settings.url)
        run = run._replace(keys=known)
        island_settings.require_block(run, settings.facts)
        return run, stored

    def init_program(self, make: Callable[..., tuple[Any, Any]], **options) -> Program:
        """See Trainer."""
        return self._diloco.init_program(make, **options)

    def calls(self, batch: Any) -> list[Call]:
        """See Trainer; each fragment is read and replaced once in a period."""
        like = self.abstract_state
        inner = Call(self._diloco.programs.inner, (like.params, like.opt_state, batch), self.period)
        return [inner, *HostValues(self._diloco.programs).calls(1)]

    def step(self, state: State, batch: Any) -> tuple[State, Any]:
        """See Trainer; it waits for the log, and sends and applies what is due."""
        state = replace(state, t=state.t + 1)
        if not self._standing.may_step:
            state = self._decided(self._waited, state)
        throttle_cpu(self.mesh, (state.params, state.outer))
        state, metrics = plain_inner_step(_run, self._diloco.programs.inner, state, batch)
        # A host that runs ahead would send at steps that are far from done.
        jax.block_until_ready(self._running)
        self._running = metrics
        state = self._decided(self._sent_and_applied, state)
        self._last_state = weakref.ref(state)
        return state, metrics

    # -- the start ------------------------------------------------------------------------------

    def join(self, state: State) -> State:
        """Catch up with the log of the store, or begin one with this state's theta.

        Raises ConfigError as bind, since the run may have begun meanwhile.
        """
        settings, name = self._settings, self._settings.name
        host = HostValues(self._diloco.programs, self._mailbox)
        plans = self._diloco.layout.plans
        self._values = Values(host, plans, self._processes, self._fresh)
        theta = [host.theta(state, plan) for plan in plans]
        settings.facts.say(f"island {name} meets the others at {settings.url}")
        state = self._decided(lambda state: self._joined(state, theta), state)
        if self._processes.decides:
            self._told = self._bucket.counts, state.t
        return state

    def _decided(self, work: Callable[[State], State], state: State) -> State:
        """The state after work(state) in process 0, in all of them, and where they stand then."""
        if not self._processes.decides:
            state, self._standing = self._values.followed(state)
            return state
        state, self._standing = work(state), self._stands()
        self._processes.tell(GO, self._standing)
        return state

    def _joined(self, state: State, theta: list[np.ndarray]) -> State:
        """The state once the island is in the log, as its next incarnation."""
        settings, say = self._settings, self._say
        self._values.state, self._begun = state, state.t
        while True:
            run, stored = self._agreed()
            driver = Driver(
                self._bucket, run, settings.pace, settings.name, theta, x=self._values,
                feedback=settings.feedback, moments_of=self._moments_of, after=self._incarnation,
                key=None if self._keys is None else self._keys.own,
            )  # fmt: skip
            self._beside = Beside(driver, settings.pace, say)
            self._beside.joined()
            if driver.stop is None:
                break
            self._beside.close(drain=False)
            again = objects.get(self._bucket, None, records.RUN)
            if stored is not None or not isinstance(again, Run):  # no other was first meanwhile
                raise self._error(driver.stop)
        self._run = run
        stands, self._incarnation = self._stands(), driver.state.incarnation
        start = f"its start number {self._incarnation}"
        say(f"island {settings.name} is in, {start}: {stands.line}")
        self._warm_from = None
        if driver.moments == "zero" and stands.records:
            self._warm_from, state = state.t, self._values.without_moments(state)
            say(f"its inner optimizer begins anew, with a warm-up of {run.sync_period} steps")
        return self._values.flushed(state, driver)

    def _say(self, line: str) -> None:
        failure = self._bucket.failure if line == core.AWAY else ""
        self._settings.facts.say(f"{line}. The last answer: {failure}" if failure else line)

    # -- between two inner steps ----------------------------------------------------------------

    def _waited(self, state: State) -> State:
        self._values.state = state
        started = time.perf_counter()
        self._beside.ready()
        self._waited_s += time.perf_counter() - started
        while not self._is_over() and (stop := self._beside.stop):
            state = self._again(state, stop)
            self._beside.ready()
        return self._values.flushed(state, self._beside.driver)

    def _again(self, state: State, stop: Stop) -> State:
        """Join once more where that helps. state.t is that of the step to come."""
        driver = self._beside.driver
        if not stop.again or not driver.finite:
            raise self._error(stop)
        self._say(f"island {self._settings.name} joins again: {stop.line}")
        self._beside.close(drain=False)
        self._moments_of = driver.state.logs[0].ledger.number
        self._values.new.clear()
        t, state = state.t, replace(state, t=state.t - 1)
        state = self._joined(state, [each.theta for each in driver.outer])
        return replace(state, t=t)

    def _sent_and_applied(self, state: State) -> State:
        self._values.state = state
        self._beside.stepped(self._settings.facts.step_tokens)
        driver = self._beside.driver
        if not driver.finite:
            raise self._error(driver.stop, state.t)
        return self._values.flushed(state, driver)

    def _stands(self) -> Standing:
        of = dict(warm_from=self._warm_from, several=self._processes.several)
        return island_processes.standing(self._run, self._beside.driver, **of)

    def _is_over(self) -> bool:
        return island_processes.is_over(self._run, self._beside.driver)

    def _error(self, stop: Stop, t: int = 0) -> Exception:
        where = f"island {self._settings.name}"
        if not self._beside.driver.finite:
            return NumericsError(
                f"step {t}: {where}: {stop.line}. Resume with a lower learning_rate."
            )
        if stop.why == REPLACED:
            return ConfigError(f"island_name={self._settings.name}: {stop.line}.")
        return CheckpointError(
            f"islands_store={self._settings.url}: {stop.line}. `python -m maxdiloco.islands audit "
            f"{self._settings.url}` says more."
        )

    # -- what the loop asks ---------------------------------------------------------------------

    def reads(self, text: Any) -> Any:
        """The blocks of the text that the island leases."""
        return LeasedText(text, self._ranges, lambda: self._standing.tokens)

    def _ranges(self, step: int) -> Ranges:
        """Of LeasedText. Waits for leases; once no step follows any range does."""
        found = self._processes.ranges(
            step, self._leased, over=lambda: self._left or self._standing.ended
        )
        return found or [(0, self._settings.facts.step_tokens // self._settings.facts.length)]

    def _leased(self, step: int) -> Ranges:
        """What was read ahead when an island joined again counts for its new blocks."""
        L, tokens = self._settings.facts.length, self._settings.facts.step_tokens
        while True:
            start = (step - self._begun - 1) * tokens
            if found := self._beside.leased(start, start + tokens):
                size = self._run.block_tokens
                firsts = [((r.block - 1) * size + r.start) // L for r in found]
                return [(n, (r.stop - r.start) // L) for n, r in zip(firsts, found, strict=True)]
            if self._left or self._is_over():
                return []
            time.sleep(_LOOK_S)

    def learning_rate(self, rate: Callable[[float], float], t: int) -> float:
        """By the tokens that are committed, and this island's on their way."""
        found = rate(self._standing.with_own * (self._settings.facts.steps - 1))
        if (begun := self._standing.warm_from) is not None:
            found *= min(1.0, (t - begun) / self._run.sync_period)
        return float(np.float32(found))

    def evaluates(self, t: int, interval: int) -> bool:
        """One island of all does, each `interval` steps of the first's tokens."""
        if self._standing.evaluates and self._processes.decides:
            self._beside.driver.evaluations = []
        return self._standing.evaluates

    def ended(self) -> bool:
        """Whether all tokens of the run are committed."""
        return self._standing.ended

    def leave(self) -> None:
        """Wait a while for what is being stored, then end the threads."""
        first, self._left = not self._left, True
        if first and self._beside is not None:
            self._beside.leave(drain=self._beside.stop is None)

    def close(self) -> None:
        """End the threads, and check_finite of the last state unless an error is under way."""
        self.leave()
        self._diloco.close()
        if (state := self._last_state()) is not None and sys.exception() is None:
            self._diloco.check_finite(state)

    # -- what a run reads of a state ------------------------------------------------------------

    def check_finite(self, state: State, *, exchanges_only: bool = False) -> None:
        """See Trainer."""
        self._diloco.check_finite(state, exchanges_only=exchanges_only)

    def bytes_sent(self, t: int) -> float:
        """Return 0: an island sends when it is time, not by the step; see extra_metrics."""
        return 0.0

    def checkpoint(self, state: State) -> tuple[dict[str, Any], dict[str, Any]]:
        """See Trainer; with the number of records of fragment 0 that the state has."""
        items, metadata = self._diloco.checkpoint(state)
        known = self._standing.records if self._standing is not None else None
        return items, metadata | {"records": known}

    def restore_plan(self, saved: SavedLayout) -> RestorePlan:
        """See Trainer; the inner moments of a checkpoint are of the records that it knows."""
        if saved.records is not None:
            self._moments_of = saved.records
        return self._diloco.restore_plan(saved)

    def extra_metrics(self, state: State) -> dict[str, float]:
        """Return metrics of the log, of what this island has sent, and of the last message."""
        if not self._processes.decides:
            return {}
        (before, t), self._told = self._told, (self._bucket.counts, state.t)
        waited, self._waited_s = self._waited_s, 0.0
        counts, steps = self._bucket.counts, max(state.t - t, 1)
        driver = self._beside.driver
        found = describe.state_metrics(state) | beside.metrics(driver, self._settings.pace)
        found |= {
            "dcn/waited_s": waited,
            "dcn/bytes_sent": (counts.sent - before.sent) / steps,
            "islands/bytes_received": (counts.received - before.received) / steps,
            "islands/requests": (counts.requests - before.requests) / steps,
        }
        return found | ({"diloco/outer_grad_norm": driver.norm} if driver.norm else {})

    @property
    def description(self) -> Description:
        """Fragments with the bytes of their messages, and the memory of the outer state."""
        layout, run = self._diloco.layout, self._run
        sizes = [
            wires.payload_size(run.wire, tuple(leaf.size for leaf in leaves))
            for leaves in leaves_of(layout, self._layer_axis)
        ]
        title = f"{len(layout.plans)} fragments, tau {run.overlap_steps}, {run.wire}"
        found = describe.description(layout, sizes=sizes)
        return found._replace(title=f"DiLoCo of {title}, elastic islands")

    def closing_line(self, state: State) -> str:
        """Return the step, and the progress of the log."""
        return f"done: step {state.t}; {self._standing.line}"
