"""The texts that a run is evaluated on: eval_dataset_path, a path or a table of them."""

import re
from typing import Any

from maxdiloco.errors import ConfigError
from maxdiloco.flags.base_yml import Table, show

KEY = "eval_dataset_path"


def named(cfg: Any) -> dict[str, str]:
    """{name: path}, the text of eval/loss first: that without a name, or else the first one.

    An empty path is the part of the training text that is held out.
    """
    given = cfg.eval_dataset_path
    if not isinstance(given, Table):
        return {"": given}
    return dict(sorted(given, key=lambda entry: entry[0] != "")) or {"": ""}


def holds_out(cfg: Any) -> bool:
    """Whether a part of the training text is held out of it (eval_fraction)."""
    return "" in named(cfg).values()


def key_of(name: str) -> str:
    """The key of a text for messages, such as eval_dataset_path.wiki."""
    return f"{KEY}.{name}" if name else KEY


def check(cfg: Any) -> None:
    """Raise ConfigError unless the texts are a path or {name: path} and the run reads text."""
    given = f"{KEY}={show(cfg.eval_dataset_path)}"
    for name, path in named(cfg).items():
        if not re.fullmatch(r"[A-Za-z0-9_-]*", name) or not isinstance(path, str):
            raise ConfigError(
                f"{given}: {name}: {show(path)} is not name: path. Write {{wiki: /data/wiki}}, "
                f"with letters, digits, '_' and '-' in a name."
            )
    if cfg.eval_dataset_path and cfg.dataset_type == "synthetic":
        raise ConfigError(
            f"{given} is text, but dataset_type=synthetic reads none. Leave {KEY} out, or train "
            f"on text."
        )
    if not cfg.sample_prompt:
        return
    prompt = f"sample_prompt={show(cfg.sample_prompt)} is"
    if cfg.dataset_type == "synthetic":
        raise ConfigError(
            f"{prompt} text, but dataset_type=synthetic is not. Leave sample_prompt out, or train "
            f"on text."
        )
    if cfg.eval_interval == -1:
        raise ConfigError(
            f"{prompt} continued at each evaluation, but eval_interval=-1 asks for none. Set "
            f"eval_interval."
        )
