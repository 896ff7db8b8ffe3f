"""The metrics files of a run: rows in metrics.jsonl and TensorBoard. Names: docs/metrics.md."""

import json
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

from etils import epath

from maxdiloco.errors import CheckpointError
from maxdiloco.metrics.line_files import open_lines, parsed, text_of
from maxdiloco.metrics.trackers import EventFile, WandbRun
from maxdiloco.processes import output
from maxdiloco.storage import durable
from maxdiloco.storage.run_folder import RunFolder, reason


class MetricsWriter:
    """Appends rows to metrics.jsonl, and to TensorBoard and Weights & Biases; in process 0.

    resume_step: the step after which this life of the run starts, or None for a new run. Later rows
    and broken lines of an earlier life are dropped, so no step is there twice. wandb_config: the
    keys of the run; None: without Weights & Biases.
    A context manager. Raises CheckpointError when metrics.jsonl cannot be written at the start. A
    disk that fails later is one warning, and the next write that succeeds writes the kept rows too.
    Rows still unwritten at the end are a CheckpointError, or a warning beside another error.
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
        self._path = folder.metrics
        self._say, self._failing = say, False
        try:
            last = _repaired(self._path, resume_step, say)
            self._sink = open_lines(self._path, folder.require_lock)
            others = [WandbRun(folder, wandb_config, say=say)] if wandb_config is not None else []
        except OSError as error:
            raise CheckpointError(
                f"{self._cannot_write(error)} Free some space or set another folder."
            ) from error
        self._last_step = last.get("step")
        self.wall_time_s = last.get("perf/wall_time_s") or 0.0  # of the last row that is kept
        self._events = None
        if tensorboard:
            purge = 0 if resume_step is None else resume_step + 1
            self._events = EventFile(folder.tensorboard, purge_step=purge, say=say)
            others.insert(0, self._events)
        self._others = others

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, kind, exception, traceback) -> None:
        for other in self._others:
            other.close()
        try:
            self._sink.close()
        except OSError as error:
            line = f"{self._cannot_write(error)} The rows since then are lost."
            if exception is None:
                raise CheckpointError(
                    f"{line} The training is not: free some space, and the same command goes on "
                    "from the last checkpoint."
                ) from error
            self._say(f"warning: {line}")  # the exception under way goes on

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Add the row of a step, with all its values: numbers or arrays with one element.

        Raises ValueError when step is not beyond the last row's.
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
        self._try(lambda: self._sink.write(row(step, numbers_by_name)))
        for other in self._others:
            other.write(step, numbers_by_name)

    def write_text(self, step: int, name: str, text: str) -> None:
        """Add a text to TensorBoard, if that is written; metrics.jsonl holds numbers alone."""
        if self._events is not None:
            self._events.write(step, {name: text})

    def sync(self) -> None:
        """Force the rows written so far to the disk, or to the object store, in all files."""
        self._try(self._sink.sync)
        if self._events is not None:
            self._events.sync()

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            if not self._failing:
                self._say(f"warning: {self._cannot_write(error)} Its rows are kept for later.")
            self._failing = True
        else:
            if self._failing:
                self._say(f"{self._path} is written again.")
            self._failing = False

    def _cannot_write(self, error: OSError) -> str:
        return f"base_output_directory: cannot write {self._path}: {reason(error)}."


def row(step: int, values: Mapping[str, float]) -> str:
    """One line of metrics.jsonl: an object with "step" and the values; null where not finite."""
    finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
    return json.dumps({"step": step} | finite, allow_nan=False)


def _repaired(
    path: epath.Path, resume_step: int | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """The last row of the file, after later rows and broken lines are dropped; {} for none."""
    text, kept = text_of(path), []
    last: dict[str, Any] = {}
    later = broken = 0
    for line in filter(None, text.split("\n")):
        found = parsed(line)
        if not isinstance(found.get("step"), int):
            broken += 1
        elif resume_step is None or not last.get("step", -1) < found["step"] <= resume_step:
            later += 1
        else:
            kept.append(line + "\n")
            last = found
    clean = "".join(kept)
    if clean != text:
        with durable.replacing(path) as new:
            new.write_bytes(clean.encode())  # whatever the locale
    if later or broken:
        say(
            f"{path.name}: {len(kept)} rows kept, {later} later rows and {broken} broken lines of "
            "an earlier life of this run dropped"
        )
    return last
