"""Read rows of metrics from the TensorBoard event files of MaxText and torchtitan."""

import itertools
import struct
from collections.abc import Iterator
from typing import Any

from etils import epath
from google.protobuf.message import DecodeError

from maxdiloco import small_files
from maxdiloco.metrics.line_files import MAX_FILE_BYTES

# {their name of a metric: its name here}. All losses are in nats per token.
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
MAX_STEP = 2**40  # far above the steps of a run, and seconds since 1970
WALL_TIME = "perf/wall_time_s"
# MaxText writes the tokens of a step. A row here has the tokens since step 1.
STEP_TOKENS, TOTAL_TOKENS = "learning/total_weights", "learning/tokens"


def find(folder: epath.Path) -> list[epath.Path]:
    """Return the event files in a folder and two levels below it, oldest first."""
    levels = ("", "*/", "*/*/")
    found = [path for level in levels for path in folder.glob(f"{level}*tfevents*")]
    return sorted(found, key=lambda path: path.name)


def rows(paths: list[epath.Path]) -> list[dict[str, Any]]:
    """Read one row per step, in the form of a line of metrics.jsonl.

    The last value of a step wins. An incomplete record at the end of a file is ignored, because the
    writer may still run.
    """
    by_step: dict[int, dict[str, Any]] = {}
    first = None
    for event in itertools.chain.from_iterable(map(_events, paths)):
        for value in event.summary.value:
            name, number = NAMES.get(value.tag, value.tag), _scalar(value)
            if number is None or name == "step" or not 0 <= event.step <= MAX_STEP:
                continue
            first = event.wall_time if first is None else first
            row = by_step.setdefault(event.step, {"step": event.step})
            row[name] = number
            row[WALL_TIME] = event.wall_time - first
    found, total, previous = [by_step[step] for step in sorted(by_step)], 0.0, -1
    for row in found:
        if STEP_TOKENS in row:
            total += row[STEP_TOKENS] * (row["step"] - previous)
            previous, row[TOTAL_TOKENS] = row["step"], total
    return found


def _scalar(value: Any) -> float | None:
    """Return the number of a summary value, or None for another kind of value."""
    if value.HasField("simple_value"):
        return value.simple_value
    if value.tensor.float_val:
        return value.tensor.float_val[0]
    if len(value.tensor.tensor_content) == 4:
        return struct.unpack("<f", value.tensor.tensor_content)[0]
    return None


def _events(path: epath.Path) -> Iterator[Any]:
    """Yield the records of a file: length (8 bytes), checksum (4), event, checksum (4)."""
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
