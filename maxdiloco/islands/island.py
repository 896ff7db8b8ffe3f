"""Elastic training through a store, for any JAX training step (needs JAX).

`Island` trains one replica. Islands exchange outer gradients through a log in a bucket or a folder:
they may start late, freeze, fail and come back. docs/development/islands-protocol.md describes the
log.
"""

import dataclasses
import functools
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from maxdiloco.diloco import quantize
from maxdiloco.engine import describe
from maxdiloco.engine.calls import Call
from maxdiloco.engine.diloco import DiLoCo, InnerStep, OnCompile
from maxdiloco.engine.layout import Layout, State
from maxdiloco.engine.settings import AUTO, ExchangeSettings
from maxdiloco.engine.trainer import Description, RestorePlan, SavedLayout
from maxdiloco.errors import CheckpointError, ConfigError, NumericsError
from maxdiloco.islands import (
    log_store,
    outer_step,
    processes,
    records,
    rules,
    runtime,
    signatures,
    state_machine,
    store_check,
)
from maxdiloco.islands.executor import Executor
from maxdiloco.islands.host_values import HostValues, leaves_of
from maxdiloco.islands.log_store import MeteredStore
from maxdiloco.islands.records import Damaged, Range, Run
from maxdiloco.islands.rules import Timing
from maxdiloco.islands.runtime import LeasedData, Runtime
from maxdiloco.islands.state_machine import REPLACED, Stop
from maxdiloco.islands.step_sizes import StepSizes
from maxdiloco.parallel.program import Program, throttle_cpu

# Records; the most that a late joiner reads after a snapshot. A snapshot has the bytes of 16
# messages of four bits. A storm of faults transfers fewer bytes with 16 than with 8 or 32.
SNAPSHOT_EVERY = 16
_LEASES_TOLD = 32  # broadcast to the other processes after a step
# The arguments of Island by the fields of run.json.
_ARGUMENTS = MappingProxyType({
    "wire": "exchange_dtype", "wire_down": "exchange_dtype", "islands_min": "min_members",
    "fragments": "num_fragments",
})  # fmt: skip


class Block(NamedTuple):
    """A part of the data that this island has leased.

    Attributes:
      index: number of the block, below num_blocks.
      epoch: how often all blocks were leased before.
      start, stop: tokens of the block that this island reads. They are 0 and block_tokens, unless a
        dead island has committed the first part.
    """

    index: int
    epoch: int
    start: int
    stop: int


class Position(NamedTuple):
    """The position in the log on which all processes of an island act until the next position.

    Attributes:
      records: number of records in the log of fragment 0.
      tokens: committed tokens in the log of fragment 0.
      progress: committed part of the run.
      expected: progress plus this island's uncommitted tokens, and the same number for each other
        island that is alive.
      ended: whether no step follows.
      evaluates: whether this island evaluates now.
      may_step: whether the next step may begin without checking the log again.
      leases: leases of the data since the last position.
      batch_size: sequences of this island in an inner step; 0 without a global batch.
    """

    records: int
    tokens: int
    progress: float
    expected: float
    ended: bool
    evaluates: bool
    may_step: bool
    leases: tuple[Range, ...]
    batch_size: int

    @property
    def line(self) -> str:
        """Return the position as text for the user."""
        done = f"{100 * self.progress:.1f} % of the run"
        return f"{self.records} records, {self.tokens:,} tokens committed, {done}"


def timing_of(period_seconds: float | Literal["auto"], dead_seconds: float) -> Timing:
    """Return the times of an island. Arguments below a minute also shorten the other times."""
    usual = Timing(dead=dead_seconds, automatic=period_seconds == AUTO)
    beat, listing = min(usual.beat, dead_seconds / 6), min(usual.list, dead_seconds / 10)
    usual = usual._replace(beat=beat, list=listing)
    if usual.automatic:
        return usual
    return rules.at_period(usual, float(period_seconds))  # a message has it as a float


