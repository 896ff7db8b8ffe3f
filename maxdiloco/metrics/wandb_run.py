"""Rows of metrics in Weights & Biases."""

import importlib
import types
import uuid
from collections.abc import Mapping
from typing import Any

from maxdiloco import small_files
from maxdiloco.errors import ConfigError
from maxdiloco.storage.run_folder import RunFolder, is_local

PROJECT = "maxdiloco"


def require_wandb() -> types.ModuleType:
    """Return the package wandb. Raises ConfigError if it is not installed."""
    try:
        return importlib.import_module("wandb")
    except ImportError as error:
        raise ConfigError(
            f"enable_wandb=true needs the package wandb ({error}). Install it: pip install wandb; "
            "or set enable_wandb=false."
        ) from error


class WandbRun:
    """A run of Weights & Biases. A restart continues the same one.

    Its methods raise `failure`, the base class of wandb's errors.
    """

    name = "wandb is switched off for this run"

    def __init__(self, folder: RunFolder, config: Mapping[str, Any]):
        """Start the run, or continue it.

        Args:
          folder: of the run. Its file wandb_id names the run of Weights & Biases.
          config: keys and values.

        Raises:
          ConfigError: the package is missing, or refuses to begin a run.
        """
        wandb = require_wandb()
        self.failure: type[Exception] = wandb.errors.Error
        path = folder.path / "wandb_id"  # a folder that was deleted and made again is another run
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

    def sync(self) -> None:
        """Do nothing: wandb stores its rows by itself."""

    def close(self) -> None:
        """Send the remaining rows."""
        self._run.finish()
