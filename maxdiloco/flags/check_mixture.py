"""Checks of packing and of the mixture of sources that need no file."""

from typing import Any

from maxdiloco.errors import ConfigError


def check(cfg: Any) -> None:
    """Raise ConfigError for keys of packing and of the mixture that cannot work. cfg: a Config."""
    if not cfg.packing and cfg.grain_packing_type != "concat_then_split":
        raise ConfigError(
            f"grain_packing_type={cfg.grain_packing_type} does nothing with packing=false. Leave "
            f"it out, or use packing=true."
        )
