"""Start a run: open, build and compile its parts, run the loop, and return the exit code."""

import contextlib
import functools
import gc
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh

from maxdiloco.checkpoint import saved_state
from maxdiloco.checkpoint.checkpointer import Checkpointer
from maxdiloco.cluster.agree import from_first_process
from maxdiloco.cluster.signals import Preemption
from maxdiloco.config import config
from maxdiloco.config.keys import Config
from maxdiloco.config.values import LARGEST
from maxdiloco.data import order, pipeline, tokenizer_base
from maxdiloco.engine.calls import START
from maxdiloco.errors import Preempted
from maxdiloco.metrics.compile_log import CompileLog
from maxdiloco.metrics.console import Console
from maxdiloco.metrics.speed import active_parameters
from maxdiloco.metrics.start_time import StartClock
from maxdiloco.metrics.wandb_run import require_wandb
from maxdiloco.models.model import count_parameters
from maxdiloco.parallel import global_batch
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.run import assemble, loop, remat_choice, run_files, startup, warnings
from maxdiloco.run import data as run_data
from maxdiloco.run import model as run_model
from maxdiloco.run import settings as run_settings
from maxdiloco.run import state as run_state
from maxdiloco.run import tokenizer as run_tokenizer
from maxdiloco.run.assemble import Parts
from maxdiloco.run.island import RunProperties
from maxdiloco.run.recorder import open_recorder
from maxdiloco.run.settings import RunSettings
from maxdiloco.storage.run_folder import RunFolder, locate, open_run_folder

if TYPE_CHECKING:
    from maxdiloco.cluster.peers import Cluster

Say = Callable[[str], None]


def run(
    cfg: Config, clock: StartClock, notes: Sequence[str] = (), *, unresolved: Config | None = None
) -> int:
    """Join the other processes and train.

    Args:
      cfg: the config.
      clock: measures the time since the program started.
      notes: log lines on the command line.
      unresolved: the config before vocab_size=auto became a number, for config.yml; None: cfg.

    Returns:
      The exit code.

    Raises:
      One of errors.USER_ERRORS.
    """
    if cfg.enable_wandb:
        require_wandb()
    with startup.set_up(cfg) as (cluster, mesh, lines):
        clock.lap("devices")
        ports = [] if cluster is None else [cluster.firewall_note]
        return _run(cfg, unresolved or cfg, mesh, cluster, clock, [*notes, *lines, *ports])


