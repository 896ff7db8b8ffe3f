"""Write the rows of a run to metrics.jsonl, TensorBoard and Weights & Biases.

A failure of the latter two is a warning and does not end a run. metrics/definitions.py has the
names.
"""

import contextlib
import json
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

from etils import epath

from maxdiloco import json_text, output
from maxdiloco.errors import CheckpointError
from maxdiloco.metrics.line_files import open_lines, read_parts
from maxdiloco.metrics.tensorboard import EventFile
from maxdiloco.metrics.wandb_run import WandbRun
from maxdiloco.storage import durable
from maxdiloco.storage.os_errors import reason, replace_os_error
from maxdiloco.storage.run_folder import RunFolder


class MetricsWriter(contextlib.AbstractContextManager):
    """Appends rows to metrics.jsonl, and to TensorBoard and Weights & Biases; in process 0.

    Rows are written in threads (line_writer): a slow disk or bucket delays no step. After a
    failure, which is one warning, the rows are kept, and the next write that succeeds writes them.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        tensorboard: bool,
        resume_step: int | None,
        say: Callable[[str], None] = output.say,
        wandb_config: Mapping[str, Any] | None = None,
    ):
        """Open the files of process 0.

        Args:
          folder: of the run.
          tensorboard: whether to write an event file.
          resume_step: the step after which this session of the run starts, or None for a new run.
            Later rows and broken lines of an earlier session are dropped, so that no step occurs
            twice.
          say: prints a line.
          wandb_config: the keys of the run, or None without Weights & Biases.

        Raises:
          CheckpointError: metrics.jsonl cannot be written.
        """
        self._path = folder.metrics
        self._say, self._is_failing = say, False
        what = f"base_output_directory: cannot write {self._path}"
        with replace_os_error(CheckpointError, what, "Free some space or set another folder."):
            last = _drop_later_rows(self._path, resume_step, say)
            self._lines = open_lines(self._path, folder.require_lock)
            self._wandb = None if wandb_config is None else WandbRun(folder, wandb_config)
        self._last_step = last.get("step")
        self.wall_time_s = last.get("perf/wall_time_s") or 0.0  # of the last row that is kept
        purge_step = 0 if resume_step is None else resume_step + 1
        self._events = EventFile(folder, purge_step=purge_step) if tensorboard else None

    def __exit__(self, kind, exception, traceback) -> None:
        """Wait until all rows are written, and close the files.

        Raises:
          CheckpointError: rows are still unwritten; if there is another error, that is a warning.
        """
        for sink in self._optional_sinks():
            self._or_give_up(sink, sink.close)
        try:
            self._lines.close()
        except OSError as error:
            line = f"{self._cannot_write(error)} The rows since then are lost."
            if exception is None:
                raise CheckpointError(
                    f"{line} The training is not: free some space, and start the same command "
                    "again to resume from the last checkpoint."
                ) from error
            self._say(f"warning: {line}")  # and the exception under way is raised

    def import_ahead(self) -> None:
        """Import tensorboardX in a thread: if PyTorch is installed, it takes seconds."""
        if self._events is not None:
            self._events.import_ahead()

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Add the row of a step.

        Args:
          step: larger than the step of the last row.
          values: all metrics of the step, numbers or arrays with one element.

        Raises:
          ValueError: the step is not larger than the step of the last row.
        """
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(
                f"step={step} is not beyond the last row's step {self._last_step}: gather all "
                "values of a step and write them once."
            )
        self._last_step = step
        numbers_by_name = {
            name: int(value) if isinstance(value, numbers.Integral) else float(value)
            for name, value in values.items()
        }
        self._or_warn(lambda: self._lines.write(f"{row(step, numbers_by_name)}\n".encode()))
        for sink in self._optional_sinks():
            self._or_give_up(sink, lambda sink=sink: sink.write(step, numbers_by_name))

    def write_text(self, step: int, name: str, text: str) -> None:
        """Add a text to TensorBoard, if that is written; metrics.jsonl holds numbers only."""
        if events := self._events:
            self._or_give_up(events, lambda: events.write(step, {name: text}))

    def sync(self) -> None:
        """Force the rows written so far to the disk, or to the object store, in all files."""
        self._or_warn(self._lines.sync)
        for sink in self._optional_sinks():
            self._or_give_up(sink, sink.sync)

    def _optional_sinks(self) -> list[EventFile | WandbRun]:
        return [sink for sink in (self._events, self._wandb) if sink is not None]

    def _or_give_up(self, sink: EventFile | WandbRun, act: Callable[[], None]) -> None:
        """Call `act`. After a failure of the sink, which is one warning, it gets no more rows."""
        try:
            act()
        except sink.failure as error:
            if sink is self._events:
                self._events = None
            else:
                self._wandb = None
            why = reason(error) if isinstance(error, OSError) else error
            self._say(f"warning: {sink.name}: {why}. metrics.jsonl is still written.")

    def _or_warn(self, act: Callable[[], None]) -> None:
        """Call `act`, with one line when it begins to fail and one when it works again."""
        try:
            act()
        except OSError as error:
            if not self._is_failing:
                self._say(f"warning: {self._cannot_write(error)} Its rows are kept for later.")
            self._is_failing = True
        else:
            if self._is_failing:
                self._say(f"{self._path} can be written again.")
            self._is_failing = False

    def _cannot_write(self, error: OSError) -> str:
        return f"base_output_directory: cannot write {self._path}: {reason(error)}."


def row(step: int, values: Mapping[str, float]) -> str:
    """Return a line of metrics.jsonl: an object with "step" and the values; null if not finite."""
    finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
    return json.dumps({"step": step} | finite, allow_nan=False)


def _drop_later_rows(
    path: epath.Path, resume_step: int | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """Drop later rows and broken lines from a file or its chunks, see MetricsWriter.

    Returns:
      The last row that is kept; {} for none.
    """
    last: dict[str, Any] = {}
    rows = later = broken = 0
    for part, content in read_parts(path).items():
        kept = []
        for line in filter(None, content.split(b"\n")):
            found = json_text.fields(line)
            if not isinstance(found.get("step"), int):
                broken += 1
            elif resume_step is None or not last.get("step", -1) < found["step"] <= resume_step:
                later += 1
            else:
                kept.append(line + b"\n")
                last = found
        rows += len(kept)
        clean = b"".join(kept)
        if not clean and part != path:
            part.unlink()
        elif clean != content:
            with durable.atomic_write(part) as new:
                new.write_bytes(clean)
    if later or broken:
        say(
            f"{path.name}: {rows} rows kept, {later} later rows and {broken} broken lines of "
            "an earlier session of this run dropped"
        )
    return last
