"""Rows of metrics as a run of Weights & Biases. Its failures end no training."""

import importlib
import types
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from maxdiloco.errors import ConfigError
from maxdiloco.storage import object_store
from maxdiloco.storage.run_folder import RunFolder, is_local

PROJECT = "maxdiloco"


def require() -> types.ModuleType:
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

    def __init__(
        self, folder: RunFolder, config: Mapping[str, Any], *, say: Callable[[str], None]
    ):
        wandb = require()
        self._error: type[Exception] = wandb.errors.Error
        self._say = say
        try:
            self._run = wandb.init(
                project=PROJECT,
                name=folder.path.name,
                id=_id(folder),
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


def _id(folder: RunFolder) -> str:
    """What wandb calls the run, made at its first start: a folder made anew is another run."""
    path = folder.path / "wandb_id"
    with object_store.as_os_errors(path):
        if not path.exists():
            path.write_text(uuid.uuid4().hex)
        return path.read_text()