def _run(
    cfg: Config,
    unresolved: Config,
    mesh: Mesh,
    cluster: "Cluster | None",
    clock: StartClock,
    notes: Sequence[str],
) -> int:
    """Open data, folder and checkpoints, build and compile, and train. See `run`."""
    primary = jax.process_index() == 0
    console = Console(shown=primary)
    say = console.say
    num_replicas = run_settings.count_replicas(run_settings.read_batch(cfg), mesh)
    # The run's config.yml has `unresolved`, because `auto` may become another number on resume.
    settings = run_settings.read(run_settings.with_replicas(cfg, num_replicas), mesh)
    shape = assemble.batch_shape(settings, mesh)
    for line in [*notes, *_config_lines(settings, mesh)]:
        say(line)
    if cfg.show_fragments:
        return _show_fragments(settings, mesh, say)

    # Open the data before creating the folder of the run, so that bad data create no folder.
    name = cfg.run_name or _new_name()
    run_state.check_paths(
        settings.checkpoint,
        locate(cfg.base_output_directory, name),
        base_output_directory=cfg.base_output_directory,
        run_name=cfg.run_name,
    )
    tokenizer = run_tokenizer.open_tokenizer(settings.tokenizer)
    text, held_out = run_data.open_data(settings.data, tokenizer, shape, say)
    for line in run_data.lines(settings.data, text, held_out, shape):
        say(line)
    counts = dict(num_replicas=num_replicas, num_tokens=tokenizer.vocab_size)
    for line in warnings.run_lines(settings.config, **counts):
        say(line)
    clock.lap("data")

    resume_hint = "The same command resumes it." if cfg.run_name else f"run_name={name} resumes it."
    with (
        open_run_folder(cfg.base_output_directory, name, primary=primary, warn=say) as folder,
        _open_checkpointer(settings, folder, tokenizer, say) as checkpointer,
        console.logging(run_files.log_path(folder), require_lock=folder.require_lock),
        _ResumeHint("" if cfg.run_name else resume_hint, say),
    ):
        contents = run_data.data_fingerprints(text, tokenizer)
        run_data.require_same_texts(held_out)
        say(f"run folder: {folder.path}{'' if cfg.run_name else f'; {resume_hint}'}")
        clock.lap("folder")
        point = run_state.find_restore_point(
            settings, checkpointer, shape, text=text, data=contents
        )
        clock.lap("restore")
        run_files.save_tokenizer(tokenizer, folder, say)
        total = text.last_step_of_epoch(point.position) if cfg.steps == "all" else cfg.steps
        length = None if settings.is_island else total
        if length is not None and point.step >= length:
            say(f"nothing to do: step {point.step} of {total} is done. Raise steps to continue.")
            return 0
        run_files.write(config.from_dict(unresolved.as_dict() | {"run_name": name}), folder, say)

        compile_log = CompileLog(say, show_memory=settings.metrics.show_memory)
        messenger = None if cluster is None else cluster.messenger
        properties = RunProperties(
            **contents, steps=total, step_tokens=shape.tokens, length=shape.length, say=say
        )
        settings, parts = remat_choice.build(
            settings,
            functools.partial(
                assemble.assemble,
                mesh=mesh,
                total_steps=total,
                on_compile=compile_log,
                messenger=messenger,
                tokenizer=tokenizer,
                properties=properties,
            ),
            mesh,
            memory=remat_choice.device_memory(mesh),
            say=say,
        )
        with contextlib.closing(parts.trainer):
            if cluster is not None and assemble.needs_bulk(settings, mesh):
                cluster.open_bulk()
            for line in _introduction(settings, parts, point, checkpointer, total=total):
                say(line)
            say(f"ready to compile after {clock.lap('build'):.1f} s")
            fresh = _compile(settings, parts, compile_log, say, resumes=point.saved is not None)
            clock.lap("compile")
            state = fresh or run_state.restore(settings, parts, point, checkpointer)
            startup.wait_for_all(say)
            done, state = state.t, parts.control.join(state)
            clock.lap("restore")
            if parts.control.ended():
                say(f"nothing to do: {parts.trainer.closing_line(state).removeprefix('done: ')}")
                return 0
            steps, text = range(done + 1, (length or LARGEST) + 1), parts.control.reads(text)
            with (
                Preemption(say) as preemption,
                open_recorder(
                    settings,
                    parts,
                    folder,
                    cluster=cluster,
                    console=console,
                    checkpointer=checkpointer,
                    note=run_state.note(settings, point.position, contents, total_steps=total),
                    data_metrics=functools.partial(text.metrics, point.position),
                    since_row=point.since_row(done),
                    done=done,
                    total=total,
                    begun=clock.begun,
                ) as recorder,
                _open_batches(settings, parts, text, point.position, steps) as batches,
            ):
                return loop.train(
                    settings,
                    parts,
                    state,
                    batches,
                    recorder,
                    steps=steps,
                    held_out=held_out,
                    preemption=preemption,
                    clock=clock,
                    resume_hint=resume_hint,
                )


def _new_name() -> str:
    """Return a name for a run without one. Runs that start in the same second differ in it."""
    second, own = map(from_first_process, (int(time.time()), secrets.randbelow(1 << 16)))
    return f"run-{second}-{own:04x}"


def _show_fragments(settings: RunSettings, mesh: Mesh, say: Say) -> int:
    parts = assemble.assemble(settings, mesh, total_steps=1, on_compile=lambda *_: None)
    for line in parts.trainer.description.fragments:
        say(line)
    return 0


def _config_lines(settings: RunSettings, mesh: Mesh) -> list[str]:
    """Return log lines on keys and mesh. Raises ConfigError if the mesh cannot hold the model."""
    run_model.parameters(run_model.build(settings.model, mesh), mesh)
    return [
        *config.describe_differences(settings.config),
        *warnings.lines(settings.config),
        mesh_lib.describe(mesh, run_settings.read_mesh(settings.config)),
    ]


