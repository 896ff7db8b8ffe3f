"""A training run: from the config to the exit code.

# R replicas  B sequences per replica  L tokens
"""

import functools
import gc
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import jax
from etils import epath

from maxdiloco.checkpoint.checkpointer import Checkpointer
from maxdiloco.cluster.agree import from_first_process, in_any_process
from maxdiloco.cluster.signals import Preemption
from maxdiloco.config import checks, config, warnings
from maxdiloco.config.keys import Config
from maxdiloco.config.values import LARGEST
from maxdiloco.data import mixture, order, pipeline, tokenizer_base
from maxdiloco.engine.calls import START
from maxdiloco.errors import INTERRUPTED, Preempted
from maxdiloco.metrics.compiles import CompileLog
from maxdiloco.metrics.console import Console
from maxdiloco.metrics.speed import active_parameters
from maxdiloco.metrics.start_time import StartClock
from maxdiloco.metrics.wandb_run import require_wandb
from maxdiloco.metrics.writer import MetricsWriter
from maxdiloco.models.model import count_parameters
from maxdiloco.parallel import feeding
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.run import assemble, remat_choice, run_files, startup
from maxdiloco.run import data as run_data
from maxdiloco.run import model as run_model
from maxdiloco.run import state as run_state
from maxdiloco.run import tokenizer as run_tokenizer
from maxdiloco.run.assemble import Parts
from maxdiloco.run.island.settings import Facts
from maxdiloco.run.recorder import Recorder, profile
from maxdiloco.storage.run_folder import RunFolder, locate, open_run_folder

if TYPE_CHECKING:
    from maxdiloco.cluster.peers import Cluster

Say = Callable[[str], None]


def run(
    cfg: Config, clock: StartClock, notes: Sequence[str] = (), *, asked: Config | None = None
) -> int:
    """Join the other processes and train; returns the exit code. Raises maxdiloco.errors.

    clock: since the program started. notes: lines on the command line. asked: the config before
    vocab_size=auto became a number, for config.yml; by default cfg.
    """
    if cfg.enable_wandb:
        require_wandb()
    with startup.joined(cfg) as cluster, startup.compile_cache(cfg) as lines:
        clock.lap("devices")
        ports = [] if cluster is None else [cluster.firewall_note]
        return train(cfg, asked or cfg, cluster, clock, [*notes, *lines, *ports])


