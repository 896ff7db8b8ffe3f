"""Where the rows of a run go: metrics.jsonl, TensorBoard and Weights & Biases.

The failures of the latter two end no run. Names: docs/metrics.md.
"""

import contextlib
import importlib
import json
import math
import numbers
import socket
import struct
import time
import types
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from etils import epath

from maxdiloco import json_text, small_files
from maxdiloco.errors import CheckpointError, ConfigError
from maxdiloco.metrics.line_files import ChunkedLines, LocalLines, open_lines, read_parts
from maxdiloco.processes import output
from maxdiloco.storage import durable
from maxdiloco.storage.run_folder import RunFolder, is_local, reason, refusing

PROJECT = "maxdiloco"  # of Weights & Biases


class MetricsWriter(contextlib.AbstractContextManager):
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
        what = f"base_output_directory: cannot write {self._path}"
        with refusing(CheckpointError, what, "Free some space or set another folder."):
            last = _repaired(self._path, resume_step, say)
            self._sink = open_lines(self._path, folder.require_lock)
            wandb = [WandbRun(folder, wandb_config)] if wandb_config is not None else []
        self._last_step = last.get("step")
        self.wall_time_s = last.get("perf/wall_time_s") or 0.0  # of the last row that is kept
        purge = 0 if resume_step is None else resume_step + 1
        self._events = EventFile(folder, purge_step=purge)
        self._others: list[EventFile | WandbRun] = [self._events, *wandb] if tensorboard else wandb

    def __exit__(self, kind, exception, traceback) -> None:
        for other in [*self._others]:
            self._or_give_up(other, lambda other: other.close())
        try:
            self._sink.close()
        except OSError as error:
            line = f"{self._cannot_write(error)} The rows since then are lost."
            if exception is None:
                raise CheckpointError(
                    f"{line} The training is not: free some space, and start the same command "
                    "again to resume from the last checkpoint."
                ) from error
            self._say(f"warning: {line}")  # the exception under way goes on

    def import_ahead(self) -> None:
        """Import tensorboardX in a thread: where PyTorch is installed it takes seconds."""
        if self._events in self._others:
            self._events.import_ahead()

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
        line = f"{row(step, numbers_by_name)}\n".encode()
        self._try(lambda: self._sink.write(line))
        for other in [*self._others]:
            self._or_give_up(other, lambda other: other.write(step, numbers_by_name))

    def write_text(self, step: int, name: str, text: str) -> None:
        """Add a text to TensorBoard, if that is written; metrics.jsonl holds numbers alone."""
        self._or_give_up(self._events, lambda events: events.write(step, {name: text}))

    def sync(self) -> None:
        """Force the rows written so far to the disk, or to the object store, in all files."""
        self._try(self._sink.sync)
        self._or_give_up(self._events, lambda events: events.sync())

    def _or_give_up(self, other: "EventFile | WandbRun", act: Callable[[Any], None]) -> None:
        """Do something with what rows go to; after a failure, which is one line, nothing more."""
        try:
            if other in self._others:
                act(other)
        except other.failure as error:
            self._others.remove(other)
            why = reason(error) if isinstance(error, OSError) else error
            self._say(f"warning: {other.name}: {why}. metrics.jsonl goes on.")

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
    """The last row of the file or its chunks, after later rows and broken lines are dropped.

    {} for none.
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
            with durable.replacing(part) as new:
                new.write_bytes(clean)
    if later or broken:
        say(
            f"{path.name}: {rows} rows kept, {later} later rows and {broken} broken lines of "
            "an earlier life of this run dropped"
        )
    return last


class EventFile:
    """Rows of metrics as scalars in an event file, which TensorBoard reads.

    purge_step: TensorBoard drops what an earlier life of the run wrote from there on. The methods
    raise OSError. Records are written here: tensorboardX's own SummaryWriter waits for ever once an
    error has ended its thread.
    """

    failure = OSError

    def __init__(self, folder: RunFolder, *, purge_step: int):
        self._folder, self._purge_step = folder, purge_step
        self._file: Any = None  # until the first row
        self._importing: Future | None = None
        self._kept: list[tuple[int, Mapping[str, float | str]]] = []  # while it is imported
        self.name = f"TensorBoard is given up for this run: {folder.tensorboard}"

    def import_ahead(self) -> None:
        """Import tensorboardX in a thread. Rows wait until it is there: two imports of one package
        at once may wait for each other's parts. What fails there fails again at the first row."""
        pool = ThreadPoolExecutor(1, thread_name_prefix="import")
        self._importing = pool.submit(importlib.import_module, "tensorboardX.summary")
        pool.shutdown(wait=False)

    def _begin(self) -> None:
        try:
            from tensorboardX.proto.event_pb2 import SessionLog
        except (ImportError, TypeError) as error:  # the latter: protobuf of another version
            raise OSError(f"tensorboardX cannot be imported: {error}") from error

        folder, step = self._folder.tensorboard, self._purge_step
        folder.mkdir(parents=True, exist_ok=True)
        # As tensorboardX names files, by the second; the step distinguishes two lives of a run.
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{step}"
        header = _record(0, file_version="brain.Event:2")
        if is_local(folder):
            self._file = LocalLines(folder / name)
            self._file.write(header)
        else:  # TensorBoard reads all event files of a folder, in the order of their names
            self._file = ChunkedLines(
                folder, self._folder.require_lock, prefix=f"{name}.", header=header
            )
        self._add(step, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, values: Mapping[str, float | str]) -> None:
        """Add the values of a step, numbers as scalars, texts as texts."""
        self._kept.append((step, values))
        if self._importing is None or self._importing.done():
            self._write_kept()

    def sync(self) -> None:
        """Force the rows written so far to the disk, or to the object store."""
        if self._file is not None:
            with self._retried():
                self._file.sync()

    def close(self) -> None:
        """Write what is left."""
        if self._importing is not None:
            self._importing.exception()  # waits
        self._write_kept()
        if self._file is not None:
            self._file.close()

    def _write_kept(self) -> None:
        if self._kept and self._file is None:
            self._begin()
        while self._kept:
            self._write(*self._kept.pop(0))

    def _write(self, step: int, values: Mapping[str, float | str]) -> None:
        from tensorboardX.proto.summary_pb2 import Summary
        from tensorboardX.summary import text

        summary = Summary()
        for name, x in values.items():
            if isinstance(x, str):
                # TensorBoard shows Markdown: indented, a text keeps its lines.
                summary.MergeFrom(text(name, "".join(f"    {line}\n" for line in x.splitlines())))
            else:
                summary.value.add(tag=name, simple_value=float(x))
        self._add(step, summary=summary)

    def _add(self, step: int, **what: Any) -> None:
        with self._retried():
            self._file.write(_record(step, **what))

    @contextlib.contextmanager
    def _retried(self) -> Iterator[None]:
        """Ignore a failed upload, which is repeated; the rows in the same bucket tell of it."""
        try:
            yield
        except OSError:
            if is_local(self._folder.tensorboard):
                raise


