"""Keys that do not go together, as together.yml lists them."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from maxdiloco.errors import ConfigError
from maxdiloco.flags import base_yml
from maxdiloco.flags.base_yml import Key, show


class Row(NamedTuple):
    """A row of together.yml, which says what the fields are."""

    when: Mapping[str, str] | None = None
    unless: Mapping[str, str] | None = None
    keys: Sequence[str] = ()
    use: str = ""
    error: str = ""
    warning: str = ""

    def counts(self, shown: Mapping[str, str]) -> bool:
        """Whether the row counts for values as text."""
        met, kept = (
            [re.fullmatch(f"(?s:{pattern})", shown[name]) for name, pattern in (each or {}).items()]
            for each in (self.when, self.unless)
        )
        return all(met) and not (kept and all(kept))


def rows() -> list[Row]:
    """The rows of together.yml."""
    return [Row(**entry) for entry in base_yml.read_table("together.yml")]


def check(cfg: Any, keys: Mapping[str, Key]) -> None:
    """Raise ConfigError for the first row that counts. cfg: a Config; keys: base.yml's."""
    shown = {name: show(value) for name, value in vars(cfg).items()}
    for row in rows():
        if row.warning or not row.counts(shown):
            continue
        if row.error:
            raise ConfigError(row.error.format_map(shown))
        beside = " ".join(f"{name}={shown[name]}" for name in row.when)
        neutral = {name: keys[name].default for name in row.keys}
        refuse(cfg, neutral, beside=beside, remedy=f" or {row.use}")


def warnings(cfg: Any) -> list[str]:
    """The lines of the rows that warn."""
    shown = {name: show(value) for name, value in vars(cfg).items()}
    return [row.warning.format_map(shown) for row in rows() if row.warning and row.counts(shown)]


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
