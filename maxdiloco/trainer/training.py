"""The training loop and what it calls at which step.

    # R replicas  B sequences per replica  L tokens
"""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import jax

from maxdiloco.checkpoint.checkpointer import Checkpointer
from maxdiloco.data import pipeline
from maxdiloco.engine.calls import START
from maxdiloco.errors import INTERRUPTED
from maxdiloco.flags import config
from maxdiloco.flags.config import Config
from maxdiloco.metrics import tables
from maxdiloco.metrics.compiles import Compiles
from maxdiloco.metrics.console import Progress
from maxdiloco.metrics.writer import MetricsWriter
from maxdiloco.models.transformer import count_parameters
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.processes import distributed, output
from maxdiloco.processes.agree import from_first_process, in_any_process
from maxdiloco.processes.preemption import Preemption
from maxdiloco.storage.run_folder import locate, open_run_folder
from maxdiloco.trainer import assemble, compiled_file, feeding, run_data, start
from maxdiloco.trainer.loop import Loop, Run


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
        peer_port=cfg.peer_port,
    ) as job:
        mesh_lib.emulate_devices(cfg, num_processes=job.num_processes)
        return _run(cfg, begun)


def _run(cfg: Config, begun: float) -> int:
    mesh = mesh_lib.build(cfg)
    assemble.check_devices(cfg, mesh)
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
    *data, index = run_data.open_data(cfg, mesh, locate(cfg.base_output_directory, name), say)
    with ExitStack() as stack:
        folder = stack.enter_context(
            open_run_folder(cfg.base_output_directory, name, primary=primary, warn=say)
        )
        if primary:
            run_data.save_index(index, folder.line_index)
        del index  # 24 bytes a document
        checkpointer = None
        if cfg.enable_checkpointing:
            checkpointer = stack.enter_context(
                Checkpointer(
                    folder.checkpoints,
                    max_to_keep=cfg.max_num_checkpoints_to_keep,
                    use_async=cfg.async_checkpointing,
                    timeout_s=cfg.checkpoint_timeout_seconds,
                    report=say,
                )
            )
        return _train(_prepare(cfg, mesh, data, folder, checkpointer, say), begun)


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
    if cfg.enable_diloco:
        for line in tables.replica_table(parts.trainer.layout):
            say(line)
        for line in tables.fragment_table(parts.trainer.layout):
            say(line)
        say(tables.outer_memory_line(parts.trainer.layout, cfg.diloco_outer_memory))
        compiles.resident = tables.resident(parts.trainer.layout)
    if cfg.compiled_trainstep_file:
        compiled_file.check(cfg.compiled_trainstep_file, cfg, parts, total_steps=total)
    meta = start.meta_of(cfg, parts, begin.position, fingerprint, total_steps=total)
    return Run(
        cfg=cfg,
        parts=parts,
        dataset=dataset,
        held_out=held_out,
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
    for line in tables.fragment_table(parts.trainer.layout):
        say(line)
    return 0


def _train(run: Run, begun: float) -> int:
    cfg, parts = run.cfg, run.parts
    run.say(f"{run.begin.origin}; {run.total} steps in all")
    for line in start.changes(cfg, parts, run.begin, total_steps=run.total):
        run.say(line)
    if run.begin.step >= run.total:
        run.say(
            f"nothing to do: step {run.begin.step} of {run.total} is done. Raise steps to go on."
        )
        return 0
    run.say(f"ready to compile after {time.perf_counter() - begun:.1f} s")
    _compile(run)
    state = start.load(cfg, parts, run.begin, run.checkpointer)
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
        loop = Loop(run, writer, progress)
        stack.callback(loop.stop_profile)
        for t in range(state.t + 1, run.total + 1):
            state, metrics = parts.trainer.step(state, next(batches))
            loop.after_step(t, state, metrics)
            if preemption.requested(t):
                return loop.stop_early(t, state, ctrl_c=in_any_process(preemption.by_ctrl_c))
        loop.finish(state)
        return INTERRUPTED if preemption.by_ctrl_c else 0


def _compile(run: Run) -> None:
    """Every program before the first step, so that none that does not fit is found later."""
    calls = assemble.calls(run.cfg, run.parts)
    if not run.begin.is_fresh(run.cfg):
        calls = [call for call in calls if call.when != START]
    path = run.cfg.compiled_trainstep_file
    if path:
        count = compiled_file.load(path, run.parts, calls)
        run.say(f"{count} compiled programs loaded from {path}")
    run.compiles.all_of(calls)


@contextmanager
def _open_batches(run: Run, done: int) -> Iterator[Iterator[Any]]:
    """Global batches from step done + 1 on; the reader ends with the context."""
    parts = run.parts
    sharding = assemble.batch_sharding(parts.mesh, parts.rules)
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
