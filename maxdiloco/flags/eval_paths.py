"""The texts that a run is evaluated on: eval_dataset_path, a path or a table of them."""

from typing import Any

from maxdiloco.flags.base_yml import Table

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
