"""Checks of the learning rate's schedule; the schedule itself is in trainer.optimizer."""

from collections.abc import Mapping
from typing import Any

from maxdiloco.errors import ConfigError
from maxdiloco.flags.base_yml import Key, show


def check(cfg: Any, keys: Mapping[str, Key]) -> None:
    """Raise ConfigError for keys of the schedule that cannot work together. keys: base.yml's."""
    fraction = "warmup_steps_fraction"
    if cfg.lr_schedule_type == "wsd":
        if cfg.warmup_steps_fraction + cfg.wsd_decay_steps_fraction > 1:
            raise ConfigError(
                f"{fraction}={show(cfg.warmup_steps_fraction)} and wsd_decay_steps_fraction="
                f"{show(cfg.wsd_decay_steps_fraction)} are more than the whole schedule together. "
                f"Lower one of them."
            )
        return
    for name in ("wsd_decay_steps_fraction", "wsd_decay_style"):
        value = vars(cfg)[name]
        if value != keys[name].default:
            raise ConfigError(
                f"{name}={show(value)} does nothing with lr_schedule_type={cfg.lr_schedule_type}. "
                f"Use lr_schedule_type=wsd, or leave {name} out."
            )
