"""Log, evaluate, save and profile a step of a run. loop.py decides when."""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
from etils import epath

from maxdiloco.checkpoint import saved_state
from maxdiloco.checkpoint.checkpointer import Checkpointer
from maxdiloco.data.pipeline import Dataset
from maxdiloco.metrics.console import Console, console_line, sample_lines
from maxdiloco.metrics.history import MAX_STEPS, History
from maxdiloco.metrics.rows import Metrics, RowCollector, Values, learning_metrics
from maxdiloco.metrics.speed import StepClock, device_memory, flops_per_token, performance
from maxdiloco.metrics.writer import MetricsWriter
from maxdiloco.run.assemble import Parts
from maxdiloco.run.settings import MetricsSettings, RunSettings
from maxdiloco.storage.run_folder import RunFolder

if TYPE_CHECKING:
    from maxdiloco.cluster.messages import Messenger
    from maxdiloco.cluster.peers import Cluster


class Recorder:
    """Metrics, evaluations, checkpoints and the profile of a run."""

    def __init__(
        self,
        parts: Parts,
        *,
        done: int,
        total: int | None,
        console: Console,
        folder: epath.Path,
        writer: MetricsWriter | None,
        messenger: "Messenger | None",
        checkpointer: Checkpointer | None,
        note: dict[str, Any],
        data_metrics: Callable[[int], dict[str, float]],
        since_row: Mapping[str, Any] | None,
        begun: float,
        profile: Callable[[int], None],
    ):
        """Start the clock of the steps.

        Args:
          parts: parts of the run.
          done: inner steps before this start.
          total: inner steps of the whole run, if known.
          console: for lines and samples.
          folder: folder of the run.
          writer: writes the metrics; None except in the first process.
          messenger: messages between processes; None in a run of one process.
          checkpointer: None if nothing is saved.
          note: metadata of the run for its checkpoints.
          data_metrics: returns the metrics of the data at a step, see Dataset.metrics.
          since_row: metrics since the last row, from the restored checkpoint; see `save`.
          begun: time.perf_counter() at the start of the program.
          profile: called before the first step and after each.
        """
        self.profile = profile
        self._parts, self._total = parts, total
        self.console, self.folder = console, folder
        self._writer, self._checkpointer = writer, checkpointer
        self._note, self._data_metrics = note, data_metrics
        self._flops_per_token = flops_per_token(
            parts.model.config, parts.params, parts.shape.length
        )
        self._clock = StepClock(done)
        self._logged = done
        if since_row is not None:
            self._logged = since_row["row"]
            parts.monitor.resume(since_row)
        self._begun = begun - (writer.wall_time_s if writer is not None else 0.0)
        self._metrics: Metrics | None = None  # of the row of the current step
        self._values: dict[str, float] = {}  # the rest of it
        self._samples: dict[int, str] = {}  # sampled text by step, until its row is written
        self.rows = RowCollector(
            jax.process_index(), parts.monitor.replicas, messenger=messenger, write=self._write
        )

    def log(self, t: int, state: Any) -> None:
        """Read this process's metrics of step t. Waits for the step, not for other processes."""
        self._metrics = self._check(state)
        parts, mesh = self._parts, self._parts.mesh
        steps, self._logged = range(self._logged + 1, t + 1), t
        self._metrics |= parts.monitor.read_row(len(steps))
        sent = sum(map(parts.trainer.bytes_sent, steps)) / len(steps)
        self._values |= {"dcn/bytes_sent": sent} | parts.trainer.extra_metrics(state)
        self._values["learning/lr"] = parts.control.learning_rate(parts.learning_rate, t)
        self._values |= self._data_metrics(t)
        self._values |= performance(
            step_time=self._clock.lap(t),
            tokens_per_step=parts.control.tokens(steps, parts.shape.tokens) / len(steps),
            flops_per_token=self._flops_per_token,
            num_devices=mesh.size,
            device_kind=mesh.devices.flat[0].device_kind,
        )
        self._values["perf/wall_time_s"] = time.perf_counter() - self._begun
        self._values |= device_memory(mesh.local_devices)

    def evaluate(self, t: int, state: Any, held_out: dict[str, Dataset]) -> None:
        """Add the losses on each text of data.open_evaluated to the row. All processes call it."""
        self._check(state, together=True)
        with self._clock.excluded():
            parts = self._parts
            outer_params = parts.trainer.evaluated.read(state)
            totals = {name: parts.evaluation(outer_params, text) for name, text in held_out.items()}
            first = next(iter(totals))
            for name in totals:
                self._values |= totals[name].metrics(name)
            self._values |= totals[first].metrics()
            if parts.sampler is not None:
                self._samples[t] = parts.sampler(outer_params)

    def first_step_is_done(self) -> None:
        """Start the work that could wait until after the first step."""
        gc.enable()  # train.main disables it
        if self._checkpointer is not None:
            self._checkpointer.open_writer()
        if self._writer is not None:
            self._writer.import_ahead()

    def write(self, t: int) -> None:
        """Write the complete rows up to step t to the files and to the console."""
        if self._values:
            self.rows.add(t, self._metrics, self._values)
            self._metrics, self._values = None, {}
        self.rows.write_complete()

    def save(self, t: int, state: Any, *, last: bool = False) -> None:
        """Save the state of step t.

        The note has since_row: the step of the last row, and the monitor's sums since then.

        Args:
          t: inner step, from 1.
          state: after step t.
          last: no save follows; wait until this one is on the disk.

        Raises:
          NumericsError: the state is known to be bad, and is not saved.
        """
        if self._checkpointer is None:
            return
        self._check(state, together=True)
        with self._clock.excluded():
            trainer = self._parts.trainer
            saved_state.require_finite(trainer, state)
            items, metadata = trainer.checkpoint(state)
            note = self._note | metadata
            note["since_row"] = {"row": self._logged, **self._parts.monitor.sums()}
            self.rows.write_all()  # the rows of a checkpoint have to be on the disk, too
            if self._writer is not None:
                self._writer.sync()
            self._checkpointer.save(t, items, note, last=last)

    def wait(self) -> None:
        """Wait until the checkpoints that were started are on the disk."""
        if self._checkpointer is not None:
            self._checkpointer.wait(last=True)

    def _check(self, state: Any, *, together: bool = False) -> Metrics:
        """Wait for the step, and return its metrics. together: see Monitor.check."""
        jax.block_until_ready(state.params)
        saved_steps = self._checkpointer.steps if self._checkpointer else list
        return self._parts.monitor.check(state, saved_steps, together=together)

    def _write(self, t: int, metrics: Metrics | None, values: Values) -> None:
        row = dict(values)
        if metrics is not None:
            row = learning_metrics(metrics, row.pop("learning/lr")) | row
        self._writer.write(t, row)
        left = not self.console.has_bar
        self.console.line(console_line(t, self._total, row, left=left))
        if sample := self._samples.pop(t, ""):
            self._writer.write_text(t, "eval/sample", sample)
            self.console.line(sample_lines(t, sample))


