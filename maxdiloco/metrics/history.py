"""history.jsonl of a run's folder: one line for each start of the run, and one for how it ended.

    {"event": "start", "time": seconds since 1970, "step": inner steps done before, "until": the
     last step, "processes", "devices", "replicas", "bytes_sent": of each inner step of a period in
     which all exchanges are under way, by a replica to all other slices; of MOST_STEPS at most}
    {"event": "end", "time": ..., "why": the error that ended it, or "" for none}
A start without an end was killed, or runs. Lines of earlier starts stay.
"""

import contextlib
import json
import time
from collections.abc import Mapping
from typing import Any

from maxdiloco.errors import CheckpointError
from maxdiloco.metrics.line_files import open_lines, parsed, text_of
from maxdiloco.processes import output
from maxdiloco.storage.run_folder import RunFolder, reason

MOST_STEPS = 10_000  # of a period in a line; our choice


class History(contextlib.AbstractContextManager):
    """Adds a line with `facts`, and one when the context is left. A failed write is a warning."""

    def __init__(self, folder: RunFolder, facts: Mapping[str, Any]):
        self._folder = folder
        self._add("start", facts)

    def __exit__(self, kind, exception, traceback) -> None:
        why = "" if exception is None else f"{kind.__name__}: {exception}"
        self._add("end", {"why": output.one_line(why)})

    def _add(self, event: str, facts: Mapping[str, Any]) -> None:
        path = self._folder.history
        try:
            with contextlib.closing(open_lines(path, self._folder.require_lock)) as file:
                file.write(json.dumps({"event": event, "time": time.time(), **facts}))
        except (OSError, CheckpointError) as error:  # the latter: another process has the lock
            output.say(f"warning: base_output_directory: cannot write {path}: {reason(error)}.")


def read(folder: RunFolder) -> list[dict[str, Any]]:
    """The lines of history.jsonl, oldest first; none where there is no file. Raises OSError."""
    events = map(parsed, text_of(folder.history).splitlines())
    return [event for event in events if event.get("event") in ("start", "end")]
