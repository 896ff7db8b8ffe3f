"""Checks of the mixture of sources that need no file."""

import re
from fractions import Fraction
from typing import Any

from maxdiloco.errors import ConfigError
from maxdiloco.flags.base_yml import Table, choices, declared, show

_FORM = "Write dataset_mixture=[{path: ..., weight: ..., name: ...}, ...]."
# What a source may have of its own, in place of the run's key.
_OWN = ("dataset_type", "text_column")


def check(cfg: Any) -> None:
    """Raise ConfigError for a mixture that cannot work. cfg: a Config."""
    if not cfg.dataset_mixture:
        return
    weights = [_weight(entry) for entry in cfg.dataset_mixture]
    names = [dict(entry)["name"] for entry in cfg.dataset_mixture]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"dataset_mixture has {names.count(name)} sources named {name}: checkpoints and "
                f"metrics tell them apart by name. Give each its own."
            )
    if not any(weights):
        raise ConfigError(
            f"dataset_mixture={show(cfg.dataset_mixture)} has no weight above 0. Give a source one."
        )
    if cfg.dataset_per_replica and len(set(weights)) > 1:
        raise ConfigError(
            "dataset_mixture has weights, which do nothing with dataset_per_replica=true: a "
            "replica reads one source. Leave them out."
        )


def _weight(entry: Any) -> Fraction:
    """The weight of a source whose entry is in order."""
    if not isinstance(entry, Table) or not all(isinstance(text, str) for _, text in entry):
        raise ConfigError(f"dataset_mixture: {show(entry)} is not a source. {_FORM}")
    shown, entry = show(entry), dict(entry)
    unknown = sorted(entry.keys() - {"path", "weight", "name", *_OWN})
    missing = [key for key in ("path", "name") if not entry.get(key)]
    if unknown or missing:
        why = f"has no {missing[0]}" if missing else f"has {unknown[0]}, which is no key of it"
        raise ConfigError(f"dataset_mixture: source {shown} {why}. {_FORM}")
    name, path, weight = entry["name"], entry["path"], entry.get("weight", "1")
    types = [kind for kind in choices(declared()["dataset_type"].allowed) if kind != "synthetic"]
    if entry.get("dataset_type", "text") not in types:
        raise ConfigError(
            f"dataset_mixture: dataset_type {entry['dataset_type']} of source {name} is none of "
            f"{', '.join(types)}. Use one of them, or leave it out for the run's dataset_type."
        )
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name):
        raise ConfigError(
            f"dataset_mixture: name {name} cannot be part of a metric's name. Use letters, digits, "
            f"'.', '_' and '-'."
        )
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path):
        raise ConfigError(
            f"dataset_mixture: path {path} of source {name} is an address, but text is read from "
            f"files. Mount the bucket and give its folder."
        )
    if not re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,2})?", weight):
        raise ConfigError(
            f"dataset_mixture: weight {weight} of source {name} is not a number of at least 0. "
            f"Give its share, such as 0.7 or 7."
        )
    return Fraction(weight)