def _open_checkpointer(
    settings: RunSettings, folder: RunFolder, tokenizer: tokenizer_base.Tokenizer, say: Say
) -> contextlib.AbstractContextManager[Checkpointer | None]:
    if not settings.checkpoint.enable_checkpointing:
        return contextlib.nullcontext()
    keep = settings.checkpoint.max_num_checkpoints_to_keep
    return Checkpointer(
        folder.checkpoints,
        max_to_keep=LARGEST if keep == "all" else keep,
        use_async=settings.checkpoint.async_checkpointing,
        files=run_tokenizer.travelling_files(tokenizer),
        say=say,
        locked=True,  # by open_run_folder
    )


@contextlib.contextmanager
def _open_batches(
    settings: RunSettings,
    parts: Parts,
    text: Any,
    position: order.Position,
    steps: range,
) -> Iterator[Iterator[Any]]:
    """Yield the global batches of some steps. text: see RunControl.reads."""
    shape, sharding = parts.batch["tokens"].shape, parts.batch["tokens"].sharding
    replicas, rows = global_batch.local_rows(sharding, shape)
    with pipeline.batches(
        text,
        position,
        steps=steps,
        replicas=replicas,
        rows=rows,
        worker_count=settings.data.grain_worker_count,
    ) as local:
        try:
            yield global_batch.assemble(local, (replicas, rows), sharding, shape)
        finally:
            parts.control.leave()  # the reader of an island may wait for a lease


class _ResumeHint(contextlib.AbstractContextManager):
    """Log after an error how to resume a run without a name. hint: the sentence; empty for none."""

    def __init__(self, hint: str, say: Say):
        self._hint, self._say = hint, say

    def __exit__(self, kind, error, trace) -> None:
        # The message of Preempted has the hint already.
        if self._hint and error is not None and not isinstance(error, Preempted):
            self._say(f"The run has no name: {self._hint}")


def _introduction(
    settings: RunSettings,
    parts: Parts,
    point: run_state.RestorePoint,
    checkpointer: Checkpointer | None,
    *,
    total: int,
) -> list[str]:
    """Return log lines on the model, the mode and the starting point of this run."""
    R, B, L = parts.shape
    active, num_parameters = "", count_parameters(parts.model)
    if parts.model.config.num_experts > 1:
        used = active_parameters(parts.model.config, parts.params)
        active = f", {used:,} of them used by a token"
    how_long = "the islands' log determines how many" if settings.is_island else total
    of_all = " of all islands" if settings.batch.islands_global_batch_size is not None else ""
    return [
        *warnings.device_lines(
            settings.config,
            platform=parts.mesh.devices.flat[0].platform,
            num_devices=parts.mesh.size,
            num_parameters=num_parameters,
        ),
        f"model: {settings.config.model_name}, {num_parameters:,} parameters{active}",
        f"kernels: {parts.model.kernels.describe()}",
        f"batch: {R} replicas * {B} sequences * {L} tokens = {parts.shape.tokens:,} tokens a step"
        f"{of_all}",
        *parts.trainer.description.start,
        f"{point.origin}; {how_long} steps in all",
        *(checkpointer.shortage(saved_state.nbytes(parts.trainer)) if checkpointer else []),
        *run_state.change_lines(settings, parts, point, total_steps=total),
    ]


def _compile(
    settings: RunSettings, parts: Parts, compile_log: CompileLog, say: Say, *, resumes: bool
) -> Any:
    """Compile every program before the first step.

    Returns:
      The state of a fresh run; None for a run that is restored.
    """
    # Begin with the inner step, which compiles longest, then the program of the first state.
    inner, *others = assemble.calls(settings, parts)
    others.sort(key=lambda call: call.when != START)
    calls = [inner, *(call for call in others if not (resumes and call.when == START))]
    say(f"compiling {len(calls)} programs, {calls[0].program.name} first; a line for each")
    remedy = remat_choice.memory_remedies(
        settings.config,
        outer_state=settings.batch.enable_diloco,
        remat_policy=settings.model.config.remat_policy,
    )
    fresh = compile_log.compile_all(
        calls, remedy=remedy, resident=parts.trainer.description.resident
    )
    if resumes:
        gc.enable()  # a restore may leave large arrays in reference cycles
    return fresh[0] if fresh else None
