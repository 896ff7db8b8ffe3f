"""Keys that do not go together and settings that are seldom meant: the rows of together.yml."""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from maxdiloco.errors import ConfigError
from maxdiloco.flags import base_yml
from maxdiloco.flags.base_yml import Key, show


class Row(NamedTuple):
    """A row of together.yml, which says what the fields are."""

    when: Mapping[str, Any] = MappingProxyType({})
    unless: Mapping[str, Any] = MappingProxyType({})
    keys: Sequence[str] = ()
    use: str = ""
    error: str = ""
    warning: str = ""
    note: str = ""

    def counts(self, named: Mapping[str, Any]) -> bool:
        """Whether the row counts; not where it asks for what is not known."""
        if not self.when.keys() | self.unless.keys() <= named.keys():
            return False
        met, kept = (
            [_met(show(wanted), named[name], named) for name, wanted in conditions.items()]
            for conditions in (self.when, self.unless)
        )
        return all(met) and not (kept and all(kept))


def _met(wanted: str, value: Any, named: Mapping[str, Any]) -> bool:
    if isinstance(value, str):
        return re.fullmatch(f"(?s:{wanted})", value) is not None
    return base_yml.allows(" ".join(str(named.get(word, word)) for word in wanted.split()), value)


def _named(cfg: Any) -> dict[str, Any]:
    """Values by name: numbers, and text of all others."""
    return {
        name: value if type(value) in (int, float) else show(value)
        for name, value in vars(cfg).items()
    }


def rows() -> list[Row]:
    """The rows of together.yml."""
    return [Row(**entry) for entry in base_yml.read_table("together.yml")]


def check(cfg: Any, keys: Mapping[str, Key], **facts: float) -> None:
    """Raise ConfigError for the first row that counts. cfg: a Config; keys: base.yml's.

    facts: what rows ask for beside the keys.
    """
    named = _named(cfg) | facts
    for row in rows():
        if not (row.error or row.keys) or not row.counts(named):
            continue
        if row.error:
            raise ConfigError(row.error.format_map(named))
        beside = " ".join(f"{name}={named[name]}" for name in row.when)
        neutral = {name: keys[name].default for name in row.keys}
        refuse(cfg, neutral, beside=beside, remedy=f" or {row.use}")


def lines(cfg: Any, **facts: Any) -> list[str]:
    """Warnings and notes: of the rows that ask for some of `facts`, or for keys alone."""
    named, found = _named(cfg) | facts, []
    for row in rows():
        asks = not facts.keys().isdisjoint(row.when.keys() | row.unless.keys())
        if (row.warning or row.note) and asks == bool(facts) and row.counts(named):
            said = f"warning: {row.warning}" if row.warning else f"note: {row.note}"
            found.append(said.format_map(named))
    return found


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