def train(
    cfg: Config,
    asked: Config,
    cluster: "Cluster | None",
    clock: StartClock,
    notes: Sequence[str],
) -> int:
    """The run in this process, see `run`: mesh, data, folder, parts, programs, state, loop."""
    primary = jax.process_index() == 0
    console = Console(shown=primary)
    say = console.say
    mesh = mesh_lib.build(cfg)
    shape = assemble.batch_shape(cfg, mesh)
    cfg = config.with_replicas(cfg, shape.num_replicas)
    for line in [*notes, *_settings(cfg, mesh)]:
        say(line)
    if cfg.show_fragments:
        return _show_fragments(cfg, mesh, say)

    # Data before the run's folder: bad data must not create one.
    name = cfg.run_name or _new_name()
    location = locate(cfg.base_output_directory, name)
    run_state.check_places(cfg, location)
    tokenizer = run_tokenizer.open_tokenizer(cfg)
    text, held_out = run_data.open_data(cfg, tokenizer, shape, say)
    M, num_tokens = shape.num_replicas, tokenizer.vocab_size
    unusual = warnings.run_lines(cfg, num_replicas=M, num_tokens=num_tokens)
    for line in [*run_data.lines(cfg, text, held_out, shape), *unusual]:
        say(line)
    clock.lap("data")

    with ExitStack() as stack:
        folder = stack.enter_context(
            open_run_folder(cfg.base_output_directory, name, primary=primary, warn=say)
        )
        checkpointer = stack.enter_context(_open_checkpointer(cfg, folder, tokenizer, say))

        data = run_state.agreed_data(text, tokenizer)
        run_data.agree(held_out)
        log_path = run_files.log_path(folder)
        stack.enter_context(console.logging(log_path, require_lock=folder.require_lock))
        again = "The same command resumes it." if cfg.run_name else f"run_name={name} resumes it."
        stack.push(functools.partial(_on_error, "" if cfg.run_name else again, say))
        say(f"run folder: {folder.path}{'' if cfg.run_name else f'; {again}'}")
        clock.lap("folder")
        begin = run_state.look(cfg, checkpointer, shape, text=text, data=data)
        clock.lap("restore")
        run_files.save_tokenizer(tokenizer, folder, say)
        done, total = begin.step, cfg.steps
        total = text.last_step_of_epoch(begin.position) if total == "all" else total
        length = None if checks.is_island(cfg) else total
        if length is not None and done >= length:
            say(f"nothing to do: step {done} of {total} is done. Raise steps to go on.")
            return 0
        run_files.write(config.from_dict(asked.as_dict() | {"run_name": name}), folder, say)
        mailbox = None if cluster is None else cluster.mailbox
        compiles = CompileLog(say, show_memory=cfg.show_memory)
        facts = Facts(**data, steps=total, step_tokens=shape.tokens, length=shape.length, say=say)
        chosen, parts = _build(cfg, mesh, compiles, mailbox, tokenizer, facts)
        trainer = parts.trainer
        stack.callback(trainer.close)
        if cluster is not None and (checks.is_island(cfg) or assemble.needs_bulk(chosen, mesh)):
            cluster.open_bulk()
        for line in _introduction(cfg, parts, begin, checkpointer, total=total, clock=clock):
            say(line)
        fresh = _compile(chosen, parts, compiles, say, resumes=begin.saved is not None)
        clock.lap("compile")
        state = fresh[0] if fresh else run_state.load(chosen, parts, begin, checkpointer)
        done, state = run_state.meet(state, say), parts.control.join(state)
        clock.lap("restore")
        if parts.control.ended():
            say(f"nothing to do: {trainer.closing_line(state).removeprefix('done: ')}")
            return 0
        preemption = stack.enter_context(Preemption(say))
        history = stack.enter_context(run_state.history_of(folder, parts, done=done, total=total))
        if cluster is not None:
            stack.push(cluster.raise_cause)
            if history is not None:
                cluster.failure_detector.before_end(history.end)
        writer = stack.enter_context(_open_writer(cfg, folder, say, done=done))
        stack.enter_context(console.progress(first_step=done, total_steps=length))
        steps, text = range(done + 1, (length or LARGEST) + 1), parts.control.reads(text)
        batches = stack.enter_context(_open_batches(cfg, parts, text, begin.position, steps))
        stack.callback(parts.control.leave)
        profiled = stack.enter_context(profile(folder, _profiled_steps(cfg, done)))
        recorder = Recorder(
            parts,
            **dict(done=done, total=length, console=console, writer=writer, mailbox=mailbox),
            checkpointer=checkpointer,
            note=run_state.note(cfg, begin.position, data, total_steps=total),
            data_metrics=functools.partial(text.metrics, begin.position),
            since_row=begin.since_row(done),
            begun=clock.begun,
        )
        profiled(done)
        for t in steps:
            batch = assemble.with_learning_rate(parts, next(batches), t)
            if t == steps.start:
                clock.lap("data")
            state, metrics = trainer.step(state, batch)
            if t == steps.start:
                _started(clock, metrics, checkpointer, writer, say)
            parts.monitor.add(t, metrics)
            last = t == length or parts.control.ended()
            if last or t % cfg.log_period == 0:
                recorder.log(t, state)
            if held_out and (last or parts.control.evaluates(t, cfg.eval_interval)):
                recorder.evaluate(t, state, held_out)
            console.advance()
            recorder.write(t)
            if not last and t % cfg.checkpoint_period == 0:
                recorder.save(t, state)
            profiled(t)
            if preemption.requested(t):
                recorder.save(t, state, last=True)
                recorder.rows.write_all()
                return _stopped(cfg, t, in_any_process(preemption.by_ctrl_c), say, again=again)
            if last:
                break

        recorder.rows.write_all()
        if cfg.save_checkpoint_on_completion:
            recorder.save(state.t, state, last=True)
        elif checkpointer is not None:
            checkpointer.wait(last=True)
        say(trainer.closing_line(state))
        say(f"run folder: {epath.Path(folder.path)}")
        return INTERRUPTED if preemption.by_ctrl_c else 0


def _new_name() -> str:
    """For a run without one; two that start in the same second differ."""
    second, own = map(from_first_process, (int(time.time()), secrets.randbelow(1 << 16)))
    return f"run-{second}-{own:04x}"


def _show_fragments(cfg: Config, mesh: jax.sharding.Mesh, say: Say) -> int:
    parts = assemble.assemble(cfg, mesh, total_steps=1, on_compile=lambda *_: None)
    for line in parts.trainer.description.fragments:
        say(line)
    return 0


def _settings(cfg: Config, mesh: jax.sharding.Mesh) -> list[str]:
    """Lines on keys and mesh. Raises ConfigError for a model that the mesh cannot hold."""
    run_model.parameters(run_model.build(cfg, mesh), mesh)
    return [
        *config.describe_differences(cfg),
        *warnings.lines(cfg),
        mesh_lib.describe(mesh, cfg),
    ]


def _open_checkpointer(
    cfg: Config, folder: RunFolder, tokenizer: tokenizer_base.Tokenizer, say: Say
) -> AbstractContextManager[Checkpointer | None]:
    if not cfg.enable_checkpointing:
        return nullcontext()
    keep = cfg.max_num_checkpoints_to_keep
    return Checkpointer(
        folder.checkpoints,
        max_to_keep=LARGEST if keep == "all" else keep,
        use_async=cfg.async_checkpointing,
        files=run_tokenizer.travelling_files(tokenizer),
        say=say,
        locked=True,  # by open_run_folder
    )


