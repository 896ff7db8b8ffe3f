"""maxdiloco: config-driven JAX pretraining with DiLoCo over slow links.

The library consists of `maxdiloco.DiLoCo` and `maxdiloco.Island`, `maxdiloco.Stacked` for their
`layer_axis`, and `Checkpointer` with `save_state` and `restore_state`. They are imported on first
use, so that `python -m maxdiloco.train` checks its flags before JAX loads.

This file and version.py also run on Python 3.6. A Python that is too old therefore ends with a
clear error, before it reads code that it cannot parse.
"""

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING

from maxdiloco.version import __version__ as __version__

if TYPE_CHECKING:
    from maxdiloco.checkpoint.checkpointer import Checkpointer
    from maxdiloco.checkpoint.saved_state import restore_state, save_state
    from maxdiloco.diloco.fragments import Stacked
    from maxdiloco.engine.diloco import DiLoCo
    from maxdiloco.islands.island import Island

__all__ = ["Checkpointer", "DiLoCo", "Island", "Stacked", "restore_state", "save_state"]
_MODULES = {
    "Checkpointer": "checkpoint.checkpointer",
    "DiLoCo": "engine.diloco",
    "Island": "islands.island",
    "Stacked": "diloco.fragments",
    "restore_state": "checkpoint.saved_state",
    "save_state": "checkpoint.saved_state",
}
# Packages required by setup.py, by the names under which they are imported.
_PACKAGES = (
    "jax", "flax", "optax", "orbax", "tensorstore", "grain", "etils", "ml_dtypes", "numpy", "yaml",
    "pydantic", "annotated_types", "tensorboardX", "tqdm", "aiohttp", "cryptography",
)  # fmt: skip
# Arguments that only print descriptions of the programs and keys, and the packages they need.
_HELP = ("-h", "--help", "help", "--schema")
_HELP_PACKAGES = ("yaml", "pydantic", "annotated_types")
_REMEDY = (
    "Activate the environment of maxdiloco (`source .venv/bin/activate`), or make one in its "
    "checkout: `bash scripts/make_venv.sh .venv`."
)


def _packages():
    """Return the packages that the arguments of this process need."""
    if "--version" in sys.argv:
        return ()
    return _HELP_PACKAGES if any(word in sys.argv for word in _HELP) else _PACKAGES


def _check_python():
    """End a program with one line and exit code 2 if this Python cannot run it.

    When maxdiloco is imported as a library, a Python that is too old raises ImportError.
    """
    if sys.version_info < (3, 11):  # noqa: UP036
        line = "is Python {}.{}, and maxdiloco needs 3.11 or newer".format(*sys.version_info[:2])
    else:
        absent = [name for name in _packages() if importlib.util.find_spec(name) is None]
        line = "has no " + ", ".join(absent) if absent else ""
    if line and sys.argv[:1] != ["-m"]:
        raise ImportError(f"{sys.executable} {line}. {_REMEDY}")
    if line:
        sys.stderr.write(f"{sys.executable} {line}. {_REMEDY}\n")
        sys.exit(2)


def __getattr__(name):
    """Import an exported name on first use (PEP 562)."""
    if name in _MODULES:
        return vars(importlib.import_module(f"maxdiloco.{_MODULES[name]}"))[name]
    raise AttributeError(
        f"module 'maxdiloco' has no attribute {name!r}: it exports {', '.join(__all__)}. "
        "Import a submodule by its full name, as in maxdiloco.diloco.schedule."
    )


# For a program, sys.argv[0] is "-m" while Python looks for the module to run.
if sys.argv[:1] == ["-m"] or sys.version_info < (3, 11):
    _check_python()
