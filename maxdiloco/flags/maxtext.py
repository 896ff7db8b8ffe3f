"""Names, keys and values that base.yml does not have: MaxText's (maxtext.yml) and former ones."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from maxdiloco.errors import ConfigError
from maxdiloco.flags import base_yml
from maxdiloco.flags.base_yml import Key, show
from maxdiloco.flags.values import Given

BASE = "base.yml"  # its file of defaults, which its command lines name first; ours too
FRACTION = (
    "would be less than a sequence for each device. Here every device adds whole sequences to the "
    "batch, and those that share sequences by context parallelism add them together. Use 1 with "
    "fewer devices in a slice, or with ici_context_parallelism."
)
MOST_FOREIGN = 20  # keys of MaxText alone in a copy of our base.yml: our choice; its own has 700
IN_ITS_PLACE = (
    "Put configs/base.yml in its place: the defaults here are this package's, and docs/maxtext.md "
    "lists those that differ."
)


# Keys that base.yml once had by another name. MaxText had them too.
RENAMED = {"cosine_learning_rate_final_fraction": "learning_rate_final_fraction"}


class Foreign(NamedTuple):
    """Keys that base.yml does not have: an entry of maxtext.yml, which says what the fields are."""

    names: Sequence[str]
    harmless: Sequence[str]
    why: str = ""
    instead: str = ""


class Tables(NamedTuple):
    """The keys of base.yml, and maxtext.yml.

    values: {key: {value: [our value, what differs], or what to do instead}}.
    """

    ours: dict[str, Key]
    other_names: dict[str, str]
    values: dict[str, dict[str, list[str] | str]]
    keys: list[Foreign]
    removed: dict[str, tuple[Any, str]]

    def foreign(self, name: str) -> Foreign | None:
        """The entry of a key of MaxText that base.yml does not have, None where there is none."""
        entries = () if name in self.ours else self.keys
        return next((entry for entry in entries if _matches(name, entry.names)), None)


def tables() -> Tables:
    """What base.yml and maxtext.yml say."""
    read = base_yml.read_table("maxtext.yml")
    keys = [Foreign(**entry) for entry in read["keys"]]
    other_names = RENAMED | read["other_names"]
    return Tables(base_yml.declared(), other_names, read["values"], keys, removed())


def removed() -> dict[str, tuple[Any, str]]:
    """{key that is gone: its default then, and the remedy, with VALUE for what was given}."""
    return base_yml.read_table("removed.yml")


def current(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A stored config by the names that keys have now, without removed ones at their default."""
    gone = removed()
    return {
        RENAMED.get(name, name): value
        for name, value in stored.items()
        if name not in gone or value != gone[name][0]
    }


def renamed(given: Mapping[str, Given], known: Tables) -> dict[str, Given]:
    """The same values by the names of base.yml; given: those of one layer, such as a file.

    Raises ConfigError when a value is there by two names, and for more than one column.
    """
    given, kind = dict(given), given.get("dataset_type")
    if kind is not None and kind.raw == "grain":  # it says no more than grain_file_type
        del given["dataset_type"]
        given = {"grain_file_type": kind._replace(raw="arrayrecord")} | given
    names: dict[str, str] = {}
    for name in given:
        own = known.other_names.get(name, name)
        if own in names:
            raise ConfigError(
                f"{name}={given[name].raw} and {names[own]}={given[names[own]].raw} both mean "
                f"{own}. Give {own} alone."
            )
        names[own] = name
    return {
        own: _column(given[name]) if name == "train_data_columns" else given[name]
        for own, name in names.items()
    }


def _column(given: Given) -> Given:
    raw, name = given.raw, "train_data_columns"
    columns = base_yml.parse_list(raw, f"{name}={raw}") if isinstance(raw, str) else raw
    if columns is None:
        return given
    if len(columns) != 1:
        raise ConfigError(
            f"{name}={show(columns)} names {len(columns)} columns, but text is in one. "
            "Use text_column=NAME."
        )
    return given._replace(raw=columns[0])


def taken(
    given: Mapping[str, Given], known: Tables, warn: Callable[[str], None]
) -> dict[str, Given]:
    """What was given without MaxText's keys, and with its values as this package names them.

    given: names as `renamed` leaves them. warn: called with a line on what was dropped, and on each
    value that was replaced. Raises ConfigError, one line for all that cannot be dropped.
    """
    kept, dropped, refused = {}, {}, []
    for name, value in given.items():
        text = value.raw if isinstance(value.raw, str) else show(value.raw)
        entry = known.foreign(name)
        nearest = known.values.get(name, {}).get(_plain(text))
        if entry is not None and (text == "" or _matches(_plain(text), entry.harmless)):
            dropped.setdefault(entry.why or "off here too", []).append(name)
        elif name in known.removed and _plain(text) == _plain(show(known.removed[name][0])):
            dropped.setdefault("that is so without it", []).append(name)
        elif entry is not None:
            refused.append(f"{name}={text} is MaxText's and not here. {entry.instead}.")
        elif name == "per_device_batch_size" and re.fullmatch(r"0?\.0*[1-9]\d*", text):
            refused.append(f"{name}={text} {FRACTION}")
        elif isinstance(nearest, str):
            refused.append(f"{name}={text} is MaxText's: {nearest}.")
        elif nearest is not None:
            own, what = nearest
            warn(f"note: {name}={text} of MaxText is {name}={own} here, {what}.")
            kept[name] = value._replace(raw=own)
        else:
            kept[name] = value
    steps = given.get("steps")
    if steps is not None and steps.raw == "-1" and "learning_rate_schedule_steps" in kept:
        warn(
            "note: steps=-1 is one epoch of the text here; in MaxText it is "
            "learning_rate_schedule_steps."
        )
    if refused:
        raise ConfigError(" ".join(refused) + " See docs/maxtext.md.")
    if dropped:
        reasons = "; ".join(f"{', '.join(names)}: {why}" for why, names in dropped.items())
        warn(f"note: keys of MaxText that do nothing here and may be left out: {reasons}.")
    return kept


def _matches(text: str, patterns: Sequence[str]) -> bool:
    return re.fullmatch("|".join(patterns), text) is not None


def _plain(text: str) -> str:
    """A value in one spelling: 0.0 and 0 are the same, and so are None and null."""
    small = text.lower()
    return "none" if small == "null" else re.sub(r"(\d)\.0*$", r"\1", small)
