"""Read a run's folder as plain values: rows, configuration, sessions and checkpoints."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from maxdiloco import json_text
from maxdiloco.checkpoint import read, seal
from maxdiloco.config import files
from maxdiloco.config.keys import KEYS
from maxdiloco.config.values import as_json
from maxdiloco.errors import ConfigError, DataError
from maxdiloco.metrics import line_files
from maxdiloco.metrics.history import read_history
from maxdiloco.report import event_files
from maxdiloco.report.event_files import MAX_STEP
from maxdiloco.storage.run_folder import RunFolder, is_local

NAN = math.nan
NOT_FINITE = math.inf  # in a column, for a row with null or a value above MAX_VALUE
# Metrics are float32. Sums and products of such values are finite in the float64 of a column.
MAX_VALUE = float(np.finfo(np.float32).max)
_SHOWN_DIGITS = 20  # of a value that is refused
_NUMBER = (int, float)
# The fields of each line of history.jsonl that the report uses, with their types.
_EVENT_FIELDS = {
    "start": dict.fromkeys(("time", "step", "until", "processes", "devices"), _NUMBER),
    "end": {"time": _NUMBER, "why": (str,)},
}


class RunData(NamedTuple):
    """The data of a run that the report shows.

    Attributes:
      name: the last parts of the folder's path that distinguish it from the other runs.
      folder: folder of the run.
      steps: [N] of its rows, strictly increasing.
      columns: {metric: float64 [N]}; NaN in a row without it, NOT_FINITE if it was not finite.
      config: {key: value} of every key, or None for a run without config.yml.
      history: the events of history.jsonl, oldest first.
      checkpoints: {step of a kept checkpoint: when it was sealed, seconds since 1970, or NaN}.
      notes: lines for the reader on missing data.
    """

    name: str
    folder: epath.Path
    steps: np.ndarray
    columns: dict[str, np.ndarray]
    config: dict[str, Any] | None
    history: list[dict[str, Any]]
    checkpoints: dict[int, float]
    notes: list[str]

    def column(self, name: str) -> np.ndarray:
        """Return a metric [N], all NaN for one that the run lacks."""
        return self.columns.get(name, np.full(len(self.steps), NAN))

    def finite(self, name: str) -> np.ndarray:
        """Return the values of a metric that exist and are finite."""
        values = self.column(name)
        return values[np.isfinite(values)]

    @property
    def num_replicas(self) -> int:
        """Number of replicas in the last row with a loss. A resume may have changed it."""
        rows = np.flatnonzero(~np.isnan(self.column("learning/loss")))
        last = rows[-1] if len(rows) else -1
        losses = [x for name, x in self.columns.items() if name.startswith(REPLICA_LOSS)]
        return max(1, sum(not math.isnan(values[last]) for values in losses))


REPLICA_LOSS = "learning/loss_replica_"


def default_config() -> dict[str, Any]:
    """Return the default of every key. `load` uses it for keys that a config.yml lacks."""
    return {name: as_json(key.default) for name, key in KEYS.items()}


def load(
    names: Sequence[str], *, base_output_directory: str, defaults: Mapping[str, Any]
) -> list[RunData]:
    """Read runs.

    Args:
      names: for each run, its name, its folder, or the folder of one of its checkpoints.
      base_output_directory: folder of the runs that are given by name.
      defaults: the default of every key.

    Returns:
      The runs, in the order of their names.

    Raises:
      CheckpointError: there is no folder for a name.
      DataError: a folder has no rows.
      ConfigError: a run is given twice, or its config.yml cannot be read.
    """
    folders: list[epath.Path] = []
    for name in names:
        folder = read.locate(name, base_output_directory=base_output_directory)
        if (folder / seal.FILE).exists() and folder.parent.name == "checkpoints":
            folder = folder.parent.parent
        if folder in folders:
            raise ConfigError(f"RUN={name}: {folder} is given twice. Give each run once.")
        folders.append(folder)
    depth = 1  # of a name: the last parts of its path that distinguish it from the others
    while len({folder.parts[-depth:] for folder in folders}) < len(folders):
        depth += 1
    return [
        _load(folder, "/".join(folder.parts[-depth:]), f"RUN={name}", defaults)
        for folder, name in zip(folders, names, strict=True)
    ]


def _load(path: epath.Path, name: str, argument: str, defaults: Mapping[str, Any]) -> RunData:
    """Read one run. argument: RUN=..., for the beginning of an error."""
    folder = RunFolder(path)
    with read.replace_read_error(path, argument):
        steps, columns, notes = _read_rows(folder, argument)
        config = _read_config(path / "config.yml", defaults)
        if config is None:
            notes.append(
                "The configuration is unknown: the folder has no config.yml. Therefore there is "
                "no timeline, and keys cannot be compared."
            )
        history = read_history(folder)
        complete = [event for event in history if _is_complete(event)]
        if broken := len(history) - len(complete):
            notes.append(f"{broken} broken lines of {folder.history.name} are left out.")
        checkpoints = {
            step: _sealed_at(folder.checkpoints / str(step) / seal.FILE)
            for step in read.steps(folder.checkpoints)
        }
    return RunData(name, path, steps, columns, config, complete, checkpoints, notes)


def _read_rows(
    folder: RunFolder, argument: str
) -> tuple[np.ndarray, dict[str, np.ndarray], list[str]]:
    """Return steps, columns and notes from metrics.jsonl, or else from TensorBoard event files."""
    events: list[epath.Path] = []
    if (content := line_files.read(folder.metrics)) is not None:
        steps, columns, notes = parse(content)
    elif events := event_files.find(folder.path):
        (steps, columns), notes = _columns(event_files.rows(events)), []
    else:
        raise DataError(
            f"{argument}: {folder.path} has no {folder.metrics.name}. Give the folder of a run "
            "that has logged a step."
        )
    if not len(steps):
        raise DataError(
            f"{argument}: {events[0] if events else folder.metrics} has no row yet. Wait until "
            "the run has logged a step (log_period), and start again."
        )
    return steps, columns, notes


def parse(text: bytes) -> tuple[np.ndarray, dict[str, np.ndarray], list[str]]:
    """Parse metrics.jsonl, and return steps, columns and notes, as in RunData."""
    rows: list[dict[str, Any]] = []
    broken = repeated = 0
    lines = text.split(b"\n")
    for number, line in enumerate(lines, 1):
        row = json_text.fields(line)
        if type(row.get("step")) is not int or not 0 <= row["step"] <= MAX_STEP:
            # A process that was killed, or one that is writing now, leaves half a line.
            broken += bool(line.strip()) and number < len(lines)
        elif rows and row["step"] <= rows[-1]["step"]:
            repeated += 1
        else:
            rows.append({n: x for n, x in row.items() if x is None or isinstance(x, int | float)})
    steps, columns = _columns(rows)
    notes = [f"{broken} broken lines of metrics.jsonl are left out."] * (broken > 0)
    notes += [f"{repeated} rows of metrics.jsonl repeat a step and are left out."] * (repeated > 0)
    return steps, columns, notes


def _columns(rows: list[dict[str, Any]]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Turn rows with increasing steps into steps and columns."""
    steps = np.array([row.pop("step") for row in rows], np.int64)
    names = dict.fromkeys(name for row in rows for name in row)
    return steps, {n: np.array([_number(x[n]) if n in x else NAN for x in rows]) for n in names}


