"""maxdiloco: config-driven JAX pretraining with DiLoCo over slow links.

The library is `maxdiloco.DiLoCo`, `maxdiloco.Stacked` for its `layer_axis`, and `Checkpointer` with
`save_state` and `restore_state`. They are imported on first use, so that `python -m
maxdiloco.train` checks its flags before JAX loads.
"""

import importlib
from typing import TYPE_CHECKING

from maxdiloco.version import __version__ as __version__

if TYPE_CHECKING:
    from maxdiloco.checkpoint.checkpointer import Checkpointer
    from maxdiloco.checkpoint.saved_state import restore_state, save_state
    from maxdiloco.diloco.fragments import Stacked
    from maxdiloco.engine.diloco import DiLoCo

__all__ = ["Checkpointer", "DiLoCo", "Stacked", "restore_state", "save_state"]
_MODULES = {
    "Checkpointer": "checkpoint.checkpointer",
    "DiLoCo": "engine.diloco",
    "Stacked": "diloco.fragments",
    "restore_state": "checkpoint.saved_state",
    "save_state": "checkpoint.saved_state",
}


def __getattr__(name):
    """Import an exported name on first use (PEP 562)."""
    if name in _MODULES:
        return vars(importlib.import_module(f"maxdiloco.{_MODULES[name]}"))[name]
    raise AttributeError(
        f"module 'maxdiloco' has no attribute {name!r}: it exports {', '.join(__all__)}. "
        "Import a submodule by its full name, as in maxdiloco.diloco.schedule.")
