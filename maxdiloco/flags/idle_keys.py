"""Keys that do nothing with the value of another key."""

from collections.abc import Mapping
from typing import Any

from maxdiloco.errors import ConfigError
from maxdiloco.flags.base_yml import show


def refuse(cfg: Any, neutral: Mapping[str, Any], *, beside: str, remedy: str) -> None:
    """Raise ConfigError for the first key that differs from its value without effect.

    neutral: key -> that value. beside: what nothing reads the keys with, as `key=value`. remedy:
    what to use in place of the neutral value, after `Use key=value`.
    """
    for name, without in neutral.items():
        value = vars(cfg)[name]
        if value != without:
            raise ConfigError(
                f"{name}={show(value)} does nothing with {beside}. Use {name}={show(without)}"
                f"{remedy}."
            )
