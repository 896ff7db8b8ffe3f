"""Rows of other trainers, MaxText's and torchtitan's, from the files they write for TensorBoard."""

import itertools
import struct
from collections.abc import Iterator
from typing import Any

from etils import epath
from google.protobuf.message import DecodeError

from maxdiloco import small_files
from maxdiloco.metrics.line_files import MAX_FILE_BYTES

# Their names of what has a name here; others keep their own. Losses are nats a token in all.
NAMES = {
    "learning/current_learning_rate": "learning/lr",
    "perf/step_time_seconds": "perf/step_time",
    "eval/avg_loss": "eval/loss",
    "loss_metrics/global_avg_loss": "learning/loss",
    "grad_norm": "learning/grad_norm",
    "lr": "learning/lr",
    "time_metrics/end_to_end(s)": "perf/step_time",
    "validation_metrics/loss": "eval/loss",
}
LATEST = 2**40  # far above what a run writes: steps, and seconds since 1970
WALL_TIME = "perf/wall_time_s"
TOKENS = ("learning/total_weights", "learning/tokens")  # of a step in MaxText; since step 1


def files(folder: epath.Path) -> list[epath.Path]:
    """The files of TensorBoard in a folder and two levels of those in it, oldest first."""
    levels = ("", "*/", "*/*/")
    found = [path for level in levels for path in folder.glob(f"{level}*tfevents*")]
    return sorted(found, key=lambda path: path.name)


def rows(paths: list[epath.Path]) -> list[dict[str, Any]]:
    """A row for each step, as a line of metrics.jsonl; of a step that is there again the last one.

    What is cut off at a file's end, as of a writer that goes on, is left out.
    """
    by_step: dict[int, dict[str, Any]] = {}
    first = None
    for event in itertools.chain.from_iterable(map(_events, paths)):
        for value in event.summary.value:
            is_tensor = not value.HasField("simple_value")
            number = value.tensor.float_val[:1] if is_tensor else [value.simple_value]
            if is_tensor and not number and len(value.tensor.tensor_content) == 4:
                number = struct.unpack("<f", value.tensor.tensor_content)
            name = NAMES.get(value.tag, value.tag)
            is_row = name != "step" and 0 <= event.step <= LATEST  # a row has a step of its own
            if number and is_row:
                first = event.wall_time if first is None else first
                row = by_step.setdefault(event.step, {"step": event.step})
                row[name] = float(number[0])
                row[WALL_TIME] = event.wall_time - first
    found, total, before = [by_step[step] for step in sorted(by_step)], 0.0, -1
    of_step, since_start = TOKENS
    for row in found:
        if of_step in row:
            total += row[of_step] * (row["step"] - before)
            before, row[since_start] = row["step"], total
    return found


def _events(path: epath.Path) -> Iterator[Any]:
    """The records of a file: a length of 8 bytes, its sum of 4, the event, its sum of 4."""
    from tensorboardX.proto.event_pb2 import Event

    content, at = small_files.read_bytes(path, MAX_FILE_BYTES), 0
    while at + 12 <= len(content):
        (length,) = struct.unpack_from("<Q", content, at)
        if at + 16 + length > len(content):
            return
        try:
            yield Event.FromString(content[at + 12 : at + 12 + length])
        except DecodeError:
            return
        at += 16 + length