class Island:
    """One replica that trains with others through a store.

    Attributes:
      timing: periods and timeouts of this island.
      run: settings that all islands have in common; after `join`.
      For the other attributes see engine.trainer.Trainer.
    """

    num_replicas = 1

    def __init__(
        self,
        inner_step: InnerStep,
        *,
        store: str,
        name: str,
        sync_period: int,
        total_tokens: int,
        step_tokens: int = 1,
        block_tokens: int = 0,
        eval_tokens: int = 0,
        global_batch_size: int | None = None,
        period_seconds: float | Literal["auto"] = 60.0,
        dead_seconds: float = 60.0,
        min_members: int = 1,
        key_file: str = "",
        same: Mapping[str, object] = MappingProxyType({}),
        init_opt_state: Callable[[Any], Any] | None = None,
        layer_axis: Any = None,
        mesh: Mesh | None = None,
        on_compile: OnCompile = lambda *_: None,
        say: Callable[[str], None] = print,
        option_names: Mapping[str, str] = MappingProxyType({}),
        **exchange: Any,
    ):
        """Check the settings; nothing is opened, allocated or compiled.

        Args:
          inner_step: (params, opt_state, batch) -> (params, opt_state, metrics), as of DiLoCo.
          store: gs://, s3:// or az://bucket/folder, or a folder that all islands see.
          name: name of this island, unique in the store. It has letters, digits, - and _.
          sync_period: H, inner steps of a round.
          total_tokens: committed tokens of all islands at which the run ends. The island that
            begins the run decides it. Count in any unit: tokens, examples or steps.
          step_tokens: tokens of an inner step of this island. With global_batch_size, of an inner
            step of all living islands together.
          block_tokens: tokens of a leased block of the data; 0: data are not leased.
          eval_tokens: tokens between two evaluations, see `evaluates`; 0: none.
          global_batch_size: sequences of an inner step of all living islands together, which share
            them; see `batch_size`. None: each island decides its own batch.
          period_seconds: time between two messages of a fragment. "auto": the islands choose it
            from the times that their messages take, and from outages (rule 7 of the protocol).
          dead_seconds: time without a heartbeat after which an island is dead.
          min_members: fewest islands in a log record.
          key_file: private key of OpenSSH to sign with; "": messages are not signed.
          same: further values that have to be equal on all islands, such as a version of the data.
          init_opt_state: returns the first opt_state, given params. It is called if the island
            returns so late that its moments are useless; None: the moments are kept.
          layer_axis: as of DiLoCo.
          mesh: as of DiLoCo; the axis `diloco` has size 1.
          on_compile: as of DiLoCo.
          say: logs a line.
          option_names: {argument: its name in error messages}.
          **exchange: num_fragments, overlap_steps, alpha, outer_optimizer, outer_lr,
            outer_momentum, exchange_dtype, error_feedback, aggregation, sequential_layers,
            num_nonlayer_fragments and outer_memory, as of DiLoCo.

        Raises:
          ValueError: a value that is not allowed.
        """
        settings = ExchangeSettings(num_replicas=1, sync_period=sync_period, **exchange)
        allowed = {
            "outer_optimizer": outer_step.OPTIMIZERS,
            "round_overlap": ("none",),
            "collective": ("all_gather", AUTO),
            "transport": ("xla", AUTO),
        }
        for argument, values in allowed.items():
            if (value := vars(settings)[argument]) not in values:
                known = " or ".join(values)
                raise ValueError(f"{argument}={value!r}: expected {known} for an island.")
        if not records.is_island_name(name):
            raise ValueError(f"name={name!r}: expected 1 to 64 letters, digits, - or _.")
        sequences = 1 if global_batch_size is None else global_batch_size
        if sequences < 1 or step_tokens % sequences:
            raise ValueError(
                f"global_batch_size={sequences}: expected None, or a divisor of "
                f"step_tokens={step_tokens}, the tokens of that many sequences."
            )
        self._settings = settings
        # The programs are for one replica without an exchange. The log has the exchange.
        plain = dataclasses.replace(
            settings,
            overlap_steps=0,
            error_feedback=False,
            collective="all_gather",
            transport="xla",
        )
        self._diloco = DiLoCo.from_settings(
            inner_step, plain, layer_axis=layer_axis, mesh=mesh, on_compile=on_compile
        )
        self.mesh, self.period = self._diloco.mesh, self._diloco.period
        self.timing = timing_of(period_seconds, dead_seconds)
        self.run = Run(
            settings=tuple((key, str(value)) for key, value in sorted(same.items())),
            wire=settings.exchange_dtype,
            # A mean is sent in eight bits or more, as with reduce-scatter.
            wire_down=quantize.finer(settings.exchange_dtype, "int8"),
            aggregation=settings.aggregation,
            outer_optimizer=settings.outer_optimizer,
            outer_lr=float(settings.outer_lr),
            outer_momentum=float(settings.outer_momentum),
            fragments=(),
            islands_min=min_members,
            sync_period=sync_period,
            overlap_steps=settings.overlap_steps,
            alpha=float(settings.alpha),
            tokens=total_tokens,
            block_tokens=block_tokens,
            eval_tokens=eval_tokens,
            snapshot_every=SNAPSHOT_EVERY,
            keys=(),
            global_batch_size=global_batch_size or 0,
        )
        self._store, self._name, self._key_file = store, name, key_file
        self._log = say if processes.decides() else lambda _: None
        self._step_tokens, self._layer_axis = step_tokens, layer_axis
        self._sequence_tokens = step_tokens // sequences
        self._sizes = StepSizes(0, step_tokens, fixed=True)  # until `rejoin`
        self._init_opt_state, self._option_names = init_opt_state, option_names
        self._bucket: MeteredStore | None = None  # of process 0
        self._opened = False
        self._keys: signatures.Keys | None = None  # of process 0
        self._runtime: Runtime | None = None  # of process 0
        self._data = LeasedData()
        self._position: Position | None = None
        self._state: State | None = None  # while process 0 may read or replace its values
        self._new: dict[int, np.ndarray] = {}  # own values by fragment that are not in the state
        self._incarnation, self._tokens = 0, 0  # tokens of this incarnation's steps
        self._leases_told = 0
        self._moments_of: int | None = None
        self._warm_from: int | None = None
        self._left, self._waited_s, self._counted = False, 0.0, (Counter(), 0)
        self._running: Any = ()
        self._last_state: Callable[[], State | None] = lambda: None  # for `close`

    # -- the start ---------------------------------------------------------------------------------

    def bind(self, params: Any, opt_state: Any) -> Layout:
        """Set layout and programs for one replica's pytrees (arrays or ShapeDtypeStructs).

        A program that restores a checkpoint calls `bind` and `rejoin` instead of `join`.
        """
        layout = self._diloco.bind(params, opt_state)
        self._values = HostValues(self._diloco.programs)
        self.abstract_state = self._diloco.abstract_state
        self.exported, self.evaluated = self._diloco.exported, self._diloco.evaluated
        self.run = self.run._replace(fragments=leaves_of(layout, self._layer_axis))
        return layout

    def open(self) -> None:
        """Open the store, and check that it has this run. `join` and `rejoin` also do this.

        Raises:
          ConfigError: the store cannot be used, or it has another run.
        """
        if not self._opened:
            self._opened = True
            processes.first(self._open)

    def _open(self) -> None:
        if self._key_file:
            self._keys = signatures.read(self._key_file)
        bucket = log_store.open_bucket(self._store, self._name_of("store"))
        store_check.require_rights(bucket, self._store, self._name)
        self._bucket = MeteredStore(bucket)
        self._agree()

    def join(self, params: Any, opt_state: Any) -> State:
        """Return the state for the first step, once this island has caught up with the log.

        An island that begins the run starts with these parameters, others with the log's.

        Args:
          params: parameters of one replica, as of DiLoCo.init.
          opt_state: optimizer state of one replica.

        Raises:
          ConfigError: the store cannot be used, or it has another run.
        """
        self.bind(params, opt_state)
        return self.rejoin(self.init_program(lambda *trees: trees)(params, opt_state))

    def rejoin(self, state: State) -> State:
        """Return the state for the next step, like `join`, for a state of a checkpoint.

        The outer parameters are the log's. The moments of the inner optimizer are kept if the
        checkpoint is at most two records behind.

        Args:
          state: donated.
        """
        self.open()
        outer = [self._values.outer(state, plan) for plan in self._diloco.layout.plans]
        self._log(f"island {self._name} joins the run at {self._store}")
        state = self._decide(lambda state: self._wait_in_several(self._join(state, outer)), state)
        tokens = self._position.batch_size * self._sequence_tokens or self._step_tokens
        self._sizes = StepSizes(state.t, tokens, fixed=not self.run.global_batch_size)
        if processes.decides():
            self._counted = self._bucket.counts, state.t
        return state

    def _agree(self) -> bool:
        """Adopt the run of the store, and return whether it has one. Raises ConfigError."""
        known = None
        try:
            known = log_store.read(self._bucket, None, records.RUN)[0]
        except Damaged as error:
            raise ConfigError(f"{self._name_of('store')}={self._store}: {error}.") from error
        except OSError:
            pass  # no run yet; or the store fails, and the state machine repeats the request
        own = self.run if known is None else self._adopted(known)
        keys = signatures.of_run(self._keys, known, self._name, self._store)
        self.run = own._replace(keys=keys)
        if 0 < own.block_tokens < self._step_tokens:
            raise ConfigError(
                f"a step of this island reads {self._step_tokens:,} tokens, and the islands of "
                f"{self._store} lease blocks of {own.block_tokens:,}: "
                f"{self._name_of('step_tokens')} is too large. Lower it, or start the run with the "
                "largest island."
            )
        return known is not None

    def _adopted(self, stored: Run) -> Run:
        """Return the own settings with those that the island that began the run has decided.

        Raises:
          ConfigError: another setting differs. The state machine also compares all of them, but it
            does not know the names of the arguments.
        """
        own = self.run._replace(
            tokens=stored.tokens,
            block_tokens=stored.block_tokens,
            keys=stored.keys,  # signatures.of_run checks whose they are
        )
        if own.eval_tokens and stored.eval_tokens:
            own = own._replace(eval_tokens=stored.eval_tokens)
        mine, others = dict(own.settings), dict(stored.settings)
        pairs = [(key, mine.get(key), others.get(key)) for key in sorted(mine.keys() | others)]
        values = ((*run[1:-1], run.global_batch_size or "null") for run in (own, stored))
        fields = zip(own._fields[1:], *values, strict=True)
        for key, here, there in (*pairs, *fields):
            if here != there:
                key = self._name_of(key)
                raise ConfigError(
                    f"{key}={here} here, and {there} in the run of {self._name_of('store')}="
                    f"{self._store}. Set {key}={there}, or use another store."
                )
        return own

    def _name_of(self, argument: str) -> str:
        argument = _ARGUMENTS.get(argument, argument)
        return self._option_names.get(argument, argument)

    def _join(self, state: State, outer: list[np.ndarray]) -> State:
        """In process 0: join the log as the next incarnation, with outer parameters by fragment."""
        self._state = state
        while True:
            has_run = self._agree()
            executor = Executor(
                self._bucket,
                self.run,
                self.timing,
                self._name,
                outer,
                x=_OwnValues(self),
                error_feedback=self._settings.feeds_back,
                moments_of=self._moments_of,
                after=self._incarnation,
                key=None if self._keys is None else self._keys.own,
            )
            self._data, self._leases_told = LeasedData(state.t), 0
            meanwhile = functools.partial(processes.tell, processes.WAIT)
            self._runtime = Runtime(executor, self._data, self._say, meanwhile)
            self._runtime.join()
            if executor.stop is None:
                break
            self._runtime.close(drain=False)
            # If another island has begun the run meanwhile, join that one.
            if has_run or not self._agree():
                raise self._error(executor.stop, state.t)
        self._incarnation, self._tokens, self._warm_from = executor.state.incarnation, 0, None
        position = self._read_position()
        self._log(
            f"island {self._name} has joined as incarnation {self._incarnation}: {position.line}"
        )
        if executor.moments == "zero" and position.records:
            self._warm_from = state.t
            if self._init_opt_state is not None:
                processes.tell(processes.RESET)
                state = self._values.without_moments(state, self._init_opt_state)
            self._log(f"its inner optimizer warms up for {self.run.sync_period} steps")
        return self._flushed(state)

    def _say(self, line: str) -> None:
        failure = self._bucket.failure if line == state_machine.AWAY else ""
        self._log(f"{line}. The last answer: {failure}" if failure else line)

    # -- one step ----------------------------------------------------------------------------------

    def step(self, state: State, batch: Any, tokens: int | None = None) -> tuple[State, Any]:
        """Take one inner step, and send and apply the fragments that are due.

        Waits if two messages of this island are undecided and the next one is due. Also waits for
        leased data.

        Args:
          state: donated.
          batch: leaves [1, ...], as with one replica of DiLoCo.
          tokens: tokens of this step; None: step_tokens, or batch_size sequences.

        Returns:
          (state, metrics with leaves [1, ...]).

        Raises:
          NumericsError: the outer gradient of this island is not finite.
          ConfigError: another program uses the name of this island.
          CheckpointError: the log cannot be followed.
        """
        tokens = self._sizes.of(state.t + 1) if tokens is None else tokens
        if not self._position.may_step:
            state = self._decide(self._wait, state)
        throttle_cpu(self.mesh, (state.params, state.outer))
        inner = self._diloco.programs.inner
        params, opt_state, metrics = inner(state.params, state.opt_state, batch)
        state = replace(state, t=state.t + 1, params=params, opt_state=opt_state)
        # Without waiting, the host would send values of steps that are still queued.
        jax.block_until_ready(self._running)
        self._running, self._tokens = metrics, self._tokens + tokens
        state = self._decide(functools.partial(self._finish_step, tokens), state)
        self._last_state = weakref.ref(state)
        if total := self.run.global_batch_size:
            size = self._position.batch_size
            if first := self._sizes.append(size * self._sequence_tokens):
                self._log(f"from step {first} on this island has {size} of {total} sequences")
        return state, metrics

    def _decide(self, work: Callable[[State], State], state: State) -> State:
        """Let process 0 work on the state, and the others repeat its calls on their shards."""
        if not processes.decides():
            return self._follow(state)
        with processes.failing_together():
            state = work(state)
        self._position = self._read_position()
        self._leases_told += len(self._position.leases)
        standing = self._incarnation, self._warm_from, self.run.block_tokens, self._position
        processes.tell(processes.GO, standing)
        return state

    def _follow(self, state: State) -> State:
        """In a process other than 0: repeat the calls of process 0, up to its next position."""
        while True:
            match processes.told():
                case processes.READ, fragment:
                    self._values.params(state, self._diloco.layout.plans[fragment])
                case processes.WRITE, fragment:
                    state = self._values.put(state, self._diloco.layout.plans[fragment], None)
                case processes.RESET, _:
                    state = self._values.without_moments(state, self._init_opt_state)
                case processes.GO, (incarnation, warm_from, block_tokens, position):
                    self._warm_from = warm_from
                    self.run = self.run._replace(block_tokens=block_tokens)
                    if incarnation != self._incarnation:
                        self._incarnation, self._tokens = incarnation, 0
                        self._data = LeasedData(state.t)
                    self._position = Position(*position)
                    self._data.extend(Range(*lease) for lease in self._position.leases)
                    if self._position.ended:
                        self._data.end()
                    return state
                case message:
                    raise AssertionError(message)

    def _wait(self, state: State) -> State:
        """Wait until the next step may begin. Join again if the log has left this island behind."""
        self._state, leases = state, self.run.block_tokens > 0 and jax.process_count() > 1
        while True:
            started = time.perf_counter()
            self._runtime.wait_to_step(self._tokens + self._step_tokens if leases else 0)
            self._waited_s += time.perf_counter() - started
            if self._is_over() or (stop := self._runtime.executor.stop) is None:
                return self._flushed(state)
            state = self._join_again(state, stop)

    def _wait_in_several(self, state: State) -> State:
        """Wait after a step instead of before the next one, if there are several processes.

        All processes read only data that are leased now, so the data of the next step must be.
        """
        return self._wait(state) if jax.process_count() > 1 else state

    def _join_again(self, state: State, stop: Stop) -> State:
        """Join as a new incarnation."""
        executor = self._runtime.executor
        if not stop.again or not executor.finite:
            raise self._error(stop, state.t)
        self._say(f"island {self._name} joins again: {stop.line}")
        self._runtime.close(drain=False)
        self._moments_of = executor.state.logs[0].state.number
        self._new.clear()
        return self._join(state, [each.theta for each in executor.outer])

    def _finish_step(self, tokens: int, state: State) -> State:
        self._state = state
        self._runtime.step_done(tokens)
        executor = self._runtime.executor
        if not executor.finite:
            raise self._error(executor.stop, state.t)
        return self._wait_in_several(self._flushed(state))

    def _flushed(self, state: State) -> State:
        """Return the state with new values and outer state, by fragment. state: donated."""
        for fragment in sorted(self._new):
            processes.tell(processes.WRITE, fragment)
            values = self._new.pop(fragment), *self._runtime.executor.outer[fragment]
            state = self._values.put(state, self._diloco.layout.plans[fragment], values)
        self._state = state
        return state

    def _read_position(self) -> Position:
        executor = self._runtime.executor
        machine, log = executor.state, executor.state.logs[0]
        own = log.tokens + sum(each.message.tokens for each in log.undecided)
        islands = len(machine.alive() | {machine.name})
        committed = log.state.tokens
        leases = self._data.ranges[self._leases_told :][:_LEASES_TOLD]
        size = rules.batch_size(self.run, log.state, machine.name)
        return Position(
            records=log.state.number,
            tokens=committed,
            progress=rules.progress(self.run, log.state),
            expected=min((committed + own * islands) / self.run.tokens, 1.0),
            ended=self._is_over(),
            evaluates=bool(executor.evaluations),
            may_step=jax.process_count() > 1 and executor.stop is None and machine.may_step(),
            leases=tuple(leases),
            batch_size=size if self.run.global_batch_size else 0,
        )

    def _is_over(self) -> bool:
        state = self._runtime.executor.state.logs[0].state  # None while the island joins again
        return state is not None and rules.progress(self.run, state) >= 1

    def _error(self, stop: Stop, t: int) -> Exception:
        if not self._runtime.executor.finite:
            where = f"step {t}: island {self._name}"
            return NumericsError(f"{where}: {stop.line}. Resume with a lower learning_rate.")
        if stop.why == REPLACED:
            return ConfigError(f"{self._name_of('name')}={self._name}: {stop.line}.")
        return CheckpointError(
            f"{self._name_of('store')}={self._store}: {stop.line}. `python -m maxdiloco.islands "
            f"audit {self._store}` says more."
        )

    # -- the data and the run ----------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether all tokens of the run are committed."""
        return self._position.ended

    @property
    def progress(self) -> float:
        """The part of the run that is done, in [0, 1], for a learning rate schedule.

        It includes this island's uncommitted tokens, and the same number for each other island that
        is alive. Otherwise the rate would jump when these tokens are committed.
        """
        return self._position.expected

    @property
    def committed_tokens(self) -> int:
        """Committed tokens of all islands."""
        return self._position.tokens

    @property
    def evaluates(self) -> bool:
        """Whether only this island evaluates after this step. True once for each evaluation."""
        evaluates = self._position.evaluates
        if evaluates and processes.decides():
            self._runtime.executor.evaluations.clear()
        return evaluates

    def warmup(self, t: int) -> float:
        """Return the factor of the learning rate at step t, below 1 after a loss of the moments."""
        if self._warm_from is None:
            return 1.0
        return min(1.0, (t - self._warm_from) / self.run.sync_period)

    def blocks(self, num_blocks: int) -> Iterator[Block]:
        """Yield leased blocks of the data until the run is done.

        No other island reads the same tokens in an epoch. The caller takes the inner steps of a
        block inside the loop; their tokens have to add up to stop - start.

        Args:
          num_blocks: number of blocks of the data; they are leased again in the next epoch.

        Raises:
          ValueError: block_tokens is 0, or the tokens of the steps do not add up to the block's.
        """
        if not self.run.block_tokens:
            raise ValueError("block_tokens=0: data are not leased. Set block_tokens.")
        while not self.done:
            read, incarnation = self._tokens, self._incarnation
            first = self._leased(read, read + 1)[0]
            stop = next((r.stop for r in self._data.ranges if r[:2] == first[:2]), first.stop)
            epoch, index = divmod(first.block - 1, num_blocks)
            yield Block(index, epoch, first.start, stop)
            # An island that has joined again meanwhile has other leases.
            if self._incarnation == incarnation and not self.done:
                steps, tokens = self._tokens - read, stop - first.start
                if steps != tokens:
                    raise ValueError(f"block {index}: its steps have {steps} tokens, not {tokens}.")

    def batch_size(self, t: int) -> int:
        """Return the sequences of this island in inner step t, with global_batch_size.

        It changes after a record with an island that has joined, or that is dead. It is known 17
        steps ahead.

        Raises:
          ValueError: t is further ahead.
        """
        return self._sizes.of(t) // self._sequence_tokens

    def leased(self, t: int) -> list[Range]:
        """Return the tokens of inner step t, for steps of step_tokens or of batch_size sequences.

        A reader that runs ahead of the steps uses it instead of `blocks`, in any thread. It waits
        until the tokens are leased. When the island joins again, data that were already read count
        for its new leases.
        """
        sizes, begun = self._sizes, self._sizes.until(self._data.begun)
        return self._leased(sizes.until(t - 1) - begun, sizes.until(t) - begun)

    def _leased(self, start: int, stop: int) -> list[Range]:
        # Without a lease the run has ended, or the next step joins again: then any data suffice.
        return self._data.read(start, stop) or [Range(1, 1, 0, stop - start)]

    @property
    def incarnation(self) -> int:
        """The number of this start of the island. It increases when the island joins again."""
        return self._incarnation

    def leave(self) -> None:
        """Wait a while for requests in flight, and announce the end of this island to others."""
        first, self._left = not self._left, True
        self._data.close()
        if first and self._runtime is not None:
            self._runtime.leave(drain=self._runtime.executor.stop is None)

    def outer_params(self, state: State) -> Any:
        """Return the outer parameters, float32, as far as this island has followed the log.

        Raises:
          NumericsError: a value is not finite.
        """
        return self._diloco.outer_params(state)

    def close(self) -> None:
        """Leave, and check the last state unless an exception is being raised."""
        self.leave()
        self._diloco.close()
        if (state := self._last_state()) is not None and sys.exception() is None:
            self._diloco.check_finite(state)

    # -- engine.trainer.Trainer --------------------------------------------------------------------

    def init_program(self, make: Callable[..., tuple[Any, Any]], **options: Any) -> Program:
        """See Trainer."""
        return self._diloco.init_program(make, **options)

    def calls(self, batch: Any) -> list[Call]:
        """See Trainer; each fragment is read and replaced once in a period."""
        like = self.abstract_state
        inner = Call(self._diloco.programs.inner, (like.params, like.opt_state, batch), self.period)
        return [inner, *self._values.calls()]

    def check_finite(self, state: State, *, exchanges_only: bool = False) -> None:
        """See Trainer."""
        self._diloco.check_finite(state, exchanges_only=exchanges_only)

    def bytes_sent(self, t: int) -> float:
        """Return 0: an island sends by time, not by steps; see extra_metrics."""
        return 0.0

    def checkpoint(self, state: State) -> tuple[dict[str, Any], dict[str, Any]]:
        """See Trainer; with the number of records of fragment 0 that the state has."""
        items, metadata = self._diloco.checkpoint(state)
        known = self._position.records if self._position is not None else None
        return items, metadata | {"records": known}

    def restore_plan(self, saved: SavedLayout) -> RestorePlan:
        """See Trainer."""
        if saved.records is not None:
            self._moments_of = saved.records
        return self._diloco.restore_plan(saved)

    def extra_metrics(self, state: State) -> dict[str, float]:
        """Return metrics of the log, of this island's traffic, and of its last message."""
        if not processes.decides():
            return {}
        (before, t), self._counted = self._counted, (self._bucket.counts, state.t)
        more, steps = self._bucket.counts - before, max(state.t - t, 1)
        executor = self._runtime.executor
        found = runtime.metrics(executor.state) | {
            "dcn/waited_s": self._waited_s,
            "dcn/bytes_sent": more["sent"] / steps,
            "islands/bytes_received": more["received"] / steps,
            "islands/requests": more["requests"] / steps,
        }
        self._waited_s = 0.0
        if self.run.global_batch_size:
            found["islands/batch_size"] = float(self.batch_size(state.t))
        if executor.norm:
            found["diloco/outer_grad_norm"] = executor.norm
        return found

    @property
    def description(self) -> Description:
        """The fragments, the bytes of their messages, and the memory of the outer state."""
        layout, run = self._diloco.layout, self.run
        sizes = [
            outer_step.payload_size(run.wire, outer_step.sizes_of(run, fragment))
            for fragment in range(len(layout.plans))
        ]
        title = f"{len(layout.plans)} fragments, tau {run.overlap_steps}, {run.wire}"
        found = describe.description(layout, sizes=sizes)
        return found._replace(title=f"DiLoCo of {title}, elastic islands")

    def closing_line(self, state: State) -> str:
        """Return the step, and the progress of the log."""
        return f"done: step {state.t}; {self._position.line}"


class _OwnValues:
    """The island's own values by fragment, as its executor reads and replaces them."""

    def __init__(self, island: Island):
        self._island = island

    def __getitem__(self, fragment: int) -> np.ndarray:
        island = self._island
        if fragment in island._new:
            return island._new[fragment]
        processes.tell(processes.READ, fragment)
        return island._values.params(island._state, island._diloco.layout.plans[fragment])

    def __setitem__(self, fragment: int, values: np.ndarray) -> None:
        self._island._new[fragment] = values
