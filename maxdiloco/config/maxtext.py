"""Translate MaxText's names and values: accept, ignore or refuse them by the table maxtext.yml."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from maxdiloco.config import files
from maxdiloco.config.files import Layer
from maxdiloco.config.keys import KEYS
from maxdiloco.config.values import shorten, show
from maxdiloco.errors import ConfigError

# A file counts as a copy of MaxText's base.yml, not of ours, if it has more than this many keys
# that exist only in MaxText. MaxText's file has 700 keys.
MAX_FOREIGN = 20


class Foreign(NamedTuple):
    """Keys of MaxText that do not exist here: an entry of maxtext.yml.

    Attributes:
      names: regular expressions of the keys.
      ignored: regular expressions of values that are ignored. An empty value is always ignored.
      why: the reason why ignoring these values loses nothing.
      instead: the remedy for other values.
    """

    names: Sequence[str]
    ignored: Sequence[str]
    why: str = "it is off here too"
    instead: str = ""


class MaxText(NamedTuple):
    """The content of maxtext.yml.

    Attributes:
      other_names: {MaxText's name: our key} of keys with the same values.
      values: {our key: {regular expression of MaxText's values: our setting to use}}.
      keys: the keys that do not exist here.
    """

    other_names: Mapping[str, str]
    values: Mapping[str, Mapping[str, str]]
    keys: Sequence[Foreign]

    def find(self, name: str) -> Foreign | None:
        """Return the entry for a key that only MaxText has, or None."""
        entries = () if name in KEYS else self.keys
        return next((entry for entry in entries if _matches(name, entry.names)), None)

    def rename(self, layer: Layer) -> Layer:
        """Replace MaxText's names. Raises ConfigError if a key has both names."""
        names: dict[str, str] = {}
        for name in layer:
            own = self.other_names.get(name, name)
            if own in names:
                both = " and ".join(
                    f"{one}={shorten(layer[one].raw)}" for one in (name, names[own])
                )
                raise ConfigError(f"{both} both mean {own}. Give only {own}.")
            names[own] = name
        return {own: layer[name] for own, name in names.items()}

    def accept(self, layer: Layer, warn: Callable[[str], None]) -> Layer:
        """Remove keys that have no effect here, with one warning, after `rename`.

        Raises:
          ConfigError: some keys or values cannot be ignored. The message names all of them.
        """
        kept, refused = dict(layer), []
        ignored: dict[str, list[str]] = {}
        for name, (raw, _) in layer.items():
            text, entry = show(raw), self.find(name)
            if entry is None:
                for value, use in self.values.get(name, {}).items():
                    if re.fullmatch(value, _plain(text)):
                        refused.append(f"{name}={text} is MaxText's value. Use {use}.")
            elif text == "" or _matches(_plain(text), entry.ignored):
                ignored.setdefault(entry.why, []).append(name)
                del kept[name]
            else:
                refused.append(f"{name}={text} is MaxText's key. {entry.instead}.")
        if refused:
            raise ConfigError(f"{' '.join(refused)} See docs/howto/migrate-from-maxtext.md.")
        if ignored:
            reasons = "; ".join(f"{', '.join(names)}: {why}" for why, names in ignored.items())
            warn(f"note: keys of MaxText that have no effect here: {reasons}.")
        return kept


def read() -> MaxText:
    """Read maxtext.yml."""
    data = files.read_data("maxtext.yml")
    keys = [Foreign(**entry) for entry in data["keys"]]
    return MaxText(data["other_names"], data["values"], keys)


def _matches(text: str, patterns: Sequence[str]) -> bool:
    return re.fullmatch("|".join(patterns), text) is not None


def _plain(text: str) -> str:
    """Return one spelling for equal values: 0.0 and 0 are equal, and so are None and null."""
    small = text.lower()
    return "none" if small == "null" else re.sub(r"(\d)\.0*$", r"\1", small)
