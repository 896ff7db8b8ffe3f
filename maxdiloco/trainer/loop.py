"""What a run is made of, and what happens after each of its inner steps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from etils import epath

from maxdiloco.checkpoint import saved_state
from maxdiloco.checkpoint.checkpointer import Checkpointer
from maxdiloco.data.pipeline import Dataset
from maxdiloco.engine.diloco import DiLoCo
from maxdiloco.errors import INTERRUPTED, Preempted
from maxdiloco.flags.config import Config
from maxdiloco.metrics.compiles import Compiles
from maxdiloco.metrics.console import Progress, console_line
from maxdiloco.metrics.speed import StepClock, performance
from maxdiloco.metrics.writer import MetricsWriter
from maxdiloco.storage.run_folder import RunFolder
from maxdiloco.trainer import optimizer, start
from maxdiloco.trainer.assemble import Parts


@dataclass(frozen=True)
class Run:
    """What the loop works with. total: inner steps of the whole run; say: one line to the user."""

    cfg: Config
    parts: Parts
    dataset: Dataset
    held_out: Dataset | None
    begin: start.Start
    total: int
    folder: RunFolder
    checkpointer: Checkpointer | None
    meta: dict[str, Any]
    flops_per_token: float
    compiles: Compiles
    primary: bool
    say: Callable[[str], None]


class Loop:
    """What happens after an inner step: metrics, evaluation, checkpoint, profile."""

    def __init__(self, run: Run, writer: MetricsWriter | None, progress: Progress):
        self.run = run
        self.writer = writer
        self.progress = progress
        self.monitor = run.parts.monitor
        self.clock = StepClock(run.begin.step)
        self.logged = run.begin.step
        self.bytes_sent = 0
        self.profiling = False

    def after_step(self, t: int, state: Any, metrics: Any) -> None:
        """Do what falls on step t; state and metrics are those after it."""
        cfg = self.run.cfg
        self.monitor.add(t, metrics)
        if cfg.enable_diloco:
            self.bytes_sent += self.run.parts.trainer.bytes_sent(t)
        last = t == self.run.total
        row = self.log(t, state) if last or t % cfg.log_period == 0 else {}
        if self.run.held_out is not None and (last or t % cfg.eval_interval == 0):
            row["eval/loss"] = self.evaluate(state)
        self.progress.advance()
        if row and self.writer is not None:
            self.writer.write(t, row)
            self.progress.line(console_line(t, self.run.total, row))
        if not last and t % cfg.checkpoint_period == 0:
            self.save(t, state)
        self.profile(t)

    def check(self, state: Any) -> dict[str, Any]:
        """Wait for the step and fetch its metrics; raise NumericsError if a step went wrong."""
        checkpointer = self.run.checkpointer
        return self.monitor.check(state, checkpointer.steps if checkpointer else list)

    def log(self, t: int, state: Any) -> dict[str, float]:
        """Fetch the metrics, which waits for the step."""
        last = self.check(state)
        cfg, parts = self.run.cfg, self.run.parts
        jax.block_until_ready(state.params)
        row = performance(
            step_time=self.clock.lap(t),
            tokens_per_step=parts.num_replicas * parts.batch_size * cfg.max_target_length,
            flops_per_token=self.run.flops_per_token,
            num_devices=parts.mesh.size,
            device_kind=parts.mesh.devices.flat[0].device_kind,
        )
        row = self.monitor.row(state, last, optimizer.learning_rate(parts.schedule, t - 1)) | row
        if cfg.enable_diloco:
            row["dcn/bytes_sent"] = self.bytes_sent / (t - self.logged)
        self.bytes_sent, self.logged = 0, t
        return row

    def evaluate(self, state: Any) -> float:
        """Loss of theta on the held-out text [nats per token]."""
        self.check(state)
        with self.clock.excluded():
            theta = self.run.parts.trainer.outer_params(state)
            return self.run.parts.evaluation(theta, self.run.held_out)

    def save(self, t: int, state: Any, *, last: bool = False) -> None:
        """Save the state of step t, unless it is known to be bad. last: and wait for the disk."""
        if self.run.checkpointer is None:
            return
        self.check(state)
        with self.clock.excluded():
            trainer = self.run.parts.trainer
            items = saved_state.items_of(trainer, state)
            note = self.run.meta | saved_state.note_of(trainer, state)
            if self.writer is not None:
                self.writer.sync()  # a checkpoint on the disk has its rows there too
            self.run.checkpointer.save(t, items, note, last=last)

    def profile(self, t: int) -> None:
        """Start or end the profile, if there is to be one."""
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
        """End the profile that is under way, if one is."""
        if self.profiling:
            jax.profiler.stop_trace()
            self.profiling = False

    def stop_early(self, t: int, state: Any, *, ctrl_c: bool) -> int:
        """SIGTERM or Ctrl-C: save and leave."""
        self.save(t, state, last=True)
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
            self.save(state.t, state, last=True)
        elif self.run.checkpointer is not None:
            self.run.checkpointer.wait(last=True)  # what is told to be done is on the disk
        trainer = self.run.parts.trainer
        done = f"done: step {state.t}"
        if isinstance(trainer, DiLoCo):
            ages = trainer.schedule.ages(state.t, dropped_until=state.dropped_until)
            done += f"; age of each fragment of theta [steps]: {', '.join(map(str, ages))}"
        self.run.say(done)
        self.run.say(f"run folder: {epath.Path(self.run.folder.path)}")
