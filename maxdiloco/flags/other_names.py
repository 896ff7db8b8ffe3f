"""Names that base.yml does not have: MaxText's, and older ones of our own.

Some mean the same as a key of base.yml, others are gone.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from maxdiloco.errors import ConfigError
from maxdiloco.flags import base_yml

# Our own before MaxText's change of name; MaxText had it too.
RENAMED = {"cosine_learning_rate_final_fraction": "learning_rate_final_fraction"}
OTHER_NAMES = {
    **RENAMED,
    "hf_path": "dataset_path",
    "hf_train_files": "dataset_path",
    "hf_eval_files": "eval_dataset_path",
    "grain_train_files": "dataset_path",
    "grain_eval_files": "eval_dataset_path",
    "grain_file_type": "dataset_type",
    "train_data_columns": "text_column",
}


class Removed(NamedTuple):
    """A key that base.yml once had: its default then, and the remedy of the error for it."""

    default: Any
    instead: str


# CHANGELOG.md names each.
REMOVED = {
    "checkpoint_timeout_seconds": Removed(1200, "Leave it out: a save has an hour."),
    # Options of programs, so neither a file nor the environment sets them.
    "compile_data_parallel": Removed(
        False, "Give the option compile_data_parallel=true to maxdiloco.train_compile alone."
    ),
    "dcn_bandwidth_gbps": Removed(
        25.0, "Give the option dcn_bandwidth_gbps=25 to maxdiloco.train_compile or plan alone."
    ),
    "max_exposed_fraction": Removed(
        1.0, "Give the option max_exposed_fraction=0.05 to maxdiloco.train_compile alone."
    ),
    "report": Removed(
        "", "Give the option report=FILE to maxdiloco.train_compile, plan or evaluate alone."
    ),
}


class Written(Protocol):
    """A value as it was written (values.Given)."""

    raw: Any

    def _replace(self, **fields: Any) -> "Written":
        """A copy with other fields."""


def translate(given: Mapping[str, Written]) -> dict[str, Any]:
    """The same values by the names of base.yml; given: those of one layer, such as a file.

    Raises ConfigError when a value is there by two names, and for more than one column.
    """
    names: dict[str, str] = {}
    given = _without_grain(given)
    for name in given:
        own = OTHER_NAMES.get(name, name)
        if own in names:
            raise ConfigError(
                f"{name}={given[name].raw} and {names[own]}={given[names[own]].raw} both mean "
                f"{own}. Give {own} alone."
            )
        names[own] = name
    return {own: _value(name, given[name]) for own, name in names.items()}


def _without_grain(given: Mapping[str, Written]) -> dict[str, Written]:
    """MaxText's dataset_type=grain says no more than grain_file_type, which is arrayrecord."""
    kind = given.get("dataset_type")
    if kind is None or kind.raw != "grain":
        return dict(given)
    rest = {name: value for name, value in given.items() if name != "dataset_type"}
    return {"grain_file_type": kind._replace(raw="arrayrecord")} | rest


def current(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A stored config by the names that keys have now, without removed ones at their default."""
    return {
        RENAMED.get(name, name): value
        for name, value in stored.items()
        if name not in REMOVED or value != REMOVED[name].default
    }


def _value(name: str, given: Written) -> Written:
    if name != "train_data_columns":
        return given
    raw = given.raw
    columns = base_yml.parse_list(raw, f"{name}={raw}") if isinstance(raw, str) else raw
    if columns is None:
        return given
    if len(columns) != 1:
        raise ConfigError(
            f"{name}={base_yml.show(columns)} names {len(columns)} columns, but text is in one. "
            "Use text_column=NAME."
        )
    return given._replace(raw=columns[0])