def _open_writer(
    cfg: Config, folder: RunFolder, say: Say, *, done: int
) -> AbstractContextManager[MetricsWriter | None]:
    if jax.process_index() != 0:
        return nullcontext()
    return MetricsWriter(
        folder,
        tensorboard=cfg.enable_tensorboard,
        resume_step=done or None,
        say=say,
        wandb_config=cfg.as_dict() if cfg.enable_wandb else None,
    )


@contextmanager
def _open_batches(
    cfg: Config, parts: Parts, text: mixture.TrainingData, position: order.Position, steps: range
) -> Iterator[Iterator[Any]]:
    """The global batches of some steps; leaving the context ends the reader."""
    shape, sharding = tuple(parts.shape), parts.batch["tokens"].sharding
    rows = feeding.local_rows(sharding, shape)
    here = dict(replicas=rows[0], rows=rows[1], worker_count=cfg.grain_worker_count)
    with pipeline.batches(text, position, steps=steps, **here) as local:
        yield feeding.feed(local, rows, sharding, shape)


def _sizes(cfg: Config, parts: Parts) -> list[str]:
    """Lines on the sizes of model and batch."""
    R, B, L = parts.shape
    active = ""
    if cfg.num_experts > 1:
        active = (
            f", {active_parameters(parts.model.config, parts.params):,} of them used by a token"
        )
    return [
        *warnings.device_lines(
            cfg,
            platform=parts.trainer.mesh.devices.flat[0].platform,
            num_devices=parts.trainer.mesh.size,
            num_parameters=count_parameters(parts.model),
        ),
        f"model: {cfg.model_name}, {count_parameters(parts.model):,} parameters{active}",
        f"kernels: {parts.model.kernels.describe()}",
        f"batch: {R} replicas * {B} sequences * {L} tokens = {parts.shape.tokens:,} tokens a step",
    ]


def _introduction(
    cfg: Config,
    parts: Parts,
    begin: run_state.Start,
    checkpointer: Checkpointer | None,
    *,
    total: int,
    clock: StartClock,
) -> list[str]:
    """Lines on what begins here."""
    how_long = "the log says how many" if checks.is_island(cfg) else total
    return [
        *_sizes(cfg, parts),
        *parts.trainer.description.start,
        f"{begin.origin}; {how_long} steps in all",
        *run_state.changes(cfg, parts, begin, checkpointer, total_steps=total),
        f"ready to compile after {clock.lap('build'):.1f} s",
    ]


def _build(cfg, mesh, compiles, mailbox, tokenizer, facts) -> tuple[Config, Parts]:
    """The config with remat_policy chosen, and the parts of a run."""
    of_run = dict(total_steps=facts.steps, mailbox=mailbox, tokenizer=tokenizer, facts=facts)
    make = functools.partial(assemble.assemble, mesh=mesh, on_compile=compiles, **of_run)
    memory = remat_choice.device_memory(mesh)
    return remat_choice.build(cfg, make, mesh, memory=memory, say=facts.say)


def _compile(
    cfg: Config, parts: Parts, compiles: CompileLog, say: Say, *, resumes: bool
) -> list[Any]:
    """Compile every program before the first step; the state of a fresh run, made meanwhile."""
    # The inner step first, which compiles longest, then the program that makes a first state.
    inner, *others = assemble.calls(cfg, parts)
    others.sort(key=lambda call: call.when != START)
    calls = [inner, *(call for call in others if not (resumes and call.when == START))]
    say(f"compiling {len(calls)} programs, {calls[0].program.name} first; a line for each")
    room = remat_choice.make_room(cfg, outer_state=checks.has_replicas(cfg))
    fresh = compiles.all_of(calls, room=room, resident=parts.trainer.description.resident)
    gc.enable()  # train.main disables it for the start
    return fresh


def _started(
    clock: StartClock,
    metrics: Any,
    checkpointer: Checkpointer | None,
    writer: MetricsWriter | None,
    say: Say,
) -> None:
    """After the first step: the line on the start, and what could wait until then."""
    jax.block_until_ready(metrics)
    say(clock.line("first step"))
    if checkpointer is not None:
        checkpointer.open_writer()
    if writer is not None:
        writer.import_ahead()


def _profiled_steps(cfg: Config, done: int) -> range:
    """See recorder.profile."""
    first = done + cfg.skip_first_n_steps_for_profiler
    return range(first, first + cfg.profiler_steps if cfg.profiler else first)


def _on_error(again: str, say: Say, kind, error, trace) -> None:
    """At the end of a `with`: how a run without a name goes on after an error that does not say."""
    if again and error is not None and not isinstance(error, Preempted):
        say(f"The run has no name: {again}")


def _stopped(cfg: Config, t: int, ctrl_c: bool, say: Say, *, again: str) -> int:
    """The exit code after Ctrl-C; after SIGTERM raise Preempted. again: how to resume the run."""
    saved = f"saved. {again}"
    if not cfg.enable_checkpointing:
        saved = "nothing is saved, since enable_checkpointing=false."
    if not ctrl_c:
        raise Preempted(f"SIGTERM after step {t}: {saved}")
    say(f"Ctrl-C after step {t}: {saved}")
    return INTERRUPTED