def _number(value: float | None) -> float:
    return float(value) if value is not None and abs(value) <= MAX_VALUE else NOT_FINITE


def _read_config(path: epath.Path, defaults: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return every key of a run's config.yml, or None without the file."""
    if not path.exists():
        return None
    config = dict(defaults)
    for key, (text, _) in files.read_yml(path).items():
        try:
            config[key] = _infer(text)
        except ValueError as error:  # raised by Python for more than 4,300 digits
            raise ConfigError(
                f"{key}={text[:_SHOWN_DIGITS]}... in {path} is too large: it has {len(text):,} "
                "digits. Give the key a number, or remove the file."
            ) from error
    return config


def _infer(text: Any) -> Any:
    """Convert text of a stored config to the type that it looks like; other values are unchanged.

    Raises:
      ValueError: a whole number has more digits than Python accepts.
    """
    if not isinstance(text, str):
        return text
    if text in ("true", "false"):
        return text == "true"
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    return float(text) if re.fullmatch(r"-?\d+(\.\d*)?(e-?\d+)?", text) else text


def _is_complete(event: dict[str, Any]) -> bool:
    """Whether a line of history.jsonl has the fields that the report uses, in their ranges."""
    for name, types in _EVENT_FIELDS[event["event"]].items():
        value = event.get(name)
        if not isinstance(value, types) or (types is _NUMBER and not abs(value) < MAX_STEP):
            return False
    sent = event.get("bytes_sent", [])
    return isinstance(sent, list) and all(
        isinstance(value, _NUMBER) and 0 <= value <= MAX_VALUE for value in sent
    )


def _sealed_at(path: epath.Path) -> float:
    """Return when a checkpoint was sealed, seconds since 1970; NaN in a bucket."""
    return os.path.getmtime(path) if is_local(path) and path.exists() else NAN