@contextlib.contextmanager
def open_recorder(
    settings: RunSettings,
    parts: Parts,
    folder: RunFolder,
    *,
    cluster: "Cluster | None",
    console: Console,
    checkpointer: Checkpointer | None,
    note: dict[str, Any],
    data_metrics: Callable[[int], dict[str, float]],
    since_row: Mapping[str, Any] | None,
    done: int,
    total: int,
    begun: float,
) -> Iterator[Recorder]:
    """Open history.jsonl, the metrics, the progress bar and the profile of a run.

    For the arguments see Recorder. The log of an island decides the number of its steps, not total.
    """
    length = None if settings.is_island else total
    primary = jax.process_index() == 0
    with contextlib.ExitStack() as stack:
        history = None
        if primary:
            history = stack.enter_context(open_history(parts, folder, done=done, total=total))
        if cluster is not None:
            stack.push(cluster.raise_cause)
            if history is not None:
                cluster.failure_detector.before_end(history.end)
        writer = None
        if primary:
            writer = MetricsWriter(
                folder,
                tensorboard=settings.metrics.enable_tensorboard,
                resume_step=done or None,
                say=console.say,
                wandb_config=settings.config.as_dict() if settings.metrics.enable_wandb else None,
            )
            stack.enter_context(writer)
        stack.enter_context(console.progress(first_step=done, total_steps=length))
        yield Recorder(
            parts,
            done=done,
            total=length,
            console=console,
            folder=epath.Path(folder.path),
            writer=writer,
            messenger=None if cluster is None else cluster.messenger,
            checkpointer=checkpointer,
            note=note,
            data_metrics=data_metrics,
            since_row=since_row,
            begun=begun,
            profile=stack.enter_context(_profile(settings.metrics, folder, done)),
        )


def open_history(parts: Parts, folder: RunFolder, *, done: int, total: int) -> History:
    """Add a line for this start to history.jsonl, and one when the context is left."""
    trainer, H = parts.trainer, parts.trainer.period
    # The steady state, in which an exchange of the previous period is in flight at the start.
    period = range(2 * H + 1, 2 * H + 1 + min(H, MAX_STEPS))
    facts = {
        "step": done,
        "until": total,
        "processes": jax.process_count(),
        "devices": parts.mesh.size,
        "replicas": trainer.num_replicas,
        "reduce_scatter": trainer.description.reduce_scatter,
        "bytes_sent": [trainer.bytes_sent(t) for t in period],
    }
    return History(folder, facts)


@contextlib.contextmanager
def _profile(
    metrics: MetricsSettings, folder: RunFolder, done: int
) -> Iterator[Callable[[int], None]]:
    """Yield a function to call before the first step and after each, with the steps done."""
    first = done + metrics.skip_first_n_steps_for_profiler
    steps = range(first, first + metrics.profiler_steps if metrics.profiler else first)
    with contextlib.ExitStack() as running:

        def after(t: int) -> None:
            if steps and t == steps.start:
                running.enter_context(jax.profiler.trace(str(folder.path / "profile")))
            elif t >= steps.stop:
                running.close()

        yield after
