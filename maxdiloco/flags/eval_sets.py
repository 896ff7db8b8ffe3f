"""Checks of the texts that a run is evaluated on."""

import re
from typing import Any

from maxdiloco.errors import ConfigError
from maxdiloco.flags.base_yml import show


def check(cfg: Any) -> None:
    """Raise ConfigError unless eval_sets is {name: path} and the run reads text."""
    for name, path in cfg.eval_sets:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or not isinstance(path, str) or not path:
            raise ConfigError(
                f"eval_sets={show(cfg.eval_sets)}: {name}: {show(path)} is not name: path. Write "
                f"{{wiki: /data/wiki}}, with letters, digits, '_' and '-' in a name."
            )
    if cfg.sample_prompt and cfg.dataset_type == "synthetic":
        raise ConfigError(
            f"sample_prompt={show(cfg.sample_prompt)} is text, but dataset_type=synthetic is not. "
            f"Leave sample_prompt out, or train on text."
        )
    if cfg.sample_prompt and cfg.eval_interval == -1:
        raise ConfigError(
            f"sample_prompt={show(cfg.sample_prompt)} is continued at each evaluation, but "
            f"eval_interval=-1 asks for none. Set eval_interval."
        )
    if cfg.eval_sets and cfg.dataset_type == "synthetic":
        raise ConfigError(
            f"eval_sets={show(cfg.eval_sets)} are texts, but dataset_type=synthetic reads none. "
            f"Leave eval_sets out, or train on text."
        )
