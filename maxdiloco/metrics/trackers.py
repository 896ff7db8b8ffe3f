"""Where else the rows go: TensorBoard and Weights & Biases. Their failures end no run."""

import contextlib
import importlib
import queue
import threading
import time
import types
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from etils import epath

from maxdiloco.errors import ConfigError
from maxdiloco.storage import store
from maxdiloco.storage.run_folder import RunFolder, is_local, reason

PROJECT = "maxdiloco"  # of Weights & Biases
# All our choice.
LOCAL_FLUSH_SECONDS = 10.0  # between two flushes to a disk
REMOTE_FLUSH_SECONDS = 60.0  # and to an object store, where the whole file is written anew
MOST_WAITING = 1000  # rows in the queue of a slow disk
CLOSE_SECONDS = 30.0  # for the last rows at the end of the run
SYNC_SECONDS = 2.0  # for those before a checkpoint


class EventFile:
    """Rows of metrics as scalars in an event file of tensorboardX, written by a thread.

    purge_step: TensorBoard drops what an earlier life of the run wrote from there on. say: prints a
    line when the file cannot be written or the thread is MOST_WAITING rows behind; nothing more is
    written then. None of the methods raises, and each waits for a bounded time. tensorboardX's own
    SummaryWriter waits for ever once an error has ended its thread.
    """

    def __init__(self, folder: epath.Path, *, purge_step: int, say: Callable[[str], None]):
        self._folder, self._purge_step, self._say = folder, purge_step, say
        self._rows: queue.Queue = queue.Queue(MOST_WAITING)
        self._error: BaseException | None = None
        self._given_up = False
        self._sync: threading.Event | None = None
        self._thread = threading.Thread(target=self._run, name="maxdiloco-tensorboard", daemon=True)
        self._thread.start()

    def write(self, step: int, values: Mapping[str, float | str]) -> None:
        """Add the values of a step, numbers as scalars, texts as texts."""
        self._put((step, time.time(), dict(values)))

    def sync(self) -> None:
        """Flush the rows written so far. One sync at a time is waited for, SYNC_SECONDS at most."""
        if self._sync is not None and not self._sync.is_set():
            return
        self._sync = threading.Event()
        self._put(self._sync)
        if not self._given_up:
            self._sync.wait(SYNC_SECONDS)

    def close(self) -> None:
        """Write the rows that are left, within CLOSE_SECONDS."""
        self._put(None)
        self._thread.join(0.0 if self._given_up else CLOSE_SECONDS)
        if self._thread.is_alive():
            self._give_up("the last rows are not written yet")
        elif self._error is not None:
            self._give_up(reason(self._error))

    def _put(self, row: tuple | threading.Event | None) -> None:
        if self._error is not None:
            self._give_up(reason(self._error))
        if self._given_up:
            return
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self._give_up(f"{MOST_WAITING} rows wait to be written")

    def _give_up(self, why: str) -> None:
        if not self._given_up:
            self._given_up = True
            self._say(
                f"warning: TensorBoard is given up for this run: {self._folder}: {why}. "
                "metrics.jsonl goes on."
            )

    def _run(self) -> None:
        def note(kind, error, trace):
            self._error = error  # for `_put`, of any kind: those of object stores are many
            return True

        with contextlib.ExitStack() as stack:
            stack.push(note)
            self._write_all()

    def _write_all(self) -> None:
        from tensorboardX import event_file_writer, record_writer
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        # The client that all other files use. tensorboardX's own uploads again when it is garbage
        # collected, after an error too.
        of_bucket = types.SimpleNamespace(open=_RemoteFile, directory_check=lambda path: None)
        for scheme in store.SCHEMES:
            record_writer.register_writer_factory(scheme, of_bucket)
        event_file_writer.directory_check(str(self._folder))
        # tensorboardX names the file by the second; the suffix distinguishes two lives of a run.
        prefix = str(self._folder / "events")
        file = event_file_writer.EventsWriter(prefix, filename_suffix=f".{self._purge_step}")
        start = SessionLog(status=SessionLog.START)
        file.write_event(Event(step=self._purge_step, wall_time=time.time(), session_log=start))
        file.flush()
        period = LOCAL_FLUSH_SECONDS if is_local(self._folder) else REMOTE_FLUSH_SECONDS
        flushed, is_new, row = time.monotonic(), False, ()
        while row is not None:
            sync = isinstance(row, threading.Event)
            if row and not sync:
                file.write_event(_event(*row))
                is_new = True
            if sync or (is_new and time.monotonic() - flushed >= period):
                file.flush()
                flushed, is_new = time.monotonic(), False
            if sync:
                row.set()
            try:
                row = self._rows.get(timeout=period)
            except queue.Empty:
                row = ()
        file.close()


def _event(step: int, wall_time: float, values: Mapping[str, float | str]) -> Any:
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary
    from tensorboardX.summary import text

    summary = Summary()
    for name, x in values.items():
        if isinstance(x, str):
            # TensorBoard shows Markdown: indented, a text keeps its lines.
            summary.MergeFrom(text(name, "".join(f"    {line}\n" for line in x.splitlines())))
        else:
            summary.value.add(tag=name, simple_value=float(x))
    return Event(step=step, wall_time=wall_time, summary=summary)


class _RemoteFile:
    """A file on an object store as tensorboardX takes one: each flush writes it whole."""

    def __init__(self, path: str):
        self._path, self._data = epath.Path(path), bytearray()

    def write(self, data: bytes) -> None:
        self._data += data

    def flush(self) -> None:
        self._path.write_bytes(bytes(self._data))

    def close(self) -> None:
        """EventsWriter has just called flush."""


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

    config: keys and values. say: prints one line when a row cannot be logged; nothing more is
    logged then. Raises ConfigError without the package, and where it refuses to begin.
    """

    def __init__(self, folder: RunFolder, config: Mapping[str, Any], *, say: Callable[[str], None]):
        wandb = require_wandb()
        self._error: type[Exception] = wandb.errors.Error
        self._say = say
        path = folder.path / "wandb_id"  # a folder that is made anew is another run
        if not path.exists():
            path.write_text(uuid.uuid4().hex)
        name = path.read_text()
        try:
            self._run = wandb.init(
                project=PROJECT,
                name=folder.path.name,
                id=name,
                resume="allow",
                config=dict(config),
                dir=str(folder.path) if is_local(folder.path) else None,
            )
        except self._error as error:
            raise ConfigError(
                f"enable_wandb=true: wandb cannot begin a run ({error}). Run `wandb login`, set "
                "WANDB_MODE=offline, or set enable_wandb=false."
            ) from error

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the row of a step; wandb sends it from a process of its own."""
        if self._run is None:
            return
        try:
            self._run.log(dict(values), step=step)
        except self._error as error:
            self._say(f"warning: wandb is given up: {error}. metrics.jsonl goes on.")
            self._run = None

    def close(self) -> None:
        """Send what is left."""
        if self._run is not None:
            self._run.finish()
