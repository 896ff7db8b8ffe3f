"""The training loop and what it calls at which step.

    # R replicas  B sequences per replica  L tokens
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import jax
from etils import epath

from maxdiloco import assemble, compiled_file, config, feeding, output, saved_state, start, tables
from maxdiloco.algorithm import DiLoCo
from maxdiloco.assemble import Parts
from maxdiloco.checkpoint import Checkpointer
from maxdiloco.checkpoint_io import from_first_process, in_any_process
from maxdiloco.compiles import Compiles
from maxdiloco.config import Config
from maxdiloco.console import Progress, console_line
from maxdiloco.data import pipeline
from maxdiloco.data.order import first_position
from maxdiloco.data.pipeline import Dataset
from maxdiloco.errors import Preempted
from maxdiloco.evaluate import Evaluation
from maxdiloco.metrics import MetricsWriter
from maxdiloco.models.transformer import count_parameters
from maxdiloco.monitor import Monitor
from maxdiloco.parallel import distributed
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.preemption import Preemption
from maxdiloco.run_folder import RunFolder, open_run_folder
from maxdiloco.signals import INTERRUPTED
from maxdiloco.speed import StepClock, performance


@dataclass(frozen=True)
class Run:
    """What the loop works with. total: inner steps of the whole run; say: one line to the user."""

    cfg: Config
    parts: Parts
    dataset: Dataset
    evaluation: Evaluation | None
    begin: start.Start
    total: int
    folder: RunFolder
    checkpointer: Checkpointer | None
    meta: dict[str, Any]
    flops_per_token: float
    compiles: Compiles
    primary: bool
    say: Callable[[str], None]


def run(cfg: Config, begun: float) -> int:
    """Train as cfg says; begun: time.perf_counter() at the start of the program.

    Returns the exit code. Raises the errors of maxdiloco.errors.
    """
    mesh_lib.choose_platform(cfg)
    if cfg.jax_cache_dir:
        jax.config.update("jax_compilation_cache_dir", cfg.jax_cache_dir)
    with distributed.processes(
        os.environ,
        timeout_s=cfg.jax_distributed_initialization_timeout,
        peer_timeout_s=cfg.peer_timeout_seconds,
    ) as job:
        mesh_lib.emulate_devices(cfg, num_processes=job.num_processes)
        return _run(cfg, begun)


def _run(cfg: Config, begun: float) -> int:
    mesh = mesh_lib.build(cfg)
    primary = jax.process_index() == 0

    def say(line: str) -> None:
        if primary:
            output.say(output.one_line(line))

    for line in [*config.describe_differences(cfg), *config.warnings(cfg)]:
        say(line)
    say(mesh_lib.describe(mesh, cfg))
    name = cfg.run_name or f"run-{from_first_process(int(time.time()))}"
    if cfg.show_fragments:
        return _show_fragments(cfg, mesh, say)
    data = _open_data(cfg, mesh)  # refused data leave no folder behind
    with ExitStack() as stack:
        folder = stack.enter_context(
            open_run_folder(cfg.base_output_directory, name, primary=primary, warn=say)
        )
        checkpointer = None
        if cfg.enable_checkpointing:
            checkpointer = stack.enter_context(
                Checkpointer(
                    folder.checkpoints,
                    max_to_keep=cfg.max_num_checkpoints_to_keep,
                    use_async=cfg.async_checkpointing,
                    report=say,
                )
            )
        return _train(_prepare(cfg, mesh, data, folder, checkpointer, say), begun)


def _open_data(cfg, mesh) -> tuple[Dataset, Dataset | None]:
    """The training text, and the held-out text if it will be asked for."""
    M = assemble.count_replicas(cfg, mesh)
    B = assemble.sequences_per_replica(cfg, mesh)
    dataset = pipeline.open_dataset(cfg, split="train")
    pipeline.check_size(dataset, first_position(M, B))
    held_out = None
    if cfg.eval_interval != -1:
        held_out = pipeline.open_dataset(cfg, split="eval")
    return dataset, held_out


def _prepare(cfg, mesh, data, folder, checkpointer, say) -> Run:
    """Everything else before the first compile: where to begin, parts, tables."""
    dataset, held_out = data
    M = assemble.count_replicas(cfg, mesh)
    B = assemble.sequences_per_replica(cfg, mesh)
    fingerprint = start.agreed_fingerprint(dataset.fingerprint)
    begin = start.look(cfg, checkpointer, M=M, B=B, data=fingerprint)
    total = cfg.steps
    if total == -1:
        total = pipeline.last_step_of_epoch(dataset, begin.position)
    compiles = Compiles(say, show_memory=cfg.show_memory)
    parts = assemble.assemble(cfg, mesh, total_steps=total, on_compile=compiles)
    say(f"model: {cfg.model_name}, {count_parameters(parts.model):,} parameters")
    say(
        f"batch: {M} replicas * {B} sequences * {cfg.max_target_length} tokens = "
        f"{M * B * cfg.max_target_length:,} tokens a step"
    )
    parts.trainer.bind(parts.params, parts.opt_state)
    if cfg.enable_diloco:
        for line in tables.replica_table(parts.trainer.layout):
            say(line)
        for line in tables.fragment_table(parts.trainer.layout):
            say(line)
        say(tables.outer_memory_line(parts.trainer.layout, cfg.diloco_outer_memory))
        compiles.resident = tables.resident(parts.trainer.layout)
    if cfg.compiled_trainstep_file:
        compiled_file.check(cfg.compiled_trainstep_file, cfg, parts, total_steps=total)
    meta = start.meta_of(cfg, parts, begin.position, fingerprint)
    return Run(
        cfg=cfg,
        parts=parts,
        dataset=dataset,
        evaluation=held_out and Evaluation(cfg, parts, held_out),
        begin=begin,
        total=total,
        folder=folder,
        checkpointer=checkpointer,
        meta=meta,
        flops_per_token=assemble.flops_per_token(cfg, parts.params),
        compiles=compiles,
        primary=jax.process_index() == 0,
        say=say,
    )


def _show_fragments(cfg, mesh, say) -> int:
    parts = assemble.assemble(cfg, mesh, total_steps=max(1, cfg.steps), on_compile=lambda *_: None)
    if not cfg.enable_diloco:
        say("enable_diloco=false: nothing is exchanged in fragments.")
        return 0
    for line in tables.fragment_table(parts.trainer.bind(parts.params, parts.opt_state)):
        say(line)
    return 0


def _train(run: Run, begun: float) -> int:
    cfg, parts = run.cfg, run.parts
    run.say(f"{run.begin.origin}; {run.total} steps in all")
    run.say(f"ready to compile after {time.perf_counter() - begun:.1f} s")
    state = start.load(cfg, parts, run.begin, run.checkpointer)
    if cfg.compiled_trainstep_file:
        calls = parts.trainer.calls(assemble.abstract_batch(cfg, parts))
        count = compiled_file.load(cfg.compiled_trainstep_file, parts, calls)
        run.say(f"{count} compiled programs loaded from {cfg.compiled_trainstep_file}")
    if state.t >= run.total:
        run.say(f"nothing to do: step {state.t} of {run.total} is done. Raise steps to go on.")
        return 0
    with ExitStack() as stack:
        preemption = stack.enter_context(Preemption(run.say))
        writer = None
        if run.primary:
            writer = stack.enter_context(
                MetricsWriter(
                    run.folder,
                    tensorboard=cfg.enable_tensorboard,
                    resume_step=state.t or None,
                    report=run.say,
                )
            )
        progress = stack.enter_context(
            Progress(first_step=state.t, total_steps=run.total, shown=run.primary)
        )
        batches = stack.enter_context(_open_batches(run, state.t))
        loop = _Loop(run, writer, progress)
        stack.callback(loop.stop_profile)
        for t in range(state.t + 1, run.total + 1):
            state, metrics = parts.trainer.step(state, next(batches))
            loop.after_step(t, state, metrics)
            if preemption.requested(t):
                return loop.stop_early(t, state, ctrl_c=in_any_process(preemption.by_ctrl_c))
        loop.finish(state)
        return INTERRUPTED if preemption.by_ctrl_c else 0


@contextmanager
def _open_batches(run: Run, done: int) -> Iterator[Iterator[Any]]:
    """Global batches from step done + 1 on; the reader ends with the context."""
    parts = run.parts
    sharding = assemble.batch_sharding(parts)
    shape = (parts.num_replicas, parts.batch_size, run.cfg.max_target_length)
    rows = feeding.local_rows(sharding, shape)
    with pipeline.batches(
        run.dataset,
        run.begin.position,
        steps=range(done + 1, run.total + 1),
        replicas=rows[0],
        rows=rows[1],
        worker_count=run.cfg.grain_worker_count,
    ) as local:
        yield feeding.feed(local, rows, sharding, shape)


class _Loop:
    """What happens after an inner step: metrics, evaluation, checkpoint, profile."""

    def __init__(self, run: Run, writer: MetricsWriter | None, progress: Progress):
        self.run = run
        self.writer = writer
        self.progress = progress
        self.monitor = Monitor(run.parts.trainer, stop_on_nan=run.cfg.nan_policy == "stop")
        self.clock = StepClock(run.begin.step)
        self.logged = run.begin.step
        self.bytes_sent = 0
        self.profiling = False

    def after_step(self, t: int, state: Any, metrics: Any) -> None:
        cfg = self.run.cfg
        self.monitor.add(t, metrics)
        self.clock.exclude(self.run.compiles.take())
        if cfg.enable_diloco:
            self.bytes_sent += self.run.parts.trainer.bytes_sent(t)
        last = t == self.run.total
        row = self.log(t, state) if last or t % cfg.log_period == 0 else {}
        if self.run.evaluation is not None and (last or t % cfg.eval_interval == 0):
            row["eval/loss"] = self.evaluate(state)
        self.progress.advance()
        if row and self.writer is not None:
            self.writer.write(t, row)
            self.progress.line(console_line(t, self.run.total, row))
        if not last and t % cfg.checkpoint_period == 0:
            self.save(t, state)
        self.profile(t)

    def check(self, state: Any) -> None:
        """Wait for the step; raise NumericsError if it or one before it went wrong."""
        checkpointer = self.run.checkpointer
        self.monitor.check(state, checkpointer.steps if checkpointer else list)

    def log(self, t: int, state: Any) -> dict[str, float]:
        """Fetch the metrics, which waits for the step."""
        self.check(state)
        cfg, parts = self.run.cfg, self.run.parts
        jax.block_until_ready(state.params)
        row = performance(
            step_time=self.clock.lap(t),
            tokens_per_step=parts.num_replicas * parts.batch_size * cfg.max_target_length,
            flops_per_token=self.run.flops_per_token,
            num_devices=parts.mesh.size,
            device_kind=parts.mesh.devices.flat[0].device_kind,
        )
        with self.clock.excluded():
            row = self.monitor.row(state, float(parts.schedule(t - 1))) | row
        if cfg.enable_diloco:
            row["dcn/bytes_sent"] = self.bytes_sent / (t - self.logged)
        self.bytes_sent, self.logged = 0, t
        return row

    def evaluate(self, state: Any) -> float:
        """Loss of theta on the held-out text [nats per token]."""
        self.check(state)
        with self.clock.excluded():
            return self.run.evaluation(self.run.parts.trainer.outer_params(state))

    def save(self, t: int, state: Any) -> None:
        """Save the state of step t, unless it is known to be bad."""
        if self.run.checkpointer is None:
            return
        self.check(state)
        with self.clock.excluded():
            trainer = self.run.parts.trainer
            items = saved_state.items_of(trainer, state)
            note = self.run.meta | saved_state.note_of(trainer, state)
            self.run.checkpointer.save(t, items, note)

    def profile(self, t: int) -> None:
        cfg = self.run.cfg
        if not cfg.profiler:
            return
        first = self.run.begin.step + cfg.skip_first_n_steps_for_profiler
        if t == first:
            jax.profiler.start_trace(str(self.run.folder.path / "profile"))
            self.profiling = True
        elif self.profiling and t >= first + cfg.profiler_steps:
            self.stop_profile()

    def stop_profile(self) -> None:
        if self.profiling:
            jax.profiler.stop_trace()
            self.profiling = False

    def stop_early(self, t: int, state: Any, *, ctrl_c: bool) -> int:
        """SIGTERM or Ctrl-C: save and leave."""
        self.save(t, state)
        if self.run.checkpointer is not None:
            self.run.checkpointer.wait()
        what = "saved. The same command goes on."
        if self.run.checkpointer is None:
            what = "nothing is saved, since enable_checkpointing=false."
        if not ctrl_c:
            raise Preempted(f"SIGTERM after step {t}: {what}")
        self.run.say(f"Ctrl-C after step {t}: {what}")
        return INTERRUPTED

    def finish(self, state: Any) -> None:
        """The last save and the last lines."""
        if self.run.cfg.save_checkpoint_on_completion:
            self.save(state.t, state)
        if self.run.checkpointer is not None:
            self.run.checkpointer.wait()  # what is told to be done is on disk
        trainer = self.run.parts.trainer
        if isinstance(trainer, DiLoCo):
            ages = ", ".join(map(str, trainer.schedule.ages(state.t)))
            self.run.say(f"done: step {state.t}; age of each fragment of theta [steps]: {ages}")
        else:
            self.run.say(f"done: step {state.t}")
        self.run.say(f"run folder: {epath.Path(self.run.folder.path)}")
