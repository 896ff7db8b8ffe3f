"""The training loop: steps, logs, evaluations, saves and stops."""

from collections.abc import Iterator
from typing import Any

import jax

from maxdiloco.cluster.agree import in_any_process
from maxdiloco.cluster.signals import Preemption
from maxdiloco.data.pipeline import Dataset
from maxdiloco.errors import INTERRUPTED, Preempted
from maxdiloco.metrics.start_time import StartClock
from maxdiloco.run.assemble import Parts, with_learning_rate
from maxdiloco.run.recorder import Recorder
from maxdiloco.run.settings import RunSettings


def train(
    settings: RunSettings,
    parts: Parts,
    state: Any,
    batches: Iterator[Any],
    recorder: Recorder,
    *,
    steps: range,
    held_out: dict[str, Dataset],
    preemption: Preemption,
    clock: StartClock,
    resume_hint: str,
) -> int:
    """Train from a state to the end of the run, or until a signal.

    Args:
      settings: settings of the run.
      parts: parts of the run.
      state: the state before the first step; donated.
      batches: global batches, one for each step.
      recorder: records metrics, evaluations and checkpoints.
      steps: numbers of the inner steps to take. An island stops earlier if its log has ended.
      held_out: texts to evaluate on; empty for no evaluation.
      preemption: SIGTERM and Ctrl-C.
      clock: measures the time since the program started.
      resume_hint: a sentence for the user on how to resume the run.

    Returns:
      The exit code.

    Raises:
      Preempted: after SIGTERM, once the state is saved.
      One of errors.USER_ERRORS: from the trainer, the data or the recorder.
    """
    trainer, control, console = parts.trainer, parts.control, recorder.console
    recorder.profile(steps.start - 1)
    for t in steps:
        # The learning rate is a leaf of the batch. So the compiled step does not depend on the
        # schedule, and a user's inner step receives the rate like any other input.
        batch = with_learning_rate(parts, next(batches), t)
        if t == steps.start:
            clock.lap("data")
        state, metrics = trainer.step(state, batch)
        if t == steps.start:
            jax.block_until_ready(metrics)
            console.say(clock.line("first step"))
            recorder.first_step_is_done()
        parts.monitor.add(t, metrics)
        last = t == steps[-1] or control.ended()
        if last or t % settings.metrics.log_period == 0:
            recorder.log(t, state)
        if held_out and (last or control.evaluates(t, settings.evaluation.eval_interval)):
            recorder.evaluate(t, state, held_out)
        console.advance()
        recorder.write(t)
        if not last and t % settings.checkpoint.checkpoint_period == 0:
            recorder.save(t, state)
        recorder.profile(t)
        if preemption.requested(t):
            recorder.save(t, state, last=True)
            recorder.rows.write_all()
            return _stopped(settings, t, preemption, recorder, resume_hint)
        if last:
            break

    recorder.rows.write_all()
    if settings.checkpoint.save_checkpoint_on_completion:
        recorder.save(state.t, state, last=True)
    else:
        recorder.wait()
    console.say(trainer.closing_line(state))
    console.say(f"run folder: {recorder.folder}")
    return INTERRUPTED if preemption.by_ctrl_c else 0


def _stopped(
    settings: RunSettings, t: int, preemption: Preemption, recorder: Recorder, resume_hint: str
) -> int:
    """Return the exit code after Ctrl-C; raise Preempted after SIGTERM."""
    saved = f"saved. {resume_hint}"
    if not settings.checkpoint.enable_checkpointing:
        saved = "nothing is saved, since enable_checkpointing=false."
    if not in_any_process(preemption.by_ctrl_c):
        raise Preempted(f"SIGTERM after step {t}: {saved}")
    recorder.console.say(f"Ctrl-C after step {t}: {saved}")
    return INTERRUPTED