def _record(step: int, **what: Any) -> bytes:
    """An event as a TFRecord: length, checksum, event, checksum."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    data = Event(step=step, wall_time=time.time(), **what).SerializeToString()
    length = struct.pack("<Q", len(data))
    first, second = (struct.pack("<I", masked_crc32c(part)) for part in (length, data))
    return length + first + data + second


def require_wandb() -> types.ModuleType:
    """The package wandb. Raises ConfigError where it is not installed."""
    try:
        return importlib.import_module("wandb")
    except ImportError as error:
        raise ConfigError(
            f"enable_wandb=true needs the package wandb ({error}). Install it: pip install wandb; "
            "or set enable_wandb=false."
        ) from error


class WandbRun:
    """Scalars of a run, in process 0. A restart goes on with the same run of Weights & Biases.

    config: keys and values. write raises `failure`. Raises ConfigError without the package, and
    where it refuses to begin.
    """

    name = "wandb is given up"

    def __init__(self, folder: RunFolder, config: Mapping[str, Any]):
        wandb = require_wandb()
        self.failure: type[Exception] = wandb.errors.Error
        path = folder.path / "wandb_id"  # a folder that is made anew is another run
        if not path.exists():
            path.write_text(uuid.uuid4().hex)
        name = small_files.read_bytes(path, max_bytes=1024).decode()
        try:
            self._run = wandb.init(
                project=PROJECT,
                name=folder.path.name,
                id=name,
                resume="allow",
                config=dict(config),
                dir=str(folder.path) if is_local(folder.path) else None,
            )
        except self.failure as error:
            raise ConfigError(
                f"enable_wandb=true: wandb cannot begin a run ({error}). Run `wandb login`, set "
                "WANDB_MODE=offline, or set enable_wandb=false."
            ) from error

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the row of a step; wandb sends it from a process of its own."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()
