"""Rows of metrics as scalars in an event file, which TensorBoard reads."""

import contextlib
import importlib
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from maxdiloco.metrics.line_files import ChunkTarget, FileTarget
from maxdiloco.metrics.line_writer import LineWriter
from maxdiloco.storage.run_folder import RunFolder, is_local


class EventFile:
    """An event file of a run. The methods raise OSError.

    The records are written here: tensorboardX's own SummaryWriter waits for ever once an error has
    ended its thread.
    """

    failure = OSError

    def __init__(self, folder: RunFolder, *, purge_step: int):
        """Make nothing until the first row.

        Args:
          folder: of the run.
          purge_step: TensorBoard drops rows of earlier sessions of the run from this step on.
        """
        self._folder, self._purge_step = folder, purge_step
        self._lines: LineWriter | None = None  # until the first row
        self._importing: Future | None = None
        self._waiting: list[tuple[int, Mapping[str, float | str]]] = []  # for the import
        self.name = f"TensorBoard is switched off for this run: {folder.tensorboard}"

    def import_ahead(self) -> None:
        """Import tensorboardX in a thread. An import that fails there fails again at a row.

        Rows wait for the import: two imports of one package at once may wait for each other's
        parts.
        """
        pool = ThreadPoolExecutor(1, thread_name_prefix="import")
        self._importing = pool.submit(importlib.import_module, "tensorboardX.summary")
        pool.shutdown(wait=False)

    def write(self, step: int, values: Mapping[str, float | str]) -> None:
        """Add the values of a step, numbers as scalars, texts as texts."""
        self._waiting.append((step, values))
        if self._importing is None or self._importing.done():
            self._write_waiting()

    def sync(self) -> None:
        """Force the rows written so far to the disk, or to the object store."""
        if self._lines is not None:
            with self._ignoring_failed_uploads():
                self._lines.sync()

    def close(self) -> None:
        """Write the remaining rows."""
        if self._importing is not None:
            self._importing.exception()  # waits
        self._write_waiting()
        if self._lines is not None:
            self._lines.close()

    def _open(self) -> None:
        try:
            from tensorboardX.proto.event_pb2 import SessionLog
        except (ImportError, TypeError) as error:  # the latter: protobuf of another version
            raise OSError(f"tensorboardX cannot be imported: {error}") from error

        folder, step = self._folder.tensorboard, self._purge_step
        folder.mkdir(parents=True, exist_ok=True)
        # As tensorboardX names files, by the second; the step distinguishes two sessions of a run.
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{step}"
        header = _record(0, file_version="brain.Event:2")
        if is_local(folder):
            self._lines = LineWriter(FileTarget(folder / name))
            self._lines.write(header)
        else:  # TensorBoard reads all event files of a folder, in the order of their names
            require_lock = self._folder.require_lock
            target = ChunkTarget(folder, require_lock, prefix=f"{name}.", header=header)
            self._lines = LineWriter(target, require_lock)
        self._add(_record(step, session_log=SessionLog(status=SessionLog.START)))

    def _write_waiting(self) -> None:
        if self._waiting and self._lines is None:
            self._open()
        while self._waiting:
            step, values = self._waiting.pop(0)
            self._add(_record(step, summary=_summary(values)))

    def _add(self, record: bytes) -> None:
        with self._ignoring_failed_uploads():
            self._lines.write(record)

    @contextlib.contextmanager
    def _ignoring_failed_uploads(self) -> Iterator[None]:
        """Ignore a failed upload: it is repeated, and metrics.jsonl in the same bucket warns."""
        try:
            yield
        except OSError:
            if is_local(self._folder.tensorboard):
                raise


def _summary(values: Mapping[str, float | str]) -> Any:
    from tensorboardX.proto.summary_pb2 import Summary
    from tensorboardX.summary import text

    summary = Summary()
    for name, value in values.items():
        if isinstance(value, str):
            # TensorBoard shows Markdown, in which an indented text keeps its lines.
            indented = "".join(f"    {line}\n" for line in value.splitlines())
            summary.MergeFrom(text(name, indented))
        else:
            summary.value.add(tag=name, simple_value=float(value))
    return summary


def _record(step: int, **fields: Any) -> bytes:
    """Return an event as a TFRecord: length, checksum, event, checksum."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    data = Event(step=step, wall_time=time.time(), **fields).SerializeToString()
    length = struct.pack("<Q", len(data))
    first, second = (struct.pack("<I", masked_crc32c(part)) for part in (length, data))
    return length + first + data + second
