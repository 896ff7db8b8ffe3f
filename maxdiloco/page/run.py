"""A run's folder as plain values: rows, configuration, starts and checkpoints.

# N rows of metrics.jsonl
"""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from maxdiloco import json_text
from maxdiloco.checkpoint import read, seal
from maxdiloco.errors import ConfigError, DataError
from maxdiloco.flags import base_yml
from maxdiloco.metrics import line_files
from maxdiloco.page import events
from maxdiloco.page.events import LATEST
from maxdiloco.storage.run_folder import RunFolder, is_local

NAN = math.nan
NOT_FINITE = math.inf  # in a column: the run wrote null, or more than LARGEST
# Metrics are float32. Sums and products of such values are finite in the float64 of a column.
LARGEST = float(np.finfo(np.float32).max)
_MOST_SHOWN = 20  # characters of a wrong value
# What the page takes from the lines of history.jsonl, all numbers but "why".
_EVENTS = {"start": ("time", "step", "until", "processes", "devices"), "end": ("time", "why")}


class Run(NamedTuple):
    """What the page shows of a run.

    steps_N: strictly increasing. columns: {metric: float64 [N]}, NaN in rows without it and
    NOT_FINITE where it was NaN or infinite. keys: of the run, or None where it does not say.
    history: of line_files.History. checkpoints: {step of one that is kept: when it was sealed,
    seconds since 1970}. notes: lines for the reader on what is missing.
    """

    name: str
    folder: epath.Path
    steps_N: np.ndarray
    columns: dict[str, np.ndarray]
    keys: dict[str, Any] | None
    history: list[dict[str, Any]]
    checkpoints: dict[int, float]
    notes: list[str]

    def column(self, name: str) -> np.ndarray:
        """A metric [N]; NaN in every row where the run has none."""
        return self.columns.get(name, np.full(len(self.steps_N), NAN))

    def finite(self, name: str) -> np.ndarray:
        """The values of a metric that are there and finite."""
        values_N = self.column(name)
        return values_N[np.isfinite(values_N)]

    @property
    def num_replicas(self) -> int:
        """Replicas whose losses the last row with a loss has; a resumed run may have others."""
        rows = np.flatnonzero(~np.isnan(self.column("learning/loss")))
        last = rows[-1] if len(rows) else -1
        of_replicas = [v for n, v in self.columns.items() if n.startswith("learning/loss_replica_")]
        return max(1, sum(not math.isnan(values_N[last]) for values_N in of_replicas))


def load(
    given: Sequence[str], *, base_output_directory: str, defaults: Mapping[str, Any]
) -> list[Run]:
    """The runs that a user names as for maxdiloco.generate, each once.

    defaults: of every key. Raises CheckpointError for a name without a folder, DataError for a
    folder without rows, ConfigError for a run that is given twice.
    """
    folders: list[epath.Path] = []
    for name in given:
        folder = read.locate(name, base_output_directory=base_output_directory)
        if (folder / seal.FILE).exists() and folder.parent.name == "checkpoints":
            folder = folder.parent.parent
        if folder in folders:
            raise ConfigError(f"RUN={name}: {folder} is given twice. Give each run once.")
        folders.append(folder)
    depth = 1  # of a name: the last parts of its path that tell it from the others
    while len({folder.parts[-depth:] for folder in folders}) < len(folders):
        depth += 1
    return [
        _load(folder, "/".join(folder.parts[-depth:]), f"RUN={name}", defaults)
        for folder, name in zip(folders, given, strict=True)
    ]


def _load(path: epath.Path, name: str, given: str, defaults: Mapping[str, Any]) -> Run:
    folder = RunFolder(path)
    with read.reading(path, given):
        others = []
        if (content := line_files.read(folder.metrics)) is not None:
            steps, columns, notes = parse(content)
        elif others := events.files(path):
            steps, columns, notes = _columns(events.rows(others))
        else:
            raise DataError(
                f"{given}: {path} holds no {folder.metrics.name}. Give the folder of a run that "
                f"has logged a step."
            )
        if not len(steps):
            raise DataError(
                f"{given}: {others[0] if others else folder.metrics} holds no row yet. Wait until "
                f"the run has logged a step (log_period), and start again."
            )
        keys, written = None, path / "config.yml"
        if written.exists():
            keys = dict(defaults)
            for key, raw, _ in base_yml.read_yml(written):
                keys[key] = base_yml.as_lists(_inferred(written, key, raw))
        else:
            notes.append(
                "The configuration is unknown: the folder has no config.yml. So there is no "
                "timeline, and keys cannot be compared."
            )
        history = line_files.read_history(folder)
        starts = [event for event in history if _is_whole(event)]
        if broken := len(history) - len(starts):
            notes.append(f"{broken} broken lines of {folder.history.name} are left out.")
        saved = {}
        for step in read.steps(folder.checkpoints):
            sealed = folder.checkpoints / str(step) / seal.FILE
            known = is_local(sealed) and sealed.exists()  # a bucket tells no time
            saved[step] = os.path.getmtime(sealed) if known else NAN
    return Run(name, path, steps, columns, keys, starts, saved, notes)


def _inferred(path: epath.Path, name: str, raw: Any) -> base_yml.Value:
    """A value of config.yml. Raises ConfigError for a whole number that no key can have."""
    try:
        return base_yml.infer(raw)
    except ValueError as error:  # of Python, for more than 4,300 digits
        raise ConfigError(
            f"{name}={raw[:_MOST_SHOWN]}... in {path} is too large: it has {len(raw):,} digits. "
            "Give the key a number, or take the file away."
        ) from error


def _is_whole(event: dict[str, Any]) -> bool:
    """Whether a line of history.jsonl has what the page takes from it."""
    values = [(name, event.get(name)) for name in _EVENTS[event["event"]]]
    sent = event.get("bytes_sent", [])
    if not isinstance(sent, list) or not all(
        isinstance(value, int | float) and 0 <= value <= LARGEST for value in sent
    ):
        return False
    return all(
        isinstance(value, str)
        if name == "why"
        else isinstance(value, int | float) and abs(value) < LATEST
        for name, value in values
    )


def parse(text: bytes) -> tuple[np.ndarray, dict[str, np.ndarray], list[str]]:
    """The rows of metrics.jsonl: steps [N], columns and notes, as in Run."""
    rows: list[dict[str, Any]] = []
    broken = repeated = 0
    lines = text.split(b"\n")
    for number, line in enumerate(lines, 1):
        row = json_text.fields(line)
        if type(row.get("step")) is not int or not 0 <= row["step"] <= LATEST:
            # A process that is killed, or one that is writing now, leaves half a line.
            broken += bool(line.strip()) and number < len(lines)
        elif rows and row["step"] <= rows[-1]["step"]:
            repeated += 1
        else:
            rows.append({n: x for n, x in row.items() if x is None or isinstance(x, int | float)})
    steps, columns, notes = _columns(rows)
    notes += [f"{broken} broken lines of metrics.jsonl are left out."] * (broken > 0)
    notes += [f"{repeated} rows of metrics.jsonl repeat a step and are left out."] * (repeated > 0)
    return steps, columns, notes


def _columns(
    rows: list[dict[str, Any]],
) -> tuple[np.ndarray, dict[str, np.ndarray], list[str]]:
    """Rows with increasing steps as `parse` returns them, without notes."""
    steps = np.array([row.pop("step") for row in rows], np.int64)
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {n: np.array([_number(x[n]) if n in x else NAN for x in rows]) for n in names}
    return steps, columns, []


def _number(value: float | None) -> float:
    return float(value) if value is not None and abs(value) <= LARGEST else NOT_FINITE
