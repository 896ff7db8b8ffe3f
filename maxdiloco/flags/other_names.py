"""Names of keys that base.yml once had: some have another name now, others are gone."""

from collections.abc import Mapping
from typing import Any, NamedTuple

# MaxText had them too.
RENAMED = {"cosine_learning_rate_final_fraction": "learning_rate_final_fraction"}


class Removed(NamedTuple):
    """A key that base.yml once had: its default then, and the remedy of the error for it."""

    default: Any
    instead: str


# CHANGELOG.md names each.
REMOVED = {
    "checkpoint_timeout_seconds": Removed(1200, "Leave it out: a save has an hour."),
    "exchange_port": Removed(0, "Use peer_port: process i listens on the port 1 + i after it."),
}


def current(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A stored config by the names that keys have now, without removed ones at their default."""
    return {
        RENAMED.get(name, name): value
        for name, value in stored.items()
        if name not in REMOVED or value != REMOVED[name].default
    }
