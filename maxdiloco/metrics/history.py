"""history.jsonl of a run's folder: a line for each start of the run, and one for its end."""

import contextlib
import json
import threading
import time
from collections.abc import Mapping
from typing import Any

from maxdiloco import json_text, output
from maxdiloco.errors import CheckpointError
from maxdiloco.metrics.line_files import open_lines, read
from maxdiloco.storage.os_errors import reason
from maxdiloco.storage.run_folder import RunFolder

MAX_STEPS = 10_000  # of a period in the line of a start: 100 kB


class History(contextlib.AbstractContextManager):
    """Adds two lines to history.jsonl: for the start of a session, and for how it ended.

        {"event": "start", "time": seconds since 1970, "step": inner steps done before, "until": the
         last step, "processes", "devices", "replicas", "reduce_scatter": whether slices average
         parts of the fragments, "bytes_sent": a replica's bytes to all other slices in each inner
         step of a full period, at most MAX_STEPS}
        {"event": "end", "time": ..., "why": the error that ended it, or "" for none}

    A session without an end was killed or is running. Lines of earlier sessions stay. A failed
    write is a warning.
    """

    def __init__(self, folder: RunFolder, start: Mapping[str, Any]):
        """Write the line of the start.

        Args:
          folder: of the run.
          start: the fields of the first line, except "event" and "time".
        """
        self._folder = folder
        self._lock, self._has_ended = threading.Lock(), False
        self._add("start", start)

    def __exit__(self, kind, exception, traceback) -> None:
        """Write the line of the end, with the error if there is one."""
        self.end("" if exception is None else f"{kind.__name__}: {exception}")

    def end(self, why: str) -> None:
        """Add the line for the end, once. Any thread may call it."""
        with self._lock:
            if not self._has_ended:
                self._has_ended = True
                self._add("end", {"why": output.one_line(why)})

    def _add(self, event: str, fields: Mapping[str, Any]) -> None:
        path = self._folder.history
        line = json.dumps({"event": event, "time": time.time(), **fields})
        try:
            with contextlib.closing(open_lines(path, self._folder.require_lock)) as file:
                file.write(f"{line}\n".encode())
        except (OSError, CheckpointError) as error:  # the latter: another process has the lock
            output.say(f"warning: base_output_directory: cannot write {path}: {reason(error)}.")


def read_history(folder: RunFolder) -> list[dict[str, Any]]:
    """Return the lines of history.jsonl, oldest first; none without a file. Raises OSError."""
    lines = (read(folder.history) or b"").decode(errors="replace").splitlines()
    events = map(json_text.fields, lines)
    return [event for event in events if event.get("event") in ("start", "end")]
