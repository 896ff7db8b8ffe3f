"""maxdiloco: config-driven JAX pretraining with DiLoCo over slow links.

The library is `maxdiloco.DiLoCo` and, for its `layer_axis`, `maxdiloco.Stacked`. Both are
imported on first use, so that `python -m maxdiloco.train` checks its flags before JAX loads.
"""

from typing import TYPE_CHECKING

from maxdiloco.version import __version__ as __version__

if TYPE_CHECKING:
    from maxdiloco.diloco.fragments import Stacked
    from maxdiloco.engine.diloco import DiLoCo

__all__ = ["DiLoCo", "Stacked"]


def __getattr__(name):
    """Import an exported name on first use (PEP 562)."""
    if name == "DiLoCo":
        from maxdiloco.engine.diloco import DiLoCo

        return DiLoCo
    if name == "Stacked":
        from maxdiloco.diloco.fragments import Stacked

        return Stacked
    raise AttributeError(
        f"module 'maxdiloco' has no attribute {name!r}: it exports {', '.join(__all__)}. "
        "Import a submodule by its full name, as in maxdiloco.diloco.schedule.")
